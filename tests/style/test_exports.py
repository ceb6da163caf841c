"""A room's public names are those its ``__init__`` lists, and they exist."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys

import pytest

from tests.style import _source

PACKAGES = sorted(
    ".".join(path.parent.relative_to(_source.PACKAGE.parent).parts)
    for path in _source.PACKAGE.rglob("__init__.py")
    if path.read_text().strip()
    and not any(part.startswith("_") for part in path.relative_to(_source.PACKAGE).parts[:-1])
)
HEAVY = ("torch", "transformers", "trl")


def _imported(package: str) -> set[str]:
    """Names that the ``__init__`` imports from stockade itself, and public ones it defines."""
    path = _source.PACKAGE.parent.joinpath(*package.split(".")) / "__init__.py"
    names: set[str] = set()
    for node in _source.tree(path).body:
        if isinstance(node, ast.ImportFrom) and re.match(r"stockade\.(?!_)", node.module or ""):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("package", PACKAGES)
def test_all_lists_what_is_exported(package):
    module = importlib.import_module(package)
    declared = list(module.__all__)
    assert len(declared) == len(set(declared))
    assert _imported(package) <= set(declared), "public, but not in __all__"
    assert [name for name in declared if not hasattr(module, name)] == []


@pytest.mark.promise("S8.2")
@pytest.mark.parametrize("room", [room for room in ("client", "gym", "rewards", "training") if room in _source.rooms()])
def test_learning_side_loads_no_custody_room(room):
    """The import contract is about source; this is about what a process of the learning side has in memory."""
    custody = sorted(_source.layer_rooms() - {"errors", "ids", "policy"})
    code = (
        f"import sys, stockade.{room}\n"
        f"print(*(name for name in {custody!r} if f'stockade.{{name}}' in sys.modules))\n"
        f"print(*(name for name in {HEAVY!r} if name in sys.modules))\n"
    )
    environment = {"PYTHONPATH": str(_source.PACKAGE.parent)}
    answer = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, check=True, capture_output=True, text=True
    )
    loaded, heavy = answer.stdout.split("\n")[:2]
    assert loaded == ""
    assert heavy == "", "the learning packages load only where a job runs"
