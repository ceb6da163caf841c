"""HTTP/1.1 request heads of a forward proxy: read strictly, judged, written again from their parts.

What the upstream gets is never what the client sent but what was understood (RFC 9112 section 3; cases 47-53, 57,
58, 60, 64-66, 69, 71, 72): origin-form, Host rebuilt from the target, framing rebuilt, hop-by-hop fields gone.
``Via`` is not added: it would tell every upstream that the client is a sandbox.
"""

from __future__ import annotations

import re
from enum import StrEnum

import msgspec

from stockade.egress.gate._head import (
    HOP_BY_HOP,
    USUAL_OPTIONS,
    Framing,
    Headers,
    HeadLimits,
    body_framing,
    connection_options,
    find_end,
    one,
    split_fields,
    write_fields,
)
from stockade.egress.gate._host import Authority, Host, parse_authority
from stockade.egress.gate._path import checked_query, normal_path
from stockade.egress.gate._reason import Malformed, Reason, safe_text

_HTTP_PORT = 80
_REQUEST_LINE = re.compile(rb"([A-Z][A-Z0-9_-]{0,31}) ([\x21-\x7e]+) HTTP/1\.([01])\r\n")
_ABSOLUTE = re.compile(rb"[Hh][Tt][Tt][Pp]://([^/?#]*)([^?#]*)(?:\?([^#]*))?")
_SCHEME = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*:")
_SHOWN = 96

# Method and URL overrides that frameworks and gateways obey (case 69; X-Original-URL: CVE-2018-14773), and fields
# that only a proxy may write: with any of them the upstream would do something else than was judged.
_DROPPED = HOP_BY_HOP | {
    b"x-http-method-override",
    b"x-http-method",
    b"x-method-override",
    b"x-original-url",
    b"x-original-host",
    b"x-rewrite-url",
    b"x-host",
    b"forwarded",
    b"x-upstream-https-proxy",
    b"x-rollout-id",
}
_DROPPED_PREFIXES = (b"proxy-", b"x-forwarded-", b"x-stockade-")
_READ = frozenset({b"host", b"content-length", b"expect"})
_SPECIAL = _DROPPED | _READ
# Names that need no further question, so that the usual request costs one look-up per line.
_COMMON = frozenset(
    {
        b"accept",
        b"accept-encoding",
        b"accept-language",
        b"authorization",
        b"cache-control",
        b"content-type",
        b"cookie",
        b"if-modified-since",
        b"if-none-match",
        b"range",
        b"user-agent",
    }
)
_CLAIMS = (b"x-rollout-id", b"x-stockade-")


class Way(StrEnum):
    """How the request came in."""

    HTTP = "http"
    CONNECT = "connect"


class Destination(msgspec.Struct, frozen=True):
    """The one canonical destination that rules, resolver, record, Host and SNI all read."""

    way: Way
    host: Host
    port: int


class Request(msgspec.Struct, frozen=True):
    """What is decided on. ``path`` is in normal form and ``query`` without ``?`` (None: no ``?``).

    For CONNECT ``method`` is ``"CONNECT"``, ``path`` is ``""`` and ``query`` None.
    """

    destination: Destination
    method: str
    path: str
    query: str | None = None


