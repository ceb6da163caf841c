"""What makes two requests the same for the store, and which answers may be kept.

A key is text, one part a line, and says all that was asked; nothing is left to a hash, so an index entry can be read
back, compared whole and named to a person. The only things left out are the way in, the order and case of header
names, and, in a recording, the fields of :data:`NEUTRAL`, which change from run to run and not what is answered.

An answer that is shared in live mode is given to rollouts that do not trust each other. There *every* header that went
out is part of the key: a field that the origin obeys and the cache does not look at is how caches are poisoned, so here
there is no such field.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

import msgspec

from stockade.egress.gate import Framing, Headers, Mode, Request, ResponseHead, safe_text

EMPTY_SHA256: Final = hashlib.sha256(b"").digest()
"""The digest of no body: a request without one and one of length 0 ask the same."""

NEUTRAL: Final = frozenset(
    {
        b"b3",
        b"baggage",
        b"cache-control",
        b"date",
        b"dnt",
        b"pragma",
        b"priority",
        b"save-data",
        b"sec-gpc",
        b"sentry-trace",
        b"traceparent",
        b"tracestate",
        b"upgrade-insecure-requests",
        b"x-amzn-trace-id",
        b"x-cloud-trace-context",
        b"x-correlation-id",
        b"x-request-id",
    }
)
"""Fields that no recording's key has: tracing, and hints about caching and taste. Every unknown field is in the key."""

_NEUTRAL_PREFIXES: Final = (b"sec-ch-", b"sec-fetch-", b"x-b3-", b"x-stainless-")
_PLAIN_NAMES: Final = frozenset(
    {b"accept", b"accept-encoding", b"accept-language", b"content-type", b"git-protocol", b"range", b"user-agent"}
)
_PLAIN = re.compile(rb"[\x20-\x7e]{0,256}")
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VISIBLE = re.compile(r"[\x21-\x7e]*", re.ASCII)
_METHOD = re.compile(r"[A-Z][A-Z0-9_-]{0,31}", re.ASCII)
_KEY = re.compile(
    r"stockade-key 1 (live|record)\n"
    r"([A-Z][A-Z0-9_-]{0,31}) (https?) ([1-9][0-9]{0,4}) ([0-9a-z.:-]{1,255})\n"
    r"(/[\x21-\x7e]*|\*)\n"
    r"(-|\?[\x21-\x7e]*)\n"
    r"([0-9a-f]{64})\n"
    r"(-|=[\x21-\x7e]{1,64})\n"
    r"((?:[!#$%&'*+.^_`|~0-9a-z-]+:(?:=[\x20-\x7e]{0,256}|#[0-9a-f]{64})\n)*)",
    re.ASCII,
)
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}

_CREDENTIALS: Final = frozenset(
    {b"api-key", b"authorization", b"cookie", b"private-token", b"x-api-key", b"x-auth-token", b"x-goog-api-key"}
)
# A failure that passes would be replayed for ever, since the first answer wins; the same request succeeds on retry.
_PASSING: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_WHOLE: Final = frozenset({Framing.LENGTH, Framing.CHUNKED})
_PERSONAL: Final = frozenset({b"set-cookie", b"content-range", b"clear-site-data"})
_SWITCHING: Final = 101


