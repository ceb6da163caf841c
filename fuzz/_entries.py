"""The store: keys say all that was asked and are read back; an entry is whole and unchanged, or it is no entry."""

from __future__ import annotations

import hashlib

from fuzz._common import LIMITS, attempt
from stockade.egress._keys import Asked, key, missing, parse_key
from stockade.egress._store import StoreFailed
from stockade.egress._store_entry import Entry, parse_entry, render_entry
from stockade.egress.gate import DETAIL_MAX, Malformed, Mode, Origin, RequestHead, Way, parse_head, parse_host

_ORIGIN = Origin(Way.TLS, "https", parse_host(b"files.test"), 443)
_STATUSES = frozenset({400, 417, 421, 431, 501})
_MAGIC = b"stockade-store 1 "


def check(data: bytes) -> None:
    """Take the first byte for what the rest is: a key, an entry, an entry behind its digest, or two requests."""
    if not data:
        return
    form, rest = data[0] & 3, data[1:]
    if form == 0:
        _check_key(rest)
    elif form == 3:
        _check_requests(rest, Mode.LIVE if data[0] & 4 else Mode.RECORD)
    else:
        if form == 2:
            rest = _MAGIC + hashlib.sha256(rest).hexdigest().encode("ascii") + b" " + rest
        _check_entry(rest)


def _check_key(raw: bytes) -> Asked | None:
    try:
        asked = parse_key(raw)
    except ValueError:
        return None
    told = missing(raw)
    assert told.isascii() and told.isprintable() and len(told) <= DETAIL_MAX
    assert "\n" not in asked.url
    return asked


def _check_entry(raw: bytes) -> None:
    try:
        entry = parse_entry(raw)
    except StoreFailed:
        return
    assert _check_key(entry.key) is not None
    written = render_entry(entry.key, entry.head, entry.blob, entry.size)
    again = parse_entry(written, entry.key)
    assert _shown(again) == _shown(entry)
    assert render_entry(again.key, again.head, again.blob, again.size) == written
    for at in (0, len(raw) // 2, len(raw) - 1):
        damaged = raw[:at] + bytes((raw[at] ^ 1,)) + raw[at + 1 :]
        try:
            parse_entry(damaged)
        except StoreFailed:
            continue
        raise AssertionError(f"a damaged entry is taken: byte {at}")


def _shown(entry: Entry) -> tuple[object, ...]:
    head = entry.head
    return entry.key, entry.blob, entry.size, head.status, head.phrase, head.headers, head.framing, head.length


def _check_requests(rest: bytes, mode: Mode) -> None:
    """Two requests have one key exactly if they ask the same."""
    keys = []
    asked = []
    for raw in rest.split(b"\n\n\n", 1):
        head = attempt(parse_head, raw, LIMITS, _ORIGIN, statuses=_STATUSES)
        if isinstance(head, Malformed):
            return
        made = key(head.request, head.headers, mode=mode)
        read = _check_key(made)
        assert read is not None
        request, where = head.request, head.request.destination
        assert (read.method, read.scheme, read.host, read.port) == ("" + request.method, "https", where.host.text, 443)
        assert (read.path, read.query, read.mode) == (request.path, request.query, mode)
        keys.append(made)
        asked.append(_meaning(head))
    if len(keys) == 2 and mode is Mode.LIVE:
        assert (keys[0] == keys[1]) == (asked[0] == asked[1]), (keys, asked)
    elif len(keys) == 2 and asked[0] == asked[1]:
        assert keys[0] == keys[1]


def _meaning(head: RequestHead) -> tuple[object, ...]:
    request = head.request
    lines: dict[bytes, list[bytes]] = {}
    for name, value in head.headers:
        lines.setdefault(name.lower(), []).append(value)
    return request.method, request.path, request.query, sorted(lines.items())
