"""What a worker knows of one rollout, and the listener that is its identity."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from stockade.egress._journal import FOLD_WINDOW_S, Journal
from stockade.egress._loop import READ, Loop, Timer, Watch
from stockade.egress._resolver import Resolver
from stockade.egress._splice import Pipes
from stockade.egress._usage import Usage
from stockade.egress.gate import Address, Budget, Reason, Rules
from stockade.errors import RecordError
from stockade.events import KINDS, ChainHead, Value

if TYPE_CHECKING:
    from stockade.egress._connection import Connection

_ACCEPTS_PER_EVENT = 16
_LINGERING_REFUSALS = 32
_ACCEPT_PAUSE_S = 0.1
_REPORTS_PER_CAP = 16
_CONNECTIONS_PER_EVENT = 1 << 20
"""More connections than can come between two events; their numbers stay below 2**53 for 2**33 events."""


class Connect(Protocol):
    """Makes the connection of an accepted socket: what a rollout needs to know of that class."""

    def __call__(self, rollout: Rollout, sock: socket.socket, number: int, *, counted: bool) -> Connection:
        """Take over ``sock``."""


@dataclass(slots=True)
class Shell:
    """What all rollouts of a worker share. ``own`` are the addresses of this host's interfaces."""

    loop: Loop
    resolver: Resolver
    pipes: Pipes
    own: frozenset[Address] = frozenset()


@dataclass(slots=True, eq=False)
class Rollout:
    """One attached rollout. Whoever is accepted on ``listener`` *is* this rollout, whatever it claims."""

    rollout_id: str
    shell: Shell
    rules: Rules
    budget: Budget
    journal: Journal
    listener: socket.socket
    record_fd: int
    on_broken: Callable[[Rollout], None]
    on_spent: Callable[[Rollout], None]
    connect: Connect
    numbered: int = 0
    revoked: bool = False
    live: set[Connection] = field(default_factory=set)
    reported_bytes: int = 0
    _broken: bool = False
    _lingering: int = 0
    _watch: Watch | None = None
    _fold_timer: Timer | None = None

    def start(self) -> None:
        """Begin to accept."""
        self.listener.setblocking(False)
        self._watch = self.shell.loop.watch(self.listener.fileno(), self._accept, self._fault, READ)

    def stop(self, reason: Reason) -> int:
        """End every connection and accept no more; return how many were ended. The chain stays open."""
        if self._watch is not None:
            self.shell.loop.unwatch(self._watch)
            self._watch = None
        self.listener.close()
        ended = self.end_all(reason)
        if self._fold_timer is not None:
            self._fold_timer.cancel()
        if not self.broken:
            try:
                self.journal.flush()
            except RecordError:
                self.break_record()
        os.close(self.record_fd)
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

    def usage(self) -> Usage:
        """Return what was used up so far."""
        return Usage(self.budget.export(), self.journal.requests, self.journal.denied)

    def touch(self) -> None:
        """Bytes moved: report at once when much was spent since the last report, for the case of a crash."""
        spent = self.budget.bytes_out + self.budget.bytes_in - self.reported_bytes
        limits = self.rules.limits
        if spent > min(limits.bytes_out, limits.bytes_in) // _REPORTS_PER_CAP:
            self.on_spent(self)

    def folded(self) -> None:
        """See to it that folded denials are written when their second is over."""
        if self.journal.folding and self._fold_timer is None:
            self._fold_timer = self.shell.loop.call_later(FOLD_WINDOW_S, self._unfold, self._fault)

    def closed(self, connection: Connection, *, counted: bool) -> None:
        """Forget a connection that closed."""
        self.live.discard(connection)
        self._give_back(counted=counted)

    def _give_back(self, *, counted: bool) -> None:
        if counted:
            self.budget.close_connection()
        else:
            self._lingering -= 1

    def _unfold(self) -> None:
        self._fold_timer = None
        try:
            self.journal.flush()
        except RecordError:
            self.break_record()

    def _accept(self, _events: int) -> None:
        for _ in range(_ACCEPTS_PER_EVENT):
            try:
                sock, _ = self.listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # Out of descriptors: a level-triggered listener would spin until one is free.
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._pause()
                    return
                continue  # ECONNABORTED and its like: that client is gone (accept(2))
            sock.setblocking(False)
            with contextlib.suppress(OSError):  # a UNIX socket has no such option
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
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
            connection = self.connect(self, sock, self.numbered, counted=counted)
        except Exception:  # noqa: BLE001 - epoll is out of memory or of watches: this client is refused
            sock.close()
            self._give_back(counted=counted)
            self.refuse_unread(Reason.INTERNAL_ERROR)
            return
        self.live.add(connection)
        if reason is None:
            connection.begin()
        else:
            connection.refuse(reason)

    def refuse_unread(
        self, reason: Reason, detail: str = "", *, connection_id: int | None = None, tunnel: bool = False
    ) -> None:
        """Record the refusal of a connection or request of which nothing is known but that it came."""
        if self.broken:
            return
        kind = "net.connect" if tunnel else "net.request"
        blank: dict[str, Value] = dict.fromkeys(KINDS[kind])
        if connection_id is not None:
            blank["connection_id"] = connection_id
        if detail:
            blank["detail"] = detail
        try:
            self.journal.deny(kind, reason, blank, self.shell.loop.now)
        except RecordError:
            self.break_record()
        self.folded()

    def _pause(self) -> None:
        if self._watch is not None:
            self.shell.loop.mute(self._watch)
            self.shell.loop.call_later(_ACCEPT_PAUSE_S, self._resume, self._fault)

    def _resume(self) -> None:
        if self._watch is not None:
            self.shell.loop.interest(self._watch, READ)

    def _fault(self, _fault: Exception) -> None:
        """A fault outside any connection: refuse this rollout rather than guess what was missed."""
        self.revoke()
        self.on_broken(self)


def first_number(start: ChainHead | None) -> int:
    """Return the number before the first connection of this worker's life.

    After a restart it lies past all earlier ones that are on record: the chain has grown since that life began.
    """
    return 0 if start is None else start.seq * _CONNECTIONS_PER_EVENT
