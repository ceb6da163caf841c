"""HTTP/1.1 response heads: read as strictly as requests, written again from their parts.

A hostile origin is as able to smuggle as a hostile client: what it sends reaches the client, and the next response on
a kept connection, only as what was understood here (RFC 9112 sections 4 and 6.3).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from stockade.egress.gate._head import (
    HOP_BY_HOP,
    USUAL_OPTIONS,
    VALUE,
    Framing,
    Headers,
    HeadLimits,
    body_framing,
    connection_options,
    fault,
    find_end,
    split_fields,
    write_fields,
)

_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9]{2})(?: (" + VALUE + rb"))?\r\n")
_PHRASE = re.compile(rb"[\x20-\x7e]{0,128}")
_SWITCHING = 101
_NO_CONTENT = 204
_NOT_MODIFIED = 304
_PROXY_AUTH = 407

# Alt-Svc would invite the client to ways that do not exist here.
_DROPPED = HOP_BY_HOP | {b"alt-svc"}
_DROPPED_PREFIXES = (b"proxy-", b"x-stockade-")
_LENGTH, _CHUNKED = Framing.LENGTH, Framing.CHUNKED  # a look-up on an enum's class is slow
_UNTIL_CLOSE = (Framing.UNTIL_CLOSE, 0)
_NOTHING = (Framing.NONE, 0)
_BODILESS = (_NO_CONTENT, _NOT_MODIFIED)
_READ = frozenset({b"connection", b"transfer-encoding", b"content-length"})


def kind_of(key: bytes) -> int:
    """Say whether a field is read here or left out, rather than forwarded."""
    return int(key in _READ or key in _DROPPED or key.startswith(_DROPPED_PREFIXES))


_USUAL = (
    b"accept-ranges access-control-allow-origin age alt-svc cache-control connection content-disposition "
    b"content-encoding content-language content-length content-type date etag expires keep-alive last-modified link "
    b"location pragma server set-cookie strict-transport-security transfer-encoding vary via x-cache "
    b"x-content-type-options x-frame-options"
).split()
KINDS = {spelling: kind_of(name) for name in _USUAL for spelling in (name, name.title())} | {b"ETag": 0}


class ResponseHead(msgspec.Struct, frozen=True):
    """A checked response head. ``length`` is the body's size if ``framing`` is LENGTH, else 0.

    ``headers`` holds what is forwarded, without the framing fields (but with the Content-Length that answers HEAD or
    accompanies 304). ``interim`` is true for 1xx but 101: read another head after it. ``keep_alive`` says whether the
    upstream connection may carry another request after the body.
    """

    status: int
    phrase: str
    headers: Headers
    framing: Framing
    length: int
    version: int
    keep_alive: bool
    interim: bool
    dropped: tuple[str, ...]
    size_bytes: int


def find_response_head(buffer: bytes | bytearray, limits: HeadLimits, *, scanned: int = 0) -> int | None:
    """Like :func:`find_head` for a response; every fault is upstream_malformed with status 502."""
    return find_end(buffer, limits, scanned, upstream=True)


def parse_response_head(raw: bytes, limits: HeadLimits, *, method: str, upgrade: bool = False) -> ResponseHead:
    """Return the response head in ``raw`` that answers ``method``, or raise Malformed(upstream_malformed, 502).

    101 is refused unless ``upgrade`` says that a WebSocket was asked for, and then it must be one (case 60; RFC 6455
    section 4.1); 407 is refused always: it would make clients send credentials (case 104).
    """
    line = _STATUS_LINE.match(raw)
    if line is None:
        raise fault("not a status line", upstream=True)
    status, version = int(line[2]), 11 if line[1] == b"1" else 10
    if status == _PROXY_AUTH or (status == _SWITCHING and not upgrade):
        raise fault(f"status {status} from the upstream", upstream=True)
    kept, told = split_fields(raw, line.end(), limits, KINDS, kind_of, upstream=True)
    special: dict[bytes, list[bytes]] = {}
    for _, key, value in told:
        special.setdefault(key, []).append(value)
    options = connection_options(special.get(b"connection", ()), upstream=True)
    if not options <= USUAL_OPTIONS:
        kept = [field for field in kept if field[0].lower() not in options]
    codings, lengths = special.get(b"transfer-encoding", ()), special.get(b"content-length", ())
    body = body_framing(codings, lengths, version, upstream=True)
    if status == _SWITCHING:
        _check_switch(special.get(b"upgrade", ()), options, body, version)
    if status >= 200 and status not in _BODILESS and method != "HEAD":
        framing, length = body or _UNTIL_CLOSE
    else:
        framing, length = _NOTHING
        if status >= 200 and status != _NO_CONTENT and body and body[0] is _LENGTH:
            kept.append((b"Content-Length", b"%d" % body[1]))
    return ResponseHead(
        status,
        _phrase(line[3]),
        tuple(kept),
        framing,
        length,
        version,
        version == 11 and b"close" not in options and framing is not _UNTIL_CLOSE[0],
        status < 200 and status != _SWITCHING,
        () if special.keys() <= _READ else tuple(sorted(name.decode("ascii") for name in special.keys() - _READ)),
        len(raw),
    )


def _check_switch(
    protocols: Sequence[bytes], options: frozenset[bytes], told: tuple[Framing, int] | None, version: int
) -> None:
    """Refuse a 101 that is no switch to a WebSocket."""
    websocket = len(protocols) == 1 and protocols[0].lower() == b"websocket"
    if version < 11 or told is not None or not websocket or b"upgrade" not in options:
        raise fault("a switch to another protocol than WebSocket", upstream=True)


def _phrase(raw: bytes | None) -> str:
    """Return the reason phrase if it is plain; nobody may depend on it (RFC 9112 section 4)."""
    if raw == b"OK":
        return "OK"
    return raw.decode("ascii") if raw and _PHRASE.fullmatch(raw) else ""


def render_response_head(head: ResponseHead, *, version: int = 11, keep_alive: bool = True) -> bytes:
    """Return the head for a client that spoke HTTP ``version`` (10 or 11).

    The body follows as ``head.framing`` says: NONE, LENGTH as it is; CHUNKED as chunks again to a 1.1 client and as
    bare data, ended by close, to a 1.0 client; UNTIL_CLOSE as it is, ended by close. ``Connection: close`` is written
    whenever ``keep_alive`` is false or the end is by close. Interim heads are for 1.1 clients only (ValueError).
    """
    if head.interim and version < 11:
        raise ValueError("HTTP/1.0 knows no interim responses")
    lines = [f"HTTP/1.1 {head.status} {head.phrase}".encode("ascii"), *write_fields(head.headers)]
    if head.framing is _LENGTH:
        lines.append(b"Content-Length: %d" % head.length)
    elif head.framing is _CHUNKED and version == 11:
        lines.append(b"Transfer-Encoding: chunked")
    if head.status == _SWITCHING:
        lines.append(b"Connection: Upgrade\r\nUpgrade: websocket")
    elif not head.interim and closes_after(head, version=version, keep_alive=keep_alive):
        lines.append(b"Connection: close")
    lines.append(b"\r\n")
    return b"\r\n".join(lines)


def closes_after(head: ResponseHead, *, version: int, keep_alive: bool) -> bool:
    """Say whether the client's connection ends with this response."""
    by_close = head.framing is _UNTIL_CLOSE[0] or (head.framing is _CHUNKED and version < 11)
    return by_close or not keep_alive
