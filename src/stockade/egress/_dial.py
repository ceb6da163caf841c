"""Connecting to the addresses that were judged, and to nothing else."""

from __future__ import annotations

import errno
import functools
import os
import socket
from collections.abc import Callable, Sequence

from stockade.egress._loop import WRITE, Loop, Timer, Watch
from stockade.egress.gate import Address

CONNECT_S = 10.0
"""All attempts together take no longer than this."""
_MIN_ATTEMPT_S = 1.0
_MAX_ATTEMPTS = 4

Done = Callable[["socket.socket | None", "Address | None", str], None]


class Dial:
    """One try after the other over ``addresses``; ``done(socket, address, why)`` is called once, later.

    The sockaddr is made from the judged integer, so there is no second look-up that could answer differently
    (egress case 26), and falling back to another family stays among the judged ones (case 28).
    """

    __slots__ = ("_addresses", "_deadline_s", "_done", "_loop", "_port", "_sock", "_timer", "_watch", "_why")

    def __init__(self, loop: Loop, addresses: Sequence[Address], port: int, done: Done) -> None:
        self._loop = loop
        self._addresses = list(addresses[:_MAX_ATTEMPTS])
        self._port = port
        self._done: Done | None = done
        self._deadline_s = loop.now + CONNECT_S
        self._sock: socket.socket | None = None
        self._watch: Watch | None = None
        self._why = "no address"
        self._timer: Timer = loop.call_later(0, self._next, self._fault)

    def cancel(self) -> None:
        """Close the socket; ``done`` will not be called."""
        self._done = None
        self._drop()

    def _next(self) -> None:
        self._drop()
        left_s = self._deadline_s - self._loop.now
        while self._addresses and left_s > 0:
            address = self._addresses.pop(0)
            code = self._connect(address)
            if code == errno.EINPROGRESS and self._sock is not None:
                share_s = max(left_s / (len(self._addresses) + 1), _MIN_ATTEMPT_S)
                ready = functools.partial(self._ready, self._sock, address)
                self._watch = self._loop.watch(self._sock.fileno(), ready, self._fault, WRITE)
                self._timer = self._loop.call_later(share_s, self._timed_out, self._fault)
                return
            if code == 0:
                self._finish(address)
                return
            self._refused(code)
        self._finish(None)

    def _connect(self, address: Address) -> int:
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        flags = socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        try:
            self._sock = socket.socket(family, flags)
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return self._sock.connect_ex((str(address), self._port))
        except OSError as error:
            return error.errno or errno.EIO

    def _ready(self, sock: socket.socket, address: Address, _events: int) -> None:
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._refused(code)
            self._next()
        else:
            self._finish(address)

    def _timed_out(self) -> None:
        self._refused(errno.ETIMEDOUT)
        self._next()

    def _refused(self, code: int) -> None:
        self._why = os.strerror(code).lower()

    def _finish(self, address: Address | None) -> None:
        sock = None
        if address is not None:
            sock, self._sock = self._sock, None
        done, self._done = self._done, None
        self._drop(keep=sock)
        if done is not None:
            done(sock, address, self._why)
        elif sock is not None:
            sock.close()

    def _drop(self, keep: socket.socket | None = None) -> None:
        self._timer.cancel()
        if self._watch is not None:
            self._loop.unwatch(self._watch)
            self._watch = None
        if self._sock is not None and self._sock is not keep:
            self._sock.close()
            self._sock = None

    def _fault(self, fault: Exception) -> None:
        self._why = type(fault).__name__
        self._finish(None)
