"""Tasks and the workspace convention (docs/tasks.md)."""

from __future__ import annotations

from stockade.gym._humaneval import Candidate, humaneval_tasks
from stockade.gym._plan import MARKER, Plan, plan_tests
from stockade.gym._task import DEFAULT_TIMEOUT_S, PromptView, Task, load_tasks, make_task
from stockade.gym._tree import Tree, export_tree
from stockade.gym._workspace import (
    DEFAULT_ARTIFACTS,
    MAX_ARTIFACT_BYTES,
    SOLUTION,
    WORKSPACE,
    artifact_path,
    artifact_problem,
    artifacts_problem,
)

__all__ = [
    "DEFAULT_ARTIFACTS",
    "DEFAULT_TIMEOUT_S",
    "MARKER",
    "MAX_ARTIFACT_BYTES",
    "SOLUTION",
    "WORKSPACE",
    "Candidate",
    "Plan",
    "PromptView",
    "Task",
    "Tree",
    "artifact_path",
    "artifact_problem",
    "artifacts_problem",
    "export_tree",
    "humaneval_tasks",
    "load_tasks",
    "make_task",
    "plan_tests",
]
