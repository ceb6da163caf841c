"""Starts and ends at bad moments: nothing half-written, nothing left, nothing imported from where it must not be."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stockade import errors
from stockade.agent import _node, _site
from stockade.broker import AUTH_HEADER
from stockade.client import BrokerClient, Run
from stockade.egress import EgressFault, EgressPool
from stockade.events import verify_run
from stockade.runs import RunDirectory
from tests.agents import (
    SMALL,
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
from tests.live import processes_with

pytestmark = pytest.mark.anyio
NETWORK = SMALL + "egress: {allow: [{host: example.com}]}\n"


def agent_of(run: Run) -> int:
    assert run._process is not None
    return run._process.pid


async def test_the_agent_imports_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who looks at collected files works where model-written modules lie."""
    collected = tmp_path / "collected"
    collected.mkdir()
    for name in ("json", "logging", "msgspec", "stockade"):
        (collected / f"{name}.py").write_text("open('TAKEN', 'w').close()\nraise SystemExit(3)\n", encoding="ascii")
    monkeypatch.chdir(collected)
    async with open_run(tmp_path) as run:
        reply = await (await run.client.create()).exec(["/bin/echo", "hello"])
    assert reply.stdout == b"hello\n"
    assert not (collected / "TAKEN").exists()


async def test_a_state_path_too_long_for_a_socket_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOCKADE_STATE", str(tmp_path / ("s" * 120)))
    with pytest.raises(errors.NodeError, match="too long"):
        async with open_run(tmp_path):
            pytest.fail("the run started")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("delay_s", [0.05, 0.4, 0.8])
async def test_a_signal_during_the_start_leaves_no_half_run(tmp_path: Path, delay_s: float) -> None:
    run = open_run(tmp_path, run_id="early")
    starting = asyncio.create_task(run.start())
    await asyncio.sleep(delay_s)
    if run._process is not None and run._process.returncode is None:
        os.kill(run._process.pid, signal.SIGTERM)
    await asyncio.gather(starting, return_exceptions=True)
    await run.close()
    folder = tmp_path / "runs" / "early"
    if folder.exists():
        assert_sealed(folder)
    assert list((tmp_path / "runs").glob(".*")) == []


async def test_a_start_that_is_given_up_leaves_no_agent(tmp_path: Path) -> None:
    run = open_run(tmp_path, run_id="given-up")
    starting = asyncio.create_task(run.start())
    await asyncio.sleep(0.3)
    assert run._process is not None
    agent = run._process.pid
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(starting, 30)
    assert not alive(agent)


async def test_a_start_that_fails_late_is_recorded_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(_: EgressPool) -> None:
        raise EgressFault("the egress worker does not start: test")

    monkeypatch.setattr(EgressPool, "start", fails)
    monkeypatch.setenv("STOCKADE_STATE", str(tmp_path / "state"))
    told: list[Mapping[str, object]] = []
    policy = write_policy(tmp_path, NETWORK)
    spec = {"policy": str(policy), "runs": str(tmp_path / "runs"), "owner_pid": os.getpid(), "run_id": "late"}
    assert await _node.run_agent(msgspec.json.encode(spec), told.append) == 2
    assert "does not start" in str(told[0]["error"])
    assert_sealed(tmp_path / "runs" / "late")
    assert events_of(tmp_path / "runs" / "late", "run.end")[0]["outcome"] == "failed"


@pytest.mark.promise("S6.4")
async def test_a_stop_is_recorded_when_the_run_is_closed_at_the_same_moment(tmp_path: Path) -> None:
    """Who sees his rollouts stopped closes the run at once: the line that confirms the stop must not be lost to that."""
    async with open_run(tmp_path) as run:
        rollouts = await asyncio.gather(*(run.client.create() for _ in range(8)))
        running = [asyncio.create_task(rollout.exec(["/bin/sleep", "60"])) for rollout in rollouts]
        await asyncio.sleep(0.2)
        RunDirectory.open(run.directory).request_stop(reason="drill", person="tester")
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        os.kill(agent_of(run), signal.SIGTERM)
        await asyncio.gather(*running, return_exceptions=True)
    assert_sealed(run.directory)
    assert events_of(run.directory, "control.kill")[0]["rollouts"] == 8
    assert RunDirectory.open(run.directory).stop_confirmed()