class RequestHead(msgspec.Struct, frozen=True):
    """A checked request head.

    ``headers`` holds what is forwarded: no Host, no hop-by-hop, Proxy-* or override fields, no Content-Length or
    Transfer-Encoding (``framing`` and ``length`` say those), no Expect (``expect_continue``: answer CONTINUE once the
    request is allowed). ``dropped`` names what was left out (lower case, safe text); ``claims`` are identities the
    client claims, as safe text: for the record, never believed (case 89). ``version`` is 10 or 11; ``size_bytes`` the
    head's size.
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


def find_head(buffer: bytes | bytearray, limits: HeadLimits, *, scanned: int = 0) -> int | None:
    """Return where the head ends (after the blank line), or None for "read more".

    ``scanned`` is how much of ``buffer`` an earlier call saw. Raises Malformed as soon as the bytes cannot become a
    head: over ``header_bytes`` (431), a bare LF, a first byte that starts no method.
    """
    return find_end(buffer, limits, scanned, upstream=False)


def parse_head(raw: bytes, limits: HeadLimits) -> RequestHead:
    """Return the request head in ``raw`` (exactly one, with its blank line), or raise Malformed.

    The target is in absolute-form with ``http`` or, for CONNECT, in authority-form; a Host field must be there in
    HTTP/1.1 and say the same (case 47).
    """
    line = _REQUEST_LINE.match(raw)
    if line is None:
        raise _malformed("not a request line", raw.partition(b"\n")[0])
    method = line[1].decode("ascii")
    version = 11 if line[3] == b"1" else 10
    request, authority = _connect(line[2]) if method == "CONNECT" else _absolute(method, line[2])
    fields = _Fields(split_fields(raw, line.end(), limits, upstream=False))
    _check_host(fields, authority, request.destination, version)
    framing = body_framing(fields.all(b"transfer-encoding"), fields.all(b"content-length"), version, upstream=False)
    if framing not in (None, (Framing.LENGTH, 0)) and method == "CONNECT":  # RFC 9110 section 9.3.6
        raise _malformed("CONNECT with a body", b"")
    options = connection_options(fields.all(b"connection"), upstream=False)
    keep_alive = version == 11 and b"close" not in options
    expect_continue = _expects(fields) and version == 11
    kind, length = framing or (Framing.NONE, 0)
    return RequestHead(
        request,
        fields.kept(options),
        kind,
        length,
        version,
        keep_alive,
        expect_continue,
        tuple(sorted(fields.dropped)),
        tuple(fields.claims),
        len(raw),
    )


class _Fields:
    """Header lines sorted into those that are forwarded, read here, and dropped."""

    __slots__ = ("_kept", "_special", "claims", "dropped")

    def __init__(self, fields: list[tuple[bytes, bytes]]) -> None:
        self._kept: list[tuple[bytes, bytes]] = []
        self._special: dict[bytes, list[bytes]] = {}
        self.dropped: set[str] = set()
        self.claims: list[str] = []
        for name, value in fields:
            key = name.lower()
            if key in _COMMON:
                self._kept.append((name, value.strip(b" \t")))
            elif key in _SPECIAL:
                self._special.setdefault(key, []).append(value.strip(b" \t"))
                if key in _DROPPED:
                    self._drop(key, value)
            elif (b"_" in key and self._is_disguised(key)) or key.startswith(_DROPPED_PREFIXES):
                self._drop(key, value)
            else:
                self._kept.append((name, value.strip(b" \t")))

    @staticmethod
    def _is_disguised(key: bytes) -> bool:
        """Say whether CGI and WSGI, which read ``_`` as ``-``, would take it for a special field."""
        dashed = key.replace(b"_", b"-")
        return dashed in _SPECIAL or dashed.startswith(_DROPPED_PREFIXES)

    def _drop(self, key: bytes, value: bytes) -> None:
        self.dropped.add(key[:_SHOWN].decode("ascii"))
        if key.startswith(_CLAIMS):
            self.claims.append(safe_text(key + b": " + value.strip(b" \t")))
        elif key == b"proxy-authorization":  # credentials are no text for a record
            self.claims.append("proxy-authorization")

    def all(self, key: bytes) -> list[bytes]:
        return self._special.get(key, [])

    def kept(self, options: frozenset[bytes]) -> Headers:
        """Return what is forwarded: what Connection names is for this hop only (case 71)."""
        if options <= USUAL_OPTIONS:
            return tuple(self._kept)
        self.dropped.update(name[:_SHOWN].lower().decode("ascii") for name, _ in self._kept if name.lower() in options)
        return tuple(field for field in self._kept if field[0].lower() not in options)


def _connect(target: bytes) -> tuple[Request, bytes]:
    authority = parse_authority(target, default_port=None)
    return Request(Destination(Way.CONNECT, authority.host, authority.port), "CONNECT", ""), target


def _absolute(method: str, target: bytes) -> tuple[Request, bytes]:
    match = _ABSOLUTE.fullmatch(target)
    if match is None:
        raise _bad_target(target)
    authority = parse_authority(match[1], default_port=_HTTP_PORT)
    path = normal_path(match[2].decode("ascii"))
    query = None if match[3] is None else checked_query(match[3].decode("ascii"))
    return Request(Destination(Way.HTTP, authority.host, authority.port), method, path, query), match[1]


def _bad_target(target: bytes) -> Malformed:
    shown = safe_text(target, limit=_SHOWN)
    if b"#" in target:
        return Malformed(Reason.MALFORMED_PATH, f"fragment in the target: {shown}")
    scheme = _SCHEME.match(target)
    if scheme and scheme[0].lower() != b"http:":
        # https:// here would go out in clear (case 64); ftp:, ws:, unix: and the rest: case 65.
        return Malformed(Reason.UNSUPPORTED_SCHEME, f"use http:// or CONNECT: {shown}")
    return _malformed("not an absolute target", target)


def _check_host(fields: _Fields, authority: bytes, destination: Destination, version: int) -> None:
    """Refuse a Host that is missing in HTTP/1.1, given twice, or not the target (cases 47, 48)."""
    host = one(fields.all(b"host"), "Host", upstream=False)
    if host is None:
        if version == 11:
            raise _malformed("no Host", b"")
        return
    # Byte for byte the authority that was parsed already is the common case.
    # Old clients leave the port out of Host in CONNECT; the target's is the one that counts.
    if host == authority:
        return
    default = _HTTP_PORT if destination.way is Way.HTTP else destination.port
    if parse_authority(host, default_port=default) != Authority(destination.host, destination.port):
        raise _malformed("Host is not the target", host)


def _expects(fields: _Fields) -> bool:
    value = one(fields.all(b"expect"), "Expect", upstream=False)
    if value is None:
        return False
    if value.lower() != b"100-continue":
        raise Malformed(Reason.MALFORMED_REQUEST, "unknown expectation", status=417)
    return True


def render_request_head(head: RequestHead, *, close: bool = False) -> bytes:
    """Return the head as the upstream gets it: origin-form, Host rebuilt, framing rebuilt.

    ``close`` adds ``Connection: close``. Raises ValueError for CONNECT: it is not forwarded.
    """
    request, where = head.request, head.request.destination
    if where.way is not Way.HTTP:
        raise ValueError("CONNECT is answered, not forwarded")
    query = "" if request.query is None else f"?{request.query}"
    port = "" if where.port == _HTTP_PORT else f":{where.port}"
    start = f"{request.method} {request.path}{query} HTTP/1.1\r\nHost: {where.host.wire}{port}\r\n"
    parts = [start.encode("ascii"), *write_fields(head.headers)]
    if head.framing is Framing.CHUNKED:
        parts.append(b"Transfer-Encoding: chunked\r\n")
    elif head.framing is Framing.LENGTH:
        parts.append(b"Content-Length: %d\r\n" % head.length)
    parts.append(b"Connection: close\r\n\r\n" if close else b"\r\n")
    return b"".join(parts)


def _malformed(what: str, shown: bytes) -> Malformed:
    return Malformed(Reason.MALFORMED_REQUEST, f"{what}: {safe_text(shown, limit=_SHOWN)}" if shown else what)
