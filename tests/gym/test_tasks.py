"""The task file is read strictly: each mistake names file, line and key."""

from __future__ import annotations

import json

import pytest

from stockade.errors import TaskError
from stockade.gym import Task, load_tasks, make_task

TESTS = "def check(candidate):\n    assert candidate(1) == 2\n"
GOOD = {"task_id": "t/1", "entry_point": "f", "solution": "def f(x): return x + 1\n", "tests": TESTS}
FULL = {
    **GOOD,
    "helpers": "def twice(x): return 2 * x\n",
    "prompt": "Add one.",
    "timeout_s": 3,
    "metadata": {"level": 2, "source": "hand", "hard": False, "ratio": 0.5, "note": None},
    "artifacts": ["solution.py", "pkg/part.py"],
}


def _write(tmp_path, *lines):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return path


def test_a_whole_task_and_a_short_one(tmp_path):
    full, short = load_tasks(_write(tmp_path, FULL, b"", {**GOOD, "task_id": "t/2"}, b"  "))
    assert full.artifacts == ("solution.py", "pkg/part.py")
    assert (full.timeout_s, full.metadata["level"]) == (3.0, 2)
    assert isinstance(full.timeout_s, float)
    assert (short.helpers, short.prompt, short.timeout_s, short.metadata) == ("", "", 20.0, {})
    assert short.artifacts == ("solution.py",)


def test_crlf_and_a_missing_last_newline_are_fine(tmp_path):
    assert len(load_tasks(_write(tmp_path, json.dumps(GOOD).encode() + b"\r"))) == 1


@pytest.mark.parametrize(
    ("line", "key", "message"),
    [
        ({**GOOD, "entrypoint": "f"}, "entrypoint", "did you mean 'entry_point'?"),
        ({**GOOD, "timeout": 3}, "timeout", "did you mean 'timeout_s'?"),
        ({**GOOD, "zzz": 3}, "zzz", "valid keys: task_id"),
        ({key: GOOD[key] for key in GOOD if key != "tests"}, "tests", "missing"),
        ({key: GOOD[key] for key in GOOD if key != "task_id"}, "task_id", "missing"),
        ({**GOOD, "task_id": 7}, "task_id", "must be text, not a number"),
        ({**GOOD, "task_id": ""}, "task_id", "1 to 128 printable"),
        ({**GOOD, "task_id": "a\nb"}, "task_id", "1 to 128 printable"),
        ({**GOOD, "task_id": "a\u202eb"}, "task_id", "1 to 128 printable"),
        ({**GOOD, "task_id": "a" * 129}, "task_id", "1 to 128 printable"),
        ({**GOOD, "entry_point": "f()"}, "entry_point", "not the name of a Python function"),
        ({**GOOD, "entry_point": "class"}, "entry_point", "not the name of a Python function"),
        ({**GOOD, "entry_point": None}, "entry_point", "must be text, not a null"),
        ({**GOOD, "solution": ["x"]}, "solution", "must be text, not a list"),
        ({**GOOD, "solution": "a\0b"}, "solution", "NUL"),
        ({**GOOD, "solution": "\ud800"}, "solution", "surrogate"),
        ({**GOOD, "helpers": True}, "helpers", "must be text, not a boolean"),
        ({**GOOD, "prompt": {}}, "prompt", "must be text, not a object"),
        ({**GOOD, "timeout_s": True}, "timeout_s", "not a boolean"),
        ({**GOOD, "timeout_s": "3"}, "timeout_s", "not a text"),
        ({**GOOD, "timeout_s": 0}, "timeout_s", "more than 0"),
        ({**GOOD, "timeout_s": 601}, "timeout_s", "at most 600"),
        ({**GOOD, "metadata": []}, "metadata", "must be an object"),
        ({**GOOD, "metadata": {"a": [1]}}, "metadata.a", "not a list"),
        ({**GOOD, "artifacts": "solution.py"}, "artifacts", "must be a list"),
        ({**GOOD, "artifacts": [1]}, "artifacts", "not a number"),
        ({**GOOD, "artifacts": ["other.py"]}, "artifacts", "must name 'solution.py'"),
        ({**GOOD, "artifacts": ["solution.py", "solution.py"]}, "artifacts", "twice"),
        ({**GOOD, "artifacts": ["solution.py", "../x"]}, "artifacts", "not a file name"),
        ({**GOOD, "artifacts": ["solution.py", "/etc/passwd"]}, "artifacts", "not a file name"),
        ({**GOOD, "artifacts": ["solution.py", ".stockade-tests.py"]}, "artifacts", "not a file name"),
        ({**GOOD, "artifacts": ["solution.py", "a//b"]}, "artifacts", "not a file name"),
        ({**GOOD, "artifacts": ["solution.py", "a\n"]}, "artifacts", "not a file name"),
        ({**GOOD, "tests": "def check(candidate):\n    candidate(1)\n"}, "tests", "no assert"),
        ({**GOOD, "tests": "def check(:\n"}, "tests", "not Python"),
        ({**GOOD, "tests": "assert True\n"}, "tests", "no top-level function check"),
        ([GOOD], None, "a list, not an object"),
        (b"null", None, "a null, not an object"),
        (b"{", None, "not JSON"),
        (b'{"task_id": "a",}', None, "not JSON"),
        (b'{"task_id": "a", "task_id": "b"}', "task_id", "twice in one object"),
        (b'{"timeout_s": NaN}', None, "NaN is not JSON"),
        (b'{"timeout_s": Infinity}', None, "Infinity is not JSON"),
        (b"\xff\xfe", None, "not UTF-8"),
        (b"\xef\xbb\xbf{}", None, "not JSON"),
        (b"[" * 200_000, None, "nested too deeply"),
    ],
)
def test_one_bad_line(tmp_path, line, key, message):
    path = _write(tmp_path, GOOD, b"", line)
    with pytest.raises(TaskError) as caught:
        load_tasks(path)
    error = caught.value
    assert (error.path, error.line, error.key) == (str(path), 3, key)
    assert str(error).startswith(f"{path}:3: ")
    assert message in str(error)
    assert "\n" not in str(error)


