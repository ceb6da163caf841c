"""The operator's proxy: where compute nodes have no way out of their own, every connection goes through it.

It is chosen by the operator alone (egress case 94). It is asked, by CONNECT, for the address that was checked here, so
that nobody resolves the name again (case 95); our own gateway is asked for the name, because it applies a policy of its
own, resolves and checks there. When it does not answer, the request fails: there is no other way.

A gateway is told which rollout asks, as a claim. Requests in clear go to it with absolute targets, so that it judges each
of them; whatever is refused there is a failure of the upstream here.
"""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from stockade.egress._dial import CONNECT_S, Dial
from stockade.egress._loop import GONE, READ, WRITE, Loop, Timer
from stockade.egress._question import Outcome
from stockade.egress._resolver import Answer, Lookup, Resolver
from stockade.egress._stream import Stream
from stockade.egress._tls_stream import TlsStream
from stockade.egress.gate import (
    Address,
    Handling,
    Headers,
    HeadLimits,
    Malformed,
    find_response_head,
    parse_response_head,
    safe_text,
)

if TYPE_CHECKING:
    import ssl

    from stockade.egress._decision import Decision
    from stockade.egress._settings import ChainSettings

ChainDone = Callable[["Stream | TlsStream | None", str], None]
_LIMITS = HeadLimits(8192, 64)
_OK = 200
_UNCHECKED = "address unchecked: the operator's proxy resolves"
_CHECKED_THERE = "address checked at the gateway"
_REFUSAL = re.compile(rb"\r\nX-Stockade-Reason: ([a-z_]{1,40})\r\n")


def refusal_in(raw: bytes) -> str | None:
    """Return why our gateway refused, from the head of its answer; None for answers that it passed on.

    Nobody else can say so through it: it leaves such a field of an origin's out.
    """
    found = _REFUSAL.search(raw)
    return None if found is None else found[1].decode("ascii")


class Chain:
    """The settings of one proxy, ready to be used."""

    __slots__ = ("_resolver", "context", "name_only", "settings", "unchecked")

    def __init__(self, settings: ChainSettings, resolver: Resolver, context: ssl.SSLContext | None) -> None:
        self.settings = settings
        self.name_only = settings.name_only
        self.unchecked = _CHECKED_THERE if settings.gateway else _UNCHECKED
        """What the record says of an address that was not looked up here."""
        self.context = context
        self._resolver = resolver

    def open(self, loop: Loop, decision: Decision, rollout_id: str, done: ChainDone) -> ChainLeg:
        """Reach the proxy and have it connect; ``done`` is called once, later."""
        return ChainLeg(self, loop, decision, self.claim(rollout_id), done)

    def claim(self, rollout_id: str) -> Headers:
        """Return what the proxy is told of who asks: nobody but our own gateway is told anything."""
        return ((b"X-Rollout-Id", rollout_id.encode("ascii")),) if self.settings.gateway else ()

    def takes_whole(self, decision: Decision) -> bool:
        """Whether the request itself is sent to the proxy, with an absolute target, and not a tunnel asked for."""
        request = decision.head.request
        return self.settings.gateway and not request.tunnel and request.scheme == "http" and decision.service is None

    def find(self, done: Callable[[Answer], None]) -> Lookup | None:
        """Look the proxy's own address up; None if it is written as one, and ``done`` was called."""
        try:
            address = Address.parse(self.settings.host)
        except ValueError:
            return self._resolver.resolve(self.settings.host, done)
        done(Answer(Outcome.FOUND, (address,)))
        return None


