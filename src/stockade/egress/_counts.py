"""What a worker counts, by names that agent and worker share: a closed list, so that a worker cannot make up others."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from stockade.egress.gate import Reason


class Counted(NamedTuple):
    """One counter: its family, and the values of the family's labels."""

    family: str
    labels: tuple[str, ...]


_KINDS = {"net.request": "request", "net.connect": "tunnel", "net.dns": "name", "net.end": "end"}

DECISIONS: Mapping[str, Mapping[Reason, str]] = MappingProxyType(
    {kind: MappingProxyType({reason: f"{word} {reason.value}" for reason in Reason}) for kind, word in _KINDS.items()}
)
"""The counter of a decision, by the kind of its event and its reason; ``end``: something allowed that the gate ended."""

STORE_HIT, STORE_MISS = "store hit", "store miss"


def tls(side: str, *, done: bool) -> str:
    """Return the counter of handshakes with ``client``, ``upstream`` or ``gateway``, by how they ended."""
    return f"tls {side} {'done' if done else 'failed'}"


COUNTED: Mapping[str, Counted] = MappingProxyType(
    {
        name: Counted("decisions", (_KINDS[kind], reason.value))
        for kind, names in DECISIONS.items()
        for reason, name in names.items()
    }
    | {name: Counted("store_lookups", (result,)) for name, result in ((STORE_HIT, "hit"), (STORE_MISS, "miss"))}
    | {
        tls(side, done=done): Counted("tls_handshakes", (side, "done" if done else "failed"))
        for side in ("client", "upstream", "gateway")
        for done in (True, False)
    }
)
"""Every counter there is."""
