"""How a client says what it wants: HTTP, SOCKS5, or by connecting to the address itself.

The first byte tells them apart on the proxy's listener (5 is SOCKS5, RFC 1928). On a transparent listener the client
believes that it talks to its server: the address that it connected to says which, and the first byte whether it
speaks TLS. Once a connection was looked into it speaks plain requests, all bound to that one server (case 78). On a
gateway's listener TLS comes first, and then the same as on a proxy's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from stockade.egress._decision import tunnel_head
from stockade.egress._reception import receive
from stockade.egress.gate import (
    ESTABLISHED,
    SOCKS_METHOD_REFUSED,
    SOCKS_METHOD_REPLY,
    TLS_ACCESS_DENIED,
    Destination,
    Handling,
    Host,
    Malformed,
    Origin,
    Reason,
    Request,
    RequestHead,
    Way,
    decide,
    find_head,
    parse_head,
    safe_text,
    socks_greeting,
    socks_reply,
    socks_request,
)

if TYPE_CHECKING:
    from stockade.egress._connection import Connection

TLS_HANDSHAKE = 0x16
_SOCKS_VERSIONS = (4, 5)
_CONNECT = b"CONNECT "


class Entry(NamedTuple):
    """Where a client on a transparent listener wanted to go."""

    host: Host
    port: int


class Opening:
    """Reads what a client sends until it is a request, and answers in the same language."""

    __slots__ = ("_connection", "_entry", "_greeted", "_read", "_scanned")

    def __init__(self, connection: Connection, entry: Entry | None, *, secured: bool) -> None:
        self._connection = connection
        self._entry = entry
        self._scanned = 0
        self._greeted = False
        self._read: Callable[[], None] = self._sniff if entry is None else self._sniff_transparent
        if secured:
            self._read = self._sniff_secured

    def begin(self) -> None:
        """Act on what is known before the first byte: behind a tcp rule the server may be the one who speaks first."""
        if self._entry is None:
            return
        request = self._wanted(self._entry)
        verdict = decide(request, self._connection.rollout.rules)
        # Where such a rule cannot hold, as in a replay, nothing that the client may say would help it either.
        if verdict.handling is Handling.RAW or verdict.reason is Reason.NOT_REPLAYABLE:
            self._connection.passage.consider(tunnel_head(request, 0))

    def received(self) -> None:
        """The client showed who it is: from now on it is read like one of a proxy's listener."""
        self._read = self._sniff

    def bound(self) -> None:
        """From now on requests of the connection's origin are read."""
        self._scanned = 0
        self._read = self._read_head

    def read(self) -> None:
        """Make something of the bytes in the connection's buffer."""
        try:
            self._read()
        except Malformed as fault:
            self.record_blank(fault.reason, fault.detail)
            self._connection.answer(
                fault.reason, fault.detail, status=fault.status, refusal=self.blank_refusal(fault.reason)
            )

    def blank_refusal(self, reason: Reason) -> bytes | None:
        """Return what tells the client that it never came to a request; None where HTTP says it."""
        if self._read == self._sniff_secured:
            return TLS_ACCESS_DENIED
        if self._read != self._read_socks:
            return None
        return socks_reply(reason) if self._greeted else SOCKS_METHOD_REFUSED

    def ended(self) -> None:
        """The client closed while a request was awaited."""
        if self._connection.buffer:
            self.record_blank(Reason.MALFORMED_REQUEST, "closed within the head")

    def established(self, head: RequestHead) -> bytes:
        """Return what tells the client that its tunnel stands."""
        way = head.request.destination.way
        if way is Way.CONNECT:
            return ESTABLISHED
        return socks_reply(Reason.ALLOWED) if way is Way.SOCKS5 else b""

    def refusal(self, head: RequestHead, reason: Reason) -> bytes | None:
        """Return what tells the client that it gets no tunnel; None where HTTP says it."""
        if not head.request.tunnel:
            return None
        way = head.request.destination.way
        if way is Way.SOCKS5:
            return socks_reply(reason)
        return TLS_ACCESS_DENIED if way is Way.TRANSPARENT else None

    def record_blank(self, reason: Reason, detail: str = "") -> None:
        """Record the refusal of something that never became a request."""
        connection = self._connection
        tunnel = self._read == self._read_socks or connection.buffer[: len(_CONNECT)] == _CONNECT
        origin, entry, place = connection.origin, self._entry, None
        if origin is not None:
            place = Destination(origin.way, origin.host, origin.port)
        elif entry is not None:
            place = Destination(Way.TRANSPARENT, entry.host, entry.port)
        connection.rollout.refuse_unread(
            reason, safe_text(detail), connection_id=connection.number, tunnel=tunnel, place=place
        )

    # ---- the languages

    def _sniff(self) -> None:
        self._read = self._read_socks if self._connection.buffer[0] in _SOCKS_VERSIONS else self._read_head
        self._read()

    def _sniff_secured(self) -> None:
        receive(self._connection)

    def _sniff_transparent(self) -> None:
        connection, entry = self._connection, self._entry
        if entry is None:
            raise RuntimeError("a transparent connection without its address")
        if connection.buffer[0] == TLS_HANDSHAKE:
            connection.passage.consider(tunnel_head(self._wanted(entry), 0))
            return
        connection.origin = Origin(Way.TRANSPARENT, "http", entry.host, entry.port)
        self._read = self._read_head
        self._read()

    def _read_head(self) -> None:
        connection = self._connection
        limits, buffer = connection.rollout.head_limits, connection.buffer
        end = find_head(buffer, limits, scanned=self._scanned)
        if end is None:
            self._scanned = len(buffer)
            return
        raw = bytes(buffer[:end])
        head = parse_head(raw, limits, origin=connection.origin)
        del buffer[:end]
        self._scanned = 0
        connection.passage.consider(head)

    def _read_socks(self) -> None:
        connection = self._connection
        buffer = connection.buffer
        if not self._greeted:
            end = socks_greeting(buffer)
            if end is None:
                return
            del buffer[:end]
            self._greeted = True
            connection.client.send(SOCKS_METHOD_REPLY)
        found = socks_request(buffer)
        if found is None:
            return
        request, end = found
        del buffer[:end]
        connection.passage.consider(tunnel_head(request, end))

    @staticmethod
    def _wanted(entry: Entry) -> Request:
        return Request(Destination(Way.TRANSPARENT, entry.host, entry.port), "CONNECT", "", scheme="")
