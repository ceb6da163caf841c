"""What one rollout may use up (case 105): pure counters, time injected.

One :class:`Budget` is shared by all connections of a rollout, so that many small requests, many
connections, range pieces and one big upload all draw on the same account. A rule with limits of its
own has an account within it, and the rollouts of a run may share a third one. The numbers live in
``cells`` that the caller gives: memory that outlives the worker makes a crash lose none of them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

import msgspec

from stockade.egress.gate._reason import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stockade.egress.gate._rules import Limits

_MICRO = 1_000_000
_REQUEST = 60 * _MICRO
"""What a request costs: an account that gains ``requests_per_minute`` a microsecond needs no division to be exact."""

_MADE, _CREDIT, _STAMP, _OUT, _IN, _REQUESTS, _DENIED = range(7)
BUDGET_CELLS = 8
"""Cells of an account: whether it was opened, request credit, its time stamp in microseconds, bytes out and in,
decisions and denials counted; one is spare."""
_OPEN = 1


class Cells(Protocol):
    """A fixed row of signed 64-bit integers: a list, or shared memory as ``memoryview.cast("q")``."""

    def __getitem__(self, index: int, /) -> int:
        """Return one."""

    def __setitem__(self, index: int, value: int, /) -> None:
        """Set one."""

    def __len__(self) -> int:
        """Return how many there are."""


class RuleLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What may pass by one rule in one rollout, or in all rollouts of a run; None: no limit of its own."""

    requests_per_minute: int | None = None
    connections: int | None = None
    bytes_out: int | None = None
    bytes_in: int | None = None


