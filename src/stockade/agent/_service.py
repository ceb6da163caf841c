"""The episode service of a node: what the broker asks for, done in the order that keeps the promises.

Create: admitted → written → made. Exec: written → run → written. Close: killed → way out shut → collected into the
record → sealed → forgotten. Whatever fails on the way ends the rollout; nothing half-made stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Coroutine, Mapping

from stockade.agent._owners import Owners
from stockade.agent._rollout import Rollout, context_of
from stockade.broker import Code, CreateRequest, ExecRequest, Refusal
from stockade.egress import EgressFault, EgressPool
from stockade.egress.gate import Rules
from stockade.errors import RecordError, SandboxFault
from stockade.events import ChainWriter, Producer, recover_head
from stockade.ids import RolloutId, new_rollout_id
from stockade.policy import OperatorConfig, Policy, SandboxLimits, policy_digest
from stockade.runs import WIRE_STATUS, Ask, Held, RunDirectory, RunState, Stage, admit
from stockade.sandbox import (
    NO_LISTENERS,
    BubblewrapBackend,
    Collected,
    ExecResult,
    Exit,
    ExitKind,
    Listeners,
    Spec,
)

_log = logging.getLogger(__name__)
_COLLECT_BYTES = 20 << 20  # so that base64 and JSON of it stay under the broker's request cap
_HELD = {
    "stopped": (Code.SHUTTING_DOWN, "the run was stopped"),
    "ending": (Code.SHUTTING_DOWN, "the run is ending"),
    "record_broken": (Code.BACKEND_ERROR, "the record of the run cannot be written"),
    "full": (Code.QUOTA_EXCEEDED, "as many episodes as allowed are live"),
}


class NodeService:
    """Implements :class:`stockade.broker.EpisodeService` for one run on one node."""

    def __init__(
        self,
        *,
        run: RunDirectory,
        run_writer: ChainWriter,
        policy: Policy,
        operator: OperatorConfig,
        backend: BubblewrapBackend,
        egress: EgressPool,
        max_live: int,
    ) -> None:
        self._run = run
        self._writer = run_writer
        self._policy = policy
        self._operator = operator
        self._digest = policy_digest(policy)
        self._backend = backend
        self.egress = egress
        self._max_live = max_live
        self._rollouts: dict[str, Rollout] = {}
        self._owners = Owners(self._owner_gone)
        self._tasks: set[asyncio.Task[object]] = set()
        self.stopped = False
        self.ending = False
        self.totals = {"rollouts": 0, "commands": 0, "requests": 0, "requests_denied": 0}

    # ---- what the broker reads

    @property
    def run_id(self) -> str:
        """The run that this node serves."""
        return self._run.run_id

    @property
    def caps(self) -> SandboxLimits:
        """What no episode may exceed."""
        return self._policy.sandbox

    @property
    def live(self) -> list[Rollout]:
        """Rollouts that are not sealed yet."""
        return list(self._rollouts.values())

    def _find(self, episode_id: str) -> Rollout:
        rollout = self._rollouts.get(episode_id)
        if rollout is None or rollout.sandbox is None:
            raise Refusal(Code.EPISODE_NOT_FOUND, f"no episode {episode_id!r}")
        return rollout

    def status(self, episode_id: str) -> str:
        """Return the wire's word for where an episode is."""
        rollout = self._find(episode_id)
        if rollout.live_sandbox.ended is not None:
            return WIRE_STATUS[Stage.ENDED]
        return WIRE_STATUS[rollout.life.stage]

    # ---- create

    async def create(self, request: CreateRequest, *, owner: int | None) -> str:
        """Make an episode; see the module's order. Returns its ID."""
        state = RunState(self.stopped, self.ending, self._writer.broken, len(self._rollouts), self._max_live)
        ask = Ask(request.role, request.memory_bytes, request.disk_bytes, request.cpus)
        answer = admit(self._policy, ask, state)
        if isinstance(answer, Held):
            code, text = _HELD.get(answer.reason, (Code.BACKEND_ERROR, f"held: {answer.reason}"))
            raise Refusal(code, text)
        rollout = self._open(request, answer.policy, network=answer.network, owner=owner)
        self._rollouts[rollout.id] = rollout
        self.totals["rollouts"] += 1
        try:
            await self._make(rollout)
        except BaseException as error:
            kind = ExitKind.STOPPED if self.stopped else ExitKind.NODE_FAULT
            await asyncio.shield(self._fail(rollout, Exit(kind, evidence=str(error))))
            raise
        if owner is not None and not self._owners.watch(owner):
            await self._finish(rollout, Exit(ExitKind.OWNER_GONE, evidence=f"process {owner}"))
            raise Refusal(Code.SHUTTING_DOWN, "the client's process has ended")
        if rollout.live_sandbox.ended is not None:
            raise Refusal(Code.SHUTTING_DOWN, f"ended while it started: {rollout.live_sandbox.ended.kind}")
        return rollout.id

    def _open(self, request: CreateRequest, policy: Policy, *, network: bool, owner: int | None) -> Rollout:
        rollout_id = RolloutId(new_rollout_id())
        fd = self._run.open_record(rollout_id, Producer.SANDBOX)
        try:
            writer = ChainWriter(fd, context_of(self.run_id, rollout_id, self._digest, request), Producer.SANDBOX)
            writer.append(
                "rollout.start",
                backend=self._backend.name,
                role=request.role,
                image="host",
                network=network,
                limits=[f"{name}={value}" for name, value in policy.sandbox.model_dump(mode="json").items()],
                metadata=[f"{name}={value}" for name, value in sorted(request.metadata.items())],
            )
        except BaseException:
            os.close(fd)
            raise
        return Rollout(rollout_id, request, policy, network, owner, writer, fd)

    async def _make(self, rollout: Rollout) -> None:
        rollout.life.move(Stage.STARTING)
        limits = rollout.policy.sandbox
        limits = limits.model_copy(update={"wall_s": min(limits.wall_s, rollout.request.ttl_s)})
        spec = Spec(rollout.id, limits, mounts=rollout.policy.mounts, proxied=rollout.network)
        rollout.sandbox = await self._backend.create(spec, Listeners() if rollout.network else NO_LISTENERS)
        if rollout.network:
            await self._attach(rollout)
        for path, data in rollout.request.files.items():
            await rollout.sandbox.write_file(path, data)
        if rollout.request.files:
            rollout.baseline = await rollout.sandbox.snapshot()
        if self.stopped:
            raise Refusal(Code.SHUTTING_DOWN, "the run was stopped")
        rollout.life.move(Stage.RUNNING)

    async def _attach(self, rollout: Rollout) -> None:
        rollout.egress_fd = self._run.open_record(rollout.id, Producer.EGRESS)
        await self.egress.attach(
            rollout.id,
            context=context_of(self.run_id, rollout.id, self._digest, rollout.request),
            rules=Rules.from_policy(rollout.policy, self._operator, own_names=(socket.gethostname(),)),
            listener=rollout.live_sandbox.listener_fds[0],
            record=rollout.egress_fd,
            record_path=self._run.record_path(rollout.id, Producer.EGRESS),
        )
        rollout.attached = True

    async def _fail(self, rollout: Rollout, exit_: Exit) -> None:
        """Take back a rollout that could not be made."""
        if rollout.sandbox is not None:
            await self._close_out(rollout, exit_)
            return
        rollout.life.move(Stage.FAILED)
        self._rollouts.pop(rollout.id, None)
        with contextlib.suppress(RecordError):  # a broken record shows as an unsealed chain
            heads = rollout.seal(exit_, {})
            self._writer.append_sealed_rollout(rollout.id, heads)
        rollout.close_descriptors()

    # ---- use

    async def exec(self, episode_id: str, request: ExecRequest) -> tuple[ExecResult, ExecResult | None]:
        """Run a command, or two that are joined by pipes."""
        rollout = self._find(episode_id)
        if request.peer is None or request.peer_id is None:
            return await self._guarded(
                rollout.run(request.command, timeout_s=request.timeout_s, pipes=None, peer=None)
            ), None
        peer = self._find(request.peer_id)
        if rollout is peer or rollout.request.role != "grading" or peer.request.role != "grading":
            # Two sandboxes that share a pipe share whatever one of them can reach.
            raise Refusal(Code.FIELD_NOT_ALLOWED, "ext.peer joins two different grading episodes only")
        with contextlib.ExitStack() as stack:
            to_peer, from_peer = _pipe(stack), _pipe(stack)
            first = rollout.run(
                request.command, timeout_s=request.timeout_s, pipes=(from_peer[0], to_peer[1]), peer=peer.id
            )
            second = peer.run(
                request.peer, timeout_s=request.timeout_s, pipes=(to_peer[0], from_peer[1]), peer=rollout.id
            )
            tasks = [asyncio.ensure_future(self._guarded(work)) for work in (first, second)]
            # After one turn of the loop both hold their own ends; ours must go, or no end of file is ever seen.
            try:
                await asyncio.sleep(0)
                stack.close()
                results = await asyncio.gather(*tasks)
            except BaseException:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                raise
        return results[0], results[1]

    async def _guarded(self, work: Awaitable[ExecResult]) -> ExecResult:
        try:
            return await work
        except RecordError as error:
            raise Refusal(Code.BACKEND_ERROR, "the record cannot be written; the rollout was ended") from error
        except ValueError as error:
            raise Refusal(Code.INVALID_REQUEST, str(error)) from error

    async def write_file(self, episode_id: str, path: str, data: bytes) -> None:
        """Write a file and count it as given, not as changed by the rollout."""
        rollout = self._find(episode_id)
        await rollout.live_sandbox.write_file(path, data)
        await self._given(rollout)

    async def put_dir(self, episode_id: str, path: str, files: Mapping[str, bytes]) -> None:
        """Write several files."""
        rollout = self._find(episode_id)
        await rollout.live_sandbox.put_dir(path, files)
        await self._given(rollout)

    async def _given(self, rollout: Rollout) -> None:
        if rollout.commands == 0:
            rollout.baseline = await rollout.live_sandbox.snapshot()

    async def read_file(self, episode_id: str, path: str) -> bytes:
        """Read a regular file."""
        return await self._find(episode_id).live_sandbox.read_file(path, limit_bytes=_COLLECT_BYTES)

    async def get_dir(self, episode_id: str, path: str) -> Collected:
        """Collect a directory."""
        return await self._find(episode_id).live_sandbox.get_dir(path, limit_bytes=_COLLECT_BYTES)

    # ---- ends

    async def close(self, episode_id: str) -> Exit:
        """End an episode for its client."""
        return await self._finish(self._find(episode_id), Exit(ExitKind.CLOSED))

    async def _finish(self, rollout: Rollout, exit_: Exit) -> Exit:
        """End a rollout once; whoever comes later gets the same answer."""
        if rollout.closing is None:
            rollout.closing = asyncio.ensure_future(self._close_out(rollout, exit_))
        return await asyncio.shield(rollout.closing)

    async def _close_out(self, rollout: Rollout, exit_: Exit) -> Exit:
        sandbox = rollout.live_sandbox
        try:
            exit_ = await sandbox.kill(exit_)
        except SandboxFault as error:
            exit_ = Exit(ExitKind.NODE_FAULT, evidence=error.message)
            _log.error("%s", error.message)
        counts: dict[str, int] = {}
        try:
            if rollout.attached:
                counts = await self._detach(rollout)
            if rollout.life.stage is Stage.RUNNING:
                rollout.life.move(Stage.ENDED)
                await rollout.record_changes()
            self._seal(rollout, exit_, counts)
        except RecordError as error:
            _log.error("the record of %s is not sealed: %s", rollout.id, error.message)
        except Exception:  # noqa: BLE001 - its record stays unsealed, which verification names
            _log.exception("while closing %s", rollout.id)
        finally:
            self._rollouts.pop(rollout.id, None)
            rollout.close_descriptors()
            await sandbox.destroy()
        return exit_

    async def _detach(self, rollout: Rollout) -> dict[str, int]:
        try:
            rollout.heads[Producer.EGRESS], usage = await self.egress.detach(rollout.id)
        except EgressFault:  # given up before: nobody writes to this chain any more, so it is closed from here
            path = self._run.record_path(rollout.id, Producer.EGRESS)
            context = context_of(self.run_id, rollout.id, self._digest, rollout.request)
            writer = ChainWriter(rollout.egress_fd, context, Producer.EGRESS, start=recover_head(path))
            rollout.heads[Producer.EGRESS] = writer.seal()
            return {}
        return {
            "requests": usage.requests,
            "requests_denied": usage.denied,
            "bytes_out": usage.bytes_out,
            "bytes_in": usage.bytes_in,
        }

    def _seal(self, rollout: Rollout, exit_: Exit, counts: Mapping[str, int]) -> None:
        heads = rollout.seal(exit_, counts)
        if rollout.life.stage is Stage.ENDED:
            rollout.life.move(Stage.SEALED)
        self.totals["commands"] += rollout.commands
        for name in ("requests", "requests_denied"):
            self.totals[name] += counts.get(name, 0)
        self._writer.append_sealed_rollout(rollout.id, heads)

    def _owner_gone(self, pid: int) -> None:
        for rollout in self.live:
            if rollout.owner == pid and rollout.sandbox is not None:
                exit_ = Exit(ExitKind.OWNER_GONE, evidence=f"process {pid}")
                rollout.sandbox.end(exit_)  # at once; the record follows
                self._spawn(self._finish(rollout, exit_))

    def _spawn(self, work: Coroutine[object, object, object]) -> None:
        task: asyncio.Task[object] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> int:
        """Stop everything: egress first, then every process; returns how many rollouts were ended. Latches."""
        self.stopped = True
        await self.egress.revoke_all()
        return await self._end_all(Exit(ExitKind.STOPPED, evidence="the run was stopped"))

    async def end(self) -> None:
        """End what is left because the run ends."""
        self.ending = True
        await self._end_all(Exit(ExitKind.CLOSED, evidence="the run ended"))
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self._owners.close()

    def egress_lost(self, rollout_id: str, evidence: str) -> None:
        """A worker could not be kept alive: its rollouts have no way out, and that is the node's fault."""
        rollout = self._rollouts.get(rollout_id)
        if rollout is not None and rollout.sandbox is not None:
            rollout.sandbox.end(Exit(ExitKind.NODE_FAULT, evidence=evidence))

    async def _end_all(self, exit_: Exit) -> int:
        live = self.live
        for rollout in live:
            if rollout.sandbox is not None:
                rollout.sandbox.end(exit_)
        while starting := [rollout for rollout in live if rollout.sandbox is None and rollout.id in self._rollouts]:
            await asyncio.sleep(0.02)
            for rollout in starting:
                if rollout.sandbox is not None:
                    rollout.sandbox.end(exit_)
        left = [rollout for rollout in live if rollout.id in self._rollouts]
        await asyncio.gather(*(self._finish(rollout, exit_) for rollout in left), return_exceptions=True)
        return len(live)


def _pipe(stack: contextlib.ExitStack) -> tuple[int, int]:
    read, write = os.pipe2(os.O_CLOEXEC)
    stack.callback(os.close, read)
    stack.callback(os.close, write)
    return read, write
