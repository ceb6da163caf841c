"""What the tests of a task promise to check, read from their text without running it.

Pass needs positive evidence for every required test (docs/grading.md): each ``assert`` statement of ``tests`` is
one required test. To know that one *ran and held*, a marker is put behind it on the same line:
``assert x == 1`` becomes ``assert x == 1; <marker>(0)``. Nothing else of the text moves, so line numbers stay
true, and the sandbox needs no parser.
"""

from __future__ import annotations

import ast
import functools
import re
import warnings
from typing import Final

import msgspec

MARKER: Final = "__stockade_held__"
"""Name that the marked tests call with the number of the assert that just held."""

ENTRY: Final = "check"
_CODING: Final = re.compile(r"[ \t\f]*#.*?coding[:=]")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The marked ``text``, the line of each assert in ``lines``, or in ``problem`` why the tests will not do."""

    text: str
    lines: tuple[int, ...]
    problem: str | None = None


@functools.lru_cache(maxsize=1024)
def plan_tests(tests: str) -> Plan:
    """Number the asserts of ``tests``; never raises on bad tests, ``problem`` says what is wrong.

    Tests without an assert or without ``check(candidate)`` cannot judge anything, and ``assert (x, "message")``
    is always true.
    """
    # The text is handed to the interpreter as str, so a coding comment would only make offsets ambiguous.
    if any(_CODING.match(line) for line in tests.split("\n")[:2]):
        return _refused("a coding comment is not needed: task files are UTF-8")
    if "\r" in tests or "\f" in tests:
        return _refused("use plain newlines: a carriage return or form feed makes line numbers ambiguous")
    if MARKER in tests:
        return _refused(f"the name {MARKER} is taken")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(tests)
    except SyntaxError as error:
        return _refused(f"not Python: {error.msg} at line {error.lineno}")
    except (ValueError, RecursionError, MemoryError):
        return _refused("not Python that can be parsed")
    if not any(_is_check(node) for node in tree.body):
        return _refused("no top-level function check(candidate)")
    asserts = [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    if not asserts:
        return _refused("no assert statement: nothing would be checked")
    always = [node.lineno for node in asserts if isinstance(node.test, ast.Tuple) and node.test.elts]
    if always:
        return _refused(f"the assert at line {always[0]} is a tuple, which is always true: drop the parentheses")
    asserts.sort(key=lambda node: (node.lineno, node.col_offset))
    return Plan(text=_mark(tests, asserts), lines=tuple(node.lineno for node in asserts))


def _refused(problem: str) -> Plan:
    return Plan(text="", lines=(), problem=problem)


def _is_check(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == ENTRY


def _mark(tests: str, asserts: list[ast.Assert]) -> str:
    # ast counts columns in bytes of UTF-8, and ends of statements lie in reading order; go backwards so that
    # an insertion does not move the places still to come.
    lines = [line.encode("utf-8") for line in tests.split("\n")]
    for number, node in reversed(list(enumerate(asserts))):
        row, column = (node.end_lineno or node.lineno) - 1, node.end_col_offset or 0
        line = lines[row]
        lines[row] = line[:column] + f"; {MARKER}({number})".encode() + line[column:]
    return b"\n".join(lines).decode("utf-8")
