"""Bodies of messages, cut out of a byte stream by their framing and framed anew."""

from __future__ import annotations

from stockade.egress.gate import LAST_CHUNK, ChunkedReader, Framing, render_chunk


class Body:
    """One body: ``feed`` gives its data and what follows it; ``done`` says that it is whole.

    ``upstream`` blames the other side for faults in chunks (502 instead of 400).
    """

    __slots__ = ("_chunks", "_framing", "_left", "done")

    def __init__(self, framing: Framing, length: int, *, upstream: bool = False) -> None:
        self._framing = framing
        self._left = length
        self._chunks = ChunkedReader(upstream=upstream) if framing is Framing.CHUNKED else None
        self.done = framing is Framing.NONE or (framing is Framing.LENGTH and length == 0)

    def feed(self, piece: bytes) -> tuple[bytes, bytes]:
        """Return (data, rest): ``rest`` is what came after the end. Raises Malformed."""
        if self.done:
            return b"", piece
        if self._framing is Framing.LENGTH:
            data, rest = piece[: self._left], piece[self._left :]
            self._left -= len(data)
            self.done = self._left == 0
            return data, rest
        if self._chunks is not None:
            data = b"".join(self._chunks.feed(piece))
            self.done = self._chunks.done
            return data, bytes(self._chunks.rest) if self.done else b""
        return piece, b""  # until the peer closes

    def end(self) -> bool:
        """Take note that the stream ended; return whether the body is whole."""
        if self._framing is Framing.UNTIL_CLOSE:
            self.done = True
        return self.done

    def render(self, data: bytes, *, chunked: bool) -> bytes:
        """Return ``data`` as it goes on to the other side, with the last chunk when the body is done.

        Chunks are made anew: neither sizes nor extensions of the sender pass (egress case 55).
        """
        if not chunked:
            return data
        return render_chunk(data) + (LAST_CHUNK if self.done else b"")
