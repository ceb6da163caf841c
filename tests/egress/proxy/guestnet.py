"""The network of a sandbox, as the holder makes it: loopback alone, and listeners that every address leads to.

A second network namespace beside that of :class:`~tests.egress.netlab.NetLab`, in which the worker and the origins are:
what is made here knows no way out but the listeners, whose descriptors go to the worker.

Run as a script, this file is the child that holds the namespace.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

if __name__ == "__main__":  # the child knows no site-packages and needs none
    ROOT = Path(__file__).resolve().parents[3]
    sys.path[0:0] = [str(ROOT), str(ROOT / "src")]

from stockade.sandbox import _anyip
from tests.egress import netlab

PROXY = ("127.0.0.1", 3128)
_MAX = 16


def _main(control: socket.socket, ports: Sequence[int]) -> None:
    netlab._unshare()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, 0x8914, struct.pack("16sH14x", b"lo", 1 | 64))  # SIOCSIFFLAGS: up, running
    proxy = socket.create_server(PROXY, backlog=128)
    listeners = [proxy, *_anyip.open_listeners(ports, dns=True)]
    socket.send_fds(control, [b"ready"], [one.fileno() for one in listeners])
    for one in listeners:
        one.close()
    netlab._answer(control)


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])), [int(port) for port in sys.argv[2:]])
    raise SystemExit(0)


from stockade.egress import Role  # noqa: E402 - the child has no msgspec
from tests.egress.proxy.harness import TIMEOUT_S  # noqa: E402


class GuestNet:
    """One sandbox's network. ``sockets`` maps the listeners to their roles; they stay this object's."""

    def __init__(self, ports: Sequence[int] = (80, 443)) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(TIMEOUT_S)
        with theirs:
            argv = [sys.executable, "-S", __file__, str(theirs.fileno()), *map(str, ports)]
            self._child = subprocess.Popen(argv, pass_fds=[theirs.fileno()])
        packet, fds, _, _ = socket.recv_fds(self._control, 16, _MAX)
        assert packet == b"ready", packet
        roles = [Role.PROXY, *[Role.TRANSPARENT] * len(ports), Role.DNS, Role.DNS_TCP]
        self._listeners = [socket.socket(fileno=fd) for fd in fds]
        self.sockets = dict(zip(fds, roles, strict=True))

    def connect(self, ip: str, port: int) -> socket.socket:
        """Connect from inside; raises OSError."""
        sock = self._made("connect", ip, port)
        sock.settimeout(TIMEOUT_S)
        return sock

    def datagrams(self, ip: str = "127.0.0.1", port: int = 53) -> socket.socket:
        """Return a UDP socket inside that is connected to ``ip``."""
        sock = self._made("udp", "::" if ":" in ip else "0.0.0.0", 0)
        sock.settimeout(TIMEOUT_S)
        try:
            sock.connect((ip, port))
        except OSError:
            sock.close()
            raise
        return sock

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the argument vector that runs ``argv`` inside."""
        return [sys.executable, "-S", netlab.__file__, "--enter", str(self._child.pid), *argv]

    def _made(self, op: str, ip: str, port: int) -> socket.socket:
        self._control.send(json.dumps({"op": op, "ip": ip, "port": port}).encode())
        packet, fds, _, _ = socket.recv_fds(self._control, 4096, 1)
        if not fds:
            problem = json.loads(packet)
            raise OSError(problem["errno"], problem["error"])
        return socket.socket(fileno=fds[0])

    def close(self) -> None:
        """End the namespace."""
        self._control.close()
        self._child.wait(TIMEOUT_S)
        for one in self._listeners:
            with contextlib.suppress(OSError):
                one.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
