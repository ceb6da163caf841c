"""What a worker knows of one rollout, and the listeners that are its identity."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from stockade.egress._door import Door
from stockade.egress._journal import FOLD_WINDOW_S, Journal
from stockade.egress._loop import Loop, Timer
from stockade.egress._names import Datagrams, Names, Streams
from stockade.egress._opening import Entry
from stockade.egress._resolver import Resolver
from stockade.egress._roles import Role
from stockade.egress._shelf import Shelf
from stockade.egress._splice import Pipes
from stockade.egress.gate import (
    BUDGET_CELLS,
    Account,
    Address,
    Budget,
    Destination,
    Headers,
    HeadLimits,
    Host,
    Reason,
    RuleLimits,
    Rules,
    Scanner,
    safe_text,
)
from stockade.errors import RecordError
from stockade.events import KINDS, ChainHead, Value

if TYPE_CHECKING:
    import ssl

    from stockade.egress._chain import Chain
    from stockade.egress._connection import Connection
    from stockade.egress._ledger import Ledger
    from stockade.egress._mint import Mint

_LINGERING_REFUSALS = 32
_SWEEP_S = 0.25
_QUESTIONS_PER_REQUEST = 4
_CONNECTIONS_PER_EVENT = 1 << 20
"""More connections than can come between two events; their numbers stay below 2**53 for 2**33 events."""


class Connecting(Protocol):
    """Makes the connection of an accepted socket: what a rollout needs to know of that class."""

    def __call__(
        self,
        rollout: Rollout,
        sock: socket.socket,
        number: int,
        *,
        entry: Entry | None = None,
        counted: bool,
        secured: bool = False,
    ) -> Connection:
        """Take over ``sock``."""


@dataclass(slots=True)
class Shell:
    """What all rollouts of a worker share. ``own`` are the addresses of this host's interfaces."""

    loop: Loop
    resolver: Resolver
    pipes: Pipes
    own: frozenset[Address] = frozenset()
    mint: Mint | None = None
    upstream_context: ssl.SSLContext | None = None
    gateway_context: ssl.SSLContext | None = None
    chain: Chain | None = None
    counters: dict[str, int] = field(default_factory=dict)

    def counts(self) -> dict[str, int]:
        """Return what was counted since the worker started, by name."""
        return dict(self.counters)

    def count(self, name: str) -> None:
        """Count one more (names: :mod:`stockade.egress._counts`)."""
        self.counters[name] = self.counters.get(name, 0) + 1


