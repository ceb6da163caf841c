"""Rollouts that are made, closed, stopped and left at the same time: each ends once, is sealed once, and is forgotten."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from stockade.agent._service import KEEP_ENDED_S, NodeService
from stockade.agent._wayout import way_out
from stockade.broker import CreateRequest, Refusal
from stockade.egress import EgressFault, EgressPool
from stockade.errors import RecordError, SandboxFault
from stockade.events import RUN_PRODUCER, ChainWriter, Context, verify_run
from stockade.ids import RUN_SCOPE, parse_run_id
from stockade.policy import OperatorConfig, parse_policy, policy_digest
from stockade.runs import RunDirectory
from stockade.sandbox import BubblewrapBackend, Exit, ExitKind
from tests.agents import events_of
from tests.live import UIDS
from tests.support import requires

pytestmark = pytest.mark.anyio

POLICY = """\
version: 1
egress: {allow: [{host: example.com}]}
sandbox: {memory: 256 MiB, pids: 64, disk: 32 MiB, wall: 1 min}
"""
SLOW_S = 0.4


class SlowPool(EgressPool):
    """A pool without workers, whose answers take their time, so that everything else can happen meanwhile."""

    def __init__(self) -> None:
        super().__init__(resolvers=())
        self.attached: list[str] = []
        self.revoke_fails = False

    async def attach(self, rollout_id: str, **_: Any) -> None:
        await asyncio.sleep(SLOW_S)
        self.attached.append(rollout_id)

    async def detach(self, rollout_id: str, *, seal: bool = True) -> Any:
        await asyncio.sleep(SLOW_S / 2)
        raise EgressFault(f"{rollout_id} is not attached")

    async def revoke_all(self) -> int:
        if self.revoke_fails:
            raise RuntimeError("a worker answered nonsense")
        return 0


class Lab:
    """A service in this process, over a real backend."""

    def __init__(self, folder: Path) -> None:
        policy = parse_policy(POLICY, source="policy.yaml")
        self.run = RunDirectory.create(folder / "runs", parse_run_id("races"), {})
        self.fd = self.run.open_record(RUN_SCOPE, RUN_PRODUCER)
        self.writer = ChainWriter(self.fd, Context("races", RUN_SCOPE, policy_digest(policy)), RUN_PRODUCER)
        self.writer.append(
            "run.start", manifest_digest=self.run.manifest_digest, backend="bubblewrap", version="0", node="n"
        )
        (folder / "state").mkdir(mode=0o700)
        self.backend = BubblewrapBackend(folder / "state", uids=UIDS)
        self.pool = SlowPool()
        self.service = NodeService(
            run=self.run,
            run_writer=self.writer,
            policy=policy,
            operator=OperatorConfig(version=1),
            backend=self.backend,
            egress=self.pool,
            way_out=way_out(policy, OperatorConfig(version=1), run_id=self.run.run_id, resolvers=(), worker_uid=None),
            max_live=16,
        )

    async def open(self) -> None:
        capabilities = await self.backend.probe()
        if not capabilities.usable:
            await self.backend.aclose()
            requires(False, f"no sandbox can be made here: {capabilities.missing}")

    def create(self, *, owner: int | None = None, files: dict[str, bytes] | None = None) -> asyncio.Task[str]:
        wish = CreateRequest("rollout", None, {}, {}, files or {}, 60.0)
        return asyncio.ensure_future(self.service.create(wish, owner=owner))

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.005)

    async def seal(self) -> None:
        """End the run; its record must be whole."""
        await self.service.end()
        assert self.service.live == []
        self.writer.append("run.end", reason="closed")
        self.writer.seal()
        report = verify_run(self.run.path)
        assert report.ok, report.problems

    async def close(self) -> None:
        await self.backend.aclose()
        os.close(self.fd)


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    lab = Lab(tmp_path)
    await lab.open()
    yield lab
    await lab.close()


def attaching(lab: Lab) -> bool:
    return any(rollout.sandbox is not None for rollout in lab.service.live)


@pytest.mark.promise("S6.4")
async def test_a_stop_while_a_rollout_is_made_closes_it_once(lab: Lab) -> None:
    creating = lab.create()
    await lab.until(lambda: attaching(lab))
    await asyncio.wait_for(lab.service.stop(), 10)
    with pytest.raises(Refusal, match="stopped"):
        await creating
    await lab.seal()
    assert [event["exit"] for event in events_of(lab.run.path, "rollout.end")] == ["stopped"]


async def test_the_end_of_a_run_while_a_rollout_is_made_closes_it_once(lab: Lab) -> None:
    creating = lab.create()
    await lab.until(lambda: attaching(lab))
    await asyncio.wait_for(lab.service.end(), 10)
    with pytest.raises(Refusal, match="ending"):
        await creating
    await lab.seal()


async def test_a_create_that_is_cancelled_at_any_moment_leaves_a_sealed_record(lab: Lab) -> None:
    for delay_s in (0.0, 0.02, 0.05, 0.1, 0.3, 0.5):
        creating = lab.create(files={"/workspace/a": b"1"})
        await asyncio.sleep(delay_s)
        creating.cancel()
        await asyncio.gather(creating, return_exceptions=True)
    await lab.until(lambda: all(rollout.made for rollout in lab.service.live))
    await lab.seal()


async def test_a_close_that_is_cancelled_is_carried_through(lab: Lab) -> None:
    episode = await lab.create()
    closing = asyncio.ensure_future(lab.service.close(episode))
    await asyncio.sleep(0.02)
    closing.cancel()
    again = await lab.service.close(episode)
    assert again.kind is ExitKind.CLOSED
    with pytest.raises(Refusal, match="no episode"):
        await lab.service.close(episode)
    await lab.seal()


async def test_an_owner_that_dies_while_its_second_rollout_is_made(lab: Lab) -> None:
    owner = await asyncio.create_subprocess_exec("/bin/sleep", "60")
    first = await lab.create(owner=owner.pid)
    creating = lab.create(owner=owner.pid)
    await lab.until(lambda: any(not rollout.made and rollout.sandbox for rollout in lab.service.live))
    owner.kill()
    await owner.wait()
    with pytest.raises(Refusal, match="has ended"):
        await creating
    await lab.until(lambda: not lab.service.live)
    with pytest.raises(Refusal, match="no episode"):
        lab.service.status(first)
    await lab.seal()
    assert {event["exit"] for event in events_of(lab.run.path, "rollout.end")} == {"owner_gone"}


async def test_an_owner_that_is_dead_already_makes_nothing(lab: Lab) -> None:
    owner = await asyncio.create_subprocess_exec("/bin/true")
    await owner.wait()
    with pytest.raises(Refusal, match="has ended"):
        await lab.create(owner=owner.pid)
    await lab.seal()
    assert events_of(lab.run.path, "rollout.start") == []


async def test_a_rollout_whose_sandbox_dies_while_it_is_made_does_not_stay(lab: Lab) -> None:
    creating = lab.create()
    await lab.until(lambda: attaching(lab))
    sandbox = lab.service.live[0].live_sandbox
    sandbox.end(Exit(ExitKind.MEMORY_LIMIT, evidence="test"))
    with pytest.raises(SandboxFault, match="while it started"):
        await creating
    assert lab.service.live == []
    await lab.seal()


@pytest.mark.promise("S6.4")
async def test_a_pool_that_fails_does_not_prevent_the_kill(lab: Lab) -> None:
    episode = await lab.create()
    sandbox = lab.service.live[0].live_sandbox
    lab.pool.revoke_fails = True
    assert await lab.service.stop() == 1
    assert sandbox.ended is not None
    assert sandbox.ended.kind is ExitKind.STOPPED
    with pytest.raises(Refusal):
        lab.service.status(episode)
    await lab.seal()


async def test_slow_dying_is_no_fault_of_the_node(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million mappings take the kernel seconds to clear up; whoever made them would have its own sample masked."""
    episode = await lab.create()
    sandbox = lab.service.live[0].live_sandbox
    kill = sandbox.kill

    async def slow(exit_: Exit) -> Exit:
        monkeypatch.setattr(sandbox, "kill", kill)
        sandbox.end(exit_)
        raise SandboxFault("it survives SIGKILL")

    monkeypatch.setattr(sandbox, "kill", slow)
    exit_ = await lab.service.close(episode)
    assert (exit_.kind, exit_.fault) == (ExitKind.CLOSED, None)
    await lab.seal()


