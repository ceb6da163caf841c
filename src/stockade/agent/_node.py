"""The node agent: composition root of everything that one run does on one node.

It starts, tells whoever started it where the broker is, serves until it is told to end, until its owner dies or
until the run is stopped, and seals the record. One agent per run and node.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import secrets
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from stockade._version import __version__
from stockade.agent._metrics import Metrics, open_metrics
from stockade.agent._owners import Owners
from stockade.agent._service import NodeService
from stockade.agent._site import Site, read_site, socket_path
from stockade.agent._wayout import WayOut, way_out
from stockade.broker import bind, check_socket_path, create_app, serving
from stockade.egress import EgressPool
from stockade.errors import NodeError, StockadeError, Stopped
from stockade.events import RUN_PRODUCER, ChainWriter, Context, clip
from stockade.ids import RUN_SCOPE, new_run_id, parse_run_id
from stockade.runs import RunDirectory, state_dir
from stockade.sandbox import BubblewrapBackend, Exit, ExitKind

_log = logging.getLogger(__name__)
STOP_POLL_S = 0.25
_LAST_COMMANDS_S = 1.0
_REASON_BYTES = 512


class AgentSpec(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What whoever starts an agent tells it, as JSON on its standard input.

    ``learn``: find out what rollouts ask for. Nothing leaves that the policy does not allow, but every tunnel is met.
    ``metrics``: where a Prometheus server may read, an address and port of loopback unless ``unsafe_metrics_anywhere``.
    """

    policy: str
    runs: str
    owner_pid: int
    run_id: str | None = None
    operator: str | None = None
    max_episodes: int = 256
    metadata: dict[str, str] = {}
    learn: bool = False
    metrics: str | None = None
    unsafe_metrics_anywhere: bool = False


