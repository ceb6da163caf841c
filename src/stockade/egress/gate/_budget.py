"""What one rollout may use up (case 105): pure counters, time injected.

One :class:`Budget` is shared by all connections of a rollout, so that many small requests, many
connections, range pieces and one big upload all draw on the same account.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stockade.egress.gate._reason import Reason

if TYPE_CHECKING:
    from stockade.egress.gate._rules import Limits

_MICRO = 1_000_000
_REQUEST = 60 * _MICRO
"""What a request costs: an account that gains ``requests_per_minute`` a microsecond needs no division to be exact."""


class Budget:
    """Requests, connections and bytes of one rollout across all its connections (case 105).

    ``now`` is seconds of a clock that does not go back and outlives the worker (CLOCK_MONOTONIC).
    The request bucket holds one minute's worth and refills evenly.
    """

    __slots__ = ("_credit", "_limits", "_stamp_us", "bytes_in", "bytes_out", "connections")

    def __init__(self, limits: Limits, *, now: float, state: dict[str, int] | None = None) -> None:
        """Start full, or go on from ``state`` (see :meth:`export`); open connections start at 0.

        A state that is not one of ``export`` raises ValueError: a budget is never refilled by a
        damaged file.
        """
        self._limits = limits
        self.connections = 0
        if state is None:
            self._credit = limits.requests_per_minute * _REQUEST
            self._stamp_us = int(now * _MICRO)
            self.bytes_out = 0
            self.bytes_in = 0
            return
        if set(state) != _STATE_KEYS or not all(_is_count(value) for value in state.values()):
            raise ValueError("not the state of a budget")
        self._credit = min(state["credit"], limits.requests_per_minute * _REQUEST)
        self._stamp_us = state["stamp_us"]
        self.bytes_out = state["bytes_out"]
        self.bytes_in = state["bytes_in"]

    def take_request(self, now: float) -> Reason | None:
        """Take one request; RATE_LIMITED if there is none left."""
        self._refill(now)
        if self._credit < _REQUEST:
            return Reason.RATE_LIMITED
        self._credit -= _REQUEST
        return None

    def retry_after_s(self, now: float) -> int:
        """Return whole seconds (1 or more) until the next request can be taken."""
        self._refill(now)
        missing = max(_REQUEST - self._credit, 0)
        return max(1, -(-missing // (max(1, self._limits.requests_per_minute) * _MICRO)))

    def _refill(self, now: float) -> None:
        now_us = int(now * _MICRO)
        # A clock that went back (a reboot between export and import) must not mint requests.
        passed = max(0, now_us - self._stamp_us)
        rate = self._limits.requests_per_minute
        self._credit = min(rate * _REQUEST, self._credit + passed * rate)
        self._stamp_us = now_us

    def open_connection(self) -> Reason | None:
        """Count a connection of the client; one that is TOO_MANY_CONNECTIONS is not counted."""
        if self.connections >= self._limits.connections:
            return Reason.TOO_MANY_CONNECTIONS
        self.connections += 1
        return None

    def close_connection(self) -> None:
        """Give a connection back."""
        if self.connections <= 0:
            raise ValueError("no connection is open")
        self.connections -= 1

    def meter(self, *, tunnel: bool = False) -> Meter:
        """Return the counters of one request, capped at ``bytes_out_per_request``, or one tunnel.

        An opaque tunnel may carry any number of requests, so only the rollout's caps bind it.
        """
        return Meter(self, None if tunnel else self._limits.bytes_out_per_request)

    @property
    def left_out(self) -> int:
        """Bytes that may still go out."""
        return max(0, self._limits.bytes_out - self.bytes_out)

    @property
    def left_in(self) -> int:
        """Bytes that may still come in."""
        return max(0, self._limits.bytes_in - self.bytes_in)

    def export(self) -> dict[str, int]:
        """Return the state as JSON-able integers, for a worker that goes on after this one."""
        return {
            "credit": self._credit,
            "stamp_us": self._stamp_us,
            "bytes_out": self.bytes_out,
            "bytes_in": self.bytes_in,
        }


_STATE_KEYS = {"credit", "stamp_us", "bytes_out", "bytes_in"}


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class Meter:
    """Counts one request's or tunnel's bytes, and with them the rollout's.

    Count *before* sending: bytes that were refused are counted (they were asked for) but must not
    be sent.
    """

    __slots__ = ("_budget", "_cap_out", "bytes_in", "bytes_out")

    def __init__(self, budget: Budget, cap_out: int | None) -> None:
        """Count on ``budget``; ``cap_out`` bytes of its own, None for no cap of its own."""
        self._budget = budget
        self._cap_out = cap_out
        self.bytes_out = 0
        self.bytes_in = 0

    def out(self, count: int) -> Reason | None:
        """Count ``count`` bytes towards the upstream; a Reason means: do not send, close.

        REQUEST_TOO_LARGE (this request) or BYTES_OUT_EXCEEDED (the rollout).
        """
        rollout_over = count > self._budget.left_out
        self.bytes_out += count
        self._budget.bytes_out += count
        if rollout_over:
            return Reason.BYTES_OUT_EXCEEDED
        if self._cap_out is not None and self.bytes_out > self._cap_out:
            return Reason.REQUEST_TOO_LARGE
        return None

    def into(self, count: int) -> Reason | None:
        """Count ``count`` bytes from the upstream; BYTES_IN_EXCEEDED: do not pass on, close."""
        over = count > self._budget.left_in
        self.bytes_in += count
        self._budget.bytes_in += count
        return Reason.BYTES_IN_EXCEEDED if over else None

    @property
    def left_out(self) -> int:
        """Most bytes that may still go out: bound each read or splice by it; 0 means stop."""
        left = self._budget.left_out
        if self._cap_out is None:
            return left
        return max(0, min(left, self._cap_out - self.bytes_out))

    @property
    def left_in(self) -> int:
        """Most bytes that may still come in: bound each read or splice by it; 0 means stop."""
        return self._budget.left_in
