"""Chunked bodies: read in any pieces, written again, and read by two other parsers."""

from __future__ import annotations

import h11

from fuzz._common import attempt, h11_request, llhttp
from stockade.egress.gate import LAST_CHUNK, ChunkedReader, Malformed, render_chunk

_HEAD = b"POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n"
_STATUSES = frozenset({400})


def check(data: bytes) -> None:
    """Take the first byte for the size of the pieces, the rest for the body and what follows it."""
    if not data:
        return
    raw, step = data[1:], data[0] % 32 + 1
    reader = ChunkedReader()
    whole = attempt(reader.feed, raw, statuses=_STATUSES)
    piecemeal = ChunkedReader()
    pieces = attempt(_in_pieces, piecemeal, raw, step, statuses=_STATUSES)
    assert isinstance(whole, Malformed) == isinstance(pieces, Malformed), (whole, pieces)
    if isinstance(whole, Malformed) or isinstance(pieces, Malformed):
        assert not reader.done and not piecemeal.done
        return
    body = b"".join(whole)
    assert (body, reader.done) == (b"".join(pieces), piecemeal.done)
    assert (reader.size_bytes, piecemeal.size_bytes) == (len(body), len(body))
    if not reader.done:
        return
    assert reader.rest == piecemeal.rest and reader.wire_bytes == piecemeal.wire_bytes
    assert raw[reader.wire_bytes :] == reader.rest
    again = ChunkedReader()
    written = b"".join(map(render_chunk, whole)) + LAST_CHUNK
    assert b"".join(again.feed(written)) == body and again.done and again.rest == b""
    _ask_oracles(raw[: reader.wire_bytes], body)
    _ask_oracles(written, body)


def _in_pieces(reader: ChunkedReader, raw: bytes, step: int) -> list[bytes]:
    found: list[bytes] = []
    for at in range(0, len(raw), step):
        found += reader.feed(raw[at : at + step])
        if reader.done:
            reader.rest += raw[at + step :]
            break
    return found


def _ask_oracles(sent: bytes, body: bytes) -> None:
    """What they take, they read the same; h11 refuses fields in a trailer that it would refuse in a head."""
    try:
        first = h11_request(_HEAD + sent)
    except h11.RemoteProtocolError:
        assert not sent.endswith(b"\r\n" + LAST_CHUNK), "h11 refuses a body without a trailer"
    else:
        assert (first.body, first.whole) == (body, True)
    second = llhttp(_HEAD + sent)
    if second is not None:
        assert (second.body, second.whole) == (body, True)
