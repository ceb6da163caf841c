"""Whoever holds the sockets of a sandbox, for tests: it stands where the egress worker stands, and writes down what comes."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import selectors
import socket
import struct
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from stockade.sandbox import Listeners, LiveSandbox

GREETING = "this is outside"
"""What a transparent listener says to everyone."""
_PKTINFO = (socket.IPPROTO_IPV6, socket.IPV6_PKTINFO)


class Outside:
    """Serves the listeners of one sandbox in a thread until closed.

    ``reached`` has one entry per connection or datagram, such as ``tcp 198.51.100.7 80``: the address that the client
    asked for. Requests to a proxy listener are refused and noted with their first line. ``names`` are the host names
    that the DNS socket knows, with their IPv4 addresses; others do not exist.
    """

    def __init__(self, sandbox: LiveSandbox, listeners: Listeners, names: Mapping[str, str] | None = None) -> None:
        self.reached: list[str] = []
        self._names = dict(names or {})
        self._sockets = [socket.socket(fileno=os.dup(fd)) for fd in sandbox.listener_fds]
        self._proxies = set(self._sockets[: len(listeners.addresses)])
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving."""
        self._wake.close()
        self._thread.join(10)
        for sock in (*self._sockets, self._woken):
            sock.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            for sock in (*self._sockets, self._woken):
                selector.register(sock, selectors.EVENT_READ, sock)
            while True:
                for key, _ in selector.select():
                    if key.data is self._woken:
                        return
                    with contextlib.suppress(OSError):  # a client that went away meanwhile
                        self._one(key.data)

    def _one(self, sock: socket.socket) -> None:
        if sock.type == socket.SOCK_DGRAM:
            self._answer(sock)
            return
        peer, _ = sock.accept()
        with peer:
            peer.settimeout(10)
            if sock in self._proxies:
                line = peer.recv(4096).split(b"\r\n")[0].decode("latin-1")
                self.reached.append(f"proxy: {line}")
                peer.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
                return
            address, port = peer.getsockname()[:2]
            self.reached.append(f"tcp {plain_address(address)} {port}")
            peer.sendall(GREETING.encode())

    def _answer(self, sock: socket.socket) -> None:
        packet, ancillary, _, client = sock.recvmsg(4096, socket.CMSG_SPACE(20))
        (info,) = (data for level, kind, data in ancillary if (level, kind) == _PKTINFO)
        asked = socket.inet_ntop(socket.AF_INET6, info[:16])
        self.reached.append(f"udp {plain_address(asked)} {sock.getsockname()[1]}")
        # The address that was asked is the one to answer from; interface 0, as the kernel knows the way.
        sock.sendmsg([self._reply(packet)], [(*_PKTINFO, info[:16] + bytes(4))], 0, client)

    def _reply(self, packet: bytes) -> bytes:
        labels, at = [], 12
        while at < len(packet) and packet[at]:
            labels.append(packet[at + 1 : at + 1 + packet[at]].decode("latin-1"))
            at += 1 + packet[at]
        if len(packet) < at + 5:
            return packet  # no question at all: a test that only wants an echo
        (kind,) = struct.unpack_from("!H", packet, at + 1)
        address = self._names.get(".".join(labels).lower())
        code = 3 if address is None else 0
        record = b""
        if address is not None and kind == 1:
            record = struct.pack("!HHHIH", 0xC00C, 1, 1, 60, 4) + socket.inet_aton(address)
        head = packet[:2] + struct.pack("!HHHHH", 0x8180 | code, 1, bool(record), 0, 0)
        return head + packet[12 : at + 5] + record


def plain_address(text: str) -> str:
    """Return an address in its own version: IPv4 where it came mapped into IPv6."""
    address = ipaddress.ip_address(text)
    return str(getattr(address, "ipv4_mapped", None) or address)
