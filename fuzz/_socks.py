"""SOCKS5: greeting and request, in any pieces, and the same destination by every other way in."""

from __future__ import annotations

from fuzz._common import LIMITS, attempt
from fuzz._requests import RULES
from stockade.egress.gate import (
    Malformed,
    Request,
    Way,
    decide,
    parse_authority,
    parse_head,
    socks_greeting,
    socks_reply,
    socks_request,
)

_STATUSES = frozenset({400})


def check(data: bytes) -> None:
    """Take the bytes for a greeting if the first is even, else for a request."""
    if not data:
        return
    raw = data[1:]
    read = socks_request if data[0] & 1 else socks_greeting
    found = attempt(read, raw, statuses=_STATUSES)
    if isinstance(found, Malformed):
        reply = socks_reply(found.reason)
        assert len(reply) == 10 and reply[1] != 0
        return
    end = _end(found)
    if end is None:
        return
    for cut in range(end):  # only the whole of it is taken
        part = attempt(read, raw[:cut], statuses=_STATUSES)
        assert part is None, (cut, part)
    assert attempt(read, raw[:end], statuses=_STATUSES) == found
    if isinstance(found, tuple):
        _check_request(found[0])


def _end(found: int | tuple[Request, int] | None) -> int | None:
    return found[1] if isinstance(found, tuple) else found


def _check_request(request: Request) -> None:
    """The same words in a CONNECT are the same destination, and get the same verdict."""
    where = request.destination
    assert where.way is Way.SOCKS5 and request.tunnel
    authority = f"{where.host.wire}:{where.port}".encode("ascii")
    assert parse_authority(authority, default_port=None) == parse_authority(authority, default_port=80)
    head = parse_head(b"CONNECT %b HTTP/1.1\r\nHost: %b\r\n\r\n" % (authority, authority), LIMITS)
    there = head.request.destination
    assert (there.host, there.port) == (where.host, where.port)
    ours, theirs = decide(request, RULES), decide(head.request, RULES)
    assert (ours.allowed, ours.reason, ours.handling) == (theirs.allowed, theirs.reason, theirs.handling)
