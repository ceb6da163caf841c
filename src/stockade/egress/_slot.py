"""What the node agent keeps of its egress workers and their rollouts."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from stockade.egress._channel import Channel
from stockade.egress._usage import Usage
from stockade.errors import StockadeError
from stockade.events import ChainHead, Context


class EgressFault(StockadeError, RuntimeError):
    """The way out itself failed: an infrastructure fault, never the candidate's."""


@dataclass(frozen=True, slots=True)
class PoolStats:
    """What the pool is doing. ``landlock`` is ``abi-N``, or ``unenforced`` if any worker lacks it."""

    workers: int
    rollouts: int
    connections: int
    queries: int
    faults: int
    restarts: int
    landlock: str


class Detached(NamedTuple):
    """The end of a rollout's chain, and what it used."""

    head: ChainHead
    usage: Usage


@dataclass(slots=True)
class Held:
    """What the agent keeps of a rollout, to hand it to the next worker."""

    rollout_id: str
    context: Context
    rules: str
    listener: int
    record: int
    path: Path
    usage: Usage | None = None
    revoked: bool = False

    def close(self) -> None:
        """Close both descriptors."""
        os.close(self.listener)
        os.close(self.record)


@dataclass(slots=True, eq=False)
class Slot:
    """A place for one worker. ``lock`` serialises attach, detach and restart; ``ready`` says that it serves."""

    channel: Channel | None = None
    held: dict[str, Held] = field(default_factory=dict)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    crashes: deque[float] = field(default_factory=deque)
    landlock: str = "unenforced"
    supervisor: asyncio.Task[None] | None = None


def host_addresses() -> list[str]:
    """Return the addresses of this host's interfaces, without zones."""
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    found = (entry for entries in psutil.net_if_addrs().values() for entry in entries if entry.family in families)
    return sorted({entry.address.partition("%")[0] for entry in found})
