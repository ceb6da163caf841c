"""Reading the project's own source, for tests of its style."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from tests.support import ROOT

PACKAGE = ROOT / "src" / "stockade"


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def source_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def is_guest(path: Path) -> bool:
    """Return whether ``path`` runs inside a sandbox."""
    return any(part.startswith("_guest") for part in path.relative_to(PACKAGE).parts)


def test_files() -> list[Path]:
    return sorted((ROOT / "tests").rglob("*.py"))


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=relative(path))


def rooms() -> list[str]:
    """Names of the packages directly below stockade, and of errors and ids."""
    return sorted(
        path.stem if path.is_file() else path.name
        for path in PACKAGE.iterdir()
        if (path / "__init__.py").exists() or (path.suffix == ".py" and not path.name.startswith("_"))
    )


@functools.cache
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def contract(contract_id: str) -> dict[str, Any]:
    contracts = project()["tool"]["importlinter"]["contracts"]
    return next(entry for entry in contracts if entry["id"] == contract_id)


def layers() -> list[str]:
    """The layer lines, top to bottom, as pyproject.toml has them."""
    return list(contract("layers")["layers"])


def layer_rooms() -> set[str]:
    return set(re.findall(r"[a-z]+", " ".join(layers())))


class TestId(NamedTuple):
    """A test function: its file, its name (``Class::test`` inside a class) and the promises it is marked with."""

    node: str
    promises: tuple[str, ...]


def tests_with_promises() -> list[TestId]:
    """Every test of the tree with its ``@pytest.mark.promise(…)`` marks, read without importing anything."""
    found: list[TestId] = []
    for path in test_files():
        if path.name.startswith("test_"):
            found += _tests_in(relative(path), tree(path).body, ())
    return found


def _tests_in(prefix: str, body: list[ast.stmt], inherited: tuple[str, ...]) -> list[TestId]:
    found: list[TestId] = []
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            found += _tests_in(f"{prefix}::{node.name}", node.body, inherited + _promises(node))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            found.append(TestId(f"{prefix}::{node.name}", inherited + _promises(node)))
    return found


def _promises(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, ...]:
    return tuple(
        argument.value
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.promise"
        for argument in decorator.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    )
