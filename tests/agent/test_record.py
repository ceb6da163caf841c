"""What a run writes about its rollouts, also when they do their worst to the writing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stockade.client import Episode
from stockade.errors import BrokerError
from tests.agents import SMALL, assert_sealed, events_of, open_run

pytestmark = pytest.mark.anyio


async def test_commands_files_and_ends_are_on_record(tmp_path: Path) -> None:
    async with open_run(tmp_path) as run:
        files = {"/workspace/kept": b"1", "/workspace/edited": b"1", "/workspace/gone": b"1"}
        who = {"task_id": "t1", "group_id": "g1", "train_step": 3, "attempt": 2}
        async with run.rollout(files=files, **who) as rollout:  # type: ignore[arg-type]
            await rollout.exec(command="echo 2 > edited; rm gone; echo x > 'new\x1b[31m'; exit 5")
    assert_sealed(run.directory)
    changes = {event["file.path"]: event["change"] for event in events_of(run.directory, "file.changed")}
    assert changes == {"edited": "modified", "gone": "removed", "new\\x1b[31m": "added"}
    (end,) = events_of(run.directory, "process.exit")
    assert (end["process.exit.code"], end["trust"], end["exit"]) == (5, "reported", "exited")
    for event in events_of(run.directory):
        assert event["run_id"] == run.run_id
        if event["rollout_id"] == rollout.id:
            assert {name: event[name] for name in who} == who


async def test_a_program_cannot_leave_its_record_unsealed(tmp_path: Path) -> None:
    async with open_run(tmp_path) as run, run.rollout(task_id="hidden") as rollout:
        await rollout.exec(["python3", "-c", "import os; os.chmod('/workspace', 0)"])
        with pytest.raises(BrokerError) as refused:
            await rollout.get_dir("/workspace")
        assert refused.value.code == "invalid_request"
    assert_sealed(run.directory)
    assert events_of(run.directory, "sandbox.violation")[0]["what"] == "workspace_unreadable"


async def _commands(rollout: Episode, count: int) -> None:
    for _ in range(count):
        await rollout.exec(["true"])


async def test_a_record_that_cannot_be_written_ends_the_rollout(tmp_path: Path) -> None:
    """The whole run's record is sabotaged as a full disk would: writes fail, and nothing goes on unseen."""
    async with open_run(tmp_path, SMALL) as run:
        rollout = await run.client.create(task_id="t")
        agent = run._process
        assert agent is not None
        import resource

        written = max(path.stat().st_size for path in (run.directory / "events").rglob("*.jsonl"))
        resource.prlimit(agent.pid, resource.RLIMIT_FSIZE, (written + 64, resource.RLIM_INFINITY))
        with pytest.raises(BrokerError) as refused:
            await _commands(rollout, 3)
        assert refused.value.code == "backend_error"
        assert await rollout.status() == "stopped"
        resource.prlimit(agent.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    from stockade.events import verify_run

    report = verify_run(run.directory)
    assert not report.ok
    assert any("not sealed" in problem.what for problem in report.problems)


async def test_a_command_whose_client_left_is_ended_and_recorded_as_that(tmp_path: Path) -> None:
    """A trainer that gave up on a request (its own time-out, a cancelled task) reads nothing any more."""
    async with open_run(tmp_path) as run:
        rollout = await run.client.create(task_id="t")
        asking = asyncio.create_task(rollout.exec(["sleep", "60"], timeout_s=60))
        while not events_of(run.directory, "process.exec"):
            await asyncio.sleep(0.02)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        async with asyncio.timeout(20):
            while not events_of(run.directory, "process.exit"):
                await asyncio.sleep(0.02)
        (left,) = events_of(run.directory, "process.exit")
        assert (left["exit"], left["evidence"]) == ("closed", "whoever asked for it left")
        running = await rollout.exec(["sh", "-c", "ls -d /proc/[0-9]*/exe | while read e; do readlink $e; done"])
        assert b"sleep" not in running.stdout, "and so is the program"
    assert_sealed(run.directory)
