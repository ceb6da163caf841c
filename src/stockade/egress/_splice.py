"""Moving bytes between two sockets through a pipe, without copying them into this process.

``splice(2)`` says how many bytes it moved, so byte caps stay exact while no byte enters Python. Each call asks for
no more than the budget has left: the cap holds to the byte, however many connections share it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from stockade.egress._stream import Stream

_F_SETPIPE_SZ = 1031
_PIPE_BYTES = 1024 * 1024
_FREE_PIPES = 64
_FLAGS = 1 | 2  # SPLICE_F_MOVE | SPLICE_F_NONBLOCK
_COPY_BYTES = 64 * 1024
"""What a direction moves by plain reads and writes first: for a handshake and a small answer a pipe costs more."""
_ROUNDS = 8
"""Moves per readiness event: a fast tunnel must not starve the others."""


@dataclass(frozen=True, slots=True)
class Pipe:
    """Both ends of a pipe."""

    reader: int
    writer: int

    def close(self) -> None:
        """Close both ends."""
        os.close(self.reader)
        os.close(self.writer)


@dataclass(slots=True)
class Pipes:
    """Empty pipes to use again. A tunnel holds one per direction only while bytes are in it."""

    _free: list[Pipe] = field(default_factory=list)

    def take(self) -> Pipe:
        """Return an empty pipe; raises OSError when descriptors run out."""
        if self._free:
            return self._free.pop()
        pipe = Pipe(*os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC))
        try:
            fcntl.fcntl(pipe.writer, _F_SETPIPE_SZ, _PIPE_BYTES)
        except OSError:
            return pipe  # over /proc/sys/fs/pipe-user-pages-soft: 64 KiB will do
        return pipe

    def give(self, pipe: Pipe, *, empty: bool) -> None:
        """Give a pipe back; one with bytes in it is closed, or they would reach another tunnel."""
        if empty and len(self._free) < _FREE_PIPES:
            self._free.append(pipe)
        else:
            pipe.close()

    def close(self) -> None:
        """Close the free pipes."""
        while self._free:
            self._free.pop().close()


class Flow(Enum):
    """What one :meth:`Pump.run` came to."""

    OPEN = "open"
    ENDED = "ended"
    EXHAUSTED = "exhausted"
    SOURCE_LOST = "source_lost"
    TARGET_LOST = "target_lost"


class Pump:
    """One direction of a tunnel: ``source`` to ``target``.

    ``left()`` is how many bytes the budget still grants, ``count(n)`` takes note of ``n`` that were read.
    """

    __slots__ = ("_copied", "_count", "_held", "_left", "_pipe", "_pipes", "_source", "_target", "ended", "other")

    def __init__(
        self,
        source: Stream,
        target: Stream,
        pipes: Pipes,
        *,
        left: Callable[[], int],
        count: Callable[[int], object],
    ) -> None:
        self._source = source
        self._target = target
        self._pipes = pipes
        self._left = left
        self._count = count
        self._pipe: Pipe | None = None
        self._held = 0
        self._copied = 0
        self.ended = False
        self.other: Pump | None = None
        """The opposite direction: when both have ended the sockets are closed, and no half-close is needed before."""

    def run(self) -> Flow:
        """Move what can be moved now, and set what both sides wait for."""
        if self.ended:
            return Flow.ENDED
        if self._copied < _COPY_BYTES:
            return self._copy()
        for _ in range(_ROUNDS):
            if self._held or self._target.out:
                flow = self._drain()
                if flow is not Flow.OPEN or self._held or self._target.out:
                    return flow
            flow, more = self._fill()
            if flow is not Flow.OPEN or not more:
                return flow
        # There may be more: say so to epoll, which is level-triggered, and let the others have their turn.
        if not self._held:
            self._source.want(read=True)
        else:
            self._target.want(write=True)
        return Flow.OPEN

    def _copy(self) -> Flow:
        """Move one read's worth without a pipe."""
        if self._target.out:
            flow = self._drain()
            if flow is not Flow.OPEN or self._target.out:
                return flow
        left = self._left()
        if left <= 0:
            return self._at_cap()[0]
        try:
            piece = self._source.receive(min(left, _COPY_BYTES))
        except OSError:
            return Flow.SOURCE_LOST
        if not piece:
            if piece is not None:
                return self._end()
            self._source.want(read=True)
            return Flow.OPEN
        self._count(len(piece))
        self._copied += len(piece)
        try:
            self._target.send(piece)
        except OSError:
            return Flow.TARGET_LOST
        self._source.want(read=not self._target.out)
        return Flow.OPEN

    def close(self) -> None:
        """Drop the pipe and whatever is in it."""
        self._release()

    def _fill(self) -> tuple[Flow, bool]:
        """Read into the pipe; return how it went and whether there is something to write."""
        left = self._left()
        try:
            if left <= 0:
                return self._at_cap()
            if self._pipe is None:
                self._pipe = self._pipes.take()
            moved = os.splice(self._source.fd, self._pipe.writer, min(left, _PIPE_BYTES), flags=_FLAGS)
        except BlockingIOError:
            self._release()
            self._source.want(read=True)
            return Flow.OPEN, False
        except OSError:
            return Flow.SOURCE_LOST, False
        if moved == 0:
            return self._end(), False
        self._held = moved
        self._count(moved)
        return Flow.OPEN, True

    def _at_cap(self) -> tuple[Flow, bool]:
        """The budget is used up exactly: the end may still come, one more byte may not."""
        waiting = self._source.peek()
        if waiting is None:
            self._source.want(read=True)
            return Flow.OPEN, False
        return (Flow.EXHAUSTED if waiting else self._end()), False

    def _drain(self) -> Flow:
        """Write out what is held; when the target is full, stop reading until it is not."""
        try:
            if self._target.flush() and self._held and self._pipe is not None:
                self._held -= os.splice(self._pipe.reader, self._target.fd, self._held, flags=_FLAGS)
        except BlockingIOError:
            pass
        except OSError:
            return Flow.TARGET_LOST
        if self._held or self._target.out:
            self._source.want(read=False)
            self._target.want(write=True)
        else:
            self._target.want(write=False)
        return Flow.OPEN

    def _end(self) -> Flow:
        self.ended = True
        self._release()
        if self.other is not None and self.other.ended:
            return Flow.ENDED
        self._source.want(read=False)
        self._target.finish()
        return Flow.ENDED

    def _release(self) -> None:
        if self._pipe is not None:
            self._pipes.give(self._pipe, empty=self._held == 0)
            self._pipe, self._held = None, 0
