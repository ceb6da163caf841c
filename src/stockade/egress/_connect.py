"""From judged addresses to a connection that is ready for the first byte: dial, the operator's proxy, TLS.

Directly, the checked address is the dialled one. Behind an operator's proxy (:class:`Chain`) the same address is what
that proxy is asked for, so nobody resolves the name again (case 95); its own certificate and ours are checked where
TLS was asked for. Whatever fails on the way is a failure of the request, never a reason to go another way.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Protocol

from stockade.egress import _counts
from stockade.egress._dial import Dial
from stockade.egress._loop import Timer
from stockade.egress._states import HEAD_S
from stockade.egress._stream import Stream
from stockade.egress._tls_stream import TlsStream
from stockade.egress.gate import Address, Reason, Request, safe_text

if TYPE_CHECKING:
    from stockade.egress._decision import Decision
    from stockade.egress._rollout import Shell

AnyStream = Stream | TlsStream


class Done(Protocol):
    """What to call with the outcome: a stream, or None with the reason and a text."""

    def __call__(self, stream: AnyStream | None, peer: Address | None, reason: Reason, why: str) -> None:
        """Take it."""


class Leg(Protocol):
    """A piece of the way that is under way."""

    def cancel(self) -> None:
        """Give it up; nothing is called any more."""


class Upstream:
    """A connection to a judged address, kept for further requests to the identical destination."""

    __slots__ = ("_host", "_port", "_scheme", "addresses", "peer", "service", "stream", "unchecked")

    def __init__(self, stream: AnyStream, decision: Decision) -> None:
        self.stream = stream
        request = decision.head.request
        self._host, self._port, self._scheme = request.destination.host, request.destination.port, request.scheme
        self.addresses = decision.addresses
        self.peer = decision.peer
        self.service = decision.service
        self.unchecked = decision.unchecked

    def serves(self, request: Request) -> bool:
        """Whether ``request`` may use this connection: same host, port and scheme, and nothing unasked has come."""
        destination = request.destination
        if self.stream.closed or request.scheme != self._scheme:
            return False
        return destination.host == self._host and destination.port == self._port


class Connect:
    """One connection for one decision. ``done`` is called once, later; :meth:`cancel` prevents it."""

    __slots__ = ("_decision", "_done", "_leg", "_peer", "_shell", "_stream", "_timer")

    def __init__(self, shell: Shell, decision: Decision, done: Done, *, rollout_id: str) -> None:
        self._shell = shell
        self._decision = decision
        self._done: Done | None = done
        self._stream: AnyStream | None = None
        self._timer: Timer | None = None
        self._peer: Address | None = None
        destination = decision.head.request.destination
        chain = None if decision.service is not None else shell.chain
        if chain is None:
            self._leg: Leg = Dial(shell.loop, decision.addresses, destination.port, self._dialled)
        else:
            self._leg = chain.open(shell.loop, decision, rollout_id, self._chained)

    def cancel(self) -> None:
        """Close what was opened."""
        self._done = None
        self._leg.cancel()
        self._close()

    def _dialled(self, sock: socket.socket | None, peer: Address | None, why: str) -> None:
        self._peer = peer
        if sock is None:
            self._fail(Reason.UPSTREAM_FAILED, why)
        elif self._done is None:
            sock.close()
        else:
            self._connected(Stream(self._shell.loop, sock, self._early, self._fault))

    def _chained(self, stream: AnyStream | None, why: str) -> None:
        if stream is None:
            self._fail(Reason.UPSTREAM_FAILED, why)
        elif self._done is None:
            stream.close()
        else:
            self._peer = self._decision.addresses[0] if self._decision.addresses else None
            self._connected(stream)

    def _connected(self, stream: AnyStream) -> None:
        self._stream = stream
        request = self._decision.head.request
        if request.tunnel or request.scheme != "https":
            self._finish()
            return
        stream.adopt(self._early, self._fault)
        context = self._shell.upstream_context
        if context is None:
            self._fail(Reason.UPSTREAM_TLS, "no trust roots")
            return
        name = request.destination.host.text
        self._stream = TlsStream.client(stream, context, name, self._greeted)
        # An upstream that accepts and then says nothing must not hold the client until its total time is over.
        self._timer = self._shell.loop.call_later(HEAD_S, self._late, self._fault)

    def _greeted(self, why: str | None) -> None:
        self._shell.count(_counts.tls("upstream", done=why is None))
        if why is None:
            self._finish()
        else:
            self._fail(Reason.UPSTREAM_TLS, why)

    def _late(self) -> None:
        self._fail(Reason.UPSTREAM_TLS, "the handshake takes too long")

    def _early(self, _events: int) -> None:
        """Nobody listens to it yet: what it has to say waits, and its end shows when it is used."""

    def _fault(self, fault: Exception) -> None:
        self._fail(Reason.UPSTREAM_FAILED, type(fault).__name__)

    def _finish(self) -> None:
        done, self._done = self._done, None
        stream, self._stream = self._stream, None
        self._stop_timer()
        if done is not None and stream is not None:
            done(stream, self._peer, Reason.ALLOWED, "")

    def _fail(self, reason: Reason, why: str) -> None:
        done, self._done = self._done, None
        self._close()
        if done is not None:
            done(None, None, reason, safe_text(why))

    def _close(self) -> None:
        self._stop_timer()
        if self._stream is not None:
            self._stream.close(abort=True)
            self._stream = None

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
