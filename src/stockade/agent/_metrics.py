"""What a Prometheus server may read of a run's way out, and where.

Counts and closed words only: no label has text in it that came from inside a sandbox, nor from a worker, which faces what
came from inside. It is read on a socket of this machine's loopback by whoever is on the machine, and on the agent's own
socket by whoever has the token, which opens nothing else.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import os
import re
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from stockade.agent._listener import is_loopback
from stockade.broker import AUTH_HEADER, METRICS_PATH, metrics_app, metrics_route, serving
from stockade.egress import COUNTED, PoolStats
from stockade.errors import ConfigError, NodeError
from stockade.ids import RunId
from stockade.runs import state_dir

if TYPE_CHECKING:
    from prometheus_client import Metric
    from starlette.applications import Starlette
    from starlette.routing import Route

_AGENTS = "agents"
_ASK_S = 10.0
_LABELS = {"decisions": ["kind", "reason"], "store_lookups": ["result"], "tls_handshakes": ["side", "result"]}
_TEXTS = {
    "decisions": "Decisions of the gate, by what was asked for and the reason",
    "store_lookups": "Questions to the store of answers",
    "tls_handshakes": "TLS handshakes, by the side that the worker spoke to",
}
_ADDRESS = re.compile(r"(?P<host>[0-9.]{7,15}|\[[0-9a-fA-F:.]{2,45}\]):(?P<port>[0-9]{1,5})", re.ASCII)
_LEVEL = re.compile(r"(?:sha256:)?[a-z0-9][a-z0-9-]{0,63}", re.ASCII)


def exposition(stats: PoolStats, run_id: str) -> bytes:
    """Return the metrics in Prometheus's text format (version 0.0.4). Raises NodeError without prometheus-client."""
    _require_client()
    from prometheus_client import CollectorRegistry, generate_latest  # late: most agents are never asked

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(stats, run_id))
    return generate_latest(registry)


def _require_client() -> None:
    try:
        import prometheus_client  # noqa: F401
    except ModuleNotFoundError as error:
        raise NodeError("metrics need prometheus-client", hint="run: pip install 'stockade[metrics]'") from error


