"""One plain-HTTP request and its response.

Neither side ever sees a byte of framing that the other one wrote: heads are rendered anew from their parsed parts,
bodies are cut out by their framing and framed again. Buffers are bounded; the side that fills one waits.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from stockade.egress._body import Body
from stockade.egress._loop import GONE, READ, WRITE, Fault, Loop
from stockade.egress._stream import HIGH_WATER_BYTES, READ_BYTES, Stream
from stockade.egress.gate import (
    CONTINUE,
    Destination,
    Framing,
    Malformed,
    Meter,
    Reason,
    ResponseHead,
    find_response_head,
    parse_response_head,
    render_request_head,
    render_response_head,
)

if TYPE_CHECKING:
    from stockade.egress._connection import Connection
    from stockade.egress._decision import Decision

_ERROR = select.EPOLLERR
_HTTP_1_1 = 11
_SWITCHING_PROTOCOLS = 101
_REPEATABLE = frozenset({"GET", "HEAD", "OPTIONS"})


class Upstream:
    """A connection to a judged address, kept for further requests to the identical destination."""

    __slots__ = ("addresses", "destination", "peer", "service", "stream")

    def __init__(
        self, loop: Loop, sock: socket.socket, decision: Decision, on_event: Callable[[int], None], on_fault: Fault
    ) -> None:
        self.stream = Stream(loop, sock, on_event, on_fault)
        self.destination = decision.head.request.destination
        self.addresses = decision.addresses
        self.peer = decision.peer
        self.service = decision.service

    def serves(self, destination: Destination) -> bool:
        """Whether a request to ``destination`` may use this connection."""
        if self.stream.closed or destination != self.destination:
            return False
        try:
            return self.stream.peek() is None  # bytes that nobody asked for, or the end: not to be used again
        except OSError:
            return False


class Exchange:
    """Moves one request up and one response down. ``answered``: a byte of the response went out."""

    __slots__ = (
        "_body",
        "_buffer",
        "_connection",
        "_decision",
        "_head",
        "_keep",
        "_meter",
        "_pending",
        "_refused",
        "_response",
        "_response_body",
        "_reused",
        "_scanned",
        "_upstream",
        "answered",
        "detail",
    )

    def __init__(self, connection: Connection, decision: Decision, meter: Meter) -> None:
        self._connection = connection
        self._decision = decision
        self._head = decision.head
        self._meter = meter
        self._body = Body(self._head.framing, self._head.length)
        self._pending = b""
        self._upstream: Stream | None = None
        self._reused = False
        self._refused = False
        self._buffer = bytearray()
        self._scanned = 0
        self._response: ResponseHead | None = None
        self._response_body = Body(Framing.NONE, 0)
        self._keep = False
        self.answered = False
        self.detail = ""

    # ---- before the permission

    def preload(self) -> Reason | None:
        """Take what has arrived of the body, and refuse now what must fail later anyway.

        A malformed chunk that came with the head is refused before anything is dialled (egress case 54), and so
        is a body that is announced as larger than the budget has left.
        """
        try:
            self._pending, rest = self._body.feed(bytes(self._connection.buffer))
        except Malformed as fault:
            self.detail = fault.detail
            return fault.reason
        self._connection.buffer[:] = rest
        announced = self._head.length if self._head.framing is Framing.LENGTH else len(self._pending)
        return self._over(len(render_request_head(self._head)) + announced)

    def _over(self, size: int) -> Reason | None:
        """Return why ``size`` more bytes may not go out, without counting them."""
        if size <= self._meter.left_out:
            return None
        return self._exceeded()

    def _exceeded(self) -> Reason:
        limits, budget = self._connection.rollout.rules.limits, self._connection.rollout.budget
        # The rollout's cap is named when it is the tighter one of the two.
        tighter = budget.left_out <= limits.bytes_out_per_request - self._meter.bytes_out
        return Reason.BYTES_OUT_EXCEEDED if tighter else Reason.REQUEST_TOO_LARGE

    # ---- the request

    def start(self, upstream: Upstream, *, reused: bool) -> None:
        """Send the head and what is there of the body."""
        self._upstream = upstream.stream
        self._reused = reused
        if not self._send_up(render_request_head(self._head)) or not self._forward(self._pending):
            return
        client = self._connection.client
        if self._head.expect_continue and not self._body.done and not self._pending:
            # Answered here: the decision is made, and an upstream that never says 100 must not stall us.
            client.send(CONTINUE)
        self._pending = b""
        client.want(read=not self._body.done)
        # A client that pipelines but reads no answers waits for itself.
        self._upstream.want(read=len(client.out) <= HIGH_WATER_BYTES)

    def client_event(self, events: int) -> None:
        """The client's side is ready."""
        client, upstream = self._connection.client, self._upstream
        if upstream is None:
            return
        if events & WRITE:
            self._connection.touch()
            if len(client.out) <= HIGH_WATER_BYTES:
                upstream.want(read=True)
        if events & READ and not self._body.done:
            self._read_body()
        elif events & _ERROR:
            self._connection.end(Reason.CLIENT_CLOSED)
        elif events & GONE:
            client.mute()

    def _read_body(self) -> None:
        client = self._connection.client
        left = self._meter.left_out
        if left <= 0:
            if client.peek():
                self._stop(self._exceeded())
            return
        piece = client.receive(min(READ_BYTES, left))
        if piece is None:
            return
        if not piece:
            self._connection.end(Reason.CLIENT_CLOSED)
            return
        self._connection.touch()
        try:
            data, rest = self._body.feed(piece)
        except Malformed as fault:
            self._decision.ended["detail"] = fault.detail
            self._stop(fault.reason)
            return
        self._connection.buffer += rest
        if self._forward(data) and self._body.done:
            client.want(read=False)

    def _forward(self, data: bytes) -> bool:
        """Send a piece of the body up; return whether the exchange goes on."""
        if self._head.framing is Framing.NONE:
            return True
        return self._send_up(self._body.render(data, chunked=self._head.framing is Framing.CHUNKED))

    def _send_up(self, data: bytes) -> bool:
        if self._upstream is None or not data or self._refused:
            return True
        reason = self._over(len(data))
        if reason is not None:
            self._stop(reason)
            return False
        self._meter.out(len(data))
        try:
            self._upstream.send(data)
        except OSError:
            # It may have answered before it hung up (413 and close): read on, send no more.
            self._refused = True
            return True
        if len(self._upstream.out) > HIGH_WATER_BYTES:
            self._connection.client.want(read=False)
        return True

    # ---- the response

    def upstream_event(self, events: int) -> None:
        """The upstream's side is ready."""
        upstream = self._upstream
        if upstream is None:
            return
        try:
            if events & WRITE:
                self._connection.touch()
                if upstream.flush() and not self._body.done:
                    self._connection.client.want(read=True)
            if not events & (READ | GONE):
                return
            if not upstream.reading and not events & _ERROR:
                upstream.mute()  # it has closed, but the client has not taken what came before
                return
            left = self._meter.left_in
            if left <= 0:
                piece = b"" if upstream.peek() is False else None
                if piece is None:
                    self._stop(Reason.BYTES_IN_EXCEEDED)
                    return
            else:
                piece = upstream.receive(min(READ_BYTES, left))
        except OSError:
            self._upstream_lost()
            return
        if piece is None:
            return
        if not piece:
            self._upstream_ended()
            return
        self._connection.touch()
        self._meter.into(len(piece))
        self._take(piece)

    def _take(self, piece: bytes) -> None:
        try:
            if self._response is None:
                self._buffer += piece
                piece = self._read_head()
                if self._response is None:
                    return
            data, rest = self._response_body.feed(piece)
        except Malformed as fault:
            self._decision.ended["detail"] = fault.detail
            self._stop(fault.reason)
            return
        self._send_down(data)
        if self._response_body.done:
            self._finish(clean=not rest)

    def _read_head(self) -> bytes:
        """Return the bytes after the final response head once it is there; interim ones are dropped."""
        limits = self._connection.rollout.rules.limits.head
        while True:
            end = find_response_head(self._buffer, limits, scanned=self._scanned)
            if end is None:
                self._scanned = len(self._buffer)
                return b""
            head = parse_response_head(bytes(self._buffer[:end]), limits, method=self._head.request.method)
            del self._buffer[:end]
            self._scanned = 0
            if head.status == _SWITCHING_PROTOCOLS:
                # Upgrade is never forwarded, so nobody asked for this (egress case 60).
                raise Malformed(Reason.UPSTREAM_MALFORMED, "unasked switch of protocols", status=502)
            if not head.interim:
                break
        self._answer(head)
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest

    def _answer(self, head: ResponseHead) -> None:
        self._response = head
        self._response_body = Body(head.framing, head.length, upstream=True)
        by_close = head.framing is Framing.UNTIL_CLOSE or (
            head.framing is Framing.CHUNKED and self._head.version < _HTTP_1_1
        )
        # An answer to a body that has not come ends the connection: where the next head starts is not known.
        self._keep = self._head.keep_alive and self._body.done and not by_close
        self._decision.status = head.status
        self._decision.ended["response_headers_bytes"] = head.size_bytes
        self.answered = True
        self._connection.client.send(render_response_head(head, version=self._head.version, keep_alive=self._keep))

    def _send_down(self, data: bytes) -> None:
        if self._response is None:
            return
        chunked = self._response.framing is Framing.CHUNKED and self._head.version >= _HTTP_1_1
        rendered = self._response_body.render(data, chunked=chunked)
        client = self._connection.client
        if rendered:
            client.send(rendered)
        if len(client.out) > HIGH_WATER_BYTES and self._upstream is not None:
            self._upstream.want(read=False)

    def _upstream_ended(self) -> None:
        if self._response is not None and self._response_body.end():
            self._finish(clean=False)
        else:
            self._upstream_lost()

    def _upstream_lost(self) -> None:
        if self._reused and not self.answered and not self._buffer and self._repeatable:
            # A kept connection that closed just as it was used: the one case where RFC 9110 section 9.2.2
            # lets a proxy repeat a request by itself.
            self._upstream, self._reused = None, False
            self._connection.passage.dial()
            return
        self._decision.ended["detail"] = "closed before the response was complete"
        self._stop(Reason.UPSTREAM_FAILED)

    @property
    def _repeatable(self) -> bool:
        return self._head.request.method in _REPEATABLE and self._head.framing is Framing.NONE

    def _finish(self, *, clean: bool) -> None:
        response = self._response
        reusable = clean and response is not None and response.keep_alive and self._body.done and not self._refused
        self._connection.passage.exchanged(keep=self._keep, reusable=reusable)

    def _stop(self, reason: Reason) -> None:
        """End with an error answer if none has begun, else by a reset that no client takes for an end."""
        if self.answered:
            self._connection.end(reason)
        else:
            self._connection.fail(reason, str(self._decision.ended.get("detail", "")))
