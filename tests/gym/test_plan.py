"""Asserts are counted and marked without moving anything else."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.gym import MARKER, plan_tests


def _held(tests: str, candidate: object) -> set[int]:
    plan = plan_tests(tests)
    assert plan.problem is None
    held: set[int] = set()
    space: dict[str, object] = {MARKER: held.add}
    exec(plan.text, space)
    space["check"](candidate)  # type: ignore[operator]
    return held


TESTS = '''\
def helper(x):
    assert x is not None, "né"
    return x


def check(candidate):
    assert (
        candidate(1)
        == 1
    ), "spread; over lines"
    if helper("ü"): assert candidate("é") == "é", "é"; assert True
    for i in range(3):
        assert candidate(i) == i   # a comment; assert False
    text = """
    assert nothing
    """
    assert text \\
        and candidate(text) == text;
    try:
        assert candidate(0)
    except AssertionError:
        pass
'''


def test_each_assert_that_holds_is_marked():
    plan = plan_tests(TESTS)
    assert plan.lines == (2, 7, 11, 11, 13, 17, 20)
    assert _held(TESTS, lambda x: x) == {0, 1, 2, 3, 4, 5}


def test_lines_stay_where_they_were():
    before, after = ast.parse(TESTS), ast.parse(plan_tests(TESTS).text)
    lines = [[node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)] for tree in (before, after)]
    assert lines[0] == lines[1]
    calls = [node for node in ast.walk(after) if isinstance(node, ast.Name) and node.id == MARKER]
    assert len(calls) == len(lines[0])
    assert plan_tests(TESTS).text.replace(";", "").count("\n") == TESTS.count("\n")


@given(
    st.lists(st.sampled_from(["assert x", "assert x, 'é'", "y = 'ü'; assert x; y = 1", "assert (x\n    )"]), min_size=1)
)
def test_any_row_of_asserts(statements):
    body = "".join(f"    {statement}\n" for statement in statements)
    assert _held(f"def check(x):\n{body}", object()) == set(range(len(statements)))


@pytest.mark.parametrize(
    ("tests", "problem"),
    [
        ("", "no top-level function check"),
        ("class A:\n    def check(self):\n        assert self\n", "no top-level function check"),
        ("async def check(candidate):\n    assert candidate\n", "no top-level function check"),
        ("def check(candidate):\n    pass\n", "no assert statement"),
        ("def check(candidate):\n    assert (candidate, 'always')\n", "line 2 is a tuple, which is always true"),
        ("def check(candidate)\n", "not Python: expected ':' at line 1"),
        ("def check(candidate):\n    assert candidate\x00\n", "not Python"),
        ("def check(candidate):\r\n    assert candidate\r\n", "carriage return"),
        ("# -*- coding: latin-1 -*-\ndef check(candidate):\n    assert candidate\n", "coding comment"),
        (f"def check(candidate):\n    assert {MARKER}(0)\n", "is taken"),
        ("def check(c):\n    assert " + "(" * 5000 + ")" * 5000, "not Python"),
        ("def check(c):\n    assert " + "-" * 200_000 + "1", "not Python"),
    ],
)
def test_tests_that_cannot_judge(tests, problem):
    assert problem in str(plan_tests(tests).problem)