class _Snapshot:
    """A collector of one moment: the workers were asked before, which takes turns of the event loop."""

    def __init__(self, stats: PoolStats, run_id: str) -> None:
        self._stats = stats
        self._run_id = run_id

    def collect(self) -> Iterator[Metric]:
        """Return all metrics."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        stats = self._stats
        said = {"run_id": self._run_id, "landlock": _level(stats.landlock), "seccomp": _level(stats.seccomp)}
        yield InfoMetricFamily("stockade_egress", "The run, and how its egress workers are confined", value=said)
        for name, text, value in (
            ("workers", "Egress workers that serve", stats.workers),
            ("rollouts", "Rollouts with a way out", stats.rollouts),
            ("connections", "Connections of sandboxes that are open", stats.connections),
        ):
            yield GaugeMetricFamily(f"stockade_egress_{name}", text, value=value)
        for name, text, value in (
            ("dns_queries", "Questions that were asked of name servers", stats.queries),
            ("worker_restarts", "Workers that were replaced", stats.restarts),
            ("faults", "Exceptions inside workers, each of which ended one connection", stats.faults),
        ):
            yield CounterMetricFamily(f"stockade_egress_{name}", text, value=value)
        moved = CounterMetricFamily("stockade_egress_bytes", "Bytes that count against budgets", labels=["direction"])
        moved.add_metric(["out"], stats.bytes_out)
        moved.add_metric(["in"], stats.bytes_in)
        yield moved
        yield from self._counted()

    def _counted(self) -> Iterable[Metric]:
        """Return the families of closed lists; of the decisions, which are many, those that were ever taken."""
        from prometheus_client.core import CounterMetricFamily

        for family, labels in _LABELS.items():
            metric = CounterMetricFamily(f"stockade_egress_{family}", _TEXTS[family], labels=labels)
            for name, counted in COUNTED.items():
                value = self._stats.counts.get(name, 0)
                if counted.family == family and (value or family != "decisions"):
                    metric.add_metric(list(counted.labels), value)
            yield metric


def _level(said: str) -> str:
    """Return how a worker says it is confined, if that is one word."""
    return said if _LEVEL.fullmatch(said) else "unknown"


# ---- where it is read


def open_metrics(text: str, *, anywhere: bool = False) -> socket.socket:
    """Return a listening socket at ``text`` (``127.0.0.1:9464``, ``[::1]:9464``), on loopback unless ``anywhere``.

    Raises ConfigError for what is no such address and for one that is taken, NodeError without prometheus-client.
    """
    _require_client()
    match = _ADDRESS.fullmatch(text)
    try:
        address = ipaddress.ip_address(match["host"].strip("[]")) if match else None
    except ValueError:
        address = None
    if match is None or address is None or int(match["port"]) >= 1 << 16:
        raise ConfigError(f"{text!r} is not an address to listen on", key="--metrics", hint="write 127.0.0.1:9464")
    if not is_loopback(str(address)) and not anywhere:
        raise ConfigError(
            f"{text} can be reached from elsewhere",
            key="--metrics",
            hint="use 127.0.0.1, or add --unsafe-metrics-anywhere",
        )
    sock = socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((str(address), int(match["port"])))
        sock.listen(16)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {text}: {error.strerror}", key="--metrics", hint="name a free port"
        ) from error
    return sock


class Metrics:
    """The metrics of one run: ``ask`` gets what its workers have counted."""

    def __init__(self, run_id: RunId, ask: Callable[[], Awaitable[PoolStats]], listener: socket.socket | None) -> None:
        """``listener``, from :func:`open_metrics`, stays the caller's."""
        self._run_id = run_id
        self._ask = ask
        self._listener = listener
        self._token = secrets.token_urlsafe(32)

    async def render(self) -> bytes:
        """Return them as they are now."""
        return exposition(await self._ask(), self._run_id)

    @property
    def route(self) -> Route:
        """The route on the agent's own socket."""
        return metrics_route(self.render, self._token)

    @property
    def app(self) -> Starlette:
        """An application of that one route, for an agent that has no other."""
        return metrics_app(self.render, token=self._token)

    @contextlib.asynccontextmanager
    async def served(self, path: Path) -> AsyncIterator[None]:
        """Serve on the listener, and say on this machine how to read them on the agent's own socket at ``path``."""
        card = _card(self._run_id, make=True)
        _write(card, json.dumps({"socket": str(path), "token": self._token}))
        try:
            async with contextlib.AsyncExitStack() as stack:
                if self._listener is not None:
                    await stack.enter_async_context(serving(metrics_app(self.render), self._listener))
                yield
        finally:
            card.unlink(missing_ok=True)


def _card(run_id: str, *, make: bool = False) -> Path:
    folder = state_dir() / _AGENTS
    if make:
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder / f"{run_id}.json"


def _write(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)  # of an agent that was killed: a run's ID is never used again
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "w", encoding="ascii") as file:
        file.write(text)


def read_metrics(run_id: str) -> str:
    """Ask the live agent of a run on this machine. Raises NodeError if there is none, or if it does not answer."""
    none = NodeError(f"no agent of run {run_id} is live on this machine", hint="ask on the node where the run is")
    try:
        told = json.loads(_card(run_id).read_bytes())
        path, token = str(told["socket"]), str(told["token"])
    except FileNotFoundError:
        raise none from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NodeError(f"what the agent of run {run_id} said of itself cannot be read: {error}") from error
    try:
        with contextlib.closing(_OverUnix(path)) as connection:
            connection.request("GET", METRICS_PATH, headers={AUTH_HEADER: token})
            answer = connection.getresponse()
            text = answer.read().decode("utf-8", "replace")
    except (FileNotFoundError, ConnectionRefusedError):
        raise none from None
    except (OSError, http.client.HTTPException) as error:
        raise NodeError(f"the agent of run {run_id} does not answer: {error}") from error
    if answer.status != http.HTTPStatus.OK:
        raise NodeError(f"the agent of run {run_id} said {answer.status}: {text.strip()}")
    return text


class _OverUnix(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("agent", timeout=_ASK_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        try:
            self.sock.connect(self._path)
        except BaseException:
            self.sock.close()
            raise
