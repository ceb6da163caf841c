"""A gateway on a login node: one egress worker in the foreground, for nodes that reach no internet themselves.

Nodes come to its listener as to a proxy; the policy is applied to whatever they ask for, whatever theirs said before, names
are looked up here, and addresses are judged here, where they are dialled. It is a run of its own with a record of its own:
the nodes' rollouts are claims in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stockade._version import __version__
from stockade.agent._listener import Keys, Listener, opened
from stockade.agent._metrics import Metrics, open_metrics
from stockade.agent._site import Site, read_site, socket_path
from stockade.agent._wayout import WayOut, way_out
from stockade.broker import bind, serving
from stockade.egress import EgressFault, EgressPool, PoolStats, Role, Usage
from stockade.errors import ConfigError
from stockade.events import RUN_PRODUCER, ChainWriter, Context, Producer, clip, recover_head
from stockade.ids import RUN_SCOPE, RolloutId, new_rollout_id, new_run_id, parse_run_id
from stockade.runs import RunDirectory, state_dir

_BACKEND = "gateway"
_STOP_POLL_S = 0.25
_REASON_BYTES = 512


@dataclass(frozen=True, slots=True)
class GatewaySpec:
    """How to start a gateway. ``authority`` is a new file for the certificate that nodes have to trust, if any."""

    policy: str
    listen: str
    runs: str
    keys: Keys = field(default_factory=Keys)
    run_id: str | None = None
    operator: str | None = None
    authority: str | None = None
    metrics: str | None = None
    unsafe_metrics_anywhere: bool = False


@dataclass(frozen=True, slots=True)
class Listening:
    """What is told once it serves. ``tls``: clients need a certificate. ``inspects``: see :class:`GatewaySpec`."""

    where: str
    tls: bool
    inspects: bool
    run_id: str
    run_dir: Path


@dataclass(frozen=True, slots=True)
class GatewayEnd:
    """How it ended: ``outcome`` is ``ended``, ``stopped`` or ``failed``."""

    outcome: str
    reason: str
    usage: Usage
    run_dir: Path


class Gateway:
    """One gateway. :meth:`serve` returns when it was told to end and its record is sealed."""

    def __init__(self, spec: GatewaySpec, tell: Callable[[Listening], None]) -> None:
        self._spec = spec
        self._tell = tell
        self._over = asyncio.Event()
        self._outcome, self._reason = "ended", "closed"
        self._pool: EgressPool | None = None

    async def stats(self) -> PoolStats | None:
        """Return what it is doing, None before it serves."""
        return None if self._pool is None else await self._pool.stats()

    async def serve(self) -> GatewayEnd:
        """Run from start to seal. Raises StockadeError before anything was written if it cannot start."""
        spec = self._spec
        site = read_site(spec.policy, spec.operator)
        run_id = new_run_id() if spec.run_id is None else parse_run_id(spec.run_id)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._end, "ended", f"signal {signal.Signals(number).name}")
        with contextlib.ExitStack() as stack:
            metrics = None
            if spec.metrics is not None:
                metrics = stack.enter_context(open_metrics(spec.metrics, anywhere=spec.unsafe_metrics_anywhere))
            listener = stack.enter_context(opened(spec.listen, spec.keys))
            uid = site.worker_uid
            way = way_out(site.policy, site.operator, run_id=run_id, resolvers=site.resolvers, worker_uid=uid)
            stack.callback(way.close)
            way = replace(way, equipment=spec.keys.added_to(way.equipment))
            if spec.authority is not None and not way.inspects:
                hint = "leave --authority away"
                raise ConfigError("nothing is looked into here, so there is no authority", key="--authority", hint=hint)
            manifest = {
                **site.manifest(),
                "unsafe": self._unsafe(site),
                "backend": {"name": _BACKEND},
                "listen": listener.where,
                "role": listener.role.value,
            }
            run = RunDirectory.create(Path(spec.runs), run_id, manifest)
            if spec.authority is not None:
                _write_new(Path(spec.authority), way.equipment.authority_cert)
            record_fd = run.open_record(RUN_SCOPE, RUN_PRODUCER)
            stack.callback(os.close, record_fd)
            writer = ChainWriter(record_fd, Context(run_id, RUN_SCOPE, site.digest), RUN_PRODUCER)
            self._pool = pool = EgressPool(
                settings=way.settings,
                equipment=way.equipment,
                workers=1,
                uid=uid,
                gid=uid,
                on_broken=self._lost,
                on_fault=self._lost,
            )
            door = _Door(run, writer, pool, way, listener)
            usage = await self._carry_out(door, site, Metrics(run.run_id, pool.stats, metrics))
        return GatewayEnd(self._outcome, self._reason, usage, run.path)

    def _unsafe(self, site: Site) -> list[str]:
        spec = self._spec
        open_ = spec.metrics is not None and spec.unsafe_metrics_anywhere
        return [*site.unsafe, *([f"unsafe_metrics_anywhere {spec.metrics}"] if open_ else [])]

    async def _carry_out(self, door: _Door, site: Site, metrics: Metrics) -> Usage:
        """Serve to the end; whatever failed, what was begun is recorded to its end."""
        run, writer, listener = door.run, door.writer, door.listener
        begun_ns = time.monotonic_ns()
        writer.append(
            "run.start",
            manifest_digest=run.manifest_digest,
            version=__version__,
            backend=_BACKEND,
            node=run.node,
            unsafe=self._unsafe(site),
            role=listener.role.value,
            metadata=[f"listen={listener.where}"],
        )
        site.record_exemptions(writer)
        try:
            async with door.served(site), _measured(metrics):
                tls, inspects = listener.role is Role.GATEWAY, door.way.inspects
                self._tell(Listening(listener.where, tls, inspects, run.run_id, run.path))
                await self._wait(door)
        except BaseException as error:
            self._end("failed", clip(f"{type(error).__name__}: {error}", _REASON_BYTES).text)
            raise
        finally:
            writer.append(
                "run.end",
                reason=self._reason,
                outcome=self._outcome,
                rollouts=1,
                requests=door.usage.requests,
                requests_denied=door.usage.denied,
                duration_ns=time.monotonic_ns() - begun_ns,
            )
            writer.seal()
        return door.usage

    async def _wait(self, door: _Door) -> None:
        """Wait for the end, and look for the STOP file: it needs no message to arrive."""
        while not self._over.is_set():
            stop = door.run.stop_requested()
            if stop is not None:
                begun_ns = time.monotonic_ns()
                await door.pool.revoke_all()
                latency_ns = time.monotonic_ns() - begun_ns
                said: dict[str, Any] = {"severity": 5, "reason": stop.reason, "person": stop.person}
                door.writer.append("control.stop", source="STOP", **said)
                door.writer.append("control.kill", rollouts=1, latency_ns=latency_ns, **said)
                self._end("stopped", "stopped")
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), _STOP_POLL_S)

    def _end(self, outcome: str, reason: str) -> None:
        if not self._over.is_set():
            self._outcome, self._reason = outcome, reason
            self._over.set()

    def _lost(self, _rollout_id: str, why: str) -> None:
        self._end("failed", why)


@dataclass(slots=True)
class _Door:
    """The listener, what serves it, and where that is written down. ``usage`` is known once it is shut."""

    run: RunDirectory
    writer: ChainWriter
    pool: EgressPool
    way: WayOut
    listener: Listener
    usage: Usage = field(default_factory=Usage)

    @contextlib.asynccontextmanager
    async def served(self, site: Site) -> AsyncIterator[None]:
        """Let clients in for as long as the block runs; then close the chain, and name it in the run's."""
        rollout_id = RolloutId(new_rollout_id())
        context = Context(self.run.run_id, rollout_id, site.digest)
        path = self.run.record_path(rollout_id, Producer.EGRESS)
        async with self.pool:
            fd = self.run.open_record(rollout_id, Producer.EGRESS)
            own = self.run.open_record(rollout_id, RUN_PRODUCER)
            life = ChainWriter(own, context, RUN_PRODUCER)
            life.append("rollout.start", backend=_BACKEND, role=_BACKEND, network=True, node=self.run.node)
            try:
                await self.pool.attach(
                    rollout_id,
                    context=context,
                    rules=self.way.rules(site.policy, site.operator),
                    sockets={self.listener.sock.fileno(): self.listener.role},
                    record=fd,
                    record_path=path,
                )
                yield
            finally:
                try:
                    head, self.usage = await self.pool.detach(rollout_id)
                except EgressFault:  # never attached, or its worker was given up: nobody writes to this chain
                    start = recover_head(path)
                    head = ChainWriter(fd, context, Producer.EGRESS, start=start if start.seq else None).seal()
                finally:
                    os.close(fd)
                    life.append(
                        "rollout.end", exit="closed", requests=self.usage.requests, requests_denied=self.usage.denied
                    )
                    sealed = life.seal()
                    os.close(own)
                self.writer.append_sealed_rollout(rollout_id, {Producer.EGRESS: head, RUN_PRODUCER: sealed})


@contextlib.asynccontextmanager
async def _measured(metrics: Metrics) -> AsyncIterator[None]:
    """Let metrics be read on a socket of this user's, and where else they are wanted."""
    path = socket_path(state_dir())
    sock = bind(path)
    try:
        async with serving(metrics.app, sock), metrics.served(path):
            yield
    finally:
        sock.close()
        path.unlink(missing_ok=True)


def _write_new(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with open(fd, "wb") as file:
        file.write(data)
