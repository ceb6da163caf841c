"""A package fetched for the second time, out of the store, against the first time from the origin."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.egress._lab import STORED
from bench.egress._peers import Peer
from bench.egress._work import Bound, Cell, Scene, Variant, Work

FETCHES = 8
_SHORT_FETCHES = 2
_LOG_S = 0.1


class Store(Work):
    """First and second fetches of the same files, each by a new rollout."""

    def variants(self, peers: Sequence[Peer]) -> list[Variant]:
        """Return one variant for clear text and one for TLS, each with a first and a second line."""
        return [_Twice(peer, tls=tls) for peer in peers if peer.stores for tls in (False, True)]


@dataclass
class _Twice:
    peer: Peer
    tls: bool
    fetched: int = field(default=0, init=False)

    @property
    def name(self) -> str:
        """The peer's, and the scheme."""
        return f"{self.peer.name}: {'https' if self.tls else 'http'}"

    async def turn(self, scene: Scene) -> Mapping[str, Cell]:
        """Fetch files that were never asked for before, and then again."""
        fetches = _SHORT_FETCHES if scene.short else FETCHES
        lines = [f"{self.name}, {which}" for which in ("first", "second")]
        found: dict[str, Cell] = {line: {} for line in lines}
        how = ["-t", "-s", "-o", f"{STORED}:443"] if self.tls else ["-o", f"{STORED}:80"]
        for _ in range(fetches):
            self.fetched += 1
            words = ["-m", "exchange", *how, "-p", f"/stored/{self.name[8:]}/{self.fetched}", "-c", "1", "-n", "1"]
            for line in lines:
                sent = scene.lab.bytes_sent()
                cell = await scene.run(self.peer, words, tls=self.tls)
                await asyncio.sleep(_LOG_S)  # the origin logs an answer once it is sent
                cell["origin_mib"] = (scene.lab.bytes_sent() - sent) / (1 << 20)
                for measure, value in cell.items():
                    found[line][measure] = found[line].get(measure, 0.0) + value / fetches
        return found


STORE: tuple[Work, ...] = (
    Store(
        "store",
        "10 MiB from the origin, and the same from the store; each by a new rollout",
        "cpu_us",
        "CPU ms",
        scale=1e-3,
        bounds=(
            Bound("cpu_us", "worker: http, first", 0.1, line="worker: http, second"),
            Bound("origin_mib", "worker: http, first", 0.1, line="worker: http, second"),
            Bound("origin_mib", "worker: https, first", 0.1, line="worker: https, second"),
        ),
        beside=("p50_us", "origin_mib"),
    ),
)
