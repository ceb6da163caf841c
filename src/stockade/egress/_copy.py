"""Moving bytes between two streams by way of this process: where one side is TLS, no pipe can do it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from stockade.egress._splice import Flow
from stockade.egress._stream import READ_BYTES

if TYPE_CHECKING:
    from stockade.egress._tls_stream import AnyStream

_ROUNDS = 8
"""Moves per readiness event, as in :mod:`stockade.egress._splice`."""


class CopyPump:
    """One direction of a relay by way of this process, where one side is TLS; used as :class:`Pump` is.

    ``left()`` is how many bytes the budget still grants, ``count(n)`` takes note of ``n`` that were read: plaintext on
    both sides, to the byte. Nothing is read while the target has not taken what came before.
    """

    __slots__ = ("_count", "_left", "_source", "_target", "ended")

    def __init__(
        self, source: AnyStream, target: AnyStream, *, left: Callable[[], int], count: Callable[[int], object]
    ) -> None:
        self._source = source
        self._target = target
        self._left = left
        self._count = count
        self.ended = False

    def run(self) -> Flow:
        """Move what can be moved now, and set what both sides wait for."""
        if self.ended:
            return Flow.ENDED
        for _ in range(_ROUNDS):
            try:
                ready = self._target.flush()
            except OSError:
                return Flow.TARGET_LOST
            if not ready:
                self._source.want(read=False)
                return Flow.OPEN  # unsent bytes wait for writability by themselves
            flow, more = self._move()
            if flow is not Flow.OPEN or not more:
                return flow
        self._source.want(read=not self._target.out)
        return Flow.OPEN

    def close(self) -> None:
        """Nothing is held between the two sides."""

    def _move(self) -> tuple[Flow, bool]:
        """Read once and send it on; return how it went and whether there may be more."""
        left = self._left()
        try:
            if left <= 0:
                return self._at_cap()
            piece = self._source.receive(min(left, READ_BYTES))
        except OSError:
            return Flow.SOURCE_LOST, False
        if piece is None:
            self._source.want(read=True)
            return Flow.OPEN, False
        if not piece:
            return self._end(), False
        self._count(len(piece))
        try:
            self._target.send(piece)
        except OSError:
            return Flow.TARGET_LOST, False
        return Flow.OPEN, True

    def _at_cap(self) -> tuple[Flow, bool]:
        """The budget is used up exactly: the end may still come, one more byte may not. Raises OSError."""
        waiting = self._source.peek()
        if waiting is None:
            self._source.want(read=True)
            return Flow.OPEN, False
        return (Flow.EXHAUSTED if waiting else self._end()), False

    def _end(self) -> Flow:
        self.ended = True
        self._source.want(read=False)
        self._target.finish()
        return Flow.ENDED
