"""The episode service of a node: what the broker asks for, done in the order that keeps the promises.

Create: admitted → written → made. Exec: written → run → written. Close: killed → way out shut → collected into the
record → sealed → forgotten. Whatever fails on the way ends the rollout; nothing half-made stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Coroutine, Mapping
from dataclasses import replace

from stockade.agent._owners import Owners
from stockade.agent._rollout import Rollout, context_of, pipe
from stockade.agent._wayout import WayOut
from stockade.broker import Code, CreateRequest, ExecRequest, Refusal
from stockade.egress import EgressPool
from stockade.errors import RecordError, SandboxFault
from stockade.events import ChainWriter, Producer, clip
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
    LiveSandbox,
    PathRefused,
    Spec,
)

_log = logging.getLogger(__name__)
KEEP_ENDED_S = 300.0
"""How long a rollout that ended can still be collected by a client that has not closed it."""
_COLLECT_BYTES = 20 << 20  # so that base64 and JSON of it stay under the broker's request cap
_EVIDENCE_BYTES = 512
_BURY_TRIES, _BURY_WAIT_S = 30, 1.0
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
        way_out: WayOut,
        max_live: int,
    ) -> None:
        self._run = run
        self._writer = run_writer
        self._policy = policy
        self._operator = operator
        self._digest = policy_digest(policy)
        self._backend = backend
        self.egress = egress
        self._way_out = way_out
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
    def has_way_out(self) -> bool:
        """Whether the policy lets any rollout reach anything."""
        return self._way_out.learn or bool(self._policy.egress.allow or self._policy.services)

    @property
    def live(self) -> list[Rollout]:
        """Rollouts that are not sealed yet."""
        return list(self._rollouts.values())

    def _find(self, episode_id: str) -> Rollout:
        rollout = self._rollouts.get(episode_id)
        if rollout is None or rollout.sandbox is None or not rollout.made:
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
        live, learn = len(self._rollouts), self._way_out.learn
        state = RunState(self.stopped, self.ending, self._writer.broken, live, self._max_live, learn)
        ask = Ask(request.role, request.memory_bytes, request.disk_bytes, request.cpus)
        answer = admit(self._policy, ask, state)
        if isinstance(answer, Held):
            code, text = _HELD.get(answer.reason, (Code.BACKEND_ERROR, f"held: {answer.reason}"))
            raise Refusal(code, text)
        if owner is not None and not self._owners.watch(owner):
            raise Refusal(Code.SHUTTING_DOWN, "the client's process has ended")
        rollout = self._open(request, answer.policy, network=answer.network, owner=owner)
        self._rollouts[rollout.id] = rollout
        self.totals["rollouts"] += 1
        try:
            await self._make(rollout)
        except BaseException as error:
            await self._finish(rollout, self._not_made(error))
            raise
        if owner is not None and owner not in self._owners:  # it died meanwhile
            await self._finish(rollout, Exit(ExitKind.OWNER_GONE, evidence=f"process {owner}"))
            raise Refusal(Code.SHUTTING_DOWN, "the client's process has ended")
        return rollout.id

    def _not_made(self, error: BaseException) -> Exit:
        evidence = clip(str(error), _EVIDENCE_BYTES).text
        if self.stopped:
            return Exit(ExitKind.STOPPED, evidence=evidence)
        asked = (Refusal, PathRefused, FileNotFoundError, IsADirectoryError, asyncio.CancelledError)
        return Exit(ExitKind.CLOSED if isinstance(error, asked) else ExitKind.NODE_FAULT, evidence=evidence)

    def _open(self, request: CreateRequest, policy: Policy, *, network: bool, owner: int | None) -> Rollout:
        rollout_id = RolloutId(new_rollout_id())
        context = context_of(self.run_id, rollout_id, self._digest, request)
        fd = self._run.open_record(rollout_id, Producer.SANDBOX)
        try:
            writer = ChainWriter(fd, context, Producer.SANDBOX)
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
            # Nothing was done and nothing is on record: an empty chain would look like one that was cut.
            with contextlib.suppress(OSError):
                os.unlink(self._run.record_path(rollout_id, Producer.SANDBOX))
            raise
        return Rollout(rollout_id, request, policy, network, owner, context, writer, fd)

    async def _make(self, rollout: Rollout) -> None:
        rollout.life.move(Stage.STARTING)
        limits = rollout.policy.sandbox
        limits = limits.model_copy(update={"wall_s": min(limits.wall_s, rollout.request.ttl_s)})
        way = self._way_out
        spec = Spec(rollout.id, limits, mounts=rollout.policy.mounts, proxied=rollout.network)
        if rollout.network:
            spec = replace(spec, trust=way.trust, env=way.env)
        rollout.sandbox = await self._backend.create(spec, way.listeners if rollout.network else NO_LISTENERS)
        if rollout.network:
            await rollout.attach(
                self.egress,
                way.rules(rollout.policy, self._operator),
                sockets=way.roles(rollout.sandbox.listener_fds),
                record=self._run.open_record(rollout.id, Producer.EGRESS),
                path=self._run.record_path(rollout.id, Producer.EGRESS),
            )
        for path, data in rollout.request.files.items():
            await rollout.sandbox.write_file(path, data)
        rollout.given = bool(rollout.request.files)
        if self.stopped or self.ending:
            raise Refusal(Code.SHUTTING_DOWN, "the run was stopped" if self.stopped else "the run is ending")
        if rollout.sandbox.ended is not None:
            raise SandboxFault(f"it ended while it started: {rollout.sandbox.ended.kind}")
        rollout.life.move(Stage.RUNNING)

    # ---- use

    async def exec(self, episode_id: str, request: ExecRequest) -> tuple[ExecResult, ExecResult | None]:
        """Run a command, or two that are joined by pipes."""
        rollout = self._find(episode_id)
        await rollout.note_given()
        if request.peer is None or request.peer_id is None:
            return await self._guarded(
                rollout.run(request.command, timeout_s=request.timeout_s, pipes=None, peer=None)
            ), None
        peer = self._find(request.peer_id)
        if rollout is peer or rollout.request.role != "grading" or peer.request.role != "grading":
            # Two sandboxes that share a pipe share whatever one of them can reach.
            raise Refusal(Code.FIELD_NOT_ALLOWED, "ext.peer joins two different grading episodes only")
        await peer.note_given()
        with contextlib.ExitStack() as stack:
            to_peer, from_peer = pipe(stack), pipe(stack)
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
        rollout.given = True

    async def put_dir(self, episode_id: str, path: str, files: Mapping[str, bytes]) -> None:
        """Write several files."""
        rollout = self._find(episode_id)
        await rollout.live_sandbox.put_dir(path, files)
        rollout.given = True

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
        """Kill, shut the way out, close the record: each whatever became of the one before."""
        sandbox = rollout.sandbox
        counts: dict[str, int] = {}
        try:
            if sandbox is not None:
                exit_ = await self._kill(sandbox, exit_)
            try:
                counts = await rollout.detach(self.egress)
            except RecordError as error:  # the worker's chain stays open; the rollout's own can still say why it ended
                _log.error("the record of the way out of %s is not sealed: %s", rollout.id, error.message)
            if rollout.made:
                rollout.life.move(Stage.ENDED)
                await rollout.record_changes()
            else:
                rollout.life.move(Stage.FAILED)
            self._seal(rollout, exit_, counts)
        except RecordError as error:
            _log.error("the record of %s is not sealed: %s", rollout.id, error.message)
        except Exception:  # noqa: BLE001 - its record stays unsealed, which verification names
            _log.exception("while closing %s", rollout.id)
        finally:
            self._rollouts.pop(rollout.id, None)
            rollout.close_descriptors()
            if sandbox is not None:
                await asyncio.wait([self._spawn(self._bury(sandbox))], timeout=_BURY_WAIT_S)
        return exit_

    async def _kill(self, sandbox: LiveSandbox, exit_: Exit) -> Exit:
        """Kill; the reason that stands does not depend on how long the kernel takes to clear up.

        A program decides how much there is to clear up (a million mappings take it seconds): were that a fault of the
        node, it could have its own sample masked.
        """
        try:
            return await sandbox.kill(exit_)
        except SandboxFault as error:
            _log.error("%s", error.message)
            return sandbox.ended or exit_

    async def _bury(self, sandbox: LiveSandbox) -> None:
        """Give back what a dead sandbox held; one whose processes are still dying is waited for."""
        for _ in range(_BURY_TRIES):
            try:
                return await sandbox.destroy()
            except SandboxFault as error:
                _log.error("%s", error.message)
        return None

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
            if rollout.owner == pid and rollout.sandbox is not None and rollout.made:
                exit_ = Exit(ExitKind.OWNER_GONE, evidence=f"process {pid}")
                rollout.sandbox.end(exit_)  # at once; the record follows
                self._spawn(self._finish(rollout, exit_))

    def _spawn(self, work: Coroutine[object, object, object]) -> asyncio.Task[object]:
        task: asyncio.Task[object] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def stop(self) -> int:
        """Stop everything: egress first, then every process; returns how many rollouts were ended. Latches."""
        self.stopped = True
        try:
            await self.egress.revoke_all()
        except Exception:  # noqa: BLE001 - whatever it is, the kill must come
            _log.exception("while cutting the way out")
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

    def sweep(self, now_s: float) -> None:
        """Close what ended :data:`KEEP_ENDED_S` ago and nobody closed: its files fill memory and its slot is taken."""
        for rollout in self.live:
            ended = None if rollout.sandbox is None or not rollout.made else rollout.sandbox.ended
            if ended is None or rollout.closing is not None:
                continue
            if rollout.ended_s is None:
                rollout.ended_s = now_s
            elif now_s - rollout.ended_s > KEEP_ENDED_S:
                self._spawn(self._finish(rollout, ended))

    def end_processes(self, exit_: Exit) -> None:
        """Kill every process at once; closing and recording come after."""
        for rollout in self.live:
            if rollout.sandbox is not None:
                rollout.sandbox.end(exit_)

    async def _end_all(self, exit_: Exit) -> int:
        live = self.live
        self.end_processes(exit_)
        # Whoever makes one closes it, too: it is told by the end of its sandbox.
        while any(not rollout.made and rollout.id in self._rollouts for rollout in live):
            await asyncio.sleep(0.02)
            self.end_processes(exit_)
        left = [rollout for rollout in live if rollout.id in self._rollouts]
        await asyncio.gather(*(self._finish(rollout, exit_) for rollout in left), return_exceptions=True)
        return len(live)
