"""One request and its response.

Neither side ever sees a byte of framing that the other one wrote: heads are rendered anew from their parsed parts,
bodies are cut out by their framing and framed again. Buffers are bounded; the side that fills one waits.
"""

from __future__ import annotations

import select
from typing import TYPE_CHECKING

from stockade.egress._body import Body
from stockade.egress._chain import refusal_in
from stockade.egress._loop import GONE, READ, WRITE
from stockade.egress._stream import HIGH_WATER_BYTES, READ_BYTES
from stockade.egress._tunnel import Tunnel
from stockade.egress.gate import (
    CONTINUE,
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
    from stockade.egress._connect import AnyStream, Upstream
    from stockade.egress._connection import Connection
    from stockade.egress._decision import Decision

_NONE = Framing.NONE
_LENGTH = Framing.LENGTH
_CHUNKED = Framing.CHUNKED
_UNTIL_CLOSE = Framing.UNTIL_CLOSE
_ERROR = select.EPOLLERR
_HTTP_1_1 = 11
_SWITCHING_PROTOCOLS = 101
_WEBSOCKET = b"websocket"
_REPEATABLE = frozenset({"GET", "HEAD", "OPTIONS"})


class Exchange:
    """Moves one request up and one response down. ``answered``: a byte of the response went out."""

    __slots__ = (
        "_body",
        "_buffer",
        "_bytes",
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
        "_scan",
        "_scanned",
        "_tape",
        "_upstream",
        "_whole",
        "answered",
        "detail",
    )

    def __init__(self, connection: Connection, decision: Decision, meter: Meter) -> None:
        self._connection = connection
        self._decision = decision
        self._head = decision.head
        self._meter = meter
        self._body = Body(self._head.framing, self._head.length)
        self._bytes = self._render()
        self._pending = b""
        scanner = connection.rollout.scanner
        self._scan = scanner.start() if scanner is not None and self._head.framing is not _NONE else None
        self._tape = None if decision.tape is None else decision.tape(connection, decision)
        self._upstream: AnyStream | None = None
        self._reused = False
        self._refused = False
        self._buffer = bytearray()
        self._scanned = 0
        self._response: ResponseHead | None = None
        self._response_body = Body(_NONE, 0)
        self._keep = False
        self.answered = False
        self.detail = ""

    def _render(self) -> bytes:
        """Return the head as it goes out: with the operator's credential in place of any that the client sent."""
        grant, rollout, chain = self._decision.grant, self._connection.rollout, self._connection.rollout.shell.chain
        self._whole = chain is not None and chain.takes_whole(self._decision)
        claim = chain.claim(rollout.rollout_id) if chain is not None and self._whole else ()
        if grant is None or not (grant.credential or grant.strip_credentials or self._head.upgrade):
            return render_request_head(self._head, absolute=self._whole, add=claim)
        add = (*rollout.credential(grant.credential), *claim)
        drop = self._head.credentials if grant.credential or grant.strip_credentials else frozenset[str]()
        return render_request_head(self._head, upgrade=self._websocket, absolute=self._whole, drop=drop, add=add)

    @property
    def _websocket(self) -> bool:
        """Whether a WebSocket was asked for, and a rule allows it; any other upgrade is not passed on (case 60)."""
        return self._head.upgrade == _WEBSOCKET and self._decision.grant is not None and self._decision.grant.websocket

    # ---- before the permission

    def preload(self) -> Reason | None:
        """Take what has arrived of the body, and refuse now what must fail later anyway.

        A malformed chunk that came with the head is refused before anything is dialled (egress case 54), and so
        is a body that is announced as larger than the budget has left.
        """
        if self._decision.body is not None:
            self._pending, self._body.done = self._decision.body, True
        elif self._head.framing is not _NONE:
            try:
                self._pending, rest = self._body.feed(bytes(self._connection.buffer))
            except Malformed as fault:
                self.detail = fault.detail
                return fault.reason
            self._connection.buffer[:] = rest
        announced = self._head.length if self._head.framing is _LENGTH else len(self._pending)
        return self._over(len(self._bytes) + announced) or self._secret(self._pending)

    def _over(self, size: int) -> Reason | None:
        """Return why ``size`` more bytes may not go out, without counting them."""
        return None if size <= self._meter.left_out else self._meter.exceeded

    def _secret(self, data: bytes) -> Reason | None:
        """Look for what must not leave; a secret that is cut in two is found when its last piece comes."""
        if self._scan is None or not data:
            return None
        found = self._scan.feed(data)
        if found is None:
            return None
        self.detail = found
        self._decision.ended["detail"] = found
        return Reason.SECRET_FOUND

    # ---- the request

    def start(self, upstream: Upstream, *, reused: bool) -> None:
        """Send the head and what is there of the body."""
        self._upstream = upstream.stream
        self._reused = reused
        # One packet for head and body: the usual request costs one system call up.
        rendered = b"" if self._head.framing is _NONE else self._rendered(self._pending)
        if not self._send_up(self._bytes + rendered):
            return
        client = self._connection.client
        if self._head.expect_continue and not self._body.done and not self._pending:
            # Answered here: the decision is made, and an upstream that never says 100 must not stall us.
            client.send(CONTINUE)
        self._pending = b""
        if client.reading is self._body.done:
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
                self._stop(self._meter.exceeded)
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
        reason = self._secret(data)
        if reason is not None:
            self._stop(reason)
        elif self._send_up(self._rendered(data)) and self._body.done:
            client.want(read=False)

    def _rendered(self, data: bytes) -> bytes:
        return self._body.render(data, chunked=self._head.framing is _CHUNKED)

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
        head = b""
        try:
            if self._response is None:
                if self._buffer:
                    self._buffer += piece
                else:
                    self._buffer[:] = piece
                piece, head = self._read_head()
                if self._response is None:
                    return
            data, rest = self._response_body.feed(piece)
        except Malformed as fault:
            self._decision.ended["detail"] = fault.detail
            self._stop(fault.reason)
            return
        if self._tape is not None and not self._tape.keep(data, last=self._response_body.done):
            # What cannot be kept must not be used either: a replay would differ (record mode only).
            self._stop(self._tape.reason)
            return
        self._send_down(head, data)
        if self._response_body.done:
            self._finish(clean=not rest)

    def _read_head(self) -> tuple[bytes, bytes]:
        """Return the bytes after the final response head once it is there, and what of it goes to the client."""
        limits = self._connection.rollout.rules.limits.head
        while True:
            end = find_response_head(self._buffer, limits, scanned=self._scanned)
            if end is None:
                self._scanned = len(self._buffer)
                return b"", b""
            raw, method = bytes(self._buffer[:end]), self._head.request.method
            head = parse_response_head(raw, limits, method=method, upgrade=self._websocket)
            refusal = refusal_in(raw) if self._whole else None
            if refusal is not None:
                raise Malformed(Reason.UPSTREAM_FAILED, f"the gateway said {refusal}", status=502)
            del self._buffer[:end]
            self._scanned = 0
            if head.status == _SWITCHING_PROTOCOLS:
                self._switch(head)
                return b"", b""
            if not head.interim:
                break
        rendered = self._answer(head)
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest, rendered

    def _switch(self, head: ResponseHead) -> None:
        """Pass the 101 on; what follows is relayed both ways, counted and capped (case 82)."""
        upstream, connection = self._upstream, self._connection
        if upstream is None:
            return
        self._decision.status = head.status
        self.answered = True
        connection.client.send(render_response_head(head, version=self._head.version, keep_alive=True))
        early = bytes(self._buffer)
        self._buffer.clear()
        self._upstream = None
        tunnel = Tunnel(connection, self._decision, self._meter, upstream)
        connection.passage.upgraded(tunnel)
        tunnel.switch(early)

    def _answer(self, head: ResponseHead) -> bytes:
        if self._tape is not None:
            self._tape.begin(head)
        self._response = head
        self._response_body = Body(head.framing, head.length, upstream=True)
        by_close = head.framing is _UNTIL_CLOSE or (head.framing is _CHUNKED and self._head.version < _HTTP_1_1)
        # An answer to a body that has not come ends the connection: where the next head starts is not known.
        self._keep = self._head.keep_alive and self._body.done and not by_close
        self._decision.status = head.status
        self._decision.ended["response_headers_bytes"] = head.size_bytes
        self.answered = True
        return render_response_head(head, version=self._head.version, keep_alive=self._keep)

    def _send_down(self, head: bytes, data: bytes) -> None:
        """Send what there is in one piece: each system call of a small response costs more than reading it."""
        if self._response is None:
            return
        chunked = self._response.framing is _CHUNKED and self._head.version >= _HTTP_1_1
        rendered = head + self._response_body.render(data, chunked=chunked)
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
        return self._head.request.method in _REPEATABLE and self._head.framing is _NONE

    def _finish(self, *, clean: bool) -> None:
        response = self._response
        if self._tape is not None and not self._tape.keep(b"", last=True):  # an answer that ended by its end
            self._stop(self._tape.reason)
            return
        reusable = clean and response is not None and response.keep_alive and self._body.done and not self._refused
        self._connection.passage.exchanged(keep=self._keep, reusable=reusable)

    def close(self) -> None:
        """Forget what was being kept of the response."""
        if self._tape is not None:
            self._tape.abort()

    def _stop(self, reason: Reason) -> None:
        """End with an error answer if none has begun, else by a reset that no client takes for an end."""
        if self.answered:
            self._connection.end(reason)
        else:
            self._connection.fail(reason, str(self._decision.ended.get("detail", "")))
