"""HTTP/1.1 request heads of a forward proxy: read strictly, judged, written again from their parts.

What the upstream gets is never what the client sent but what was understood (RFC 9112 section 3; cases 47-53, 57,
58, 60, 64-66, 69, 71, 72, 78): see :mod:`stockade.egress.gate._render`.
"""

from __future__ import annotations

import re
from functools import lru_cache

import msgspec

from stockade.egress.gate._destination import PORTS, Destination, Origin, Request, Way, tunnel_request
from stockade.egress.gate._fields import KINDS, RequestFields, kind_of
from stockade.egress.gate._head import (
    Framing,
    Headers,
    HeadLimits,
    body_framing,
    connection_options,
    find_end,
    one,
    split_fields,
)
from stockade.egress.gate._host import Authority, parse_authority
from stockade.egress.gate._path import checked_query, normal_path
from stockade.egress.gate._reason import Malformed, Reason, safe_text

_METHOD = rb"([A-Z][A-Z0-9_-]{0,31}+)"
# Every part is possessive: no target makes the pattern try twice.
_REQUEST_LINE = re.compile(
    _METHOD + rb" (?:[Hh][Tt][Tt][Pp]([Ss]?)://([^/?#\x00-\x20\x7f-\xff]*+))?+([^?#\x00-\x20\x7f-\xff]*+)"
    rb"(?:\?([^#\x00-\x20\x7f-\xff]*+))?+ HTTP/1\.([01])\r\n"
)
_ANY_LINE = re.compile(_METHOD + rb" ([\x21-\x7e]++) HTTP/1\.[01]\r\n")
_SCHEME = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*:")
_SHOWN = 96
_MISDIRECTED = 421
_NO_NAMES: frozenset[str] = frozenset()
_NOTHING = (Framing.NONE, 0)
_CHUNKED = Framing.CHUNKED  # a look-up on an enum's class is slow
_HTTP = Way.HTTP


class RequestHead(msgspec.Struct, frozen=True):
    """A checked request head.

    ``headers`` holds what is forwarded: no Host, no hop-by-hop, Proxy-* or override fields, no Content-Length or
    Transfer-Encoding (``framing`` and ``length`` say those), no Expect (``expect_continue``: answer CONTINUE once the
    request is allowed). ``dropped`` names what was left out (lower case, safe text); ``claims`` are identities the
    client claims, as safe text: for the record, never believed (case 89). ``version`` is 10 or 11; ``size_bytes`` the
    head's size. ``upgrade`` is the protocol asked for by Upgrade and Connection together, in lower case;
    ``credentials`` names those of ``headers`` that say who is asking, in lower case.
    """

    request: Request
    headers: Headers
    framing: Framing
    length: int
    version: int
    keep_alive: bool
    expect_continue: bool
    dropped: tuple[str, ...]
    claims: tuple[str, ...]
    size_bytes: int
    upgrade: bytes | None = None
    credentials: frozenset[str] = _NO_NAMES

    @property
    def body(self) -> bool:
        """Whether a body of at least one byte is announced."""
        return self.length > 0 or self.framing is _CHUNKED


def find_head(buffer: bytes | bytearray, limits: HeadLimits, *, scanned: int = 0) -> int | None:
    """Return where the head ends (after the blank line), or None for "read more".

    ``scanned`` is how much of ``buffer`` an earlier call saw. Raises Malformed as soon as the bytes cannot become a
    head: over ``header_bytes`` (431), a bare LF, a first byte that starts no method, a first line that is none of a
    request. Who speaks another protocol, such as SSH, says one line and waits.
    """
    end = find_end(buffer, limits, scanned, upstream=False)
    if end is None:
        after = buffer.find(b"\r\n") + 2
        if after > max(scanned, 1):  # the first line is whole, and was not before
            line = bytes(buffer[:after])
            if _REQUEST_LINE.match(line) is None:
                raise _bad_line(line)
    return end


def parse_head(raw: bytes, limits: HeadLimits, origin: Origin | None = None) -> RequestHead:
    """Return the request head in ``raw`` (exactly one, with its blank line), or raise Malformed.

    Without ``origin`` the target is in absolute-form with ``http`` or, for CONNECT, in authority-form; a Host field
    must be there in HTTP/1.1 and say the same (case 47). With ``origin`` the connection is bound already: the target
    is in origin-form, and Host (and the target, where it is absolute all the same) must name the origin, else
    host_mismatch (421, case 78).
    """
    line = _REQUEST_LINE.match(raw)
    if line is None:
        raise _bad_line(raw)
    version = 11 if line[6] == b"1" else 10
    kept, told = split_fields(raw, line.end(), limits, KINDS, kind_of, upstream=False)
    fields = RequestFields(told)
    special = fields.special
    host = one(special[b"host"], "Host", upstream=False) if b"host" in special else None
    request = _plain(line, host, version) if origin is None else _bound(line, host, origin)
    framing, length = _NOTHING
    if b"content-length" in special or b"transfer-encoding" in special:
        framing, length = _framing(special, version, request)
    options = connection_options(special.get(b"connection", ()), upstream=False)
    return RequestHead(
        request,
        fields.without(kept, options),
        framing,
        length,
        version,
        version == 11 and b"close" not in options,
        b"expect" in special and _expects(special[b"expect"]) and version == 11,
        fields.left_out if fields.dropped else (),
        tuple(fields.claims),
        len(raw),
        _upgrade(special[b"upgrade"]) if b"upgrade" in special and b"upgrade" in options else None,
        frozenset(name.decode("ascii") for name in fields.credentials) if fields.credentials else _NO_NAMES,
    )


