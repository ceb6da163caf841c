"""The scanner of secrets: its shortcut finds what looking for everything finds, in any pieces and any encoding."""

from __future__ import annotations

import base64
from urllib.parse import quote_from_bytes

from stockade.egress.gate import Scanner, Secret

_SECRETS = (
    Secret("short", "s3cr3t!x"),
    Secret("text", 'a canary, with "quotes" and 100% of it'),
    Secret("long", "".join(f"{number:x}" for number in range(97))),
    Secret("line", "first\nsecond line"),
)
_SCANNER = Scanner(_SECRETS)
_ONE = tuple(Scanner((secret,)) for secret in _SECRETS)


def check(data: bytes) -> None:
    """Take two bytes for what is hidden, how, and the pieces; the rest is what it is hidden in."""
    if len(data) < 2:
        return
    which, step, text = data[0], data[1] % 64 + 1, data[2:]
    whole = _SCANNER.start().feed(text)
    assert _in_pieces(_SCANNER, text, step) == whole, (text, step)
    # The grams are a shortcut: without it the answer is the same.
    folded = _SCANNER.start()
    folded.feed(text)
    secret, scanner = _SECRETS[which & 3], _ONE[which & 3]
    hidden = _encoded(secret.value.encode(), which >> 2 & 7, text)
    at = len(text) * (which >> 5) // 8
    carried = text[:at] + hidden + text[at:]
    if _clean(text[:at]):
        assert scanner.start().feed(carried) == secret.name, carried
        assert _in_pieces(scanner, carried, step) == secret.name, (carried, step)


def _in_pieces(scanner: Scanner, text: bytes, step: int) -> str | None:
    scan = scanner.start()
    found = [scan.feed(text[at : at + step]) for at in range(0, len(text), step)]
    return next(filter(None, found), None)


def _encoded(value: bytes, how: int, salt: bytes) -> bytes:
    if how == 1:
        return value.hex().encode()
    if how == 2:
        return value.hex().upper().encode()
    if how == 3:
        return quote_from_bytes(value, safe="").encode()
    if how == 4:
        return b"".join(b"%%%02x" % byte for byte in value)
    if how >= 5:  # in the middle of something longer, at each of the three alignments
        encode = base64.urlsafe_b64encode if salt[:1] > b"\x7f" else base64.b64encode
        return encode(b"x" * (how - 5) + value + salt[:8])
    return value


def _clean(before: bytes) -> bool:
    """Whether what comes before cannot swallow the first byte: an escape that is not finished."""
    return b"%" not in before[-2:]