async def test_nothing_is_written_after_a_record_was_closed(lab: Lab) -> None:
    """Its descriptor's number is another file's by then."""
    episode = await lab.create()
    rollout = lab.service.live[0]
    await lab.service.close(episode)
    rollout.writer._sealed = False  # as after a close that failed before the seal
    with pytest.raises(RecordError, match="is closed"):
        rollout._append("sandbox.violation", what="late")
    await lab.seal()


async def test_what_ended_and_was_not_closed_is_swept_after_a_while(lab: Lab) -> None:
    rollout_id = await lab.create()
    kept = await lab.create()
    (rollout,) = [one for one in lab.service.live if one.id == rollout_id]
    await rollout.live_sandbox.kill(Exit(ExitKind.MEMORY_LIMIT))
    lab.service.sweep(1000.0)
    assert (await lab.service.get_dir(rollout_id, "/workspace")).files == {}, "it can still be collected"
    lab.service.sweep(1000.0 + KEEP_ENDED_S)
    assert lab.service.status(rollout_id) == "stopped"
    lab.service.sweep(1001.0 + KEEP_ENDED_S)
    await lab.until(lambda: [one.id for one in lab.service.live] == [kept])
    with pytest.raises(Refusal, match="no episode"):
        lab.service.status(rollout_id)
    await lab.seal()
    ends = {event["rollout_id"]: event["exit"] for event in events_of(lab.run.path, "rollout.end")}
    assert ends == {rollout_id: "memory_limit", kept: "closed"}
