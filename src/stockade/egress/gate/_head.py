"""What request and response heads share: where a head ends, its fields, its body's framing.

RFC 9112 lets a recipient be lenient in a dozen places, and each leniency has been somebody's request smuggling. Here
there is none: lines end in CRLF, no folding, no space before the colon, no control characters (cases 48, 50-53, 57,
58, 72).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

import msgspec

from stockade.egress.gate._reason import Malformed, Reason, safe_text

Headers = tuple[tuple[bytes, bytes], ...]

TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"  # RFC 9110 section 5.6.2
VALUE = rb"[^\x00-\x08\x0a-\x1f\x7f]*"
_LENGTH = re.compile(rb"0|[1-9][0-9]{0,14}")
_BARE_LF = re.compile(rb"(?<!\r)\n")
_TCHAR = frozenset(b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
_TOKEN = re.compile(TOKEN)
_LINE = re.compile(TOKEN + rb":" + VALUE)
_CONTROLS = bytes(set(range(0x20)) - set(b"\t\r\n")) + b"\x7f"
_SHOWN = 64

HOP_BY_HOP = frozenset(
    # RFC 9110 section 7.6.1; Proxy-* by prefix; http2-settings with Upgrade: h2c (case 60).
    {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"http2-settings"}
)


class Framing(StrEnum):
    """How the body ends (RFC 9112 section 6.3)."""

    NONE = "none"
    LENGTH = "length"
    CHUNKED = "chunked"
    UNTIL_CLOSE = "until_close"


class HeadLimits(msgspec.Struct, frozen=True):
    """Most bytes of a head (start line to blank line) and most header lines (case 72)."""

    header_bytes: int = 65536
    header_count: int = 100


def fault(detail: str, *, upstream: bool, reason: Reason = Reason.MALFORMED_REQUEST, status: int = 400) -> Malformed:
    """Return the error for a head of the client (``reason``, ``status``) or of the upstream (always 502)."""
    if upstream:
        return Malformed(Reason.UPSTREAM_MALFORMED, detail, status=502)
    return Malformed(reason, detail, status=status)


def find_end(buffer: bytes | bytearray, limits: HeadLimits, scanned: int, *, upstream: bool) -> int | None:
    """Return where the head ends, None for "read more"; raise what can be known already."""
    if buffer and buffer[0] not in _TCHAR:
        raise fault("the first byte starts no head", upstream=upstream)
    blank = buffer.find(b"\r\n\r\n", max(scanned - 3, 0))
    if blank < 0 and _BARE_LF.search(buffer, max(scanned - 1, 0)):
        raise fault("bare LF in the head", upstream=upstream)
    if blank + 4 > limits.header_bytes or (blank < 0 and len(buffer) >= limits.header_bytes):
        detail = f"head over {limits.header_bytes} bytes"
        raise fault(detail, upstream=upstream, reason=Reason.HEADER_TOO_LARGE, status=431)
    return None if blank < 0 else blank + 4


KEPT = 0
"""The kind of a field that is forwarded as it is. Positive kinds are told instead, negative ones are told as well."""

Field = tuple[bytes, bytes]


def split_fields(
    raw: bytes,
    start: int,
    limits: HeadLimits,
    kinds: Mapping[bytes, int],
    kind_of: Callable[[bytes], int],
    *,
    upstream: bool,
) -> tuple[list[Field], list[tuple[int, bytes, bytes]]]:
    """Return the header lines of a whole head from ``start`` on: what is kept, and what is told by its kind.

    ``kinds`` knows the usual names in their usual spellings, which need no look at their characters; ``kind_of`` is
    asked for any other, in lower case. Values are trimmed, names that are told in lower case.
    """
    if len(raw) > limits.header_bytes:
        detail = f"head over {limits.header_bytes} bytes"
        raise fault(detail, upstream=upstream, reason=Reason.HEADER_TOO_LARGE, status=431)
    block = raw[start:]
    lines = block.split(b"\r\n")
    ends = len(lines) - 1
    # Every CR and every LF is half of a line's end, and there is no other control character.
    if block[-4:] != b"\r\n\r\n"[-len(block) :] or block.count(b"\r") != ends or block.count(b"\n") != ends:
        raise fault(_bad_line(lines), upstream=upstream)
    if len(block.translate(None, _CONTROLS)) != len(block):
        raise fault(_bad_line(lines), upstream=upstream)
    if ends - 1 > limits.header_count:
        detail = f"over {limits.header_count} header lines"
        raise fault(detail, upstream=upstream, reason=Reason.TOO_MANY_HEADERS, status=431)
    del lines[-2:]
    kept: list[Field] = []
    special: list[tuple[int, bytes, bytes]] = []
    for line in lines:
        name, colon, value = line.partition(b":")
        kind = kinds.get(name)
        if kind is None:
            if not _TOKEN.fullmatch(name):
                raise fault(_bad_line(lines), upstream=upstream)
            kind = kind_of(name.lower())
        if not colon:
            raise fault(_bad_line(lines), upstream=upstream)
        value = value.strip(b" \t")
        if kind <= KEPT:
            kept.append((name, value))
        if kind != KEPT:
            special.append((kind, name.lower(), value))
    return kept, special


def _bad_line(lines: list[bytes]) -> str:
    """Say which line of a head is no header line."""
    for number, line in enumerate(lines, 1):
        if _LINE.fullmatch(line):
            continue
        if not line:
            return "bytes after the blank line" if any(lines[number:]) else "the blank line does not end the head"
        if line[:1] in (b" ", b"\t"):
            return "folded header line"
        return f"not a header line: {safe_text(line, limit=_SHOWN)}"
    return "a head without its end"


def one(values: Sequence[bytes], name: str, *, upstream: bool) -> bytes | None:
    """Return the only value of a header, None without one; two are malformed even if equal (case 51)."""
    if len(values) > 1:
        raise fault(f"{name} twice", upstream=upstream)
    return values[0] if values else None


def body_framing(
    codings: Sequence[bytes], lengths: Sequence[bytes], version: int, *, upstream: bool
) -> tuple[Framing, int] | None:
    """Return what Transfer-Encoding and Content-Length say, None if there is neither (RFC 9112 section 6.3).

    Both at once, either twice, any coding but ``chunked``, and codings in HTTP/1.0 are refused (cases 50-53).
    """
    coding = one(codings, "Transfer-Encoding", upstream=upstream)
    length = one(lengths, "Content-Length", upstream=upstream)
    if coding is not None:
        if length is not None:
            raise fault("Content-Length with Transfer-Encoding", upstream=upstream)
        if version < 11:
            raise fault("Transfer-Encoding in HTTP/1.0", upstream=upstream)
        if coding.lower() != b"chunked":
            detail = f"transfer coding {safe_text(coding, limit=_SHOWN)}"
            raise fault(detail, upstream=upstream, reason=Reason.UNSUPPORTED_CODING, status=501)
        return Framing.CHUNKED, 0
    if length is None:
        return None
    if not _LENGTH.fullmatch(length):
        raise fault(f"not a length: {safe_text(length, limit=_SHOWN)}", upstream=upstream)
    return Framing.LENGTH, int(length)


USUAL_OPTIONS = frozenset({b"close", b"keep-alive"})
"""Options of Connection that name no field."""

_NO_OPTIONS: frozenset[bytes] = frozenset()
_USUAL = {text: frozenset({text.lower()}) for text in (b"keep-alive", b"Keep-Alive", b"close", b"Close")}


def connection_options(values: Sequence[bytes], *, upstream: bool) -> frozenset[bytes]:
    """Return the options of the Connection fields, in lower case (RFC 9110 section 7.6.1)."""
    if not values:
        return _NO_OPTIONS
    if len(values) == 1 and (usual := _USUAL.get(values[0])) is not None:
        return usual
    options = {option.strip(b" \t").lower() for value in values for option in value.split(b",")} - {b""}
    if not all(map(_TOKEN.fullmatch, options)):
        raise fault("bad Connection option", upstream=upstream)
    return frozenset(options)


def write_fields(headers: Headers) -> list[bytes]:
    """Return the header lines, without their ends."""
    return [b": ".join(field) for field in headers]
