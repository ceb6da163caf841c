"""Workloads about what is held: memory of idle tunnels and of peers that never read, and CPU as rollouts grow in number."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.egress import _meter
from bench.egress._lab import PLAIN, SILENT_NAME, TUNNEL
from bench.egress._peers import Peer
from bench.egress._work import GET, Bound, Cell, LoadFailed, Scene, Variant, Work, opened

IDLE_TUNNELS = 1000
DEAF_CLIENTS = 64
ROLLOUTS = (1, 30, 300, 1000)
_SHORT = 16
_HELD_KIB = 1024
"""Well above one high-water mark and one read for each side; a leak goes past it within a second."""
_READY_S = 60


async def held_kib(scene: Scene, peer: Peer, words: Sequence[str], clients: int, looks: Sequence[float]) -> list[int]:
    """Let clients come and stay; return the peer's memory before, and ``looks`` seconds after all are in place."""
    await peer.renew()
    async with opened(peer, 1) as where:
        pids = peer.pids()
        found = [_meter.memory_kib(pids)]
        stay = ["-c", str(clients), "-d", str(max(looks) + 1)]
        process = await asyncio.create_subprocess_exec(
            *scene.command([*words, *stay], where, tls=True), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout is not None, "it was asked for"
        async with asyncio.timeout(_READY_S):
            line = await process.stdout.readline()
        passed = 0.0
        for look in looks:
            await asyncio.sleep(look - passed)
            passed = look
            found.append(_meter.memory_kib(pids))
        _, complaint = await process.communicate()
    if line.split() != [b"READY", str(clients).encode()]:
        raise LoadFailed(f"{line!r} {complaint.decode(errors='replace').strip()}")
    return found


class Idle(Work):
    """Memory at rest, and for each tunnel that says nothing."""

    def variants(self, peers: Sequence[Peer]) -> list[Variant]:
        """Return one line for each proxy."""
        return [_IdleOf(peer) for peer in peers if peer.tunnels and peer.pids()]


@dataclass
class _IdleOf:
    peer: Peer
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.peer.name

    async def turn(self, scene: Scene) -> Mapping[str, Cell]:
        """Hold the tunnels once."""
        clients = _SHORT if scene.short else IDLE_TUNNELS
        words = ("-m", "hold", "-t", "-s", "-o", f"{TUNNEL}:443")
        before, held = await held_kib(scene, self.peer, words, clients, [0.5 if scene.short else 2])
        return {self.name: {"base_mib": before / 1024, "kib_each": (held - before) / clients}}


class NeverReads(Work):
    """Memory for clients that ask for a gigabyte and read none of it, and for an origin that reads nothing."""

    def variants(self, peers: Sequence[Peer]) -> list[Variant]:
        """Return three lines for each proxy."""
        proxies = [peer for peer in peers if peer.tunnels and peer.pids()]
        return [_Deaf(peer, kind) for peer in proxies for kind in _DEAF]


_DEAF: Mapping[str, tuple[str, ...]] = {
    "client, plain": ("-m", "deaf", "-k", "-o", f"{PLAIN}:80", "-p", "/1g"),
    "client, tunnel": ("-m", "deaf", "-t", "-s", "-o", f"{TUNNEL}:443", "-p", "/1g"),
    "origin, tunnel": ("-m", "flood", "-t", "-s", "-o", f"{SILENT_NAME}:443"),
}


@dataclass
class _Deaf:
    peer: Peer
    kind: str
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = f"{self.peer.name}: {self.kind}"

    async def turn(self, scene: Scene) -> Mapping[str, Cell]:
        """Hold the clients once, and look twice: what is bounded does not grow any more."""
        clients = _SHORT if scene.short else DEAF_CLIENTS
        looks = [0.5, 1] if scene.short else [2, 6]
        before, early, late = await held_kib(scene, self.peer, _DEAF[self.kind], clients, looks)
        return {self.name: {"kib_each": (early - before) / clients, "later_kib_each": (late - before) / clients}}


class Rollouts(Work):
    """CPU for a GET of the same clients, spread over more and more rollouts."""

    def variants(self, peers: Sequence[Peer]) -> list[Variant]:
        """Return one line for each number of rollouts; only the worker knows what a rollout is."""
        return [_Attached(peer, count) for peer in peers if peer.rollouts for count in ROLLOUTS]


@dataclass
class _Attached:
    peer: Peer
    count: int
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = f"{self.peer.name}: {self.count}"

    async def turn(self, scene: Scene) -> Mapping[str, Cell]:
        """Run the same clients over ``count`` rollouts."""
        amount = ["-c", str(_SHORT), "-n", "64"] if scene.short else ["-c", str(max(ROLLOUTS)), "-d", "3"]
        return {self.name: await scene.run(self.peer, [*GET, *amount], doors=self.count)}


HELD: tuple[Work, ...] = (
    Idle(
        "idle",
        f"{IDLE_TUNNELS} idle tunnels: base, and KiB for each",
        "kib_each",
        "KiB each",
        most_rounds=2,
        bounds=(Bound("base_mib", "", 30), Bound("kib_each", "", 4)),
        beside=("base_mib",),
    ),
    NeverReads(
        "never_reads",
        f"{DEAF_CLIENTS} peers that never read: KiB for each after 2 s and after 6 s",
        "kib_each",
        "KiB each",
        most_rounds=2,
        bounds=(Bound("later_kib_each", "", _HELD_KIB),),
        beside=("later_kib_each",),
    ),
    Rollouts(
        "rollouts",
        f"plain GET of 1 KiB by {max(ROLLOUTS)} clients over a number of rollouts",
        "cpu_us",
        "CPU µs",
        bounds=(Bound("cpu_us", "worker: 1", 1.1),),
    ),
)
