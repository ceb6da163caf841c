"""Workloads that are one run of the clients: what they are told to do, and what one turn of it measures."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bench.egress import _meter
from bench.egress._lab import INSPECTED, ORIGIN, PLAIN, TUNNEL, Lab
from bench.egress._peers import Peer

Cell = dict[str, float]
"""What one variant measured in one turn: names of measures and their values."""

_LIMIT_S = 600


class LoadFailed(Exception):
    """The clients did not get what they asked for."""


@dataclass(frozen=True)
class Scene:
    """What a workload has at hand. ``short`` asks for amounts that only show that it runs."""

    lab: Lab
    load: Path
    short: bool

    def command(self, words: Sequence[str], doors: Sequence[str], *, tls: bool) -> list[str]:
        """Return the clients' command line; without doors they go to the origin themselves."""
        return [str(self.load), *words, *(doors or ["-a", f"{ORIGIN}:{443 if tls else 80}"])]

    async def run(self, peer: Peer, words: Sequence[str], *, doors: int = 1, tls: bool = False) -> Cell:
        """Run the clients once against ``peer``; return their figures and the CPU that it cost the peer."""
        async with opened(peer, doors) as where:
            warm_up = "-w" in words
            process = await asyncio.create_subprocess_exec(
                *self.command(words, where, tls=tls),
                stdin=subprocess.PIPE if warm_up else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            assert process.stdout is not None, "it was asked for"
            async with asyncio.timeout(_LIMIT_S):
                if warm_up:
                    await process.stdout.readline()
                pids = peer.pids()
                before, waited = _meter.cpu_s(pids), _meter.pressure_s()
                out, complaint = await process.communicate(b"go\n" if warm_up else None)
            used, waited = _meter.cpu_s(pids) - before, _meter.pressure_s() - waited
        figures: dict[str, Any] = json.loads(out) if process.returncode == 0 else {}
        if not figures or figures["errors"] or not figures["ops"]:
            said = complaint.decode(errors="replace").strip().partition("\n")[0]
            raise LoadFailed(f"{figures} {said}")
        seconds = figures["seconds"]
        return {
            "cpu_us": used / figures["ops"] * 1e6,
            "rate": figures["ops"] / seconds,
            "mb_s": figures["bytes"] / seconds / 1e6,
            "cpu_s_gib": used / max(figures["bytes"], 1) * (1 << 30),
            "p50_us": figures["p50_us"],
            "p99_us": figures["p99_us"],
            "ours": float("stockade" in figures["issuer"]),
            "pressure": waited / seconds,
        }


@contextlib.asynccontextmanager
async def opened(peer: Peer, doors: int) -> AsyncIterator[list[str]]:
    """Give ``doors`` doors of ``peer``, and take them away again."""
    try:
        yield await peer.open(doors)
    finally:
        await peer.shut()


class Variant(Protocol):
    """One line of a table: does its thing once per round. ``name`` is a peer's, or says what is varied."""

    @property
    def name(self) -> str:
        """What it is called."""

    async def turn(self, scene: Scene) -> Mapping[str, Cell]:
        """Measure once; the keys are lines of the table, usually only ``name``."""


@dataclass(frozen=True)
class Bound:
    """What is promised: ``measure`` of the lines that begin with ``line`` is at most (or at least) ``ratio`` of another's.

    Without ``against`` the ratio is the figure itself.
    """

    measure: str
    against: str
    ratio: float
    at_least: bool = False
    line: str = "worker"


@dataclass(frozen=True)
class Work:
    """A workload: what is compared, in which unit, and what is shown beside it."""

    name: str
    title: str
    measure: str
    unit: str
    scale: float = 1.0
    bounds: tuple[Bound, ...] = ()
    beside: tuple[str, ...] = ("rate", "p50_us", "p99_us")
    most_rounds: int = 1000

    def variants(self, peers: Sequence[Peer]) -> list[Variant]:
        """Return the lines that ``peers`` make, the first one of them being nothing special."""
        raise NotImplementedError


@dataclass(frozen=True)
class Exchange(Work):
    """A run of the clients, the same for every peer that suits."""

    words: tuple[str, ...] = ()
    amount: tuple[str, ...] = ("-d", "3")
    short: tuple[str, ...] = ("-n", "64")
    doors: int = 1
    tls: bool = False
    inspected: bool = False

    def variants(self, peers: Sequence[Peer]) -> list[Variant]:
        """Return one line for each peer that can do it."""
        able = [peer for peer in peers if (peer.inspects if self.inspected else peer.tunnels)]
        return [ExchangeOf(self, peer) for peer in able]


@dataclass(frozen=True)
class ExchangeOf:
    """One peer's line."""

    work: Exchange
    peer: Peer

    @property
    def name(self) -> str:
        """The peer's."""
        return self.peer.name

    async def turn(self, scene: Scene) -> Mapping[str, Cell]:
        """Run the clients once."""
        work = self.work
        words = [*work.words, *(work.short if scene.short else work.amount)]
        return {self.name: await scene.run(self.peer, words, doors=work.doors, tls=work.tls)}


GET = ("-m", "exchange", "-k", "-w", "-o", f"{PLAIN}:80", "-p", "/1k")
TUNNEL_GET = ("-m", "exchange", "-t", "-s", "-o", f"{TUNNEL}:443")

EXCHANGES: tuple[Work, ...] = (
    Exchange(
        "get",
        "plain GET of 1 KiB, 16 kept connections",
        "cpu_us",
        "CPU µs",
        bounds=(Bound("cpu_us", "envoy", 0.9),),
        words=(*GET, "-c", "16"),
    ),
    Exchange(
        "tunnel",
        "new CONNECT tunnel, TLS handshake, one GET; 8 clients",
        "cpu_us",
        "CPU µs",
        bounds=(Bound("cpu_us", "envoy", 1.0), Bound("cpu_us", "squid", 1.2)),
        words=(*TUNNEL_GET, "-p", "/1k", "-c", "8"),
        tls=True,
    ),
    Exchange(
        "bulk",
        "1 GiB through one tunnel",
        "cpu_s_gib",
        "CPU s/GiB",
        bounds=(Bound("cpu_s_gib", "envoy", 0.5), Bound("mb_s", "direct", 0.8, at_least=True)),
        beside=("mb_s",),
        words=(*TUNNEL_GET, "-p", "/1g", "-c", "1", "-n", "1"),
        amount=("-d", "120"),
        short=("-p", "/64m", "-d", "120"),
        tls=True,
    ),
    Exchange(
        "inspected",
        "new inspected connection, one GET; 8 clients",
        "cpu_us",
        "CPU µs",
        bounds=(Bound("cpu_us", "squid-bump", 0.6),),
        words=("-m", "exchange", "-t", "-s", "-o", f"{INSPECTED}:443", "-p", "/1k", "-c", "8"),
        tls=True,
        inspected=True,
    ),
    Exchange(
        "latency",
        "plain GET of 1 KiB, 64 rollouts at once with one connection each",
        "p99_us",
        "p99 ms",
        scale=1e-3,
        bounds=(Bound("p99_us", "squid", 1.25),),
        beside=("p50_us", "rate", "cpu_us"),
        words=(*GET, "-c", "64"),
        doors=64,
    ),
)