@dataclass(eq=False)
class Rollout:
    """One attached rollout. Whoever is accepted on one of its doors *is* this rollout, whatever it claims."""

    rollout_id: str
    shell: Shell
    rules: Rules
    budget: Budget
    journal: Journal
    record_fd: int
    on_broken: Callable[[Rollout], None]
    connect: Connecting
    names: Names
    ledger: Ledger | None = None
    shelf: Shelf | None = None
    numbered: int = 0
    revoked: bool = False
    live: set[Connection] = field(default_factory=set)
    doors: list[Door | Datagrams | Streams] = field(default_factory=list)
    _broken: bool = False
    _holding: bool = False
    _lingering: int = 0
    _fold_timer: Timer | None = None
    _sweep_timer: Timer | None = None

    def open(self, role: Role, sock: socket.socket) -> None:
        """Take over one of its sockets, and begin to serve it."""
        if role is Role.DNS:
            self.doors.append(Datagrams(self, sock))
        elif role is Role.DNS_TCP:
            self.doors.append(Streams(self, sock))
        else:
            self.doors.append(Door(self, sock, role))

    def stop(self, reason: Reason) -> int:
        """End every connection and accept no more; return how many were ended. The chain stays open."""
        while self.doors:
            self.doors.pop().close()
        ended = self.end_all(reason)
        for timer in (self._fold_timer, self._sweep_timer):
            if timer is not None:
                timer.cancel()
        if not self.broken:
            try:
                self.journal.flush()
            except RecordError:
                self.break_record()
        os.close(self.record_fd)
        if self.ledger is not None:
            self.ledger.close()
        return ended

    def revoke(self) -> int:
        """End every connection now and refuse what comes; return how many were ended."""
        self.revoked = True
        return self.end_all(Reason.REVOKED)

    def end_all(self, reason: Reason) -> int:
        """End every connection with ``reason``; return how many there were."""
        ended = list(self.live)
        for connection in ended:
            connection.end(reason)
        return len(ended)

    # ---- what its rules make

    @cached_property
    def questions(self) -> Account:
        """How many questions about names are answered: four for each request, for nothing leaves because of one."""
        limits = RuleLimits(requests_per_minute=self.rules.limits.requests_per_minute * _QUESTIONS_PER_REQUEST)
        return Account(limits, [0] * BUDGET_CELLS, now=self.shell.loop.now)

    @cached_property
    def head_limits(self) -> HeadLimits:
        """The limits of one head."""
        return self.rules.limits.head

    @cached_property
    def scanner(self) -> Scanner | None:
        """Looks for known secrets in what goes out; None where there are none."""
        return Scanner(self.rules.secrets) if self.rules.secrets else None

    def credential(self, name: str | None) -> Headers:
        """Return the header of a credential that the operator holds; an unknown one raises KeyError."""
        if name is None:
            return ()
        found = next((one for one in self.rules.credentials if one.name == name), None)
        if found is None:
            raise KeyError(name)
        return (found.field,)

    # ---- the record

    @property
    def broken(self) -> bool:
        """Whether the record failed: then nothing is allowed any more."""
        return self._broken or self.journal.broken

    def break_record(self) -> None:
        """Take note that the record cannot be written: end what runs, refuse what comes, tell the agent."""
        if self._broken:
            return
        self._broken = True
        self.end_all(Reason.RECORD_FAILED)
        self.on_broken(self)

    def held(self) -> None:
        """See to it that ends which wait are written before the loop does."""
        if not self._holding:
            self._holding = True
            self.shell.loop.defer(self._write_held, self.fault)

    def _write_held(self) -> None:
        self._holding = False
        try:
            self.journal.write_held()
        except RecordError:
            self.break_record()

    def folded(self) -> None:
        """See to it that folded denials are written when their second is over."""
        if self.journal.folding and self._fold_timer is None:
            self._fold_timer = self.shell.loop.call_later(FOLD_WINDOW_S, self._unfold, self.fault)

    def _unfold(self) -> None:
        self._fold_timer = None
        try:
            self.journal.flush()
        except RecordError:
            self.break_record()

    def refuse_unread(
        self,
        reason: Reason,
        detail: str = "",
        *,
        connection_id: int | None = None,
        tunnel: bool = False,
        place: Destination | None = None,
    ) -> None:
        """Record the refusal of a connection or request of which nothing is known but that it came, and to where."""
        kind = "net.connect" if tunnel else "net.request"
        blank: dict[str, Value] = dict.fromkeys(KINDS[kind])
        if connection_id is not None:
            blank["connection_id"] = connection_id
        if place is not None:
            blank["server.address"], blank["server.port"] = place.host.text, place.port
            blank["way"] = place.way.value
        if detail:
            blank["detail"] = detail
        self._deny(kind, reason, blank)

    def refuse_name(self, reason: Reason, host: Host | None, qtype: str, detail: str = "") -> None:
        """Record that a name has no address in here."""
        fields: dict[str, Value] = {"dns.question.name": None if host is None else host.text}
        if qtype:
            fields["dns.question.type"] = qtype
        if detail:
            fields["detail"] = safe_text(detail)
        self._deny("net.dns", reason, fields)

    def tell_name(self, host: Host, address: Address, rule: str | None) -> bool:
        """Record that a name was given its address; False if that cannot be recorded."""
        fields: dict[str, Value] = {"dns.question.name": host.text, "network.peer.address": str(address)}
        if self.rules.learn:
            fields["rule"] = rule
        try:
            self.journal.allow("net.dns", fields)
        except RecordError:
            self.break_record()
            return False
        return True

    def _deny(self, kind: str, reason: Reason, fields: dict[str, Value]) -> None:
        if self.broken:
            return
        try:
            self.journal.deny(kind, reason, fields, self.shell.loop.now)
        except RecordError:
            self.break_record()
        self.folded()

    # ---- connections

    def closed(self, connection: Connection, *, counted: bool) -> None:
        """Forget a connection that closed."""
        self.live.discard(connection)
        self._give_back(counted=counted)

    def _give_back(self, *, counted: bool) -> None:
        if counted:
            self.budget.close_connection()
        else:
            self._lingering -= 1

    def admit(self, sock: socket.socket, entry: Entry | None, *, secured: bool = False) -> None:
        """Begin to serve an accepted socket, or say why not."""
        reason = self.budget.open_connection()
        if reason is not None:
            if self._lingering >= _LINGERING_REFUSALS:
                sock.close()  # nobody is owed an explanation who opens this many
                self.refuse_unread(reason)
                return
            self._lingering += 1
        self.numbered += 1
        counted = reason is None
        try:
            connection = self.connect(self, sock, self.numbered, entry=entry, counted=counted, secured=secured)
        except Exception:  # noqa: BLE001 - epoll is out of memory or of watches: this client is refused
            sock.close()
            self._give_back(counted=counted)
            self.refuse_unread(Reason.INTERNAL_ERROR)
            return
        self.live.add(connection)
        if self._sweep_timer is None:
            self._sweep_timer = self.shell.loop.call_later(_SWEEP_S, self._sweep, self.fault)
        if reason is None:
            connection.begin()
        else:
            connection.refuse(reason)

    def _sweep(self) -> None:
        """Keep the time of all connections at once: a timer for each would cost more than their requests."""
        self._sweep_timer = None
        for connection in list(self.live):
            connection.guard(connection.sweep)
        if self.live:
            self._sweep_timer = self.shell.loop.call_later(_SWEEP_S, self._sweep, self.fault)

    def fault(self, _fault: Exception) -> None:
        """A fault outside any connection: refuse this rollout rather than guess what was missed."""
        self.revoke()
        self.on_broken(self)


def first_number(start: ChainHead | None) -> int:
    """Return the number before the first connection of this worker's life.

    After a restart it lies past all earlier ones that are on record: the chain has grown since that life began.
    """
    return 0 if start is None else start.seq * _CONNECTIONS_PER_EVENT
