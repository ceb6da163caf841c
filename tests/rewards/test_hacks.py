"""Reward hacks (reference R1 to R36): each fools a grader that is written in the usual way, and none fools ours."""

from __future__ import annotations

import pytest

from stockade.gym import make_task
from stockade.rewards import Grader, Verdict, attempt
from tests.rewards import naive
from tests.rewards.hacks import CANARY, HACKS, RIGHT, TESTS, Hack

pytestmark = pytest.mark.anyio

hacks = pytest.mark.parametrize("hack", HACKS, ids=lambda hack: hack.case)


def _task(hack: Hack, program: str):
    return make_task(
        {
            "task_id": "t/" + hack.case,
            "entry_point": "f",
            "solution": program,
            "tests": hack.tests,
            "timeout_s": hack.timeout_s,
        }
    )


@hacks
def test_hack_fools_a_naive_grader(tmp_path, hack):
    assert hack.naive(tmp_path, hack.program, hack.tests)


@pytest.mark.promise("S7.1")
@hacks
async def test_hack_fails_here(client, hack):
    files = {name: text.encode() for name, text in hack.files.items()}
    sample = await attempt(client, Grader(client), _task(hack, hack.program), files=files)
    assert sample.verdict is hack.verdict
    assert sample.reward == 0
    assert hack.evidence in sample.evidence
    assert CANARY not in sample.evidence


async def test_the_right_program_passes_beside_visible_tests(client):
    """The same path says ok where it should: the refusals above are about the hacks."""
    files = {name: text.encode() for name, text in naive.VISIBLE_TESTS.items()}
    task = make_task({"task_id": "right", "entry_point": "f", "solution": RIGHT, "tests": TESTS})
    sample = await attempt(client, Grader(client), task, files=files)
    assert (sample.verdict, sample.tests_passed, sample.tests_required) == (Verdict.OK, 3, 3)
    assert sample.reward == 1
    assert sample.rollout_id.startswith("ep_")
