"""Text from inside a sandbox: made printable, and short, before it enters an event."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

ARGS_LIMIT_BYTES = 8 * 1024
"""How much of an argument vector an event keeps."""

_ESCAPED = [chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in range(256)]
_ESCAPED[ord("\\")] = "\\\\"
_TABLE = {byte: shown for byte, shown in enumerate(_ESCAPED) if shown != chr(byte)}


class Clipped(NamedTuple):
    """Escaped text, whether something was cut off, and the full size in bytes before that."""

    text: str
    truncated: bool
    full_bytes: int


class ClippedArgs(NamedTuple):
    """An escaped argument vector.

    ``full_bytes`` counts each argument with its closing NUL, as execve does.
    """

    args: list[str]
    truncated: bool
    full_bytes: int


def to_bytes(text: str) -> bytes:
    """Return the bytes behind ``text``; never raises.

    What ``os.fsdecode`` smuggled through as a lone surrogate becomes its byte again; any other lone
    surrogate becomes its three-byte (WTF-8) form.
    """
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def clip(data: str | bytes, limit_bytes: int) -> Clipped:
    r"""Return at most ``limit_bytes`` bytes of ``data`` as printable ASCII.

    Every byte outside 0x20-0x7e becomes ``\xNN`` and a backslash is doubled, so that the text can
    be neither a terminal sequence nor a bidirectional override, cannot break a line, and can be
    turned back into the bytes. The result has at most four characters per byte kept.
    """
    raw = data if isinstance(data, bytes) else to_bytes(data)
    kept = raw[:limit_bytes]
    return Clipped(kept.decode("latin-1").translate(_TABLE), len(kept) < len(raw), len(raw))


def clip_args(args: Iterable[str | bytes], limit_bytes: int = ARGS_LIMIT_BYTES) -> ClippedArgs:
    """Return the first ``limit_bytes`` bytes of an argument vector, each argument escaped as by :func:`clip`."""
    kept: list[str] = []
    room = limit_bytes
    full = 0
    truncated = False
    for arg in args:
        raw = arg if isinstance(arg, bytes) else to_bytes(arg)
        full += len(raw) + 1
        if room <= 0:
            truncated = True
            continue
        part = clip(raw, room)
        kept.append(part.text)
        truncated = truncated or part.truncated
        room -= len(raw) + 1
    return ClippedArgs(kept, truncated, full)
