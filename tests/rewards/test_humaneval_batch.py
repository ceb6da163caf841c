"""The first half of the main job: 164 references pass, and of 164 × 5 cheats none does."""

from __future__ import annotations

import pytest

from stockade.gym import Candidate, humaneval_tasks
from stockade.rewards import Verdict, run_batch
from tests.gym.test_humaneval import _installed
from tests.rewards.naive import exit_code
from tests.support import requires

pytestmark = pytest.mark.anyio

CHEATS = [candidate for candidate in Candidate if candidate is not Candidate.REFERENCE]
FOOLED = {Candidate.OS_EXIT, Candidate.ALWAYS_EQUAL}


@pytest.fixture(autouse=True)
def _package():
    requires(_installed(), "the extra humaneval is not installed")


@pytest.mark.promise("S7.4")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("candidate", list(Candidate))
async def test_all_references_and_no_cheat(broker, candidate):
    result = await run_batch(broker, humaneval_tasks(candidate), parallel=2, on_result=lambda _: None)
    expected = Verdict.OK if candidate is Candidate.REFERENCE else Verdict.WRONG
    other = [
        f"{sample.task_id}: {sample.verdict.value}: {sample.evidence}"
        for sample in result.samples
        if sample.verdict is not expected
    ]
    assert not other
    assert result.counts[expected] == 164


@pytest.mark.parametrize("candidate", list(Candidate))
async def test_two_problems(local_client, candidate):
    tasks = [task for task in humaneval_tasks(candidate) if task.task_id in ("HumanEval/38", "HumanEval/33")]
    result = await run_batch(local_client, tasks, parallel=2, on_result=lambda _: None)
    expected = Verdict.OK if candidate is Candidate.REFERENCE else Verdict.WRONG
    assert [sample.verdict for sample in result.samples] == [expected] * 2


@pytest.mark.parametrize("candidate", sorted(FOOLED))
def test_the_same_cheat_fools_a_naive_grader(tmp_path, candidate):
    task = next(iter(humaneval_tasks(candidate)))
    tests = f"{task.tests}\nf = {task.entry_point}\n"
    assert exit_code(tmp_path, task.solution, tests)
