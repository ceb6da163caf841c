"""The drawing, the import rules and the packages are the same house."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.style import _source
from tests.support import ROOT

LEARNING = {"client", "gym", "rewards", "training"}
SHARED = {"errors", "ids", "policy"}


def _block(name: str) -> list[str]:
    """Return the lines of the fenced block that follows ``<!-- name -->`` in docs/architecture.md."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    match = re.search(rf"<!-- {name} -->\n+```[a-z]*\n(.*?)```", text, re.DOTALL)
    assert match, f"docs/architecture.md has no block {name!r}"
    return match[1].splitlines()


def test_drawing_shows_the_layers_of_the_import_rules():
    """One line per layer, top to bottom; a room in parentheses is yet to come; text after two spaces explains."""
    drawn = [re.split(r"\s{2,}", line.strip())[0] for line in _block("rooms")]
    assert drawn == _source.layers()


def test_drawing_shows_the_learning_side():
    drawn = {line.split()[0] for line in _block("learning")}
    assert drawn == LEARNING


def test_every_room_has_its_place():
    assert set(_source.rooms()) <= _source.layer_rooms() | LEARNING


def test_optional_layers_are_those_that_do_not_exist():
    optional = set(re.findall(r"\(([a-z]+)\)", " ".join(_source.layers())))
    assert optional == _source.layer_rooms() - set(_source.rooms())


def test_two_trees_contract_names_every_custody_room():
    custody = (_source.layer_rooms() & set(_source.rooms())) - SHARED
    forbidden = _source.contract("two-trees")["forbidden_modules"]
    assert {name.removeprefix("stockade.") for name in forbidden} == custody
    sources = _source.contract("two-trees")["source_modules"]
    assert {name.removeprefix("stockade.") for name in sources} == LEARNING


def test_custody_contract_names_every_custody_room_but_the_front_doors():
    custody = (_source.layer_rooms() & set(_source.rooms())) - {"cli", "web"}
    sources = _source.contract("custody-knows-no-learning")["source_modules"]
    assert {name.removeprefix("stockade.") for name in sources} == custody


@pytest.mark.promise("S8.1")
def test_import_contracts_hold():
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache", "--no-logo"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout


def test_gate_imports_only_pure_rooms():
    """The deciding half of the egress room never reaches for the half that moves bytes."""
    allowed = ("stockade.egress.gate", "stockade.errors", "stockade.ids", "stockade.policy")
    modules = [
        node.module or ""
        for path in (_source.PACKAGE / "egress" / "gate").glob("*.py")
        for node in ast.walk(_source.tree(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stockade")
    ]
    assert modules
    assert [module for module in modules if not module.startswith(allowed)] == []