def test_an_id_comes_once(tmp_path):
    with pytest.raises(TaskError, match=r":2: task_id: 't/1' was already used on line 1"):
        load_tasks(_write(tmp_path, GOOD, GOOD))


def test_a_line_has_a_limit(tmp_path):
    with pytest.raises(TaskError, match="at most 4194304"):
        load_tasks(_write(tmp_path, {**GOOD, "prompt": "x" * (4 << 20)}))


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_an_empty_file_holds_no_task(tmp_path, content):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(content)
    with pytest.raises(TaskError, match="holds no task"):
        load_tasks(path)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(TaskError, match="No such file"):
        load_tasks(tmp_path / "none.jsonl")
    with pytest.raises(TaskError, match="Is a directory"):
        load_tasks(tmp_path)


def test_the_prompt_view_has_nothing_hidden():
    task = make_task({**FULL, "metadata": {"answer": "canary-1"}, "tests": TESTS + "# canary-2\n"})
    view = repr(task.prompt_view)
    assert task.prompt_view.prompt == "Add one."
    assert not [secret for secret in ("canary", "check", "return x", "twice") if secret in view]


def test_the_digest_names_task_and_program():
    digests = {make_task({**GOOD, **change}).digest for change in ({}, {"solution": "x"}, {"timeout_s": 2})}
    assert len(digests) == 3
    assert make_task(GOOD).digest == make_task(dict(reversed(GOOD.items()))).digest


def test_a_task_is_frozen_and_closed():
    task = make_task(GOOD)
    with pytest.raises(AttributeError):
        task.tests = ""  # type: ignore[misc]
    with pytest.raises(TypeError):
        Task(**{**GOOD, "finding": "x"})  # type: ignore[arg-type]
    with pytest.raises(TaskError, match=r"^tests: missing"):
        make_task({key: GOOD[key] for key in GOOD if key != "tests"})
