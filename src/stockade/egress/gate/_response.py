"""HTTP/1.1 response heads: read as strictly as requests, written again from their parts.

A hostile origin is as able to smuggle as a hostile client: what it sends reaches the client, and the next response on
a kept connection, only as what was understood here (RFC 9112 sections 4 and 6.3).
"""

from __future__ import annotations

import re

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


class ResponseHead(msgspec.Struct, frozen=True):
    """A checked response head. ``length`` is the body's size if ``framing`` is LENGTH, else 0.

    ``headers`` holds what is forwarded, without the framing fields (but with the Content-Length that answers HEAD or
    accompanies 304). ``interim`` is true for 1xx: read another head after it. ``keep_alive`` says whether the
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


def parse_response_head(raw: bytes, limits: HeadLimits, *, method: str) -> ResponseHead:
    """Return the response head in ``raw`` that answers ``method``, or raise Malformed(upstream_malformed, 502).

    101 is refused (no Upgrade was forwarded), 407 too: it would make clients send credentials (case 104).
    """
    line = _STATUS_LINE.match(raw)
    if line is None:
        raise fault("not a status line", upstream=True)
    status, version = int(line[2]), 11 if line[1] == b"1" else 10
    if status in (_SWITCHING, _PROXY_AUTH):
        raise fault(f"status {status} from the upstream", upstream=True)
    special: dict[bytes, list[bytes]] = {b"connection": [], b"transfer-encoding": [], b"content-length": []}
    kept: list[tuple[bytes, bytes]] = []
    dropped: set[bytes] = set()
    for name, value in split_fields(raw, line.end(), limits, upstream=True):
        key = name.lower()
        if key in special:
            special[key].append(value.strip(b" \t"))
        elif key in _DROPPED or key.startswith(_DROPPED_PREFIXES):
            dropped.add(key)
        else:
            kept.append((name, value.strip(b" \t")))
    options = connection_options(special[b"connection"], upstream=True)
    told = body_framing(special[b"transfer-encoding"], special[b"content-length"], version, upstream=True)
    bodiless = status < 200 or status in (_NO_CONTENT, _NOT_MODIFIED) or method == "HEAD"
    framing, length = (Framing.NONE, 0) if bodiless else told or (Framing.UNTIL_CLOSE, 0)
    if not options <= USUAL_OPTIONS:
        kept = [field for field in kept if field[0].lower() not in options]
    if told and told[0] is Framing.LENGTH and bodiless and status >= 200 and status != _NO_CONTENT:
        kept.append((b"Content-Length", b"%d" % told[1]))
    return ResponseHead(
        status,
        _phrase(line[3]),
        tuple(kept),
        framing,
        length,
        version,
        keep_alive=version == 11 and b"close" not in options and framing is not Framing.UNTIL_CLOSE,
        interim=status < 200,
        dropped=tuple(sorted(name.decode("ascii") for name in dropped)),
        size_bytes=len(raw),
    )


def _phrase(raw: bytes | None) -> str:
    """Return the reason phrase if it is plain; nobody may depend on it (RFC 9112 section 4)."""
    return raw.decode("ascii") if raw and _PHRASE.fullmatch(raw) else ""


def render_response_head(head: ResponseHead, *, version: int = 11, keep_alive: bool = True) -> bytes:
    """Return the head for a client that spoke HTTP ``version`` (10 or 11).

    The body follows as ``head.framing`` says: NONE, LENGTH as it is; CHUNKED as chunks again to a 1.1 client and as
    bare data, ended by close, to a 1.0 client; UNTIL_CLOSE as it is, ended by close. ``Connection: close`` is written
    whenever ``keep_alive`` is false or the end is by close. Interim heads are for 1.1 clients only (ValueError).
    """
    if head.interim and version < 11:
        raise ValueError("HTTP/1.0 knows no interim responses")
    parts = [f"HTTP/1.1 {head.status} {head.phrase}\r\n".encode("ascii"), *write_fields(head.headers)]
    if head.framing is Framing.LENGTH:
        parts.append(b"Content-Length: %d\r\n" % head.length)
    elif head.framing is Framing.CHUNKED and version == 11:
        parts.append(b"Transfer-Encoding: chunked\r\n")
    if not head.interim and closes_after(head, version=version, keep_alive=keep_alive):
        parts.append(b"Connection: close\r\n")
    parts.append(b"\r\n")
    return b"".join(parts)


def closes_after(head: ResponseHead, *, version: int, keep_alive: bool) -> bool:
    """Say whether the client's connection ends with this response."""
    by_close = head.framing is Framing.UNTIL_CLOSE or (head.framing is Framing.CHUNKED and version < 11)
    return by_close or not keep_alive