class Node:
    """One agent. ``serve`` returns when the run is over and its record is sealed."""

    def __init__(self, spec: AgentSpec, tell: Callable[[Mapping[str, object]], None]) -> None:
        self._spec = spec
        self._tell = tell
        self._over = asyncio.Event()
        self._reason = "closed"
        self._kept: Mapping[str, str] | None = None

    async def serve(self) -> None:
        """Run from start to seal. Raises StockadeError before anything was written if it cannot start."""
        site = read_site(self._spec.policy, self._spec.operator)
        run_id = new_run_id() if self._spec.run_id is None else parse_run_id(self._spec.run_id)
        _raise_descriptor_limit()
        state = state_dir()
        path = socket_path(state)
        check_socket_path(path)  # now, while nothing was written yet
        # From here on: a signal that ends the process in the middle of a start would leave half a run.
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._end, f"signal {signal.Signals(number).name}")
        async with contextlib.AsyncExitStack() as opened:
            metrics = None
            if self._spec.metrics is not None:
                anywhere = self._spec.unsafe_metrics_anywhere
                metrics = opened.enter_context(open_metrics(self._spec.metrics, anywhere=anywhere))
            # The first of the range is the egress workers': no sandbox may share a uid with who guards its way out.
            uids = site.operator.uid_range
            backend = BubblewrapBackend(state, uids=(uids.first + 1, uids.count - 1))
            opened.push_async_callback(backend.aclose)
            capabilities = await backend.probe()
            if not capabilities.usable:
                raise NodeError(
                    f"no sandbox can be made here: {capabilities.missing}",
                    hint=capabilities.hint or "see: stockade doctor",
                )
            way = way_out(
                site.policy,
                site.operator,
                run_id=run_id,
                resolvers=site.resolvers,
                worker_uid=site.worker_uid,
                learn=self._spec.learn,
            )
            opened.callback(way.close)
            if self._over.is_set():
                raise Stopped(f"ended before the run began: {self._reason}", hint="nothing was written")
            manifest = {
                **site.manifest(),
                "unsafe": self._unsafe(site),
                "backend": {
                    "name": capabilities.name,
                    "version": capabilities.version,
                    "interpreter": capabilities.interpreter,
                },
                "per_sandbox_uid": capabilities.per_sandbox_uid,
                "metadata": dict(self._spec.metadata),
                "learn": self._spec.learn,
            }
            run = RunDirectory.create(Path(self._spec.runs), run_id, manifest)
            if run.stop_requested():
                raise Stopped(f"run {run_id} was stopped", hint="start a new run")
            await self._run(run, site, way, backend, path, metrics)

    def _unsafe(self, site: Site) -> list[str]:
        spec = self._spec
        open_ = spec.metrics is not None and spec.unsafe_metrics_anywhere
        return [*site.unsafe, *([f"unsafe_metrics_anywhere {spec.metrics}"] if open_ else [])]

    async def _run(
        self,
        run: RunDirectory,
        site: Site,
        way: WayOut,
        backend: BubblewrapBackend,
        path: Path,
        metrics: socket.socket | None,
    ) -> None:
        record_fd = run.open_record(RUN_SCOPE, RUN_PRODUCER)
        try:
            writer = ChainWriter(record_fd, Context(run.run_id, RUN_SCOPE, site.digest), RUN_PRODUCER)
            writer.append(
                "run.start",
                manifest_digest=run.manifest_digest,
                version=__version__,
                backend=backend.name,
                node=run.node,
                unsafe=self._unsafe(site),
                metadata=[f"{name}={value}" for name, value in sorted(self._spec.metadata.items())],
            )
            site.record_exemptions(writer)
            service = self._service(run, writer, site, backend, way)
            self._kept = way.kept(site.policy)
            await self._carry_out(run, service, writer, path, Metrics(run.run_id, service.egress.stats, metrics))
        finally:
            os.close(record_fd)

    def _service(
        self, run: RunDirectory, writer: ChainWriter, site: Site, backend: BubblewrapBackend, way: WayOut
    ) -> NodeService:
        def lost(rollout_id: str, why: str) -> None:
            service.egress_lost(rollout_id, why)

        service = NodeService(
            run=run,
            run_writer=writer,
            policy=site.policy,
            operator=site.operator,
            backend=backend,
            egress=EgressPool(
                settings=way.settings,
                equipment=way.equipment,
                uid=site.worker_uid,
                gid=site.worker_uid,
                on_broken=lost,
                on_fault=lost,
            ),
            way_out=way,
            max_live=self._spec.max_episodes,
        )
        return service

    async def _carry_out(
        self, run: RunDirectory, service: NodeService, writer: ChainWriter, path: Path, metrics: Metrics
    ) -> None:
        """Serve to the end; whatever failed, what was begun is recorded to its end."""
        started_ns = time.monotonic_ns()
        outcome = "failed"
        try:
            if service.has_way_out:
                await service.egress.start()
            await self._serve(run, service, writer, path, metrics)
            outcome = "ended"
        except Exception as error:
            self._reason = clip(f"{type(error).__name__}: {error}", _REASON_BYTES).text
            raise
        finally:
            try:
                await service.end()
                outcome = "stopped" if service.stopped else outcome
                totals: dict[str, Any] = {**service.totals, "duration_ns": time.monotonic_ns() - started_ns}
                writer.append("run.end", reason=self._reason, outcome=outcome, **totals)
                writer.seal()
            finally:
                await service.egress.aclose()

    async def _serve(
        self, run: RunDirectory, service: NodeService, writer: ChainWriter, path: Path, metrics: Metrics
    ) -> None:
        token = secrets.token_urlsafe(32)

        def owner_gone(pid: int) -> None:
            self._end(f"process {pid}, which started this run, has ended")
            # At once: requests in flight are not waited for when nobody is left to read the answers.
            service.end_processes(Exit(ExitKind.OWNER_GONE, evidence=f"process {pid}"))

        owners = Owners(owner_gone)
        sock = bind(path)
        watching = asyncio.create_task(self._watch_stop(run, service, writer), name="stop")
        try:
            app = create_app(service, token, ttl_s=service.caps.wall_s, metrics=metrics.route)
            async with serving(app, sock), metrics.served(path):
                if not owners.watch(self._spec.owner_pid):
                    return
                told = {"socket": str(path), "token": token, "run_id": run.run_id, "run_dir": str(run.path)}
                self._tell({**told, "store": self._kept})
                await self._over.wait()
                service.ending = True
                # Commands in flight get a moment to end by themselves; then they are ended, and answered as such, before
                # the server cuts its answers off.
                end = Exit(ExitKind.CLOSED, evidence="the run ended")
                asyncio.get_running_loop().call_later(_LAST_COMMANDS_S, service.end_processes, end)
        finally:
            if not service.stopped:  # a stop under way is carried through, and recorded
                watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            owners.close()
            sock.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def _end(self, reason: str) -> None:
        if not self._over.is_set():
            self._reason = reason
            self._over.set()

    async def _watch_stop(self, run: RunDirectory, service: NodeService, writer: ChainWriter) -> None:
        """Poll the STOP file: it works over any shared file system and needs no message to arrive."""
        while True:
            try:
                stop = run.stop_requested()
            except Exception as error:  # noqa: BLE001 - who cannot ask whether to stop must stop
                _log.error("cannot look for the STOP file: %s", error)
                await self._stop(service, writer, f"the run directory cannot be read: {error}", None)
                return
            if stop:
                await self._stop(service, writer, stop.reason, stop.person)
                return
            service.sweep(time.monotonic())
            await asyncio.sleep(STOP_POLL_S)

    async def _stop(self, service: NodeService, writer: ChainWriter, reason: str, person: str | None) -> None:
        begun = time.monotonic_ns()
        ended = await service.stop()  # first: a record that cannot be written must not keep anything alive
        latency = time.monotonic_ns() - begun
        writer.append("control.stop", severity=5, reason=reason, person=person, source="STOP")
        writer.append("control.kill", severity=5, reason=reason, person=person, rollouts=ended, latency_ns=latency)


def _raise_descriptor_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def run_agent(spec_text: bytes, tell: Callable[[Mapping[str, object]], None]) -> int:
    """Run an agent; returns its exit code. What went wrong before it served is told, not raised."""
    told = False

    def once(message: Mapping[str, object]) -> None:
        nonlocal told
        told = True
        tell(message)

    try:
        await Node(msgspec.json.decode(spec_text, type=AgentSpec), once).serve()
    except (StockadeError, OSError, msgspec.DecodeError) as error:
        if told:
            _log.exception("the agent failed")
            return 1
        kind = type(error).__name__ if isinstance(error, StockadeError) else "NodeError"
        text = error.message if isinstance(error, StockadeError) else str(error)
        once({"error": text, "hint": getattr(error, "hint", None), "kind": kind})
        return 2
    return 0


def dumps(message: Mapping[str, object]) -> bytes:
    """Return a message for the ready descriptor."""
    return json.dumps(message).encode()
