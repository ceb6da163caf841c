"""The way of one request through the gate.

The order of work is fixed, and each step can only say no: budget, rules, credentials, secrets, store, resolver,
addresses, record, dial. Nothing is resolved for a denied name (egress case 42), nothing is dialled that is not on
record, and each request of a connection is decided on its own (case 49).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stockade.egress._connect import AnyStream, Connect, Upstream
from stockade.egress._decision import Decision
from stockade.egress._exchange import Exchange
from stockade.egress._inspection import Inspection
from stockade.egress._question import Outcome
from stockade.egress._resolver import Answer, Lookup
from stockade.egress._shelf import Gather, Serve, Shelf
from stockade.egress._states import State
from stockade.egress._tunnel import Tunnel
from stockade.egress.gate import (
    Address,
    Framing,
    Handling,
    Reason,
    RequestHead,
    decide,
    judge_addresses,
    judge_credentials,
    judge_upgrade,
)

if TYPE_CHECKING:
    from stockade.egress._connection import Connection

_INSPECT = Handling.INSPECT
_RAW = Handling.RAW
_NONE = Framing.NONE
_EXCHANGE = State.EXCHANGE
_DIAL = State.DIAL
_RESOLVE = State.RESOLVE
_FOUND = Outcome.FOUND
_GATEWAY_TIMEOUT = 504
_OK = 200
_WEBSOCKET = b"websocket"


class Passage:
    """The far side of a connection: what is being looked up, dialled or relayed for its current request."""

    __slots__ = ("_connect", "_connection", "_lookup", "_loop", "_relay", "_upstream")

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._loop = connection.rollout.shell.loop
        self._lookup: Lookup | None = None
        self._connect: Connect | None = None
        self._upstream: Upstream | None = None
        self._relay: Exchange | Tunnel | Inspection | Gather | Serve | None = None

    # ---- for the connection

    def client_event(self, events: int) -> None:
        """The client's socket is ready while something is relayed."""
        if self._relay is not None:
            self._relay.client_event(events)

    @property
    def can_answer(self) -> bool:
        """Whether the client waits for a response of which no byte went out yet."""
        return self._relay is not None and not self._relay.answered

    def drop(self, *, abort: bool = False) -> None:
        """Stop whatever goes on, and close the upstream side."""
        if self._lookup is not None:
            self._lookup.cancel()
            self._lookup = None
        if self._connect is not None:
            self._connect.cancel()
            self._connect = None
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.close()
        self._drop_upstream(abort=abort)

    # ---- the steps

    def consider(self, head: RequestHead) -> None:
        """Ask budget and rules; then look for the addresses."""
        connection = self._connection
        rollout, request = connection.rollout, head.request
        now = self._loop.now
        decision = Decision(head, connection.number, time.monotonic_ns(), now, certified=connection.certified)
        connection.decision = decision
        if rollout.revoked or rollout.broken:
            connection.deny(Reason.REVOKED if rollout.revoked else Reason.RECORD_FAILED)
            return
        reason = rollout.budget.take_request(now)
        if reason is not None:
            connection.deny(reason)
            return
        verdict = decide(request, rollout.rules, body=head.body)
        decision.rule, decision.grant, decision.handling = verdict.rule, verdict.grant, verdict.handling
        grant = verdict.grant
        if not verdict.allowed or grant is None:
            connection.deny(verdict.reason)
            return
        decision.limited = grant.limited
        if grant.limited >= 0:
            reason = rollout.budget.take_of_rule(grant.limited, now)
            if reason is not None:
                connection.deny(reason)
                return
        if grant.wildcard and not rollout.names.admit(request.destination.host):
            connection.deny(Reason.TOO_MANY_NAMES)
            return
        if not self._clean(decision):
            return
        if verdict.handling is _INSPECT:
            self._inspect(decision)
            return
        if rollout.shelf is not None and not request.tunnel and rollout.shelf.concerns(grant):
            self._from_shelf(decision, rollout.shelf)
            return
        self.seek()

    def _clean(self, decision: Decision) -> bool:
        """Whether credentials, upgrade and known secrets let the head pass; else it was refused."""
        connection, head = self._connection, decision.head
        grant, rollout = decision.grant, connection.rollout
        if grant is None:
            return False
        asks = head.credentials or head.upgrade or grant.guarded or grant.credential
        if asks and not head.request.tunnel:  # what comes with a CONNECT goes nowhere
            for verdict in (judge_credentials(head, grant), judge_upgrade(head, grant)):
                if not verdict.allowed:
                    connection.deny(verdict.reason)
                    return False
        if rollout.scanner is not None:
            found = rollout.scanner.scan(head)  # of a tunnel too: its name is asked of servers outside
            if found is not None:
                connection.deny(Reason.SECRET_FOUND, found)
                return False
        return True

    def _from_shelf(self, decision: Decision, shelf: Shelf) -> None:
        """Serve what is recorded; a body that belongs to the recording's name is read first."""
        connection = self._connection
        if shelf.strict and decision.head.upgrade == _WEBSOCKET:
            connection.deny(Reason.NOT_REPLAYABLE)
            return
        if decision.head.framing is _NONE:
            shelf.look(self._connection, decision, b"")
            return
        if not shelf.strict:  # what comes with a body is not shared, so nobody need wait for all of it
            self.seek()
            return
        decision.meter = connection.rollout.budget.meter(limited=decision.limited)
        connection.enter(State.GATHER)
        self._relay = Gather(connection, decision, shelf)
        self._relay.start()

    def serve(self, relay: Serve) -> None:
        """Answer out of the store; that too is a permission, and on record first."""
        connection, decision = self._connection, self._connection.decision
        if decision is None or decision.grant is None:
            relay.close()
            return
        if decision.meter is None:
            decision.meter = connection.rollout.budget.meter(limited=decision.limited)
        self._relay = relay
        if not self._crowded(decision) and connection.record_permission(decision):
            connection.enter(_EXCHANGE)
            relay.start()

    def _crowded(self, decision: Decision) -> bool:
        """Whether the rule's connections were all taken meanwhile; then it was refused.

        They are counted from the permission on: many that wait for one look-up have all seen room for one.
        """
        if decision.limited < 0 or not self._connection.rollout.budget.rules[decision.limited].full:
            return False
        self._connection.deny(Reason.TOO_MANY_CONNECTIONS)
        return True

    def _inspect(self, decision: Decision) -> None:
        """The tunnel will end here; nothing is resolved or dialled for it."""
        connection = self._connection
        self._drop_upstream()
        if not connection.record_permission(decision):
            return
        connection.client.send(connection.opening.established(decision.head))
        connection.enter(State.FLIGHT)
        self._relay = Inspection(connection, decision)
        self._relay.start()

    def inspected(self) -> None:
        """The inspection found out what is spoken inside."""
        self._relay = None

    def seek(self) -> None:
        """Find addresses for a request that rules allow."""
        connection, decision = self._connection, self._connection.decision
        if decision is None or decision.grant is None:
            return
        rollout, destination = connection.rollout, decision.head.request.destination
        upstream = self._upstream
        if upstream is not None:
            if upstream.serves(decision.head.request):
                # The same canonical destination: its addresses were judged when this socket was dialled.
                decision.addresses, decision.peer = upstream.addresses, upstream.peer
                decision.service, decision.unchecked = upstream.service, upstream.unchecked
                self._permit()
                return
            self._drop_upstream()
        host, pinned = destination.host, decision.grant.pinned
        if pinned is not None:
            decision.service = host.text
            self._judge((pinned,), pinned=True)
        elif host.address is not None:
            self._judge((host.address,))
        elif rollout.shell.chain is not None and rollout.shell.chain.name_only:
            decision.unchecked = rollout.shell.chain.unchecked
            self._permit()
        else:
            known = rollout.shell.resolver.cached(host.text)
            if known is not None:
                self._resolved(known)
                return
            connection.enter(_RESOLVE)
            self._lookup = rollout.shell.resolver.resolve(
                host.text, lambda answer: connection.guard(lambda: self._resolved(answer))
            )

    def _resolved(self, answer: Answer) -> None:
        decision, self._lookup = self._connection.decision, None
        if decision is None:
            return
        decision.dns_ns = time.monotonic_ns() - decision.started_ns
        if answer.outcome is _FOUND:
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
        if decision is None or decision.grant is None:
            return
        if self._crowded(decision):
            return
        tunnel = decision.head.request.tunnel
        if decision.meter is None:
            decision.meter = rollout.budget.meter(tunnel=tunnel, limited=decision.limited)
        exchange = None
        if not tunnel:
            exchange = Exchange(connection, decision, decision.meter)
            reason = exchange.preload()
            if reason is not None:
                connection.deny(reason, exchange.detail)
                return
        if not connection.record_permission(decision):
            return
        self._relay = exchange
        if exchange is not None and self._upstream is not None:
            connection.enter(_EXCHANGE)
            exchange.start(self._upstream, reused=True)
        else:
            self.dial()

    def dial(self) -> None:
        """Connect to the judged addresses (again, if a kept connection went stale)."""
        connection = self._connection
        decision = connection.decision
        if decision is None:
            return
        self._drop_upstream()
        connection.enter(_DIAL)
        self._connect = Connect(
            connection.rollout.shell,
            decision,
            lambda stream, peer, reason, why: connection.guard(lambda: self._connected(stream, peer, reason, why)),
            rollout_id=connection.rollout.rollout_id,
        )

    def _connected(self, stream: AnyStream | None, peer: Address | None, reason: Reason, why: str) -> None:
        connection = self._connection
        decision, self._connect = connection.decision, None
        if decision is None or decision.meter is None:
            if stream is not None:
                stream.close()
            return
        decision.connect_ns = time.monotonic_ns() - decision.started_ns
        if stream is None:
            decision.ended["detail"] = why
            connection.fail(reason, why)
            return
        decision.peer = peer
        stream.adopt(self._upstream_event, connection.fault)
        upstream = Upstream(stream, decision)
        self._upstream = upstream
        if isinstance(self._relay, Exchange):
            connection.enter(_EXCHANGE)
            self._relay.start(upstream, reused=False)
            return
        raw = decision.handling is _RAW
        connection.enter(State.TUNNEL if raw else State.FLIGHT)
        decision.status = _OK
        tunnel = Tunnel(connection, decision, decision.meter, upstream.stream)
        self._relay = tunnel
        established = connection.opening.established(decision.head)
        if established:
            connection.client.send(established)
        tunnel.start(raw=raw)

    def _upstream_event(self, events: int) -> None:
        try:
            relay = self._relay
            if isinstance(relay, Tunnel | Exchange):
                relay.upstream_event(events)
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
        self._relay = None
        if not reusable:
            self._drop_upstream()
        elif self._upstream is not None:
            self._upstream.stream.want(read=True)
        self._connection.completed(keep=keep)

    def upgraded(self, tunnel: Tunnel) -> None:
        """Both sides switched protocols: from now on bytes are relayed, counted and capped."""
        self._relay = tunnel
        self._connection.enter(State.TUNNEL)
