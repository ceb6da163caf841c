"""What tests may rely on, and what a candidate cannot get by them."""

from __future__ import annotations

import msgspec
import pytest

from stockade.gym import SOLUTION, make_task
from stockade.rewards import Grader, Verdict
from tests.rewards.hacks import RIGHT

pytestmark = pytest.mark.anyio


async def _grade(client, tests: str, program: str = RIGHT, **fields: object):
    task = make_task(
        {"task_id": "t", "entry_point": "f", "solution": program, "tests": tests, "timeout_s": 20, **fields}
    )
    return await Grader(client).grade(task, {SOLUTION: program.encode()})


async def test_a_candidate_that_raises_can_be_expected(local_client):
    tests = """
def check(candidate):
    try:
        candidate(-1)
    except CandidateError as error:
        assert error.kind == "ValueError" and error.message == "negative"
    else:
        assert False, "no error"
"""
    raises = "def f(x):\n    raise ValueError('negative')\n"
    grade = await _grade(local_client, tests, raises)
    # `assert False` never ran, so this style is no pass: the assert must be one that runs.
    assert (grade.verdict, grade.evidence) == (Verdict.WRONG, "asserts that never ran, at lines of the tests: 8")
    better = tests.replace('assert False, "no error"', 'raise AssertionError("no error")')
    assert (await _grade(local_client, better, raises)).verdict is Verdict.OK
    assert (await _grade(local_client, better)).verdict is Verdict.WRONG


async def test_swallowing_everything_does_not_help(local_client):
    tests = """
def check(candidate):
    for x in range(3):
        try:
            candidate(x)
        except BaseException:
            pass
    assert True
"""
    assert (await _grade(local_client, tests)).verdict is Verdict.OK
    grade = await _grade(local_client, tests, "import os\n\n\ndef f(x):\n    os._exit(0)\n")
    assert grade.verdict is Verdict.WRONG
    assert "ended without an answer (exited, exit code 0)" in grade.evidence


async def test_an_empty_answer_makes_no_assert_run(local_client):
    """A vacuous pass: every item is right, and there is none."""
    tests = "def check(candidate):\n    for item in candidate(3):\n        assert item > 0\n"
    assert (await _grade(local_client, tests, "def f(x):\n    return [x]\n")).verdict is Verdict.OK
    grade = await _grade(local_client, tests, "def f(x):\n    return []\n")
    assert grade.evidence == "asserts that never ran, at lines of the tests: 3"
    assert (grade.tests_passed, grade.tests_required) == (0, 1)


async def test_emptying_the_argument_does_not_change_what_is_expected(local_client):
    tests = "def check(candidate):\n    given = [3, 1, 2]\n    assert candidate(given) == sorted(given)\n"
    hack = "def f(x):\n    x.clear()\n    return []\n"
    space: dict[str, object] = {}
    exec(tests + hack, space)
    space["check"](space["f"])  # type: ignore[operator]  # in one process it passes
    assert (await _grade(local_client, tests, hack)).verdict is Verdict.WRONG


async def test_prints_of_the_tests_are_no_report(local_client):
    tests = "def check(candidate):\n    print('noise')\n    assert candidate(1) == 10\n"
    assert (await _grade(local_client, tests)).verdict is Verdict.OK


async def test_a_candidate_cannot_answer_ahead(local_client):
    """A right answer to call 2, sent before it was asked, is an answer to another question."""
    ahead = (
        "import posix\n\n\ndef f(x):\n    posix.write(4, b'00000013' + b't3:i2;s5:valuei16;')\n    return 3 * x + 7\n"
    )
    grade = await _grade(local_client, "def check(c):\n    assert c(1) == 10\n    assert c(5) == 22\n", ahead)
    assert grade.verdict is Verdict.WRONG
    assert grade.evidence.startswith("no usable answer")


async def test_calls_have_a_cap(local_client):
    tests = "def check(candidate):\n    for i in range(100_001):\n        assert candidate(0) == 7\n"
    grade = await _grade(local_client, tests)
    assert "more than 100000 calls" in grade.evidence


async def test_a_candidate_that_never_runs_is_not_a_pass(local_client):
    tests = "def check(candidate):\n    assert True\n"
    assert (await _grade(local_client, tests)).evidence == "the tests never called the candidate"


async def test_arguments_are_literals(local_client):
    grade = await _grade(local_client, "def check(candidate):\n    assert candidate(print) == 1\n")
    assert "the tests pass a value of type builtin_function_or_method" in grade.evidence


async def test_helpers_and_keywords_and_other_artifacts(local_client):
    task = make_task(
        {
            "task_id": "t",
            "entry_point": "f",
            "solution": "import part\n\n\ndef f(*, x):\n    return part.twice(x)\n",
            "tests": "def check(candidate):\n    assert candidate(x=4) == double(4)\n",
            "helpers": "def double(x):\n    return x + x\n",
            "artifacts": ["solution.py", "part.py"],
        }
    )
    files = {SOLUTION: task.solution.encode(), "part.py": b"def twice(x):\n    return 2 * x\n"}
    assert (await Grader(local_client).grade(task, files)).verdict is Verdict.OK
    alone = msgspec.structs.replace(task, artifacts=("solution.py",))
    assert "ModuleNotFoundError" in (await Grader(local_client).grade(alone, files)).evidence


@pytest.mark.parametrize(
    ("program", "evidence"),
    [
        ("", "KeyError"),
        ("f = 3\n", "TypeError"),
        ("def f(:\n", "SyntaxError"),
        ("raise SystemExit(0)\n", "SystemExit"),
        ("def f(x):\n    return f(x)\n", "RecursionError"),
        ("def f(x):\n    return lambda: 1\n", "type function"),
        ("def f(x):\n    return 'x' * (2 << 20)\n", "at most 1048576 travel"),
        ("class E(Exception):\n    def __str__(self):\n        raise E\n\n\ndef f(x):\n    raise E\n", "E: "),
        ("import os\nos.close(4)\n\n\ndef f(x):\n    return 10\n", "ended without an answer"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n", "ended without an answer"),
        ("\udcff", "SyntaxError"),
    ],
)
async def test_whatever_it_does_is_wrong(local_client, program, evidence):
    task = make_task(
        {"task_id": "t", "entry_point": "f", "solution": "", "tests": "def check(c):\n    assert c(1) == 10\n"}
    )
    grade = await Grader(local_client).grade(task, {SOLUTION: program.encode("utf-8", "surrogateescape")})
    assert grade.verdict is Verdict.WRONG
    assert evidence in grade.evidence


async def test_what_was_left_has_a_size_and_a_name(local_client):
    task = make_task({"task_id": "t", "entry_point": "f", "solution": "", "tests": "def check(c):\n    assert c(1)\n"})
    grader = Grader(local_client)
    large = await grader.grade(task, {SOLUTION: b"#" * ((1 << 20) + 1)})
    assert (large.verdict, "at most 1048576" in large.evidence) == (Verdict.WRONG, True)
    assert (await grader.grade(task, {"other.py": b""})).evidence == "the rollout left no solution.py"
    assert local_client.created == 0
