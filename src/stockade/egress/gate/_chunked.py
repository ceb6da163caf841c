"""Chunked bodies: decoded strictly, written again canonically (RFC 9112 section 7.1).

Nothing of the sender's framing is forwarded: sizes are written anew, extensions and trailers are
dropped. So two parsers can never disagree about where a body that passed here ends.
"""

from __future__ import annotations

import re
from enum import Enum, auto

from stockade.egress.gate._reason import Malformed, Reason

LAST_CHUNK = b"0\r\n\r\n"

_LINE_MAX = 1024  # a size line with its extensions (case 55)
_EXTENSIONS_MAX = 16 * 1024  # … and those of a whole body, as in Go's CVE-2023-39326
_TRAILER_MAX = 8 * 1024
_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_QUOTED = rb'"(?:[\t \x21\x23-\x5b\x5d-\x7e\x80-\xff]|\\[\t \x21-\x7e\x80-\xff])*"'
# 15 digits stay below 2**60: no size can wrap anybody's integer (case 54). No spaces anywhere.
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})((?:;" + _TOKEN + rb"(?:=(?:" + _TOKEN + rb"|" + _QUOTED + rb"))?)*)\r\n")
_TRAILER = re.compile(_TOKEN + rb":[^\x00-\x08\x0a-\x1f\x7f]*\r\n")


class _State(Enum):
    SIZE = auto()
    DATA = auto()
    DATA_END = auto()
    TRAILER = auto()
    DONE = auto()
    BROKEN = auto()


class ChunkedReader:
    """Decodes and checks a chunked body piece by piece (cases 54-56).

    ``done`` turns true at the end; ``rest`` then holds the bytes after it. ``size_bytes`` counts
    the data so far, ``wire_bytes`` all that was consumed, framing included.
    """

    def __init__(self, *, upstream: bool = False) -> None:
        """``upstream``: faults are upstream_malformed (502) instead of malformed_body (400)."""
        self.done = False
        self.rest = b""
        self.size_bytes = 0
        self.wire_bytes = 0
        self._upstream = upstream
        self._state = _State.SIZE
        self._pending = b""
        self._left = 0
        self._extensions = 0
        self._trailer = 0

    def feed(self, data: bytes | bytearray | memoryview) -> list[bytes]:
        """Return the data pieces in ``data``; raise Malformed and stay broken on any fault.

        On a fault nothing of this call is returned. After ``done`` feeding is a ValueError.
        """
        if self._state is _State.DONE:
            raise ValueError("the body has ended")
        if self._state is _State.BROKEN:
            raise self._fault("the body is broken")
        buffer = self._pending + bytes(data)
        pieces: list[bytes] = []
        position = self._run(buffer, pieces)
        self.wire_bytes += position
        if self.done:
            self.rest, self._pending = buffer[position:], b""
        else:
            self._pending = buffer[position:]
        self.size_bytes += sum(map(len, pieces))
        return pieces

    def _run(self, buffer: bytes, pieces: list[bytes]) -> int:
        """Consume what can be consumed; return how far."""
        position = 0
        while True:
            before, state = position, self._state
            if state is _State.DATA:
                position = self._take_data(buffer, position, pieces)
            elif state is _State.DATA_END:
                position = self._take_data_end(buffer, position)
            elif state is _State.DONE:
                return position
            else:
                position = self._take_line(buffer, position)
            if position == before and self._state is state:
                return position

    def _take_data(self, buffer: bytes, position: int, pieces: list[bytes]) -> int:
        piece = buffer[position : position + self._left]
        if piece:
            pieces.append(piece)
            self._left -= len(piece)
        if not self._left:
            self._state = _State.DATA_END
        return position + len(piece)

    def _take_data_end(self, buffer: bytes, position: int) -> int:
        end = buffer[position : position + 2]
        if end == b"\r\n":
            self._state = _State.SIZE
            return position + 2
        if end not in (b"", b"\r"):  # h11 before 0.16 took any two bytes here (CVE-2025-43859)
            raise self._fault("chunk data does not end in CRLF")
        return position

    def _take_line(self, buffer: bytes, position: int) -> int:
        limit = _LINE_MAX if self._state is _State.SIZE else _TRAILER_MAX - self._trailer
        newline = buffer.find(b"\n", position, position + limit)
        if newline < 0:
            if len(buffer) - position >= limit:
                raise self._fault("line of the chunked framing too long")
            return position
        end = newline + 1
        if self._state is _State.SIZE:
            self._take_size(buffer, position, end)
        else:
            self._take_trailer(buffer, position, end)
        return end

    def _take_size(self, buffer: bytes, position: int, end: int) -> None:
        match = _SIZE.fullmatch(buffer, position, end)
        if match is None:
            raise self._fault("not a chunk size")
        self._extensions += len(match[2])
        if self._extensions > _EXTENSIONS_MAX:
            raise self._fault("too many chunk extensions")
        self._left = int(match[1], 16)
        self._state = _State.DATA if self._left else _State.TRAILER

    def _take_trailer(self, buffer: bytes, position: int, end: int) -> None:
        if end - position == 2 and buffer[position] == 0x0D:
            self._state = _State.DONE
            self.done = True
            return
        self._trailer += end - position
        if not _TRAILER.fullmatch(buffer, position, end):
            raise self._fault("not a trailer field")

    def _fault(self, detail: str) -> Malformed:
        self._state = _State.BROKEN
        if self._upstream:
            return Malformed(Reason.UPSTREAM_MALFORMED, detail, status=502)
        return Malformed(Reason.MALFORMED_BODY, detail)


def render_chunk(data: bytes) -> bytes:
    """Return ``data`` as one chunk; empty data gives ``b""`` (only LAST_CHUNK ends a body)."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""