class Asked(msgspec.Struct, frozen=True):
    """What a key says.

    ``body`` is the hex digest of the request's body; ``headers`` are (name, ``=value``), or (name, ``#digest``) of a
    value that is no plain text or may be a credential.
    """

    mode: Mode
    method: str
    scheme: str
    host: str
    port: int
    path: str
    query: str | None
    body: str
    credential: str | None
    headers: tuple[tuple[str, str], ...]

    @property
    def url(self) -> str:
        """The URL as a person writes it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == _DEFAULT_PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.path}{'' if self.query is None else f'?{self.query}'}"


def key(
    request: Request, headers: Headers, body_sha256: bytes | None = None, *, mode: Mode, credential: str | None = None
) -> bytes:
    """Return the key of ``request`` as it goes out.

    ``headers`` are those of the client that are forwarded, ``body_sha256`` the 32 bytes of the body's digest (None:
    no body), ``credential`` the name of what a rule adds. Credentials of the client are in it as digests only. Raises
    ValueError for a tunnel and for parts that the gate would not have let through.
    """
    if request.tunnel:
        raise ValueError("a tunnel has no key")
    where = request.destination
    digest = EMPTY_SHA256 if body_sha256 is None else body_sha256
    if len(digest) != len(EMPTY_SHA256):
        raise ValueError("not a SHA-256 digest")
    if not (_METHOD.fullmatch(request.method) and _VISIBLE.fullmatch(f"{request.path}{request.query or ''}")):
        raise ValueError("not a request of the gate")
    live = mode is Mode.LIVE
    lines = [
        f"stockade-key 1 {'live' if live else 'record'}",
        f"{request.method} {request.scheme} {where.port} {where.host.text}",
        request.path,
        "-" if request.query is None else f"?{request.query}",
        digest.hex(),
        "-" if credential is None else f"={credential}",
        # Lines of one name keep their order, which means something (RFC 9110 section 5.3); names have none.
        *sorted(_lines(headers, live=live), key=_name_of),
        "",
    ]
    return "\n".join(lines).encode("ascii")


def _name_of(line: str) -> str:
    return line.partition(":")[0]


def _lines(headers: Headers, *, live: bool) -> list[str]:
    lines = []
    for name, value in headers:
        lower = name.lower()
        if not _NAME.fullmatch(name):
            raise ValueError("not the name of a header")
        if not live:
            if lower in NEUTRAL or lower.startswith(_NEUTRAL_PREFIXES):
                continue
            if lower == b"user-agent":
                # Some sites answer curl and a browser differently, but none should answer by the version.
                value = value.partition(b"/")[0].strip().lower()  # noqa: PLW2901
        lines.append(f"{lower.decode('ascii')}:{_shown(lower, value)}")
    return lines


def _shown(name: bytes, value: bytes) -> str:
    if name in _PLAIN_NAMES and _PLAIN.fullmatch(value):
        return f"={value.decode('ascii')}"
    return f"#{hashlib.sha256(value).hexdigest()}"


def parse_key(raw: bytes) -> Asked:
    """Return what a key says, or raise ValueError."""
    match = _KEY.fullmatch(raw.decode("ascii"))  # UnicodeDecodeError is a ValueError
    if match is None:
        raise ValueError("not a key")
    mode, method, scheme, port, host, path, query, body, credential, rest = match.groups()
    headers = tuple((name, text) for name, _, text in (line.partition(":") for line in rest.splitlines()))
    return Asked(
        Mode(mode),
        method,
        scheme,
        host,
        int(port),
        path,
        None if query == "-" else query[1:],
        body,
        None if credential == "-" else credential[1:],
        headers,
    )


def missing(raw: bytes) -> str:
    """Return the text that names what was not recorded, for a denial: printable ASCII of at most 200 characters.

    The URL comes first, then what else may be why nothing fits: a body, a range, the fields that were sent.
    """
    asked = parse_key(raw)
    told = [f"{name}{text if text[0] == '=' and len(text) > 1 else ''}" for name, text in asked.headers]
    if asked.body != EMPTY_SHA256.hex():
        told.insert(0, f"body sha256:{asked.body[:12]}")
    more = f" ({', '.join(told)})" if told else ""
    return safe_text(f"{asked.method} {asked.url}{more}")


def shareable(request: Request, headers: Headers, credential: str | None = None) -> bool:
    """Say whether this request may be answered in live mode with what another rollout fetched.

    Only a plain GET of the whole thing, without anybody's credentials, and without the wish for a fresh answer
    (RFC 9111 sections 3.5 and 5.2.1).
    """
    if request.method != "GET" or credential is not None:
        return False
    for name, value in headers:
        lower = name.lower()
        if lower in _CREDENTIALS or lower == b"range" or lower.startswith((b"if-", b"sec-websocket-")):
            return False
        if lower in (b"cache-control", b"pragma") and _directives(value) & {b"no-cache", b"no-store"}:
            return False
    return True


def storable(
    request: Request, headers: Headers, response: ResponseHead, mode: Mode, credential: str | None = None
) -> bool:
    """Say whether ``response``, an answer of the upstream to ``request``, may be kept.

    Live: a whole 200 to a :func:`shareable` request, meant for everybody and with an end that cannot be mistaken for a
    cut. Record: everything that is an answer (also 3xx and 4xx, with its cookies), but no failure that passes by
    itself. Answers of the proxy itself never come here.
    """
    if request.tunnel or response.interim or response.status == _SWITCHING:
        return False
    if mode is Mode.RECORD:
        return response.status not in _PASSING
    if mode is not Mode.LIVE or response.status != 200 or response.framing not in _WHOLE:
        return False
    for name, value in response.headers:
        lower = name.lower()
        if lower in _PERSONAL or (lower == b"vary" and b"*" in value):
            return False
        if lower == b"cache-control" and _directives(value) & {b"no-store", b"private"}:
            return False
    return shareable(request, headers, credential)


def _directives(value: bytes) -> set[bytes]:
    return {part.partition(b"=")[0].strip().lower() for part in value.split(b",")}