class ChainLeg:
    """One connection through the proxy: found, dialled, greeted, asked."""

    __slots__ = ("_buffer", "_chain", "_claim", "_decision", "_dial", "_done", "_lookup", "_loop", "_stream", "_timer")

    def __init__(self, chain: Chain, loop: Loop, decision: Decision, claim: Headers, done: ChainDone) -> None:
        self._chain = chain
        self._loop = loop
        self._decision = decision
        self._claim = claim
        self._done: ChainDone | None = done
        self._buffer = bytearray()
        self._lookup: Lookup | None = None
        self._dial: Dial | None = None
        self._stream: Stream | TlsStream | None = None
        self._timer: Timer = loop.call_later(CONNECT_S, self._late, self._fault)
        loop.call_later(0, self._begin, self._fault)

    def cancel(self) -> None:
        """Give it up."""
        self._done = None
        self._drop()

    def _begin(self) -> None:
        if self._done is None:
            return
        if self._chain.settings.kind == "unix":
            self._open_unix()
        else:
            self._lookup = self._chain.find(self._found)

    def _found(self, answer: Answer) -> None:
        self._lookup = None
        if answer.outcome is not Outcome.FOUND:
            self._fail(f"the operator's proxy has no address: {answer.outcome.value}")
            return
        self._dial_to(answer.addresses)

    def _dial_to(self, addresses: Sequence[Address]) -> None:
        self._dial = Dial(self._loop, addresses, self._chain.settings.port, self._dialled)

    def _dialled(self, sock: socket.socket | None, _peer: Address | None, why: str) -> None:
        self._dial = None
        if sock is None:
            self._fail(f"the operator's proxy: {why}")
        else:
            self._reached(sock)

    def _open_unix(self) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            sock.connect(self._chain.settings.host)
        except OSError as error:  # BlockingIOError too: its backlog is full
            sock.close()
            self._fail(f"the operator's proxy: {error.strerror}")
            return
        self._reached(sock)

    def _reached(self, sock: socket.socket) -> None:
        if self._done is None:
            sock.close()
            return
        stream = Stream(self._loop, sock, self._ready, self._fault)
        self._stream = stream
        context = self._chain.context
        if self._chain.settings.kind != "https":
            self._ask()
        elif context is None:
            self._fail("the operator's proxy: no certificate authority for it")
        else:
            self._stream = TlsStream.client(stream, context, self._chain.settings.host, self._greeted)

    def _greeted(self, why: str | None) -> None:
        if why is not None:
            self._fail(f"the operator's proxy: {why}")
        elif self._stream is not None:
            self._stream.adopt(self._ready, self._fault)
            self._ask()

    def _ask(self) -> None:
        if self._stream is None:
            return
        if self._chain.takes_whole(self._decision):
            self._finish(self._stream)
            return
        destination = self._decision.head.request.destination
        host = destination.host.wire
        if not self._chain.name_only and self._decision.addresses:
            address = self._decision.addresses[0]
            host = f"[{address}]" if address.version == 6 else str(address)
        authority = f"{host}:{destination.port}"
        claim = b"".join(b"%b: %b\r\n" % field for field in self._claim)
        self._stream.send(f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n".encode("ascii") + claim + b"\r\n")
        self._stream.want(read=True)

    def _ready(self, events: int) -> None:
        stream = self._stream
        if stream is None:
            return
        try:
            if events & WRITE:
                stream.flush()
            if not events & (READ | GONE) or not self._read_answer(stream):
                return
            raw = bytes(self._buffer)
            head = parse_response_head(raw, _LIMITS, method="CONNECT")
            early = head.status == _OK and self._decision.handling is not Handling.RAW and stream.peek()
        except OSError as error:
            self._fail(f"the operator's proxy: {error.strerror}")
        except Malformed as fault:
            self._fail(f"the operator's proxy: {fault.detail}")
        else:
            if head.status != _OK:
                self._fail(f"the operator's proxy said {refusal_in(raw) or head.status}")
            elif early:
                # TLS and HTTP servers wait for the client; who speaks first here is not the server that was asked for.
                self._fail("the operator's proxy sent bytes behind its answer")
            else:
                self._finish(stream)

    def _read_answer(self, stream: Stream | TlsStream) -> bool:
        """Return whether the head of the answer is whole now. Raises OSError and Malformed.

        It is read byte by byte, for what comes behind it is the tunnel's: behind a tcp rule servers speak first.
        """
        while find_response_head(self._buffer, _LIMITS, scanned=len(self._buffer) - 1) is None:
            piece = stream.receive(1)
            if piece is None:
                return False
            if not piece:
                raise ConnectionResetError(errno.ECONNRESET, "closed the connection")
            self._buffer += piece
        return True

    def _finish(self, stream: Stream | TlsStream) -> None:
        done, self._done, self._stream = self._done, None, None
        self._drop()
        stream.want(read=False)
        if done is not None:
            done(stream, "")
        else:
            stream.close()

    def _late(self) -> None:
        self._fail("the operator's proxy does not answer")

    def _fault(self, fault: Exception) -> None:
        self._fail(type(fault).__name__)

    def _fail(self, why: str) -> None:
        done, self._done = self._done, None
        self._drop()
        if done is not None:
            done(None, safe_text(why))

    def _drop(self) -> None:
        self._timer.cancel()
        if self._lookup is not None:
            self._lookup.cancel()
        if self._dial is not None:
            self._dial.cancel()
        if self._stream is not None:
            self._stream.close(abort=True)
        self._lookup = self._dial = self._stream = None