def _plain(line: re.Match[bytes], host: bytes | None, version: int) -> Request:
    """Return the request of a connection that is bound to nothing: absolute-form, or CONNECT."""
    name, secure, authority, path, query, _ = line.groups()
    if name == b"CONNECT":
        return _connect(line, host, version)
    if authority is None or secure:
        raise _bad_target(line)
    destination = _destination(authority)
    if host != authority:  # byte for byte the same is the common case, and it is parsed already
        _check_host(host, version, Authority(destination.host, destination.port), default_port=80)
    return Request(destination, name.decode("ascii"), *_path_and_query(path, query))


def _connect(line: re.Match[bytes], host: bytes | None, version: int) -> Request:
    target = line[4]
    if line[3] is not None or line[5] is not None:
        raise _malformed("not an authority", line[0])
    authority = parse_authority(target, default_port=None)
    if host != target:
        # Old clients leave the port out of Host; the target's is the one that counts.
        _check_host(host, version, authority, default_port=authority.port)
    return tunnel_request(Way.CONNECT, authority.host, authority.port)


def _bound(line: re.Match[bytes], host: bytes | None, origin: Origin) -> Request:
    """Return the request of a connection that is bound to ``origin``."""
    name, secure, authority, path, query, _ = line.groups()
    if name == b"CONNECT":
        raise _malformed("CONNECT inside a tunnel", b"")
    if authority is None:
        if not path.startswith(b"/"):
            raise _bad_target(line)
    elif (b"https" if secure else b"http") != origin.scheme.encode() or not _names(authority, origin):
        raise _misdirected("the target is not this connection's", authority)
    if host is None:
        raise _misdirected("no Host", b"")
    if host != origin.authority and not _names(host, origin):
        raise _misdirected("Host is not this connection's", host)
    return Request(origin.destination, name.decode("ascii"), *_path_and_query(path, query), origin.scheme)


def _names(authority: bytes, origin: Origin) -> bool:
    """Say whether an authority is the origin's; without a port it means that of the scheme."""
    return _authority(authority, PORTS[origin.scheme]) == Authority(origin.host, origin.port)


@lru_cache(maxsize=1024)
def _authority(raw: bytes, default_port: int) -> Authority:
    """Parse an authority; clients say the same few over and over. What is malformed is not remembered."""
    return parse_authority(raw, default_port=default_port)


@lru_cache(maxsize=1024)
def _destination(authority: bytes) -> Destination:
    """Return where an absolute target leads, remembered likewise."""
    parsed = parse_authority(authority, default_port=80)
    return Destination(_HTTP, parsed.host, parsed.port)


def _path_and_query(path: bytes, query: bytes | None) -> tuple[str, str | None]:
    return normal_path(path.decode("ascii")), None if query is None else checked_query(query.decode("ascii"))


def _check_host(host: bytes | None, version: int, target: Authority, *, default_port: int) -> None:
    """Refuse a Host that is missing in HTTP/1.1, or not the target (cases 47, 48)."""
    if host is None:
        if version == 11:
            raise _malformed("no Host", b"")
    elif _authority(host, default_port) != target:
        raise _malformed("Host is not the target", host)


def _framing(special: dict[bytes, list[bytes]], version: int, request: Request) -> tuple[Framing, int]:
    codings, lengths = special.get(b"transfer-encoding", ()), special.get(b"content-length", ())
    framing = body_framing(codings, lengths, version, upstream=False) or _NOTHING
    if request.tunnel:  # RFC 9110 section 9.3.6: CONNECT has no body; a length of 0 is harmless
        if framing != (Framing.LENGTH, 0):
            raise _malformed("CONNECT with a body", b"")
        return _NOTHING
    return framing


def _expects(values: list[bytes]) -> bool:
    value = one(values, "Expect", upstream=False)
    if value is None or value.lower() != b"100-continue":
        raise Malformed(Reason.MALFORMED_REQUEST, "unknown expectation", status=417)
    return True


def _upgrade(values: list[bytes]) -> bytes | None:
    """Return the protocol asked for; of several the one that matters, so that no list hides it."""
    protocols = [token.strip(b" \t").lower() for value in values for token in value.split(b",")]
    if b"websocket" in protocols:
        return b"websocket"
    return next(filter(None, protocols), None)


def _bad_line(raw: bytes) -> Malformed:
    """Say what is wrong with a request line that is none."""
    line = _ANY_LINE.match(raw)
    if line is None:
        return _malformed("not a request line", raw.partition(b"\n")[0])
    return Malformed(Reason.MALFORMED_PATH, f"fragment in the target: {safe_text(line[2], limit=_SHOWN)}")


def _bad_target(line: re.Match[bytes]) -> Malformed:
    target = line[0].split(b" ")[1]
    scheme = _SCHEME.match(target)
    if scheme and scheme[0].lower() != b"http:":
        # https:// here would go out in clear (case 64); ftp:, ws:, unix: and the rest: case 65.
        return Malformed(Reason.UNSUPPORTED_SCHEME, f"use http:// or CONNECT: {safe_text(target, limit=_SHOWN)}")
    return _malformed("a target that has no place here", target)


def _misdirected(what: str, shown: bytes) -> Malformed:
    detail = f"{what}: {safe_text(shown, limit=_SHOWN)}" if shown else what
    return Malformed(Reason.HOST_MISMATCH, detail, status=_MISDIRECTED)


def _malformed(what: str, shown: bytes) -> Malformed:
    return Malformed(Reason.MALFORMED_REQUEST, f"{what}: {safe_text(shown, limit=_SHOWN)}" if shown else what)
