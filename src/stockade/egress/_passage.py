"""The way of one request through the gate.

The order of work is fixed, and each step can only say no: budget, rules, resolver, addresses, record, dial. Nothing
is resolved for a denied name (egress case 42), nothing is dialled that is not on record, and each request of a
connection is decided on its own (case 49).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stockade.egress._decision import Decision
from stockade.egress._dial import Dial
from stockade.egress._exchange import Exchange, Upstream
from stockade.egress._question import Outcome
from stockade.egress._resolver import Answer, Lookup
from stockade.egress._states import State
from stockade.egress._tunnel import Tunnel
from stockade.egress.gate import ESTABLISHED, Address, Reason, RequestHead, decide, judge_addresses, safe_text

if TYPE_CHECKING:
    from stockade.egress._connection import Connection

_GATEWAY_TIMEOUT = 504
_OK = 200


class Passage:
    """The far side of a connection: what is being looked up, dialled or relayed for its current request."""

    __slots__ = ("_connection", "_dial", "_exchange", "_lookup", "_loop", "_tunnel", "_upstream")

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._loop = connection.rollout.shell.loop
        self._lookup: Lookup | None = None
        self._dial: Dial | None = None
        self._upstream: Upstream | None = None
        self._exchange: Exchange | None = None
        self._tunnel: Tunnel | None = None

    # ---- for the connection

    def client_event(self, events: int) -> None:
        """The client's socket is ready while something is relayed."""
        if self._tunnel is not None:
            self._tunnel.client_event(events)
        elif self._exchange is not None:
            self._exchange.client_event(events)

    @property
    def can_answer(self) -> bool:
        """Whether the client waits for a response of which no byte went out yet."""
        return self._exchange is not None and not self._exchange.answered

    def drop(self, *, abort: bool = False) -> None:
        """Stop whatever goes on, and close the upstream side."""
        if self._lookup is not None:
            self._lookup.cancel()
            self._lookup = None
        if self._dial is not None:
            self._dial.cancel()
            self._dial = None
        if self._tunnel is not None:
            self._tunnel.close()
        self._drop_upstream(abort=abort)

    # ---- the steps

    def consider(self, head: RequestHead, number: int) -> None:
        """Ask budget and rules; then look for the addresses."""
        connection = self._connection
        rollout, request = connection.rollout, head.request
        decision = Decision(head, number, time.monotonic_ns(), self._loop.now)
        connection.decision = decision
        if rollout.revoked or rollout.broken:
            connection.deny(Reason.REVOKED if rollout.revoked else Reason.RECORD_FAILED)
            return
        reason = rollout.budget.take_request(self._loop.now)
        if reason is not None:
            connection.deny(reason)
            return
        verdict = decide(request, rollout.rules)
        decision.rule, decision.wildcard = verdict.rule, verdict.wildcard
        if not verdict.allowed:
            connection.deny(verdict.reason)
            return
        if self._upstream is not None and self._upstream.serves(request.destination):
            # The same canonical destination: its addresses were judged when this socket was dialled.
            decision.addresses, decision.peer = self._upstream.addresses, self._upstream.peer
            decision.service = self._upstream.service
            self._permit()
            return
        self._drop_upstream()
        host = request.destination.host
        if verdict.pinned is not None:
            decision.service = host.text
            self._judge((verdict.pinned,), pinned=True)
        elif host.address is not None:
            self._judge((host.address,))
        else:
            connection.enter(State.RESOLVE)
            self._lookup = rollout.shell.resolver.resolve(
                host.text, lambda answer: connection.guard(lambda: self._resolved(answer))
            )

    def _resolved(self, answer: Answer) -> None:
        decision, self._lookup = self._connection.decision, None
        if decision is None:
            return
        decision.dns_ns = time.monotonic_ns() - decision.started_ns
        if answer.outcome is Outcome.FOUND:
            self._judge(answer.addresses)
            return
        status = _GATEWAY_TIMEOUT if answer.outcome is Outcome.TIMED_OUT else None
        self._connection.deny(Reason.RESOLVE_FAILED, answer.outcome.value, status=status)

    def _judge(self, addresses: Sequence[Address], *, pinned: bool = False) -> None:
        """Every address of the answer must be acceptable; only these are ever dialled."""
        connection = self._connection
        rollout, decision = connection.rollout, connection.decision
        if decision is None:
            return
        decision.addresses = tuple(addresses)
        verdict = judge_addresses(addresses, rollout.rules, own=rollout.shell.own, pinned=pinned)
        if verdict.allowed:
            self._permit()
        else:
            connection.deny(verdict.reason)

    def _permit(self) -> None:
        """Put the permission on record, then act on it."""
        connection = self._connection
        rollout, decision = connection.rollout, connection.decision
        if decision is None:
            return
        decision.meter = rollout.budget.meter(tunnel=decision.tunnel)
        exchange = None
        if not decision.tunnel:
            exchange = Exchange(connection, decision, decision.meter)
            reason = exchange.preload()
            if reason is not None:
                connection.deny(reason, exchange.detail)
                return
        if not connection.record_permission(decision):
            return
        self._exchange = exchange
        if exchange is not None and self._upstream is not None:
            self._connection.enter(State.EXCHANGE)
            exchange.start(self._upstream, reused=True)
        else:
            self.dial()

    def dial(self) -> None:
        """Connect to the judged addresses (again, if a kept connection went stale)."""
        decision = self._connection.decision
        if decision is None:
            return
        self._drop_upstream()
        self._connection.enter(State.DIAL)
        port = decision.head.request.destination.port
        self._dial = Dial(
            self._loop,
            decision.addresses,
            port,
            lambda sock, peer, why: self._connection.guard(lambda: self._dialled(sock, peer, why)),
        )

    def _dialled(self, sock: socket.socket | None, peer: Address | None, why: str) -> None:
        connection = self._connection
        decision, self._dial = connection.decision, None
        if decision is None or decision.meter is None:
            if sock is not None:
                sock.close()
            return
        decision.connect_ns = time.monotonic_ns() - decision.started_ns
        if sock is None:
            decision.ended["detail"] = safe_text(why)
            connection.fail(Reason.UPSTREAM_FAILED, why)
            return
        decision.peer = peer
        upstream = Upstream(self._loop, sock, decision, self._upstream_event, connection.fault)
        self._upstream = upstream
        if self._exchange is not None:
            self._connection.enter(State.EXCHANGE)
            self._exchange.start(upstream, reused=False)
            return
        self._connection.enter(State.FLIGHT)
        decision.status = _OK
        self._tunnel = Tunnel(connection, decision, decision.meter, upstream.stream)
        connection.client.send(ESTABLISHED)
        self._tunnel.start()

    def _upstream_event(self, events: int) -> None:
        try:
            if self._tunnel is not None:
                self._tunnel.upstream_event(events)
            elif self._exchange is not None and self._connection.state is State.EXCHANGE:
                self._exchange.upstream_event(events)
            else:
                self._drop_upstream()  # an unused kept connection has nothing to say but its end
        except OSError:  # passing the bytes on to the client failed
            self._connection.end(Reason.CLIENT_CLOSED)

    def _drop_upstream(self, *, abort: bool = False) -> None:
        """Close the upstream connection, if there is one."""
        if self._upstream is not None:
            self._upstream.stream.close(abort=abort)
            self._upstream = None

    def exchanged(self, *, keep: bool, reusable: bool) -> None:
        """One exchange is complete; keep what can be kept, and let the connection go on."""
        self._exchange = None
        if not reusable:
            self._drop_upstream()
        elif self._upstream is not None:
            self._upstream.stream.want(read=True)
        self._connection.completed(keep=keep)
