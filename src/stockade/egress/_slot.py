"""What the node agent keeps of its egress workers and their rollouts."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from stockade.egress._channel import Channel
from stockade.egress._counts import COUNTED
from stockade.egress._ledger import make_ledger, memory_file, used
from stockade.egress._roles import Role
from stockade.egress._usage import Usage
from stockade.egress.gate import Rules
from stockade.errors import StockadeError
from stockade.events import ChainHead, Context


class EgressFault(StockadeError, RuntimeError):
    """The way out itself failed: an infrastructure fault, never the candidate's."""


@dataclass(frozen=True, slots=True)
class PoolStats:
    """What the pool is doing. ``landlock`` is ``abi-N``, or ``unenforced`` if any worker lacks it.

    ``counts`` has the counters of :mod:`stockade.egress._counts`. They and ``queries`` and ``faults`` never go back: those
    of workers that ended are in them, as they were last seen. Bytes are those of all rollouts there were, exactly.
    """

    workers: int
    rollouts: int
    connections: int
    queries: int
    faults: int
    restarts: int
    landlock: str
    seccomp: str = "unenforced"
    counts: Mapping[str, int] = field(default_factory=dict)
    bytes_out: int = 0
    bytes_in: int = 0


class Detached(NamedTuple):
    """The end of a rollout's chain, and what it used."""

    head: ChainHead
    usage: Usage


@dataclass(slots=True)
class Held:
    """What the agent keeps of a rollout, to hand it to the next worker. All descriptors are duplicates of its own."""

    rollout_id: str
    context: Context
    rules: Rules
    sockets: tuple[tuple[Role, int], ...]
    record: int
    path: Path
    ledger: int = -1
    document: int = -1
    revoked: bool = False

    @classmethod
    def keep(
        cls, rollout_id: str, context: Context, rules: Rules, sockets: Mapping[int, Role], record: int, path: Path
    ) -> Held:
        """Duplicate the descriptors, and make the memory that each worker in turn counts in."""
        held = cls(rollout_id, context, rules, (), -1, path)
        try:
            held.record = os.dup(record)
            held.sockets = tuple((role, os.dup(fd)) for fd, role in sockets.items())
            held.ledger = make_ledger(accounts=held.accounts, names=rules.limits.names)
            held.document = memory_file("stockade-rules", rules.to_json().encode("ascii"))
        except BaseException:
            held.close()
            raise
        return held

    @property
    def accounts(self) -> int:
        """How many accounts the ledger has: the rollout's, and one for each rule with limits of its own."""
        return 1 + len(self.rules.rule_limits)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What goes to a worker, in the order of the protocol."""
        return (self.record, self.ledger, self.document, *(fd for _, fd in self.sockets))

    @property
    def usage(self) -> Usage:
        """What was used up until now."""
        return Usage(*used(self.ledger, accounts=self.accounts, names=self.rules.limits.names))

    def close(self) -> None:
        """Close all of it."""
        for fd in self.descriptors:
            if fd >= 0:
                os.close(fd)


@dataclass(slots=True, eq=False)
class Slot:
    """A place for one worker. ``lock`` serialises attach, detach and restart; ``ready`` says that it serves."""

    channel: Channel | None = None
    held: dict[str, Held] = field(default_factory=dict)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    crashes: deque[float] = field(default_factory=deque)
    landlock: str = "unenforced"
    seccomp: str = "unenforced"
    place: int = 0
    supervisor: asyncio.Task[None] | None = None
    last: Mapping[str, int] = field(default_factory=dict)
    """What the worker had counted when it was last asked."""
    past: Counter[str] = field(default_factory=Counter)
    """What the workers before it had."""
    moved: tuple[int, int] = (0, 0)
    """Bytes out and in of the rollouts that are gone."""

    def heard(self, answer: Mapping[str, object]) -> None:
        """Take note of what the worker has counted; it cannot take back what it said before."""
        if answer:
            self.last = {name: max(_count(answer, name), self.last.get(name, 0)) for name in _COUNTERS}

    def succeed(self) -> None:
        """Keep the counts of a worker that is gone."""
        self.past.update(self.last)
        self.last = {}

    def forget(self, held: Held) -> None:
        """Let a rollout go, and keep what it moved."""
        usage = held.usage
        self.moved = (self.moved[0] + usage.bytes_out, self.moved[1] + usage.bytes_in)
        held.close()


_COUNTERS = ("queries", "faults", *COUNTED)


def _count(answer: Mapping[str, object], name: str) -> int:
    """Return a count of a worker's answer, 0 for what is none: a worker faces what is hostile."""
    value = answer.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def summed(slots: Sequence[Slot], answers: Sequence[Mapping[str, object]], *, restarts: int) -> PoolStats:
    """Add up what the workers of ``slots`` answered; an empty answer stands for the one before it."""
    running = [slot for slot in slots if slot.ready.is_set()]
    for slot, answer in zip(slots, answers, strict=True):
        slot.heard(answer)
    used = [held.usage for slot in slots for held in slot.held.values()]

    def total(name: str) -> int:
        return sum(slot.past[name] + slot.last.get(name, 0) for slot in slots)

    def level(of: str) -> str:
        levels = {str(getattr(slot, of)) for slot in running}
        return levels.pop() if len(levels) == 1 else "unenforced"

    return PoolStats(
        workers=len(running),
        rollouts=sum(len(slot.held) for slot in slots),
        connections=sum(_count(answer, "connections") for answer in answers),
        queries=total("queries"),
        faults=total("faults"),
        restarts=restarts,
        landlock=level("landlock"),
        seccomp=level("seccomp"),
        counts={name: count for name in COUNTED if (count := total(name))},
        bytes_out=sum(slot.moved[0] for slot in slots) + sum(usage.bytes_out for usage in used),
        bytes_in=sum(slot.moved[1] for slot in slots) + sum(usage.bytes_in for usage in used),
    )


def host_addresses() -> list[str]:
    """Return the addresses of this host's interfaces, without zones."""
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    found = (entry for entries in psutil.net_if_addrs().values() for entry in entries if entry.family in families)
    return sorted({entry.address.partition("%")[0] for entry in found})
