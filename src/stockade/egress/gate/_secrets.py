"""Known secrets on their way out: found in the clear and in the encodings that tools use by themselves (case 99).

No scanner finds what somebody takes pains to hide; this one is for the accident, and for the lazy thief.
"""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from stockade.egress.gate._request import RequestHead
    from stockade.egress.gate._rule import Secret

SECRET_MIN = 8
"""Fewest bytes of a secret: what is shorter is found everywhere."""
_CORE = 64
_ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})")
_UNESCAPED = re.compile(rb"%[0-9A-Fa-f]?\Z")
# Everything that encoders change without meaning is made equal: case, the two alphabets of base64, line breaks and
# blanks in it, the backslashes of JSON.
_FOLD = bytes(range(256)).lower().translate(bytes.maketrans(b"-_", b"+/"))
_GONE = b" \t\r\n\\"


class Scanner:
    """Looks for secrets in streams of bytes; immutable, shared by any number of streams.

    Each secret is looked for as it is, in base64 (also in the middle of something longer), in hex and
    percent-encoded. Of a secret over 64 bytes the middle 64 are looked for. Raises ValueError for one under
    :data:`SECRET_MIN` bytes.
    """

    __slots__ = ("_gram", "_grams", "_needles", "_step", "tail")

    def __init__(self, secrets: Iterable[Secret]) -> None:
        self._needles: dict[bytes, str] = {}
        for secret in secrets:
            raw = secret.value.encode("utf-8")
            needles = tuple(_forms(raw))
            if min(map(len, needles)) < SECRET_MIN:
                raise ValueError(f"the secret {secret.name!r} has fewer than {SECRET_MIN} bytes besides blanks")
            for needle in needles:
                self._needles.setdefault(needle, secret.name)
        shortest = min(map(len, self._needles), default=SECRET_MIN)
        # Any needle in a text holds one whole gram at a place that is looked at: every ``step`` bytes.
        self._gram = (shortest + 1) // 2
        self._step = shortest - self._gram + 1
        self._grams = frozenset(
            needle[at : at + self._gram] for needle in self._needles for at in range(len(needle) - self._gram + 1)
        )
        self.tail = max(map(len, self._needles), default=1) - 1
        """Bytes of a stream that a needle may have begun in."""

    def start(self) -> Scan:
        """Begin with a new stream."""
        return Scan(self)

    def scan(self, head: RequestHead) -> str | None:
        """Return the name of a secret in a head's host, target or fields, None if there is none.

        Scan what the client sent, before any credential is added: that one may go out.
        """
        request = head.request
        target = f"{request.destination.host.text}\n{request.path}\n{request.query or ''}\n".encode()
        return self.start().feed(target + b"\n".join(map(b":".join, head.headers)))

    def find(self, text: bytes) -> str | None:
        """Return the name of a secret in folded ``text``, None if there is none."""
        gram = self._gram
        if self._grams.isdisjoint([text[at : at + gram] for at in range(0, len(text) - gram + 1, self._step)]):
            return None
        return next((name for needle, name in self._needles.items() if needle in text), None)


class Scan:
    """One stream: what was cut in two by its pieces is found when the last piece comes."""

    __slots__ = ("_carry", "_scanner", "_tail")

    def __init__(self, scanner: Scanner) -> None:
        self._scanner = scanner
        self._tail = b""
        self._carry = b""

    def feed(self, piece: bytes | bytearray | memoryview) -> str | None:
        """Return the name of a secret that ends in this piece, None if there is none."""
        scanner = self._scanner
        if not scanner.tail:
            return None
        data = self._carry + bytes(piece)
        self._carry = b""
        if b"%" in data:
            unfinished = _UNESCAPED.search(data, max(len(data) - 2, 0))
            if unfinished:
                data, self._carry = data[: unfinished.start()], unfinished[0]
            data = _ESCAPE.sub(_decoded, data)
        text = self._tail + data.translate(_FOLD, _GONE)
        self._tail = text[-scanner.tail :]
        return scanner.find(text + self._carry)


def _decoded(match: re.Match[bytes]) -> bytes:
    return bytes((int(match[1], 16),))


def _forms(raw: bytes) -> Iterator[bytes]:
    """Return what to look for, folded as the stream will be."""
    start = max(0, (len(raw) - _CORE) // 2)
    core = raw[start : start + _CORE]
    plain = {core, _ESCAPE.sub(_decoded, core), core.replace(b" ", b"+"), core.replace(b"\n", b"n")}
    encoded = {core.hex().encode("ascii"), *(_base64_core(core, offset) for offset in range(3))}
    yield from (form.translate(_FOLD, _GONE) for form in sorted(plain | encoded))


def _base64_core(raw: bytes, offset: int) -> bytes:
    """Return the characters that depend on ``raw`` alone where ``offset`` bytes come before it (RFC 4648)."""
    text = base64.b64encode(bytes(offset) + raw)
    return text[-(-offset * 8 // 6) : (offset + len(raw)) * 8 // 6]
