"""One rollout on this node: its sandbox, its way out, its record, and the order in which they end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stockade.broker import Command, CreateRequest
from stockade.egress import EgressFault, EgressPool, Role
from stockade.egress.gate import Rules
from stockade.errors import RecordError, StockadeError
from stockade.events import (
    ChainHead,
    ChainWriter,
    Context,
    EventVerdict,
    Producer,
    Trust,
    clip,
    clip_args,
    recover_head,
)
from stockade.ids import RolloutId
from stockade.policy import Policy
from stockade.runs import Lifecycle, Stage
from stockade.sandbox import ExecResult, Exit, ExitKind, LiveSandbox, PathRefused, Usage

_HEAD_BYTES = 2048  # of each stream that a record shows; the rest is counted
_MAX_CHANGES = 2000


@dataclass(slots=True, eq=False)
class Rollout:
    """State of one rollout; the node's service moves it along."""

    id: RolloutId
    request: CreateRequest
    policy: Policy
    network: bool
    owner: int | None
    context: Context
    writer: ChainWriter
    record_fd: int
    life: Lifecycle = field(default_factory=Lifecycle)
    sandbox: LiveSandbox | None = None
    attached: bool = False
    egress_fd: int = -1
    egress_path: Path | None = None
    heads: dict[Producer, ChainHead] = field(default_factory=dict)
    given: bool = False
    """Whether files were put in that the baseline does not know yet."""
    baseline: Mapping[str, str] = field(default_factory=dict)
    started_ns: int = field(default_factory=time.monotonic_ns)
    commands: int = 0
    closing: asyncio.Future[Exit] | None = None
    ended_s: float | None = None
    """When it was first seen ended but not closed (monotonic clock)."""

    @property
    def live_sandbox(self) -> LiveSandbox:
        """The sandbox; a rollout that answers requests has one."""
        if self.sandbox is None:
            raise StockadeError(f"{self.id} has no sandbox")
        return self.sandbox

    @property
    def made(self) -> bool:
        """Whether its making is over. Until then only whoever makes it may close it."""
        return self.life.stage not in (Stage.ADMITTED, Stage.STARTING)

    async def attach(
        self, pool: EgressPool, rules: Rules, *, sockets: Mapping[int, Role], record: int, path: Path
    ) -> None:
        """Give it its way out, with a record of its own: ``record`` is the new file at ``path``."""
        self.egress_fd, self.egress_path = record, path
        await pool.attach(
            self.id,
            context=self.context,
            rules=rules,
            sockets=sockets,
            record=record,
            record_path=path,
        )
        self.attached = True

    async def detach(self, pool: EgressPool) -> dict[str, int]:
        """Shut its way out and close that record; returns what was counted. Raises RecordError."""
        if self.egress_path is None:
            return {}
        if self.attached:
            with contextlib.suppress(EgressFault):  # given up before
                self.heads[Producer.EGRESS], usage = await pool.detach(self.id)
                return {
                    "requests": usage.requests,
                    "requests_denied": usage.denied,
                    "bytes_out": usage.bytes_out,
                    "bytes_in": usage.bytes_in,
                }
        # Nobody writes to this chain, or nobody ever did: it is closed from here.
        start = recover_head(self.egress_path)
        self.heads[Producer.EGRESS] = ChainWriter(self.egress_fd, self.context, Producer.EGRESS, start=start).seal()
        return {}

    def fail_closed(self, error: RecordError) -> None:
        """What cannot be recorded must not go on."""
        if self.sandbox is not None:
            self.sandbox.end(Exit(ExitKind.NODE_FAULT, evidence=f"the record cannot be written: {error.message}"))

    async def run(
        self, command: Command, *, timeout_s: float, pipes: tuple[int, int] | None, peer: str | None
    ) -> ExecResult:
        """Record a command, run it, record its end. Raises RecordError before anything ran."""
        self.commands += 1
        number = self.commands
        self._record_exec(number, command, timeout_s, peer)
        try:
            result = await self.live_sandbox.exec(
                command.argv,
                cwd=command.cwd or self.request.workdir,
                env={**self.request.env, **command.env},
                stdin=command.stdin,
                timeout_s=timeout_s,
                pipes=pipes,
            )
        except asyncio.CancelledError:
            left = Exit(ExitKind.CLOSED, evidence="whoever asked for it left")
            with contextlib.suppress(RecordError):  # what ended it may have closed the record as well
                self._record_exit(number, ExecResult(left, b"", b"", False, False, Usage()))
            raise
        self._record_exit(number, result)
        return result

    def _append(self, kind: str, **fields: object) -> None:
        if self.record_fd < 0:  # closed: the number may be another file's by now
            raise RecordError(f"the record of {self.id} is closed")
        try:
            self.writer.append(kind, **fields)  # type: ignore[arg-type]  # the schema checks each value
        except RecordError as error:
            self.fail_closed(error)
            raise

    async def note_given(self) -> None:
        """Before the first command: what lies in the workspace now was given to the rollout, not made by it."""
        if self.given and self.commands == 0:
            self.given = False
            self.baseline = await self.live_sandbox.snapshot()

    def _record_exec(self, number: int, command: Command, timeout_s: float, peer: str | None) -> None:
        args = clip_args(command.argv)
        fields: dict[str, object] = {
            "process.command_args": args.args,
            "exec_id": number,
            "via": command.via,
            "process.working_directory": command.cwd or self.request.workdir or "/workspace",
            "env_names": sorted({*self.request.env, *command.env}),
            "stdin_bytes": len(command.stdin),
            "timeout_ns": int(timeout_s * 1e9),
        }
        if args.truncated:
            fields |= {"truncated": True, "full_bytes": args.full_bytes}
        if peer is not None:
            fields["peer_rollout_id"] = peer
        self._append("process.exec", **fields)

    def _record_exit(self, number: int, result: ExecResult) -> None:
        exit_ = result.exit
        self._append(
            "process.exit",
            # The exit code comes from pid 1 inside; a limit was seen from outside.
            trust=Trust.REPORTED if exit_.kind in (ExitKind.EXITED, ExitKind.SIGNALED) else Trust.OBSERVED,
            exec_id=number,
            exit=exit_.kind.value,
            signal=exit_.signal,
            duration_ns=result.usage.wall_ns,
            cpu_ns=result.usage.cpu_ns,
            max_rss_bytes=result.usage.max_rss_bytes,
            stdout_bytes=len(result.stdout),
            stderr_bytes=len(result.stderr),
            stdout_truncated=result.stdout_truncated,
            stderr_truncated=result.stderr_truncated,
            stdout_head=clip(result.stdout, _HEAD_BYTES).text,
            stderr_head=clip(result.stderr, _HEAD_BYTES).text,
            evidence=exit_.evidence,
            fault=None if exit_.fault is None else exit_.fault.value,
            **{"process.exit.code": exit_.code},
        )

    async def record_changes(self) -> None:
        """Record which files of the workspace differ from what was put there."""
        if self.commands == 0:
            return
        try:
            after = await self.live_sandbox.snapshot()
        except (OSError, PathRefused) as error:
            # A program may take its own workspace's permissions away; its record is closed all the same.
            self._append("sandbox.violation", what="workspace_unreadable", evidence=clip(str(error), 512).text)
            return
        changes = [
            (path, "added" if path not in self.baseline else "modified")
            for path in after
            if after[path] != self.baseline.get(path)
        ]
        changes += [(path, "removed") for path in self.baseline if path not in after]
        for path, change in sorted(changes)[:_MAX_CHANGES]:
            size, _, digest = after.get(path, "0:").partition(":")
            self._append(
                "file.changed",
                change=change,
                size_bytes=int(size) if path in after else None,
                sha256=digest or None,
                **{"file.path": clip(path, 4096).text},
            )
        if len(changes) > _MAX_CHANGES:
            self._append("sandbox.violation", what="too_many_changes", limit=f"{len(changes)} files changed")

    def seal(self, exit_: Exit, counts: Mapping[str, int]) -> dict[Producer, ChainHead]:
        """Write the last two lines of the rollout's own chain; returns the heads of all its chains."""
        usage = None if self.sandbox is None else self.sandbox.usage()
        denied = exit_.fault is not None
        self._append(
            "rollout.end",
            verdict=EventVerdict.DENIED if denied else EventVerdict.OBSERVED,
            exit=exit_.kind.value,
            evidence=exit_.evidence,
            fault=None if exit_.fault is None else exit_.fault.value,
            commands=self.commands,
            duration_ns=time.monotonic_ns() - self.started_ns,
            cpu_ns=0 if usage is None else usage.cpu_ns,
            max_rss_bytes=0 if usage is None else usage.max_rss_bytes,
            **counts,
        )
        self.heads[Producer.SANDBOX] = self.writer.seal()
        return self.heads

    def close_descriptors(self) -> None:
        """Give back the record's descriptors."""
        for fd in (self.record_fd, self.egress_fd):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self.record_fd = self.egress_fd = -1


def pipe(stack: contextlib.ExitStack) -> tuple[int, int]:
    """Return a pipe's two ends, read and write, which ``stack`` closes."""
    read, write = os.pipe2(os.O_CLOEXEC)
    stack.callback(os.close, read)
    stack.callback(os.close, write)
    return read, write


def context_of(run_id: str, rollout_id: RolloutId, digest: str, request: CreateRequest) -> Context:
    """Return what every line of a rollout's record says about where it belongs."""
    return Context(
        run_id=run_id,
        rollout_id=rollout_id,
        policy_digest=digest,
        task_id=request.task_id,
        group_id=request.group_id,
        train_step=request.train_step,
        attempt=request.attempt,
    )
