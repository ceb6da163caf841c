"""A non-blocking socket with one bounded outbound buffer."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable

from stockade.egress._loop import READ, WRITE, Fault, Loop, Watch

READ_BYTES = 64 * 1024
"""Most bytes of one ``recv``."""
HIGH_WATER_BYTES = 256 * 1024
"""A buffer with more than this stops the side that fills it; it can grow by one read beyond."""

_ABORT = struct.pack("ii", 1, 0)


class Stream:
    """One side of a connection. ``on_event(events)`` is called when it is ready for what it waits for.

    That nobody wants to read is told to epoll only when bytes do come: the usual client sends nothing while it waits
    for an answer, and two system calls for each request are saved.
    """

    __slots__ = ("_loop", "_watch", "closed", "fd", "on_event", "out", "reading", "sock", "writing")

    def __init__(self, loop: Loop, sock: socket.socket, on_event: Callable[[int], None], on_fault: Fault) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.out = bytearray()
        self.on_event = on_event
        self.closed = False
        self.reading = False
        """Whether this side waits for bytes."""
        self.writing = False
        self._loop = loop
        self._watch: Watch = loop.watch(self.fd, self._dispatch, on_fault)

    def _dispatch(self, events: int) -> None:
        if events & READ and not self.reading:
            self._loop.interest(self._watch, WRITE if self.writing or self.out else 0)
            events &= ~READ
            if not events:
                return
        self.on_event(events)

    def want(self, *, read: bool | None = None, write: bool | None = None) -> None:
        """Say what to wait for; None keeps it. Unsent bytes always wait for writability."""
        if read is not None:
            self.reading = read
        if write is not None:
            self.writing = write
        watch = self._watch
        mask = WRITE if self.writing or self.out else 0
        if self.reading or (watch.mask & READ and not watch.muted):
            mask |= READ
        if mask != watch.mask or watch.muted:
            self._loop.interest(watch, mask)

    def mute(self) -> None:
        """Ignore even hang-ups until the next :meth:`want`."""
        self._loop.mute(self._watch)

    def adopt(self, on_event: Callable[[int], None], on_fault: Fault) -> None:
        """Give it to another owner."""
        self.on_event = on_event
        self._watch.on_fault = on_fault

    def send(self, data: bytes | bytearray | memoryview) -> None:
        """Send now what the kernel takes and keep the rest; raises OSError if the peer is gone."""
        if not self.out:
            try:
                sent = self.sock.send(data)
            except BlockingIOError:
                sent = 0
            if sent == len(data):
                return
            data = memoryview(data)[sent:]
        self.out += data
        self.want()

    def flush(self) -> bool:
        """Send more of what is kept; return whether nothing is left. Raises OSError."""
        if self.out:
            try:
                sent = self.sock.send(self.out)
            except BlockingIOError:
                return False
            del self.out[:sent]
            if not self.out:
                self.want()
        return not self.out

    def receive(self, size: int = READ_BYTES) -> bytes | None:
        """Return up to ``size`` bytes, ``b""`` at the end, None if there are none yet. Raises OSError."""
        try:
            return self.sock.recv(size)
        except BlockingIOError:
            return None

    def peek(self) -> bool | None:
        """Return whether a byte waits (True), the end was reached (False), or neither yet (None)."""
        try:
            return bool(self.sock.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return None

    def finish(self) -> None:
        """Pass the end of the bytes on (half-close)."""
        with contextlib.suppress(OSError):  # the peer is gone: its own event says so
            self.sock.shutdown(socket.SHUT_WR)

    def close(self, *, abort: bool = False) -> None:
        """Close; ``abort`` sends RST, so that a cut-off body does not look whole. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._loop.forget(self._watch)
        if abort:
            with contextlib.suppress(OSError):
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
        self.sock.close()
        self.out.clear()
