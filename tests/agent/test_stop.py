"""A stop cuts the way out, kills every process, latches, and gives no sample."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from stockade.errors import BrokerError
from stockade.runs import RunDirectory
from tests.agents import assert_sealed, events_of, open_run

pytestmark = pytest.mark.anyio


@pytest.mark.promise("S6.4")
async def test_a_stop_ends_running_commands_and_admits_nothing_more(tmp_path: Path) -> None:
    async with open_run(tmp_path) as run:
        rollouts = [await run.client.create(task_id=f"t{number}") for number in range(4)]
        running = [asyncio.create_task(rollout.exec(["sleep", "60"])) for rollout in rollouts]
        await asyncio.sleep(0.2)
        begun = time.monotonic()
        RunDirectory.open(run.directory).request_stop(reason="drill", person="tester")
        replies = await asyncio.wait_for(asyncio.gather(*running), 20)
        assert time.monotonic() - begun < 20
        assert {reply.exit for reply in replies} == {"stopped"}
        assert {reply.fault for reply in replies} == {"stopped"}
        with pytest.raises(BrokerError) as refused:
            await run.client.create(task_id="late")
        assert (refused.value.code, refused.value.status) == ("shutting_down", 503)
    assert_sealed(run.directory)
    kill = events_of(run.directory, "control.kill")[0]
    assert kill["rollouts"] == 4
    assert kill["person"] == "tester"
    assert {event["exit"] for event in events_of(run.directory, "rollout.end")} == {"stopped"}
    assert events_of(run.directory, "run.end")[0]["outcome"] == "stopped"


async def test_a_plain_file_named_stop_is_enough(tmp_path: Path) -> None:
    async with open_run(tmp_path) as run:
        rollout = await run.client.create()
        (run.directory / "STOP").touch()
        reply = await asyncio.wait_for(rollout.exec(["sleep", "60"]), 20)
    assert reply.fault == "stopped"
    assert_sealed(run.directory)


async def test_stop_before_anything_runs(tmp_path: Path) -> None:
    async with open_run(tmp_path) as run:
        (run.directory / "STOP").touch()
        await asyncio.sleep(1)
        with pytest.raises(BrokerError, match="stopped"):
            await run.client.create()
    assert_sealed(run.directory)
