"""The source keeps the rules that a linter does not know; each rule is shown a sample that breaks it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

import pytest

from tests.style import _source

MAX_MODULE_LINES = 400
MAX_TEST_LINES = 600
MAX_FUNCTION_LINES = 60

ADDRESS_PROPERTIES = frozenset(
    f"is_{name}"
    for name in ("global", "private", "loopback", "link_local", "multicast", "reserved", "site_local", "unspecified")
)


class Rule(NamedTuple):
    """What a module must not contain: ``offences`` names each place; ``sample`` is a module that has some."""

    offences: Callable[[str, ast.Module], Iterable[str]]
    sample: str
    guests: bool = True  # whether it also holds for code that runs inside a sandbox, which guards nothing


def _long(text: str, _: ast.Module) -> Iterable[str]:
    count = len(text.splitlines())
    if count >= MAX_MODULE_LINES:
        yield f"{count} lines"


def _long_function(_: str, tree: ast.Module) -> Iterable[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            count = node.end_lineno - node.lineno + 1
            if count > MAX_FUNCTION_LINES:
                yield f"{node.name} has {count} lines"


def _eager_annotations(_: str, tree: ast.Module) -> Iterable[str]:
    code = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef
    postponed = any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body)
    if any(isinstance(node, code) for node in tree.body) and not postponed:
        yield "no 'from __future__ import annotations'"


def _swallowed(_: str, tree: ast.Module) -> Iterable[str]:
    """A handler for everything must act: fail closed, record, translate. Silence is how a guard fails open."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and _catches_everything(node.type) and _does_nothing(node.body):
            yield f"line {node.lineno}: an empty handler"
        if isinstance(node, ast.Call) and _suppresses_everything(node):
            yield f"line {node.lineno}: suppress"


def _suppresses_everything(call: ast.Call) -> bool:
    return ast.unparse(call.func) in ("suppress", "contextlib.suppress") and any(map(_catches_everything, call.args))


def _catches_everything(caught: ast.expr | None) -> bool:
    if isinstance(caught, ast.Tuple):
        return any(_catches_everything(entry) for entry in caught.elts)
    return caught is None or ast.unparse(caught) in ("Exception", "BaseException")


def _does_nothing(body: list[ast.stmt]) -> bool:
    return all(
        isinstance(node, ast.Pass | ast.Continue | ast.Break)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in body
    )


def _judged_by_ipaddress(_: str, tree: ast.Module) -> Iterable[str]:
    """Its tables differ between Python versions and miss embedded addresses (egress case 35)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ADDRESS_PROPERTIES:
            yield f"line {node.lineno}: {node.attr}"


def _half_made(text: str, _: ast.Module) -> Iterable[str]:
    yield from re.findall(r"\b(?:TODO|FIXME|XXX|HACK|NotImplementedError|NotImplemented)\b", text)


def _evaluates(_: str, tree: ast.Module) -> Iterable[str]:
    """What comes from inside is text: nothing outside may execute or unpickle it (R34)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("eval", "exec", "compile", "__import__"):
            yield f"line {node.lineno}: {ast.unparse(node.func)}()"
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            if name.partition(".")[0] in ("pickle", "marshal", "shelve", "dill", "cloudpickle"):
                yield f"imports {name}"


def _foreign_private(_: str, tree: ast.Module) -> Iterable[str]:
    """Rooms meet through their public names. Which room the module is in, the caller prepends as its docstring."""
    own = ast.get_docstring(tree) or ""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stockade."):
            room, *rest = (node.module or "").split(".")[1:]
            private = any(part.startswith("_") for part in [*rest, *(alias.name for alias in node.names)])
            if room != own and not room.startswith("_") and private:
                yield f"line {node.lineno}: {node.module}"


RULES = {
    "modules are short": Rule(_long, "\n" * MAX_MODULE_LINES),
    "functions are short": Rule(_long_function, "def f():\n" + "    x\n" * MAX_FUNCTION_LINES),
    "annotations are postponed": Rule(_eager_annotations, "import os", guests=False),
    "nothing is swallowed": Rule(_swallowed, "try:\n x\nexcept (OSError, Exception):\n pass", guests=False),
    "nothing is suppressed": Rule(_swallowed, "with contextlib.suppress(Exception):\n x", guests=False),
    "addresses are not judged by ipaddress": Rule(_judged_by_ipaddress, "x.is_global"),
    "nothing is half made": Rule(_half_made, "# TO" + "DO: later"),
    "nothing is evaluated": Rule(_evaluates, "eval(x)", guests=False),
    "nothing is unpickled": Rule(_evaluates, "from pickle import loads", guests=False),
    "rooms meet through public names": Rule(_foreign_private, "from stockade.egress._loop import x"),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_source_keeps(rule):
    offences = []
    for path in _source.source_files():
        if rule.guests or not _source.is_guest(path):
            tree = _source.tree(path)
            if rule.offences is _foreign_private:
                room = ast.Expr(ast.Constant(path.relative_to(_source.PACKAGE).parts[0].removesuffix(".py")))
                tree = ast.Module([room, *tree.body], [])
            offences += [f"{_source.relative(path)}: {offence}" for offence in rule.offences(path.read_text(), tree)]
    assert offences == []


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_rule_rejects_its_sample(rule):
    assert list(rule.offences(rule.sample, ast.parse(rule.sample)))


def test_a_handler_that_acts_or_that_is_narrow_is_fine():
    text = "try:\n x\nexcept Exception:\n raise\ntry:\n x\nexcept OSError:\n pass\n"
    assert list(_swallowed(text, ast.parse(text))) == []


def test_test_modules_are_short():
    counts = {_source.relative(path): len(path.read_text().splitlines()) for path in _source.test_files()}
    assert {name: count for name, count in counts.items() if count >= MAX_TEST_LINES} == {}
