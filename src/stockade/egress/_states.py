"""What a client's connection can be doing, as a table.

::

    HEAD ──▶ RESOLVE ──▶ DIAL ──▶ FLIGHT ──▶ TUNNEL            (a verified tunnel)
      │  ╲───────────────▲ │ ╲──▶ TUNNEL                        (a tcp rule: bytes as they are)
      │                    ╰────▶ EXCHANGE ──▶ IDLE ──▶ HEAD    (requests; a pipelined one skips IDLE)
      ├──▶ EXCHANGE (same destination, upstream connection still open; or out of the store) ──▶ DIAL (it had gone stale)
      ├──▶ GATHER (a body that names a recording is read first) ──▶ RESOLVE, DIAL, EXCHANGE
      ├──▶ FLIGHT ──▶ HANDSHAKE ──▶ HEAD                        (inspection: TLS ends here, requests follow)
      ╰──▶ HANDSHAKE ──▶ HEAD                                   (a gateway's own TLS, before the first request)
    EXCHANGE ──▶ TUNNEL                                         (an upgrade that a rule allows)
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
"""A client has this long to send a head, a first TLS flight, or its part of a handshake (egress case 73)."""
DRAIN_S = 2.0


class State(StrEnum):
    """Where a connection stands."""

    IDLE = "idle"
    HEAD = "head"
    GATHER = "gather"
    RESOLVE = "resolve"
    DIAL = "dial"
    FLIGHT = "flight"
    HANDSHAKE = "handshake"
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
_WAY_OUT = frozenset({State.RESOLVE, State.DIAL, State.EXCHANGE})

PHASES: Mapping[State, Phase] = MappingProxyType(
    {
        State.IDLE: Phase(_END | {State.HEAD}, idle=True, reads=True),
        State.HEAD: Phase(_END | _WAY_OUT | {State.GATHER, State.FLIGHT, State.HANDSHAKE}, limit_s=HEAD_S, reads=True),
        State.GATHER: Phase(_END | _WAY_OUT, idle=True, reads=True),
        # The resolver and the dialler end by themselves. What the client sends meanwhile stays in the
        # kernel's buffer, which is the small cap that egress case 61 asks for.
        State.RESOLVE: Phase(_END | {State.DIAL}),
        State.DIAL: Phase(_END | {State.FLIGHT, State.TUNNEL, State.EXCHANGE}),
        State.FLIGHT: Phase(_END | {State.TUNNEL, State.HANDSHAKE, State.HEAD}, limit_s=HEAD_S, reads=True),
        State.HANDSHAKE: Phase(_END | {State.HEAD}, limit_s=HEAD_S, reads=True),
        State.TUNNEL: Phase(_END, idle=True, reads=True),
        State.EXCHANGE: Phase(_END | {State.IDLE, State.HEAD, State.DIAL, State.TUNNEL}, idle=True),
        State.DRAIN: Phase(frozenset({State.CLOSED}), limit_s=DRAIN_S, reads=True),
        State.CLOSED: Phase(frozenset()),
    }
)
