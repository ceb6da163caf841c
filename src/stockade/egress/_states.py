"""What a client's connection can be doing, as a table.

::

    HEAD ──▶ RESOLVE ──▶ DIAL ──▶ FLIGHT ──▶ TUNNEL          (CONNECT)
      │  ╲───────────────▲  ╲───▶ EXCHANGE ──▶ IDLE ──▶ HEAD  (plain HTTP; a pipelined request skips IDLE)
      ╰──▶ EXCHANGE (same destination, upstream connection still open) ──▶ DIAL (it had just gone stale)
    every state ──▶ DRAIN (answer sent, waiting for the client to read it) ──▶ CLOSED

A step that is not in the table is a bug in this room, and raises; the loop then ends that one connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from stockade.egress.gate import Reason

HEAD_S = 10.0
"""A client has this long to send a head, or a first TLS flight (egress case 73)."""
DRAIN_S = 2.0


class State(StrEnum):
    """Where a connection stands."""

    IDLE = "idle"
    HEAD = "head"
    RESOLVE = "resolve"
    DIAL = "dial"
    FLIGHT = "flight"
    TUNNEL = "tunnel"
    EXCHANGE = "exchange"
    DRAIN = "drain"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Phase:
    """One row: the states that may follow, and the time limits.

    ``limit_s`` counts from entering the state and ends in ``limit_reason``; ``idle`` says that the policy's
    ``idle_s`` applies, counted from the last byte, and ``reads`` that the client's bytes are wanted.
    """

    next: frozenset[State]
    limit_s: float | None = None
    limit_reason: Reason = Reason.HEADER_TIMEOUT
    idle: bool = False
    reads: bool = False


_END = frozenset({State.DRAIN, State.CLOSED})

PHASES: Mapping[State, Phase] = MappingProxyType(
    {
        State.IDLE: Phase(_END | {State.HEAD}, idle=True, reads=True),
        State.HEAD: Phase(_END | {State.RESOLVE, State.DIAL, State.EXCHANGE}, limit_s=HEAD_S, reads=True),
        # The resolver and the dialler end by themselves. What the client sends meanwhile stays in the
        # kernel's buffer, which is the small cap that egress case 61 asks for.
        State.RESOLVE: Phase(_END | {State.DIAL}),
        State.DIAL: Phase(_END | {State.FLIGHT, State.EXCHANGE}),
        State.FLIGHT: Phase(_END | {State.TUNNEL}, limit_s=HEAD_S, reads=True),
        State.TUNNEL: Phase(_END, idle=True, reads=True),
        State.EXCHANGE: Phase(_END | {State.IDLE, State.HEAD, State.DIAL}, idle=True),
        State.DRAIN: Phase(frozenset({State.CLOSED}), limit_s=DRAIN_S, reads=True),
        State.CLOSED: Phase(frozenset()),
    }
)
