"""The programs that are shipped: small, old enough Python, two built-in modules."""

from __future__ import annotations

import ast
import sys

import pytest

from stockade.rewards import _guest_text as text

PROGRAMS = {"tests": text.tests_program(), "candidate": text.candidate_program()}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_python_3_8_can_parse_it(program):
    tree = ast.parse(program, feature_version=(3, 8))
    # Annotations such as list[int] are never evaluated, on any version.
    future = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert [(node.module, node.names[0].name) for node in future] == [("__future__", "annotations")]


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_it_imports_built_in_modules_only(program):
    tree = ast.parse(program)
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert names
    assert names <= {"posix", "sys"} <= set(sys.builtin_module_names)


def test_both_sides_ship_the_same_codec():
    codec, _, _ = PROGRAMS["tests"].partition(b"class Channel:")
    assert codec == PROGRAMS["candidate"].partition(b"class Channel:")[0]
    assert b"def decode(" in codec


def test_the_candidate_is_not_told_how_tests_run():
    assert b"nonce" not in PROGRAMS["candidate"]
    assert b"check" not in PROGRAMS["candidate"].split(b"class Channel:")[1]
