"""Response heads: read, written for the client, and read again by three parsers."""

from __future__ import annotations

from fuzz._common import LIMITS, SMALL, attempt, fields, h11_response, lines_are_lines, llhttp
from stockade.egress.gate import (
    Framing,
    HeadLimits,
    Malformed,
    ResponseHead,
    closes_after,
    find_response_head,
    parse_response_head,
    render_response_head,
)

_METHODS = ("GET", "HEAD", "POST", "PUT")
_STATUSES = frozenset({502})
_BODIES = {
    Framing.NONE: b"",
    Framing.LENGTH: b"x" * 64,
    Framing.CHUNKED: b"5\r\nhello\r\n0\r\n\r\n",
    Framing.UNTIL_CLOSE: b"to the end",
}
_DATA = {Framing.CHUNKED: b"hello"}
_NEVER_SENT = frozenset((b"alt-svc", b"keep-alive", b"te", b"trailer", b"http2-settings"))


def check(data: bytes) -> None:
    """Take the first byte for the request (method, whether a WebSocket was asked for, small limits), the rest for the head."""
    if not data:
        return
    method, upgrade = _METHODS[data[0] & 3], bool(data[0] & 4)
    limits = SMALL if data[0] & 0x80 else LIMITS
    raw = data[1:]
    end = attempt(find_response_head, raw, limits, statuses=_STATUSES)
    if isinstance(end, Malformed):
        return
    head = attempt(
        parse_response_head,
        raw if end is None else raw[:end],
        limits,
        method=method,
        upgrade=upgrade,
        statuses=_STATUSES,
    )
    if isinstance(head, Malformed):
        return
    assert end is not None, "a head without its end"
    assert 100 <= head.status < 600 and head.status != 407
    assert upgrade or head.status != 101
    assert head.interim == (head.status < 200 and head.status != 101)
    written = render_response_head(head)
    _check_written(written, head, method, upgrade=upgrade, limits=limits)
    if head.status == 101:
        return
    if not head.interim:
        old = render_response_head(head, version=10, keep_alive=False)
        lines_are_lines(old)
        assert b"\r\ntransfer-encoding:" not in old.lower()
        assert b"\r\nConnection: close\r\n" in old
    _ask_oracles(written, head, method)


def _check_written(written: bytes, head: ResponseHead, method: str, *, upgrade: bool, limits: HeadLimits) -> None:
    lines_are_lines(written)
    names = [line.partition(b":")[0].lower() for line in written.split(b"\r\n")[1:-2]]
    assert _NEVER_SENT.isdisjoint(names), names
    assert not any(name.startswith((b"proxy-", b"x-stockade-")) for name in names), names
    assert names.count(b"content-length") + names.count(b"transfer-encoding") <= 1
    wider = HeadLimits(limits.header_bytes + 1024, limits.header_count + 4)
    again = parse_response_head(written, wider, method=method, upgrade=upgrade)
    assert (again.status, again.phrase, again.headers) == (head.status, head.phrase, head.headers)
    assert (again.framing, again.length, again.interim) == (head.framing, head.length, head.interim)
    if head.framing is not Framing.UNTIL_CLOSE:
        assert render_response_head(again) == written
    closes = closes_after(head, version=11, keep_alive=True)
    assert closes == (head.framing is Framing.UNTIL_CLOSE)


def _ask_oracles(written: bytes, head: ResponseHead, method: str) -> None:
    """The client reads the same answer, and its end at the same byte."""
    body = _BODIES[head.framing]
    data = _DATA.get(head.framing, body)
    if head.framing is Framing.LENGTH:
        body = data = body[: head.length]
    whole = head.framing is not Framing.LENGTH or head.length == len(data)
    closed = head.framing is Framing.UNTIL_CLOSE
    first = h11_response(written + body, method, closed=closed)
    assert first.start == (head.status,)
    assert (first.body, first.whole) == (data, whole), (first, head)
    if method == "HEAD" or closed or head.interim:
        return  # llhttp knows neither what was asked nor that the connection has ended
    second = llhttp(written + body, response=True)
    if second is not None:
        assert second.start == first.start
        assert second.body == data
        assert fields(second.headers) == fields(first.headers)