async def test_commands_in_flight_when_a_run_ends_are_answered(tmp_path: Path) -> None:
    async with open_run(tmp_path) as run:
        rollout = await run.client.create()
        running = asyncio.create_task(rollout.exec(["/bin/sleep", "60"]))
        await asyncio.sleep(0.2)
        os.kill(agent_of(run), signal.SIGTERM)
        reply = await asyncio.wait_for(running, 10)
    assert (reply.exit, reply.fault) == ("closed", None)
    assert_sealed(run.directory)


OWNER = """
import asyncio, json, sys
from pathlib import Path
from tests.agents import open_run

async def main():
    async with open_run(Path(sys.argv[1])) as run:
        print(json.dumps({**run.environment, "dir": str(run.directory)}), flush=True)
        await asyncio.sleep(100)

asyncio.run(main())
"""


async def test_the_owners_death_ends_at_once_what_others_have_running(tmp_path: Path) -> None:
    """Rollouts of another process of the run, with commands that nobody will cut short."""
    owner = python_program(OWNER, str(tmp_path))
    marker = f"77.{os.getpid()}"
    try:
        told: dict[str, Any] = await asyncio.to_thread(read_line, owner)
        async with BrokerClient(told["STOCKADE_BROKER_SOCKET"], told["STOCKADE_BROKER_TOKEN"]) as client:
            rollouts = [await client.create() for _ in range(3)]
            running = [asyncio.create_task(rollout.exec(["/bin/sleep", marker])) for rollout in rollouts]
            await asyncio.to_thread(wait_until, lambda: len(processes_with(marker)) == 3, 20, "commands that run")
            owner.kill()
            took_s = await asyncio.to_thread(wait_until, lambda: not processes_with(marker), 20, "their end")
            replies = await asyncio.gather(*running)
        assert took_s < 2
        assert {reply.fault for reply in replies} == {"stopped"}
    finally:
        kill_tree(owner)
    folder = Path(told["dir"])
    await asyncio.to_thread(wait_until, lambda: verify_run(folder).ok, 20, "the seal")


async def test_a_client_that_left_while_its_episode_was_made_leaves_none(tmp_path: Path) -> None:
    """It never learns the ID: the episode would hold its place until its time is over."""
    async with open_run(tmp_path) as run:
        body = b'{"image":"host"}'
        token = run.environment["STOCKADE_BROKER_TOKEN"]
        head = f"POST /episodes HTTP/1.1\r\nHost: b\r\n{AUTH_HEADER}: {token}\r\nContent-Length: {len(body)}\r\n\r\n"
        for _ in range(3):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.connect(run.environment["STOCKADE_BROKER_SOCKET"])
                sock.sendall(head.encode() + body)
                time.sleep(0.01)
        ends = lambda: events_of(run.directory, "rollout.end")  # noqa: E731
        await asyncio.to_thread(wait_until, lambda: len(ends()) == 3, 20, "the end of all three")
    assert_sealed(run.directory)


def test_only_sockets_that_nobody_answers_are_swept(tmp_path: Path) -> None:
    """An agent in another container that shares this state has a pid that is not in our /proc."""
    folder = tmp_path / "sockets"
    folder.mkdir()
    gone = 1 << 22  # above pid_max
    dead, live = folder / f"{gone}-dead.sock", folder / f"{gone}-live.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(live))
        listener.listen(1)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as was:
            was.bind(str(dead))
        _site.socket_path(tmp_path)
        assert sorted(path.name for path in folder.iterdir()) == [live.name]