class Account:
    """One row of counters with its caps. ``now`` is seconds of a clock that does not go back (CLOCK_MONOTONIC)."""

    __slots__ = ("_cells", "_full", "_guard", "_live", "_place", "_rate", "cap_connections", "cap_in", "cap_out")

    def __init__(
        self,
        limits: RuleLimits,
        cells: Cells,
        *,
        now: float,
        guard: Callable[[], AbstractContextManager[object]] = nullcontext,
        live: Cells | None = None,
        place: int = 0,
    ) -> None:
        """Open the account in ``cells``, or go on with what they hold; ``guard`` locks cells that others write too.

        Open connections are counted in ``live[place]``; the other places are those of other workers. Cells that no account can have left raise ValueError: a budget is never refilled by damaged memory.
        """
        if len(cells) < BUDGET_CELLS:
            raise ValueError(f"an account needs {BUDGET_CELLS} cells")
        self._cells, self._guard = cells, guard
        self._rate = limits.requests_per_minute
        self._full = (self._rate or 0) * _REQUEST
        self.cap_connections, self.cap_out, self.cap_in = limits.connections, limits.bytes_out, limits.bytes_in
        self._live: Cells = [0] if live is None else live
        self._place = place
        with guard():
            if cells[_MADE] == _OPEN:
                if min(cells[index] for index in range(_CREDIT, BUDGET_CELLS)) < 0:
                    raise ValueError("not the cells of an account")
                cells[_CREDIT] = min(cells[_CREDIT], self._full)
            elif any(cells[index] for index in range(BUDGET_CELLS)):
                raise ValueError("not the cells of an account")
            else:
                cells[_CREDIT], cells[_STAMP], cells[_MADE] = self._full, int(now * _MICRO), _OPEN

    def take_request(self, now: float) -> bool:
        """Take one request; False if there is none left."""
        if self._rate is None:
            return True
        with self._guard():
            credit = self._refill(now)
            if credit < _REQUEST:
                return False
            self._cells[_CREDIT] = credit - _REQUEST
        return True

    def retry_after_s(self, now: float) -> int:
        """Return whole seconds (1 or more) until the next request can be taken."""
        if self._rate is None:
            return 1
        with self._guard():
            missing = max(_REQUEST - self._refill(now), 0)
        return max(1, -(-missing // (max(1, self._rate) * _MICRO)))

    def _refill(self, now: float) -> int:
        cells, now_us = self._cells, int(now * _MICRO)
        # A clock that went back (a reboot between two workers) must not mint requests.
        passed = max(0, now_us - cells[_STAMP])
        credit = min(self._full, cells[_CREDIT] + passed * (self._rate or 0))
        cells[_CREDIT], cells[_STAMP] = credit, now_us
        return credit

    def add(self, *, out: int = 0, into: int = 0) -> None:
        """Count bytes."""
        cells = self._cells
        with self._guard():
            if out:
                cells[_OUT] += out
            if into:
                cells[_IN] += into

    @property
    def left_out(self) -> int | None:
        """Bytes that may still go out; None: no limit."""
        return None if self.cap_out is None else max(0, self.cap_out - self._cells[_OUT])

    @property
    def left_in(self) -> int | None:
        """Bytes that may still come in; None: no limit."""
        return None if self.cap_in is None else max(0, self.cap_in - self._cells[_IN])

    @property
    def full(self) -> bool:
        """Whether no further connection may be open."""
        if self.cap_connections is None:
            return False
        return sum(self._live[place] for place in range(len(self._live))) >= self.cap_connections

    def open_connection(self) -> None:
        """Count one more."""
        self._live[self._place] += 1

    def close_connection(self) -> None:
        """Count one less."""
        self._live[self._place] -= 1


class Budget:
    """Requests, connections and bytes of one rollout across all its connections (case 105).

    The request bucket holds one minute's worth and refills evenly. ``rules`` are the accounts of rules with limits
    of their own, by :attr:`Grant.limited`; ``run`` is the account that all rollouts of a run share.
    """

    __slots__ = ("_cells", "_full", "_limits", "_rate", "connections", "rules", "run")

    def __init__(
        self,
        limits: Limits,
        *,
        now: float,
        cells: Cells | None = None,
        rules: Sequence[Account] = (),
        run: Account | None = None,
    ) -> None:
        """Start full, or go on from what ``cells`` hold; open connections start at 0. May raise ValueError."""
        self._limits = limits
        self._cells: Cells = [0] * BUDGET_CELLS if cells is None else cells
        own = Account(RuleLimits(limits.requests_per_minute), self._cells, now=now)
        self._rate, self._full = limits.requests_per_minute, own._full  # noqa: SLF001 - one class of counters
        self.rules, self.run = tuple(rules), run
        self.connections = 0

    def take_request(self, now: float) -> Reason | None:
        """Take one request; RATE_LIMITED if there is none left."""
        cells, now_us = self._cells, int(now * _MICRO)
        passed = now_us - cells[_STAMP]
        credit = cells[_CREDIT]
        if passed > 0:
            credit = min(self._full, credit + passed * self._rate)
        cells[_STAMP] = now_us
        if credit < _REQUEST:
            cells[_CREDIT] = credit
            return Reason.RATE_LIMITED
        if self.run is not None and not self.run.take_request(now):
            cells[_CREDIT] = credit
            return Reason.RATE_LIMITED
        cells[_CREDIT] = credit - _REQUEST
        return None

    def take_of_rule(self, index: int, now: float) -> Reason | None:
        """Take one request of the rule with limits number ``index`` (-1: it has none)."""
        if index < 0:
            return None
        account = self.rules[index]
        if account.full:
            return Reason.TOO_MANY_CONNECTIONS
        return None if account.take_request(now) else Reason.RATE_LIMITED

    def retry_after_s(self, now: float, index: int = -1) -> int:
        """Return whole seconds (1 or more) until the next request can be taken, by that rule too."""
        cells, now_us = self._cells, int(now * _MICRO)
        credit = min(self._full, cells[_CREDIT] + max(0, now_us - cells[_STAMP]) * self._rate)
        waits = [max(1, -(-max(_REQUEST - credit, 0) // (max(1, self._rate) * _MICRO)))]
        waits += [one.retry_after_s(now) for one in (self.run, *self.rules[index:][: index >= 0]) if one is not None]
        return max(waits)

    def open_connection(self) -> Reason | None:
        """Count a connection of the client; one that is TOO_MANY_CONNECTIONS is not counted."""
        if self.connections >= self._limits.connections or (self.run is not None and self.run.full):
            return Reason.TOO_MANY_CONNECTIONS
        self.connections += 1
        if self.run is not None:
            self.run.open_connection()
        return None

    def close_connection(self) -> None:
        """Give a connection back."""
        if self.connections <= 0:
            raise ValueError("no connection is open")
        self.connections -= 1
        if self.run is not None:
            self.run.close_connection()

    def meter(self, *, tunnel: bool = False, limited: int = -1) -> Meter:
        """Return the counters of one request, capped at ``bytes_out_per_request``, or one tunnel.

        An opaque tunnel may carry any number of requests, so only the caps of rollout, rule and run bind it.
        """
        accounts = [self.rules[limited]] if limited >= 0 else []
        if self.run is not None:
            accounts.append(self.run)
        return Meter(self, None if tunnel else self._limits.bytes_out_per_request, tuple(accounts))

    def decided(self, *, denied: bool, first: bool = True) -> None:
        """Count a decision; ``first`` is False where an allowed one was ended by the gate later."""
        if first:
            self._cells[_REQUESTS] += 1
        if denied:
            self._cells[_DENIED] += 1

    @property
    def requests(self) -> int:
        """Decisions so far."""
        return self._cells[_REQUESTS]

    @property
    def denied(self) -> int:
        """Denials so far, also of what was allowed first."""
        return self._cells[_DENIED]

    @property
    def bytes_out(self) -> int:
        """Bytes that went out."""
        return self._cells[_OUT]

    @property
    def bytes_in(self) -> int:
        """Bytes that came in."""
        return self._cells[_IN]

    @property
    def left_out(self) -> int:
        """Bytes that may still go out."""
        return max(0, self._limits.bytes_out - self._cells[_OUT])

    @property
    def left_in(self) -> int:
        """Bytes that may still come in."""
        return max(0, self._limits.bytes_in - self._cells[_IN])


class Meter:
    """Counts one request's or tunnel's bytes, and with them the rollout's, the rule's and the run's.

    Count *before* sending: bytes that were refused are counted (they were asked for) but must not
    be sent.
    """

    __slots__ = ("_accounts", "_budget", "_cap_out", "_cells", "bytes_in", "bytes_out")

    def __init__(self, budget: Budget, cap_out: int | None, accounts: tuple[Account, ...] = ()) -> None:
        """Count on ``budget`` and ``accounts``; ``cap_out`` bytes of its own, None for no cap of its own."""
        self._budget = budget
        self._cells = budget._cells  # noqa: SLF001 - one class of counters, and the byte path is hot
        self._cap_out = cap_out
        self._accounts = accounts
        self.bytes_out = 0
        self.bytes_in = 0

    def out(self, count: int) -> Reason | None:
        """Count ``count`` bytes towards the upstream; a Reason means: do not send, close.

        REQUEST_TOO_LARGE (this request) or BYTES_OUT_EXCEEDED (rollout, rule or run).
        """
        over = count > self._budget.left_out
        for account in self._accounts:
            left = account.left_out
            over = over or (left is not None and count > left)
            account.add(out=count)
        self.bytes_out += count
        self._cells[_OUT] += count
        if over:
            return Reason.BYTES_OUT_EXCEEDED
        if self._cap_out is not None and self.bytes_out > self._cap_out:
            return Reason.REQUEST_TOO_LARGE
        return None

    def into(self, count: int) -> Reason | None:
        """Count ``count`` bytes from the upstream; BYTES_IN_EXCEEDED: do not pass on, close."""
        over = count > self.left_in
        for account in self._accounts:
            account.add(into=count)
        self.bytes_in += count
        self._cells[_IN] += count
        return Reason.BYTES_IN_EXCEEDED if over else None

    @property
    def left_out(self) -> int:
        """Most bytes that may still go out: bound each read or splice by it; 0 means stop."""
        left = self._left_of_all()
        if self._cap_out is None:
            return left
        return max(0, min(left, self._cap_out - self.bytes_out))

    @property
    def exceeded(self) -> Reason:
        """Why no more may go out: the cap that is the tighter one."""
        if self._cap_out is not None and self._cap_out - self.bytes_out < self._left_of_all():
            return Reason.REQUEST_TOO_LARGE
        return Reason.BYTES_OUT_EXCEEDED

    def _left_of_all(self) -> int:
        left = self._budget.left_out
        for account in self._accounts:
            own = account.left_out
            if own is not None and own < left:
                left = own
        return left

    @property
    def left_in(self) -> int:
        """Most bytes that may still come in: bound each read or splice by it; 0 means stop."""
        left = self._budget.left_in
        for account in self._accounts:
            own = account.left_in
            if own is not None and own < left:
                left = own
        return left
