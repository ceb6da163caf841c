"""What all workers of a pool are told when they start, and the parts of it that travel as descriptors.

Keys, certificates and trust roots go in sealed memory files, never in a message that could be logged, never by a path: a
worker reads them before it gives up every file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec

from stockade.egress._ledger import memory_file
from stockade.egress.gate import RuleLimits


class ChainSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The operator's proxy that every connection goes through.

    ``kind`` ``unix``: ``host`` is the path of its socket and ``port`` 0. ``name_only``: it resolves names itself, as our
    own gateway does; else it is asked for the checked address. ``gateway`` says that it is one.
    """

    kind: Literal["http", "https", "unix"]
    host: str
    port: int
    name_only: bool = False
    gateway: bool = False


class StoreSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much the store may hold, and which recording this run writes to or plays."""

    max_bytes: int
    recording: str = "default"


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What fits into a message. ``run_limits`` are shared by all rollouts of all workers of the run."""

    resolvers: tuple[str, ...] = ()
    store: StoreSettings | None = None
    chain: ChainSettings | None = None
    run_limits: RuleLimits | None = None


MEMORY_PARTS = (
    *("authority_cert", "authority_key", "roots", "chain_ca", "chain_cert", "chain_key"),
    *("gateway_cert", "gateway_key", "gateway_ca"),
)
"""Parts that are memory files: the fields of :class:`Equipment` but ``store``."""


@dataclass(frozen=True, slots=True, repr=False)
class Equipment:
    """What the agent gives a pool beside the settings; no repr, for a repr ends up in logs.

    ``authority_cert``, ``authority_key``: PEM of the run's own certificate authority, without which nothing is
    inspected. ``roots``: PEM of what upstream certificates are checked against. ``store``: descriptor of the store's
    directory, which stays the caller's. ``chain_*``: PEM for the operator's proxy. ``gateway_*``: certificate and key of
    a gateway's listener, and the authorities of its clients.
    """

    authority_cert: bytes = b""
    authority_key: bytes = b""
    roots: bytes = b""
    store: int = -1
    chain_ca: bytes = b""
    chain_cert: bytes = b""
    chain_key: bytes = b""
    gateway_cert: bytes = b""
    gateway_key: bytes = b""
    gateway_ca: bytes = b""

    def memory_parts(self) -> dict[str, bytes]:
        """Return what goes as memory files, by the name of the part."""
        return {name: data for name in MEMORY_PARTS if (data := getattr(self, name))}

    @contextlib.contextmanager
    def descriptors(self, *, run_ledger: int) -> Iterator[dict[str, int]]:
        """Give the descriptors of all parts by name, ``run_ledger`` among them; the memory files are closed afterwards."""
        with contextlib.ExitStack() as opened:
            given: dict[str, int] = {}
            for name, data in self.memory_parts().items():
                given[name] = memory_file(f"stockade-{name}", data)
                opened.callback(os.close, given[name])
            kept = {"store": self.store, "run": run_ledger}
            yield given | {name: fd for name, fd in kept.items() if fd >= 0}
