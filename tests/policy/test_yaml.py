"""What the strict reader takes, and what it never lets through."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import Field
from ruamel.yaml import YAML

from stockade.errors import ConfigError, JobError, PolicyError
from stockade.policy import Policy, StrictModel, load_document, load_policy, parse_document, parse_policy
from tests.support import requires

RULE = "version: 1\negress:\n  allow:\n    - host: abc.test\n"


def refusal(text: str) -> PolicyError:
    with pytest.raises(PolicyError) as caught:
        parse_policy(text, source="p.yaml")
    return caught.value


@pytest.mark.parametrize(
    "text",
    [
        RULE,
        RULE.replace("\n", "\r\n"),
        "---\n" + RULE,
        RULE + "...\n",
        "# comment\n\n" + RULE + "\n# end\n",
        '{"version": 1, "egress": {"allow": [{"host": "abc.test"}]}}',
        "version: 1\negress:\n  allow:\n  - 'host': \"abc.test\"\n",
        "version: 1\negress:\n  allow: [{host: ABC.test}]\n",
    ],
)
def test_ways_to_write_one_policy(text):
    assert parse_policy(text, source="p").egress.allow[0].host.text == "abc.test"


def test_block_scalar_is_text():
    waiver = "{waives: trifecta, person: A. Person, expires: 2027-01-31"
    text = f"version: 1\nwaivers:\n  - {waiver}, reason: 'the data is public'}}\n"
    assert parse_policy(text, source="p").waivers[0].reason == "the data is public"


@pytest.mark.promise("S1.1")
@pytest.mark.parametrize(("word", "meaning"), [("no", False), ("012", 10), ("1:30", 90), ("on", True), ("y", True)])
def test_words_with_two_meanings_are_refused(word, meaning):
    yaml_1_1 = YAML(typ="safe", pure=True)
    yaml_1_1.version = (1, 1)
    yaml_1_2 = YAML(typ="safe", pure=True)
    assert yaml_1_1.load(f"a: {word}")["a"] == meaning
    assert yaml_1_2.load(f"a: {word}")["a"] != meaning, "the two readers agree: this word is no danger"
    for key in ("{private: %s}", "{private: [%s]}"):
        refusal(f"version: 1\ndata: {key % word}\n")
    assert "some YAML readers" in refusal(f"version: 1\nservices: [{{name: {word}}}]\n").message


@pytest.mark.parametrize(
    "char", ["\x00", "\x07", "\x1b", "\x7f", "\x85", "\u2028", "\u200b", "\u202e", "\ufeff", "\ud800", "\r"]
)
def test_invisible_and_control_characters(char):
    error = refusal(f"version: 1\n# {char} here\n")
    assert error.line == 2
    assert f"U+{ord(char):04X}" in error.message


def test_hidden_line_breaks_cannot_move_a_rule_out_of_a_comment():
    """NEL ends a line for a YAML 1.1 reader and is a letter for others: here a rule behind it would appear."""
    assert refusal("version: 1 # note\x85egress: {allow: [{host: evil.example}]}\n").line == 1


def test_escapes_that_break_the_parser_are_its_error_not_ours():
    with pytest.raises(OverflowError):
        list(YAML(typ="safe", pure=True).parse('a: "\\UFFFFFFFF"'))
    assert refusal('version: 1\nstages: "\\UFFFFFFFF"\n').line == 2


def test_size_is_bounded(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text(RULE + "#" * (1 << 20))
    with pytest.raises(PolicyError, match="larger than 1 MiB"):
        load_policy(path)
    assert "larger than 1 MiB" in refusal(path.read_text()).message
    path.write_text(RULE + "#" * ((1 << 20) - len(RULE)))
    load_policy(path)


@pytest.mark.parametrize(
    "body",
    ["[" * 500_000, "{a: " * 100_000, "a: [" + "1, " * 300_000 + "]", "- " * 100_000, "? " * 100_000, "a\n" * 300_000],
    ids=["lists", "maps", "items", "nested-items", "keys", "lines"],
)
def test_work_is_bounded(body):
    begin = time.monotonic()
    refusal("version: 1\nx:\n  " + body)
    assert time.monotonic() - begin < 20


def test_two_keys_that_differ_in_quotes_only_are_one_key():
    assert "given twice" in refusal("version: 1\n'version': 1\n").message


def test_first_error_of_the_file_is_told():
    error = refusal("version: 1\nsandbox: {pids: 0}\negress:\n  allow: [{host: '*'}]\n")
    assert (error.line, error.key) == (2, "sandbox.pids")


def test_key_in_message_is_escaped():
    error = refusal('version: 1\n"\\e[31mred": 1\n')
    assert "\x1b" not in str(error)
    assert error.key == "'\\x1b[31mred'"


def test_source_line_is_no_key_of_a_file():
    for text in (
        "version: 1\negress:\n  allow: [{host: abc.test, source_line: 3}]\n",
        "version: 1\ndata: {source_line: 1}\n",
    ):
        assert "unknown key 'source_line'" in refusal(text).message


# ------------------------------------------------------------------------------------------- files


def test_missing_file(tmp_path):
    with pytest.raises(PolicyError, match=r"none\.yaml: cannot be read: No such file"):
        load_policy(tmp_path / "none.yaml")


def test_directory(tmp_path):
    with pytest.raises(PolicyError, match="not a regular file"):
        load_policy(tmp_path)


def test_fifo_does_not_hang(tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    with pytest.raises(PolicyError, match="not a regular file"):
        load_policy(path)


def test_name_that_is_no_name(tmp_path):
    with pytest.raises(PolicyError, match="cannot be read"):
        load_policy(tmp_path / "a\0b")


def test_unreadable_file(tmp_path):
    requires(os.geteuid() != 0, "root may read every file", must_run_in_ci=False)
    path = tmp_path / "p.yaml"
    path.write_text(RULE)
    path.chmod(0)
    with pytest.raises(PolicyError, match="cannot be read: Permission denied"):
        load_policy(path)


def test_egress_case_093_file_that_everybody_may_write(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text(RULE)
    path.chmod(0o644)
    load_policy(path)
    path.chmod(0o666)
    with pytest.raises(PolicyError, match="everybody may write"):
        load_policy(path)


# ------------------------------------------------------------------------------- other documents


class Job(StrictModel):
    """A document of another room."""

    steps: int
    env: dict[str, str] = Field(default_factory=dict)


def test_other_files_are_read_as_strictly(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("steps: 3\nenv: {LANG: C}\n")
    assert load_document(path, Job, error=JobError) == Job(steps=3, env={"LANG": "C"})
    path.write_text("stepz: 3\n")
    with pytest.raises(JobError, match="did you mean 'steps'") as caught:
        load_document(path, Job, error=JobError)
    assert not isinstance(caught.value, PolicyError)
    with pytest.raises(ConfigError, match="expected text, found the number 1") as deep:
        parse_document("steps: 3\nenv:\n  LANG: 1\n", Job, source="j")
    assert (deep.value.line, deep.value.key) == (3, "env.LANG")


# ------------------------------------------------------------------------------------ properties

FRAGMENTS = st.sampled_from(
    [
        "version: 1\n",
        "egress:\n",
        "  allow:\n",
        "    - host: ",
        "abc.test\n",
        "{",
        "}",
        "[",
        "]",
        ",",
        ": ",
        "- ",
        "'",
        '"',
        "&a",
        "*a",
        "!!str ",
        "|\n",
        ">\n",
        "---\n",
        "...\n",
        "%YAML 1.2\n",
        "<<: ",
        "? ",
        "#",
        "\\",
        "\n",
        "  ",
        "ports: ",
        "443",
        "0x1bb",
        "yes",
        "~",
        "mounts:",
        "data: {private: true}\n",
        "services:",
        "\t",
        "\u202e",
        "methods: [GET]",
        "1 MiB",
        "*.",
        "xn--",
        "::1",
        "10.0.0.1",
        "waivers:",
        "2027-01-31",
        "sandbox: {memory: 1 GiB}\n",
    ]
)


def outcome(read: Callable[[], Policy]) -> Policy | PolicyError:
    """Anything but these two goes through and fails the test."""
    try:
        return read()
    except PolicyError as error:
        return error


def check(text: str) -> None:
    result = outcome(lambda: parse_policy(text, source="p"))
    assert isinstance(result, Policy) or "\n" not in str(result)


@given(st.text())
@example("\udcff")
@example('"\\ud800": 1')
@example("version: 1\negress: {allow: [{host: xn--0.example.org}]}")
def test_any_text_is_a_policy_or_a_policy_error(text):
    check(text)


@given(st.lists(FRAGMENTS, max_size=30).map("".join))
def test_any_heap_of_fragments_is_a_policy_or_a_policy_error(text):
    check(text)


VALUES = st.one_of(st.text(max_size=20), FRAGMENTS, st.integers().map(str), st.floats().map(str))


@given(st.sampled_from(["host", "ports", "methods", "paths", "x"]), VALUES)
def test_any_value_in_a_rule_is_a_policy_or_a_policy_error(key, value):
    check(f"version: 1\negress:\n  allow:\n    - {{host: abc.test}}\n    - {key}: {value}\n")
    check(f"version: 1\negress:\n  allow:\n    - {key}: [{value}]\n")


@given(st.binary(max_size=200))
def test_any_bytes_in_a_file_are_a_policy_or_a_policy_error(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(data)
    result = outcome(lambda: load_policy(path))
    path.unlink()
    assert isinstance(result, Policy) or result.path == str(path)
