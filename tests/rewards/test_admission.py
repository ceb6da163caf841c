"""P5: what does nothing must fail, and the reference must pass twice."""

from __future__ import annotations

import pytest

from stockade.errors import TaskError
from stockade.gym import make_task
from stockade.rewards import Grader, admit_task
from tests.rewards.hacks import RIGHT, TESTS

pytestmark = pytest.mark.anyio


def _task(tests: str = TESTS, solution: str = RIGHT):
    return make_task({"task_id": "t", "entry_point": "f", "solution": solution, "tests": tests})


async def test_a_fair_task_is_admitted(client):
    admission = await admit_task(Grader(client), _task())
    assert admission.problems == ()
    assert admission.admitted


@pytest.mark.parametrize(
    ("tests", "problem"),
    [
        ("def check(c):\n    c(1)\n    assert True\n", "a program that returns nothing got ok"),
        ("def check(c):\n    assert c(1) is not None\n", "a program that returns True got ok"),
        ("def check(c):\n    assert c(0) == 7 or c(0) == 0\n", "a program that returns its argument got ok"),
        ("def check(c):\n    assert not c(-2) > 7\n", "a program that returns 0 got ok"),
        (TESTS + "    if candidate(0) == 8:\n        assert True\n", "never ran, at lines of the tests: 7"),
        (TESTS.replace("13", "14"), "the reference got wrong on run 1: failed at line 3"),
    ],
)
async def test_an_unfair_task_is_not(local_client, tests, problem):
    admission = await admit_task(Grader(local_client), _task(tests))
    assert not admission.admitted
    assert any(problem in found for found in admission.problems)


async def test_the_reference_may_be_another_than_the_candidate(local_client):
    task = _task(solution="def f(x):\n    return 0\n")
    assert not (await admit_task(Grader(local_client), task)).admitted
    assert (await admit_task(Grader(local_client), task, reference=RIGHT)).admitted


async def test_tests_that_pass_by_chance_are_found(local_client):
    """The reference must pass every time: this one passes or fails with the parity of a random number."""
    flaky = "import random\n\n\ndef check(c):\n    assert c(1) == 10\n    assert random.random() < 1e-9\n"
    assert not (await admit_task(Grader(local_client), _task(flaky))).admitted


async def test_tests_without_an_assert_never_get_so_far():
    with pytest.raises(TaskError, match="no assert"):
        _task("def check(candidate):\n    candidate(1)\n")
