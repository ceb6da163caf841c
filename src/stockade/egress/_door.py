"""One listening socket of a sandbox: who is accepted on it is that sandbox's rollout."""

from __future__ import annotations

import contextlib
import errno
import socket
from typing import TYPE_CHECKING

from stockade.egress._loop import READ, Watch
from stockade.egress._opening import Entry
from stockade.egress._roles import Role
from stockade.egress.gate import Address, Host

if TYPE_CHECKING:
    from stockade.egress._rollout import Rollout

_ACCEPTS_PER_EVENT = 16
ACCEPT_PAUSE_S = 0.1
_MAPPED_PREFIX = 0xFFFF << 32
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Door:
    """Accepts, for one of the roles of stream sockets."""

    __slots__ = ("_role", "_rollout", "_sock", "_watch")

    def __init__(self, rollout: Rollout, sock: socket.socket, role: Role) -> None:
        self._rollout = rollout
        self._sock = sock
        self._role = role
        sock.setblocking(False)
        self._watch: Watch = rollout.shell.loop.watch(sock.fileno(), self._accept, rollout.fault, READ)

    def close(self) -> None:
        """Accept no more."""
        self._rollout.shell.loop.unwatch(self._watch)
        self._sock.close()

    def _accept(self, _events: int) -> None:
        for _ in range(_ACCEPTS_PER_EVENT):
            try:
                sock, _ = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # Out of descriptors: a level-triggered listener would spin until one is free.
                if error.errno in EXHAUSTED:
                    self._pause()
                    return
                continue  # ECONNABORTED and its like: that client is gone (accept(2))
            sock.setblocking(False)
            entry = self._entry(sock) if self._role is Role.TRANSPARENT else None
            with contextlib.suppress(OSError):  # a UNIX socket has no such option
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._rollout.admit(sock, entry, secured=self._role is Role.GATEWAY)

    def _entry(self, sock: socket.socket) -> Entry:
        """Return where the client wanted to go: its own end of the connection says so, and it cannot lie."""
        text, port = sock.getsockname()[:2]
        address = Address.parse(text.partition("%")[0])
        if address.version == 6 and address.value & ~0xFFFFFFFF == _MAPPED_PREFIX:
            address = Address(4, address.value & 0xFFFFFFFF)
        host = self._rollout.names.host(address)
        return Entry(Host(str(address), address) if host is None else host, port)

    def _pause(self) -> None:
        loop = self._rollout.shell.loop
        loop.mute(self._watch)
        loop.call_later(ACCEPT_PAUSE_S, self._resume, self._rollout.fault)

    def _resume(self) -> None:
        if self._watch.live:
            self._rollout.shell.loop.interest(self._watch, READ)
