r"""One event as bytes: the canonical form that is hashed, and the line that lies on disk.

The canonical form is RFC 8785: keys sorted, no spaces, shortest escapes, UTF-8. For events, which
have ASCII keys and neither floats nor big integers, msgspec's deterministic encoding *is* that form
(a property test holds the two against each other). ``hash`` is the SHA-256 of the previous line's
hash, as 64 ASCII digits, followed by the canonical form of the event without ``hash``.

The line is that same form with DEL and everything beyond ASCII escaped as ``\uXXXX``, and with
``hash`` put last. So a record shown by ``cat`` can move no cursor and reorder no text, and since
there is exactly one line for an event, a verifier can demand it byte for byte.
"""

from __future__ import annotations

import os
import re
from hashlib import sha256

import msgspec

from stockade.events._schema import Event

GENESIS = "0" * 64
"""The ``prev`` of a chain's first event."""

LINE_LIMIT_BYTES = 1 << 20
"""Longest line, with its newline."""

canonical = msgspec.json.Encoder(order="deterministic").encode
"""Return the RFC 8785 form of an event; raises ``UnicodeEncodeError`` on a lone surrogate."""

canonical_of_sorted = msgspec.json.Encoder().encode
"""Return the same, in half the time, for a dict whose keys are in order already."""

_decode = msgspec.json.Decoder(dict[str, int | str | bool | list[str] | None]).decode

_VARIANT = {digit: "89ab"[int(digit, 16) & 3] for digit in "0123456789abcdef"}
"""A digit of chance with the two bits of the variant set (RFC 9562 section 4.1)."""

_NOT_PLAIN = re.compile("[\x7f-\U0010ffff]")


def chain_hash(prev: str, body: bytes) -> str:
    """Return the hash of the event with canonical form ``body`` (without ``hash``) that follows ``prev``.

    ``prev`` is ASCII where a writer left it; a verifier passes whatever an editor put there, which must end as a wrong
    hash and not as an exception.
    """
    return sha256(prev.encode("utf-8") + body).hexdigest()


def to_line(body: bytes, digest: str) -> bytes:
    """Return the line for the event with canonical form ``body``; ``digest`` is its hash."""
    if not body.isascii() or b"\x7f" in body:
        body = _NOT_PLAIN.sub(_escape, body.decode("utf-8")).encode("ascii")
    return b'%b,"hash":"%b"}\n' % (body[:-1], digest.encode("ascii"))


def _escape(match: re.Match[str]) -> str:
    point = ord(match[0])
    if point < 0x10000:
        return f"\\u{point:04x}"
    point -= 0x10000
    return f"\\u{0xD800 + (point >> 10):04x}\\u{0xDC00 + (point & 0x3FF):04x}"


class _Chance:
    """Random digits, asked of the kernel for many IDs at a time. They are no secrets; a child must not repeat them."""

    def __init__(self) -> None:
        self._digits = ""
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._digits = ""

    def take(self) -> str:
        if not self._digits:
            self._digits = os.urandom(_ID_BYTES * _IDS_AT_A_TIME).hex()
        taken, self._digits = self._digits[: 2 * _ID_BYTES], self._digits[2 * _ID_BYTES :]
        return taken


_ID_BYTES, _IDS_AT_A_TIME = 10, 64
_CHANCE = _Chance()


def uuid7(time_ns: int) -> str:
    """Return a UUIDv7 (RFC 9562 §5.7): 48 bits of Unix milliseconds, then 74 bits of chance."""
    stamp, chance = f"{time_ns // 1_000_000 & 0xFFFF_FFFF_FFFF:012x}", _CHANCE.take()
    return f"{stamp[:8]}-{stamp[8:]}-7{chance[1:4]}-{_VARIANT[chance[4]]}{chance[5:8]}-{chance[8:]}"


def decode(line: bytes) -> Event:
    """Return the object in a line; raises ``ValueError`` for anything but a flat JSON object without fractions.

    Only the JSON grammar and the types are checked here, nothing that an event must have.
    """
    return _decode(line)
