"""Tasks: what a rollout is asked, and the hidden tests that judge what it leaves.

A task file is JSONL, one object a line (docs/tasks.md). It is read strictly: a misspelt key silently ignored
would be a test that never ran.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import keyword
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec

from stockade.errors import TaskError
from stockade.gym._plan import plan_tests
from stockade.gym._workspace import DEFAULT_ARTIFACTS, artifact_problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Scalar = str | int | float | bool | None

DEFAULT_TIMEOUT_S: Final = 20.0
MAX_TIMEOUT_S: Final = 600.0
MAX_LINE_BYTES: Final = 4 * 1024 * 1024
MAX_TASK_ID: Final = 128

_REQUIRED: Final = ("task_id", "entry_point", "solution", "tests")
_OPTIONAL: Final = ("helpers", "prompt", "timeout_s", "metadata", "artifacts")
_KEYS: Final = _REQUIRED + _OPTIONAL
_TASK_ID: Final = re.compile(rf"[!-~]{{1,{MAX_TASK_ID}}}")


class PromptView(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the policy model may see of a task: no tests, no helpers, no solution, no metadata."""

    task_id: str
    entry_point: str
    prompt: str


class Task(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One task and, in ``solution``, the candidate program that a batch runs for it.

    ``tests`` defines ``check(candidate)`` in Python with at least one ``assert``; ``helpers`` is trusted code that
    the tests need and that runs beside them. ``timeout_s`` bounds the rollout's program and, again, its grading.
    ``artifacts`` are the files below the workspace that grading receives; everything else is ignored.
    """

    task_id: str
    entry_point: str
    solution: str
    tests: str
    helpers: str = ""
    prompt: str = ""
    timeout_s: float = DEFAULT_TIMEOUT_S
    metadata: dict[str, Scalar] = msgspec.field(default_factory=dict)
    artifacts: tuple[str, ...] = DEFAULT_ARTIFACTS

    @property
    def prompt_view(self) -> PromptView:
        """The part of the task that may be shown to the policy model and put into a rollout."""
        return PromptView(task_id=self.task_id, entry_point=self.entry_point, prompt=self.prompt)

    @property
    def digest(self) -> str:
        """``sha256:`` and the hex digest of the whole task: the same task and program, or not."""
        encoded = msgspec.json.encode(self, order="deterministic")
        return "sha256:" + hashlib.sha256(encoded).hexdigest()


class _Bad(Exception):
    """A field that will not do; the caller knows file and line."""

    def __init__(self, key: str | None, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.key = key
        self.message = message
        self.hint = hint


def load_tasks(path: str | Path) -> list[Task]:
    """Read a task file.

    Blank lines are skipped. Raises :class:`TaskError` with file, line, key and the nearest valid name when a
    line is not one JSON object, a field is unknown, missing or of the wrong type, ``tests`` cannot judge
    anything, a ``task_id`` comes twice, or the file holds no task.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TaskError(
            f"cannot be read: {error.strerror}", path=path, hint="give the path of a JSONL file of tasks"
        ) from error
    tasks: list[Task] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            task = _parse_line(line)
            if task.task_id in seen:
                raise _Bad("task_id", f"{task.task_id!r} was already used on line {seen[task.task_id]}")
        except _Bad as bad:
            raise TaskError(bad.message, path=path, line=number, key=bad.key, hint=bad.hint) from None
        seen[task.task_id] = number
        tasks.append(task)
    if not tasks:
        raise TaskError("holds no task", path=path, hint="one JSON object a line; see docs/tasks.md")
    return tasks


def make_task(fields: Mapping[str, object]) -> Task:
    """Check ``fields`` as one line of a task file would be checked, and return the task."""
    try:
        return _build(fields)
    except _Bad as bad:
        raise TaskError(bad.message, key=bad.key, hint=bad.hint) from None


def _parse_line(line: bytes) -> Task:
    if len(line) > MAX_LINE_BYTES:
        raise _Bad(None, f"the line has {len(line)} bytes; at most {MAX_LINE_BYTES} are read")
    try:
        parsed = json.loads(line.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except UnicodeDecodeError:
        raise _Bad(None, "the line is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _Bad(
            None, f"not JSON: {error.msg} at column {error.colno}", "one object a line, no trailing comma"
        ) from None
    except RecursionError:
        raise _Bad(None, "nested too deeply") from None
    if not isinstance(parsed, dict):
        raise _Bad(None, f"a {_kind(parsed)}, not an object", "one JSON object a line; see docs/tasks.md")
    return _build(parsed)


def _no_duplicates(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise _Bad(key, "the key comes twice in one object")
        found[key] = value
    return found


def _no_constant(text: str) -> NoReturn:
    raise _Bad(None, f"{text} is not JSON")


def _build(fields: Mapping[str, object]) -> Task:
    for key in fields:
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(_KEYS)}"
            raise _Bad(key, "unknown key", hint)
    for key in _REQUIRED:
        if key not in fields:
            raise _Bad(key, "missing", f"every task needs {', '.join(_REQUIRED)}")
    task = Task(
        task_id=_task_id(fields["task_id"]),
        entry_point=_entry_point(fields["entry_point"]),
        solution=_text(fields, "solution"),
        tests=_text(fields, "tests"),
        helpers=_text(fields, "helpers"),
        prompt=_text(fields, "prompt"),
        timeout_s=_timeout(fields.get("timeout_s", DEFAULT_TIMEOUT_S)),
        metadata=_metadata(fields.get("metadata", {})),
        artifacts=_artifacts(fields.get("artifacts", list(DEFAULT_ARTIFACTS))),
    )
    problem = plan_tests(task.tests).problem
    if problem is not None:
        raise _Bad("tests", problem, "tests define check(candidate) and judge with assert; see docs/tasks.md")
    return task


def _text(fields: Mapping[str, object], key: str) -> str:
    value = fields.get(key, "")
    if not isinstance(value, str):
        raise _Bad(key, f"must be text, not a {_kind(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise _Bad(key, "holds half a surrogate pair, which no file can store") from None
    if "\0" in value:
        raise _Bad(key, "holds a NUL character")
    return value


def _task_id(value: object) -> str:
    if not isinstance(value, str):
        raise _Bad("task_id", f"must be text, not a {_kind(value)}")
    if not _TASK_ID.fullmatch(value):
        raise _Bad("task_id", f"must be 1 to {MAX_TASK_ID} printable ASCII characters without blanks")
    return value


def _entry_point(value: object) -> str:
    if not isinstance(value, str):
        raise _Bad("entry_point", f"must be text, not a {_kind(value)}")
    if not value.isidentifier() or keyword.iskeyword(value):
        raise _Bad("entry_point", f"{value!r} is not the name of a Python function")
    return value


def _timeout(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Bad("timeout_s", f"must be a number of seconds, not a {_kind(value)}")
    if not math.isfinite(value) or not 0 < value <= MAX_TIMEOUT_S:
        raise _Bad("timeout_s", f"must be more than 0 and at most {MAX_TIMEOUT_S:g} seconds")
    return float(value)


def _metadata(value: object) -> dict[str, Scalar]:
    if not isinstance(value, dict):
        raise _Bad("metadata", f"must be an object, not a {_kind(value)}")
    found: dict[str, Scalar] = {}
    for key, item in value.items():
        if not isinstance(item, str | int | float | bool | None):
            raise _Bad(f"metadata.{key}", f"must be text, a number, true, false or null, not a {_kind(item)}")
        found[str(key)] = item
    return found


def _artifacts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise _Bad("artifacts", f"must be a list of file names, not a {_kind(value)}")
    found: list[str] = []
    for item in value:
        if not isinstance(item, str):
            raise _Bad("artifacts", f"must hold file names, not a {_kind(item)}")
        problem = artifact_problem(item)
        if problem is not None:
            raise _Bad("artifacts", problem)
        found.append(item)
    if len(set(found)) != len(found):
        raise _Bad("artifacts", "names a file twice")
    if DEFAULT_ARTIFACTS[0] not in found:
        raise _Bad("artifacts", f"must name {DEFAULT_ARTIFACTS[0]!r}, the file that defines the entry point")
    return tuple(found)


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "text"
    return "list" if isinstance(value, list) else "object"
