r"""One entry of the index: what was asked, whole, and the head of the answer.

::

    stockade-store 1 <sha256 of all that follows> <bytes of key> <bytes of head> <bytes of body> <sha256 of body>\n
    <key><head>

The head is one that the gate parsed, written by the gate, and it is parsed by the gate again when it is read: whatever
became of the file, no header comes out of it that could not have come from an upstream.
"""

from __future__ import annotations

import hashlib
import re

import msgspec

from stockade.egress._keys import parse_key
from stockade.egress._store_files import StoreFailed
from stockade.egress.gate import Framing, HeadLimits, Malformed, ResponseHead, parse_response_head, render_response_head

ENTRY_BYTES = 256 * 1024
"""No entry is longer."""

_LIMITS = HeadLimits(header_bytes=ENTRY_BYTES, header_count=1024)
_MAGIC = b"stockade-store 1 "
_FIRST = re.compile(rb"([1-9][0-9]{0,6}) ([1-9][0-9]{0,6}) (0|[1-9][0-9]{0,14}) ([0-9a-f]{64})\n")
_DIGEST_END = len(_MAGIC) + 64


class Entry(msgspec.Struct, frozen=True):
    """An entry as it was read. ``blob`` is the hex digest of the body and ``size`` its bytes."""

    key: bytes
    head: ResponseHead
    blob: str
    size: int


def body_length(head: ResponseHead) -> int | None:
    """Return how long the body will be, None if only its end tells."""
    if head.framing is Framing.LENGTH:
        return head.length
    return 0 if head.framing is Framing.NONE else None


def render_entry(key: bytes, head: ResponseHead, blob: str, size: int) -> bytes:
    """Return the bytes of an entry; raise StoreFailed for a head that would not come out as it goes in."""
    method = _method(key)
    # As it is served: a length where there is a body, and nothing about the connection that it came by.
    framing, length = (Framing.NONE, 0) if head.framing is Framing.NONE else (Framing.LENGTH, size)
    kept = ResponseHead(head.status, head.phrase, head.headers, framing, length, 11, True, False, (), 0)
    try:
        rendered = render_response_head(kept)
    except ValueError as error:  # a phrase that is no ASCII
        raise StoreFailed("store: a head that cannot be kept") from error
    if _parse_head(rendered, method) != msgspec.structs.replace(kept, size_bytes=len(rendered)):
        raise StoreFailed("store: a head that cannot be kept")
    rest = b"%d %d %d %b\n%b%b" % (len(key), len(rendered), size, blob.encode("ascii"), key, rendered)
    raw = b"%b%b %b" % (_MAGIC, hashlib.sha256(rest).hexdigest().encode("ascii"), rest)
    if len(raw) > ENTRY_BYTES:
        raise StoreFailed(f"store: an entry of {len(raw)} bytes; at most {ENTRY_BYTES} are kept")
    return raw


def parse_entry(raw: bytes, key: bytes | None = None) -> Entry:
    """Return the entry in ``raw``, which must be that of ``key`` (None: of any key), or raise StoreFailed."""
    rest = raw[_DIGEST_END + 1 :]
    start = _MAGIC + hashlib.sha256(rest).hexdigest().encode("ascii") + b" "
    first = _FIRST.match(rest)
    if not raw.startswith(start) or first is None:
        raise StoreFailed("store: an entry is damaged")
    key_bytes, head_bytes, size, blob = int(first[1]), int(first[2]), int(first[3]), first[4].decode("ascii")
    found = rest[first.end() : first.end() + key_bytes]
    rendered = rest[first.end() + key_bytes :]
    if len(rendered) != head_bytes or (key is not None and found != key):
        raise StoreFailed("store: an entry is not what its name says")
    head = _parse_head(rendered, _method(found))
    if head.framing not in (Framing.LENGTH, Framing.NONE) or head.length != size:
        raise StoreFailed("store: an entry with two lengths of its body")
    return Entry(found, head, blob, size)


def _method(key: bytes) -> str:
    try:
        return parse_key(key).method
    except ValueError as error:
        raise StoreFailed("store: not a key") from error


def _parse_head(rendered: bytes, method: str) -> ResponseHead:
    try:
        return parse_response_head(rendered, _LIMITS, method=method)
    except Malformed as fault:
        raise StoreFailed(f"store: a head that no upstream may send: {fault.detail}") from fault
