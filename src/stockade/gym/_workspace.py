"""The workspace convention: what a rollout leaves and what is taken from it.

A rollout leaves its program as ``/workspace/solution.py``. Only the files that the task declares are collected,
only if they are regular, only up to a size; whatever else lies there (``conftest.py``, ``reward.txt``,
``sitecustomize.py``, a changed test) is never looked at.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

WORKSPACE: Final = "/workspace"
SOLUTION: Final = "solution.py"
DEFAULT_ARTIFACTS: Final = (SOLUTION,)
MAX_ARTIFACT_BYTES: Final = 1024 * 1024
"""All artifacts of one rollout together."""

# No part begins with a dot: those names are the grader's own, and '..' would leave the workspace.
_ARTIFACT: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
_MAX_NAME: Final = 200


def artifact_problem(name: str) -> str | None:
    """Say why ``name`` cannot be a declared artifact, or return ``None``."""
    if len(name) > _MAX_NAME or not _ARTIFACT.fullmatch(name):
        return (
            f"{name!r} is not a file name below the workspace (letters, digits, '_', '-', '.'; no part begins with '.')"
        )
    return None


def artifact_path(name: str) -> str:
    """The absolute path of a declared artifact inside a sandbox."""
    problem = artifact_problem(name)
    if problem is not None:
        raise ValueError(problem)
    return f"{WORKSPACE}/{name}"


def artifacts_problem(files: Mapping[str, bytes]) -> str | None:
    """Say why collected ``files`` cannot be graded (size), or return ``None``."""
    size = sum(len(data) for data in files.values())
    if size > MAX_ARTIFACT_BYTES:
        return f"the artifacts have {size} bytes; at most {MAX_ARTIFACT_BYTES} are graded"
    return None
