"""Who dies takes what is theirs along: trainer, agent, person at the keyboard."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.agents import (
    alive,
    assert_sealed,
    events_of,
    kill_tree,
    open_run,
    python_program,
    read_line,
    wait_until,
    write_policy,
)

pytestmark = pytest.mark.anyio

# Opens a run, starts a program in a rollout, says where everything is, and waits for ever.
OWNER = """
import asyncio, json, os, sys
from stockade.client import connect

async def main():
    async with connect(sys.argv[1], runs=sys.argv[2]) as run:
        rollout = await run.client.create(task_id="t")
        await rollout.exec(command="sleep 300 >/dev/null 2>&1 & echo $!")
        print(json.dumps({"run": str(run.directory), "agent": run._process.pid, "env": run.environment}), flush=True)
        await asyncio.sleep(300)

asyncio.run(main())
"""

# A second process that uses the run of another one, as a trainer does.
TRAINER = """
import asyncio, json, sys
from stockade.client import BrokerClient

async def main():
    async with BrokerClient.from_environment() as client:
        rollout = await client.create(task_id="trainer")
        await rollout.exec(command="sleep 300 >/dev/null 2>&1 &")
        print(json.dumps({"rollout": rollout.id}), flush=True)
        await asyncio.sleep(300)

asyncio.run(main())
"""


def sandbox_processes(agent: int) -> list[int]:
    """Every process below an agent's spawner, the holders' and guests' included."""
    found, pending = [], [agent]
    while pending:
        pid = pending.pop()
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            children = [int(word) for word in task.read_text("ascii").split()]
            found += children
            pending += children
    return found


@pytest.mark.promise("S5.1")
async def test_sigkill_of_a_trainer_ends_its_rollouts_and_no_others(tmp_path: Path) -> None:
    async with open_run(tmp_path) as run:
        mine = await run.client.create(task_id="mine")
        trainer = python_program(TRAINER, env=run.environment)
        try:
            theirs = read_line(trainer)["rollout"]
            assert (await run.client.request("GET", f"/episodes/{theirs}"))["status"] == "running"
            trainer.send_signal(signal.SIGKILL)
            trainer.wait(10)

            def ended() -> bool:
                return any(event["rollout_id"] == theirs for event in events_of(run.directory, "rollout.end"))

            # The promise is two seconds; a machine under load gets more, and the ordinary case is milliseconds.
            wait_until(ended, 10, "the rollout of a dead trainer ends")
        finally:
            kill_tree(trainer)
        assert await mine.status() == "running"
    end = next(event for event in events_of(run.directory, "rollout.end") if event["rollout_id"] == theirs)
    assert end["exit"] == "owner_gone"
    assert end["fault"] == "stopped"
    assert_sealed(run.directory)


@pytest.mark.promise("S5.2")
async def test_sigkill_of_the_agent_ends_every_sandbox(tmp_path: Path) -> None:
    owner = python_program(OWNER, str(write_policy(tmp_path)), str(tmp_path / "runs"))
    try:
        told = read_line(owner)
        inside = sandbox_processes(told["agent"])
        assert len(inside) >= 4, "spawner, isolator, guest and the sleeping command"
        os.kill(told["agent"], signal.SIGKILL)
        wait_until(lambda: not any(alive(pid) for pid in inside), 10, "sandboxes die with their agent")
    finally:
        kill_tree(owner)
    socket = Path(told["env"]["STOCKADE_BROKER_SOCKET"])
    assert socket.exists(), "a killed agent cannot tidy up"
    async with open_run(tmp_path):
        assert not socket.exists(), "the next agent does it"


@pytest.mark.promise("S5.3")
async def test_sigkill_of_the_owner_ends_the_run_and_seals_its_record(tmp_path: Path) -> None:
    owner = python_program(OWNER, str(write_policy(tmp_path)), str(tmp_path / "runs"))
    try:
        told = read_line(owner)
        inside = sandbox_processes(told["agent"])
        owner.send_signal(signal.SIGKILL)
        owner.wait(10)
        wait_until(lambda: not any(alive(pid) for pid in [told["agent"], *inside]), 15, "agent and sandboxes end")
    finally:
        kill_tree(owner)
    assert_sealed(Path(told["run"]))
    assert "which started this run" in events_of(Path(told["run"]), "run.end")[0]["reason"]


@pytest.mark.promise("S5.3")
async def test_ctrl_c_seals_the_record(tmp_path: Path) -> None:
    owner = python_program(OWNER, str(write_policy(tmp_path)), str(tmp_path / "runs"))
    try:
        told = read_line(owner)
        owner.send_signal(signal.SIGINT)
        owner.wait(30)
    finally:
        kill_tree(owner)
    assert_sealed(Path(told["run"]))
    assert not alive(told["agent"])


@pytest.mark.promise("S5.3")
async def test_sigterm_of_the_agent_seals_the_record(tmp_path: Path) -> None:
    owner = python_program(OWNER, str(write_policy(tmp_path)), str(tmp_path / "runs"))
    try:
        told = read_line(owner)
        os.kill(told["agent"], signal.SIGTERM)
        wait_until(lambda: not alive(told["agent"]), 15, "the agent ends")
        assert_sealed(Path(told["run"]))
    finally:
        kill_tree(owner)
