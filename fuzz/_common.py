"""What the targets share: limits, the check of an error, and the two oracles of HTTP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import h11
import httptools

from stockade.egress.gate import DETAIL_MAX, Headers, HeadLimits, Malformed

LIMITS = HeadLimits()
SMALL = HeadLimits(header_bytes=256, header_count=4)
T = TypeVar("T")


class Message(NamedTuple):
    """One HTTP message as an oracle reads it; ``start`` is (method, target) or (status,)."""

    start: tuple[Any, ...]
    headers: list[tuple[bytes, bytes]]
    body: bytes
    whole: bool


def attempt(function: Callable[..., T], *args: Any, statuses: frozenset[int], **kwargs: Any) -> T | Malformed:
    """Return what the function returns, or the Malformed that it raises, checked; anything else goes on."""
    try:
        return function(*args, **kwargs)
    except Malformed as error:
        fault = error
    assert fault.status in statuses, fault.status
    assert fault.detail.isascii() and fault.detail.isprintable(), fault.detail
    assert len(fault.detail) <= DETAIL_MAX
    return fault


def lines_are_lines(written: bytes) -> None:
    """Check what the gate has written: CRLF at the end of every line, one blank line, no control character."""
    assert written.endswith(b"\r\n\r\n") and written.index(b"\r\n\r\n") == len(written) - 4, written
    assert written.count(b"\r\n") == written.count(b"\n") == written.count(b"\r"), written
    assert not written.translate(None, bytes(range(0x20, 0x7F)) + bytes(range(0x80, 0x100)) + b"\t\r\n"), written


def fields(headers: Headers | list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return fields in one order and spelling; blanks around a value mean nothing (RFC 9110 section 5.5).

    Nor does the case of a coding's name (RFC 9112 section 7), which h11 folds.
    """
    plain = [(bytes(name).lower(), bytes(value).strip(b" \t")) for name, value in headers]
    return sorted((name, value.lower() if name == b"transfer-encoding" else value) for name, value in plain)


def h11_request(raw: bytes) -> Message:
    """Read a request by h11."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    connection.receive_data(raw)
    head = connection.next_event()
    assert isinstance(head, h11.Request), head
    return _rest(connection, (bytes(head.method), bytes(head.target)), list(head.headers.raw_items()))


def h11_response(raw: bytes, method: str, *, closed: bool) -> Message:
    """Read a response to ``method`` by h11; ``closed``: the connection ends behind it."""
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    connection.send(h11.Request(method=method, target="/", headers=[("host", "a.test")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(raw)
    if closed:
        connection.receive_data(b"")
    head = connection.next_event()
    assert isinstance(head, h11.Response | h11.InformationalResponse), head
    start, headers = (head.status_code,), list(head.headers.raw_items())
    if isinstance(head, h11.InformationalResponse):
        return Message(start, headers, b"", whole=True)
    return _rest(connection, start, headers)


def _rest(connection: h11.Connection, start: tuple[Any, ...], headers: list[tuple[bytes, bytes]]) -> Message:
    body = b""
    while True:
        event = connection.next_event()
        if not isinstance(event, h11.Data):
            return Message(start, headers, body, isinstance(event, h11.EndOfMessage))
        body += bytes(event.data)


class _Collector:
    def __init__(self) -> None:
        self.url, self.headers, self.body, self.whole = b"", list[tuple[bytes, bytes]](), b"", False

    def on_url(self, piece: bytes) -> None:
        self.url += piece

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_body(self, piece: bytes) -> None:
        self.body += piece

    def on_message_complete(self) -> None:
        self.whole = True


def llhttp(raw: bytes, *, response: bool = False) -> Message | None:
    """Read a message by llhttp; None where it refuses it, for example a method that is not on its list."""
    seen = _Collector()
    parser = (httptools.HttpResponseParser if response else httptools.HttpRequestParser)(seen)
    try:
        parser.feed_data(raw)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        return None
    start = (parser.get_status_code(),) if response else (parser.get_method(), seen.url)
    return Message(start, seen.headers, seen.body, seen.whole)
