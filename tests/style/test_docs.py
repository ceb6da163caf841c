"""The documents keep to the code: promises have tests, commands exist, links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import click
import pytest
import typer.main
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from stockade.egress.gate import Reason, status_of
from tests.style import _source
from tests.support import ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PROMISE = re.compile(r"^\*\*(S\d+\.\d+)\*\* ", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/]+\.py::[\w:]+)`")


class Promise(NamedTuple):
    """One numbered promise and the tests it names."""

    number: str
    tests: tuple[str, ...]


def _promises() -> list[Promise]:
    text = (ROOT / "SPECIFICATION.md").read_text()
    starts = list(PROMISE.finditer(text))
    ends = [match.start() for match in starts[1:]] + [len(text)]
    return [
        Promise(match[1], tuple(TEST.findall(text[match.end() : end]))) for match, end in zip(starts, ends, strict=True)
    ]


def test_promises_are_numbered_in_order():
    numbers = [tuple(int(part) for part in promise.number[1:].split(".")) for promise in _promises()]
    assert numbers == sorted(set(numbers))
    assert numbers


@pytest.mark.parametrize("promise", _promises(), ids=lambda promise: promise.number)
def test_promise_names_tests_that_exist_and_say_so(promise):
    marked = {test.node: test.promises for test in _source.tests_with_promises()}
    assert promise.tests, "a promise without a test is a wish"
    missing = [node for node in promise.tests if node not in marked]
    assert not missing, "named, but there is no such test"
    unmarked = [node for node in promise.tests if promise.number not in marked[node]]
    assert not unmarked, f'named, but not marked @pytest.mark.promise("{promise.number}")'


def test_marked_tests_are_named_by_their_promise():
    named = {(promise.number, node) for promise in _promises() for node in promise.tests}
    marked = {(number, test.node) for test in _source.tests_with_promises() for number in test.promises}
    assert marked - named == set()


def _commands() -> dict[str, click.Command]:
    """Every command of the command line by its words, for example ``policy check``."""
    from stockade.cli import app

    found: dict[str, click.Command] = {}
    queue = [("", typer.main.get_command(app))]
    while queue:
        prefix, command = queue.pop()
        for name, child in getattr(command, "commands", {}).items():
            words = f"{prefix} {name}".strip()
            if getattr(child, "commands", None) is None:
                found[words] = child
            queue.append((words, child))
    return found


def _mentioned(text: str) -> list[str]:
    """Every ``stockade …`` written as code: a line of a fenced block, or a span between backquotes."""
    lines = [
        line.strip()
        for block in re.findall(r"```(?:sh|console)\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
    ]
    spans = re.findall(r"`(stockade [a-z][^`\n]*)`", text)
    return [line.removeprefix("$ ") for line in lines if line.removeprefix("$ ").startswith("stockade ")] + spans


def test_mentioned_commands_exist():
    commands = _commands()
    mentioned = [(_source.relative(path), line) for path in DOCUMENTS for line in _mentioned(path.read_text())]
    assert mentioned
    assert [entry for entry in mentioned if not _is_command(entry[1], commands)] == []


def _is_command(line: str, commands: dict[str, click.Command]) -> bool:
    words = shlex.split(line.replace("…", ""), comments=True)[1:]
    return " ".join(words[:1]) in commands or " ".join(words[:2]) in commands


def test_every_command_and_option_is_documented():
    text = (ROOT / "docs" / "cli.md").read_text()
    missing = []
    for words, command in _commands().items():
        if f"## `stockade {words}" not in text:
            missing.append(words)
            continue
        section = text.split(f"## `stockade {words}", 1)[1].split("\n## ", 1)[0]
        options = [option for parameter in command.params for option in parameter.opts if option.startswith("--")]
        missing += [f"{words} {option}" for option in options if option not in section and option != "--help"]
    assert not missing


def test_links_lead_to_files_that_exist():
    broken = []
    for path in DOCUMENTS:
        targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text())
        missing = [target for target in targets if "://" not in target and not (path.parent / target).exists()]
        broken += [(_source.relative(path), target) for target in missing]
    assert broken == []


def test_readme_opens_with_two_commands():
    """A fresh machine needs ``make demo`` and ``make test``, and nothing else first."""
    text = (ROOT / "README.md").read_text()
    first = re.search(r"```sh\n(.*?)```", text, re.DOTALL)
    assert first
    commands = [line.split("#")[0].strip() for line in first[1].splitlines() if line.strip()]
    assert commands == ["make demo", "make test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{command.split()[1]}:", makefile, re.MULTILINE) for command in commands)


def test_ci_runs_the_readmes_test_command():
    assert re.search(r"\bmake test\b", (ROOT / ".ci" / "run").read_text())


def _pins() -> dict[str, str]:
    found: dict[str, str] = {}
    for path in sorted((ROOT / "requirements").glob("*.txt")):
        for line in path.read_text().splitlines():
            if line and not line.startswith("#"):
                name, _, version = line.partition(";")[0].partition("==")
                key = canonicalize_name(name)
                assert found.get(key, version) == version, f"{path.name}: {name} is pinned twice, differently"
                found[key] = version
    return found


def test_locks_satisfy_the_declared_bounds():
    project = _source.project()["project"]
    declared = [
        *project["dependencies"],
        *(line for lines in project["optional-dependencies"].values() for line in lines),
    ]
    pins = _pins()
    for text in declared:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), text


def test_core_stays_small():
    assert len(_source.project()["project"]["dependencies"]) <= 15


def test_licence_table_names_every_pinned_package():
    rows = re.findall(r"^\| ([\w.-]+) \|", (ROOT / "docs" / "licences.md").read_text(), re.MULTILINE)
    assert sorted(canonicalize_name(name) for name in rows if name != "package") == sorted(_pins())


def test_version_is_the_same_everywhere():
    version = _source.project()["project"]["version"]
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


def test_decisions_are_numbered_and_have_a_status():
    paths = sorted((ROOT / "docs" / "adr").glob("[0-9]*.md"))
    assert [int(path.name[:4]) for path in paths] == list(range(1, len(paths) + 1))
    for path in paths:
        assert re.search(r"^Status: (accepted|superseded by \d{4})$", path.read_text(), re.MULTILINE), path.name
    index = Path(ROOT / "docs" / "architecture.md").read_text()
    assert all(path.name in index for path in paths)


def test_every_reason_of_the_gate_is_explained_with_its_status():
    page = (ROOT / "docs" / "egress.md").read_text()
    rows = re.findall(r"^\| `([a-z_0-9]+)` \| (\d{3}|–) \|", page, re.MULTILINE)
    assert [name for name, _ in rows] == [reason.value for reason in Reason], "docs/egress.md lists the reasons"
    for name, status in rows:
        if status != "–":
            assert status_of(Reason(name)) == int(status), name
