"""A batch: each result once, none lost, nothing left behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from stockade.errors import AgentGone, RunError
from stockade.gym import make_task
from stockade.rewards import ResultLog, Sample, Verdict, run_batch
from tests.rewards.hacks import RIGHT, TESTS
from tests.rewards.local_client import LocalReply
from tests.rewards.test_verdicts import SILENT, STOP, FakeClient

pytestmark = pytest.mark.anyio

SLEEPER = "import time\nopen('started', 'w').close()\ntime.sleep(60)\n"


def _tasks(count: int, solution: str = RIGHT):
    return [
        make_task({"task_id": f"t/{number}", "entry_point": "f", "solution": solution, "tests": TESTS})
        for number in range(count)
    ]


@pytest.mark.promise("S6.3")
async def test_resumed_where_it_was_cut_off(client, tmp_path):
    """Cancelled in the middle, the batch keeps what is finished; run again, it does only the rest."""
    tasks = _tasks(6)
    path = tmp_path / "results.jsonl"

    with ResultLog(path) as log:
        job: asyncio.Task[object]

        def third(sample: Sample) -> None:
            log.append(sample)
            if len(log.samples) == 3:
                job.cancel()

        job = asyncio.ensure_future(run_batch(client, tasks, parallel=1, on_result=third))
        with pytest.raises(asyncio.CancelledError):
            await job
    with ResultLog(path) as log:
        done = log.finished(tasks)
        assert len(done) == 3
        result = await run_batch(client, tasks, parallel=2, on_result=log.append, resume=done)
        assert (len(result.samples), result.resumed, result.not_started) == (3, 3, 0)
        assert log.finished(tasks) == {task.task_id for task in tasks}
    assert result.counts == {verdict: 3 if verdict is Verdict.OK else 0 for verdict in Verdict}
    assert path.read_bytes().count(b"\n") == 6


async def test_cancelling_closes_every_sandbox(local_client):
    batch = asyncio.ensure_future(run_batch(local_client, _tasks(4, SLEEPER), parallel=4, on_result=lambda _: None))
    async with asyncio.timeout(30):
        while len(list(local_client.folder.glob("*/started"))) < 4:
            await asyncio.sleep(0.02)
    batch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await batch
    assert not local_client.open


async def test_each_rollout_and_grading_is_a_fresh_sandbox(local_client):
    """P1: three sandboxes a task, and the rollout's is closed before those of the grading are made."""
    events: list[str] = []
    create = local_client.create

    async def spy(*, role: str, **rest: Any) -> Any:
        episode = await create(role=role, **rest)
        events.append(f"open {role}")
        close = episode.close

        async def closing() -> Any:
            events.append(f"close {role}")
            return await close()

        episode.close = closing
        return episode

    local_client.create = spy
    result = await run_batch(local_client, _tasks(2), parallel=1, on_result=lambda _: None)
    one = ["open rollout", "close rollout", *["open grading"] * 2, *["close grading"] * 2]
    assert events == one * 2
    assert len({sample.rollout_id for sample in result.samples}) == 2


async def test_a_result_that_cannot_be_kept_ends_the_batch(local_client):
    def full(sample: Sample) -> None:
        raise RunError("disk full")

    with pytest.raises(RunError, match="disk full"):
        await run_batch(local_client, _tasks(5), parallel=2, on_result=full)
    assert not local_client.open


async def test_after_a_stop_nothing_starts():
    client: Any = FakeClient(rollout=STOP)
    kept: list[Sample] = []
    result = await run_batch(client, _tasks(10), parallel=2, on_result=kept.append)
    assert result.stopped
    assert {sample.verdict for sample in kept} == {Verdict.STOPPED}
    assert len(kept) + result.not_started == 10
    assert len(kept) <= 3


async def test_without_an_agent_there_is_one_error():
    client: Any = FakeClient(creates=[AgentGone("nobody answers")] * 50)
    kept: list[Sample] = []
    with pytest.raises(AgentGone, match="nobody answers"):
        await run_batch(client, _tasks(10), parallel=3, on_result=kept.append)
    assert not kept


async def test_an_infrastructure_fault_is_a_row_and_the_batch_goes_on():
    lost = LocalReply(**{**SILENT.__dict__, "fault": "infrastructure", "exit": "node_fault"})
    client: Any = FakeClient(grading=replace(SILENT, peer=lost))
    result = await run_batch(client, _tasks(5), parallel=2, on_result=lambda _: None)
    assert result.counts[Verdict.INFRASTRUCTURE_FAULT] == 5
    assert not result.stopped


async def test_parallel_is_a_bound():
    class Busy(FakeClient):
        now = most = 0

        async def create(self, *, role: str, **rest: Any) -> Any:
            if role == "rollout":
                self.now += 1
                self.most = max(self.most, self.now)
                await asyncio.sleep(0.005)
                self.now -= 1
            return await super().create(role=role, **rest)

    client: Any = Busy()
    await run_batch(client, _tasks(12), parallel=3, on_result=lambda _: None)
    assert client.most == 3
    with pytest.raises(ValueError, match="at least 1"):
        await run_batch(client, _tasks(1), parallel=0, on_result=lambda _: None)
