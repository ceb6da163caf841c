"""A network of one's own for tests: public addresses on loopback, in a network namespace that ends with the test.

The gate has no test switch, so origins must have public addresses. A small child process makes a network namespace
(as root, or with a user namespace as an ordinary user), brings ``lo`` up, makes 11.0.0.0/8 and a few internal ranges
local there, and hands out sockets made inside by SCM_RIGHTS. A socket belongs to the namespace it was made in, so
origins and resolver are plain threads of the test, and :meth:`NetLab.connect` shows that what the gate refuses can be
reached without it. :meth:`NetLab.command` runs a program, such as an egress worker or an agent, inside.

::

    with NetLab() as lab:
        lab.add_host("files.example.org", "11.0.0.5")
        origin = lab.http("11.0.0.5", 80)
        worker = subprocess.Popen(lab.command([sys.executable, "-m", …]), …)

Run as a script, this file is that child, or the entry of a program into the namespace.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import json
import os
import re
import socket
import ssl
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

RESOLVER = "11.0.0.53"
WORKER_OWN = "11.0.0.200"
"""What tests call the worker's own address: in the lab every address is local."""

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_LOCAL_V4 = ("11.0.0.1/8", "10.0.0.1/8", "169.254.169.254/16", "192.168.0.1/16", "172.16.0.1/12", "100.64.0.1/10")
_LOCAL_V6 = ("2600:5::5", "2600:5::6", "fd00::5")


# ------------------------------------------------------------------------------------- the child's part


def _main(arguments: list[str]) -> None:
    if arguments[0] == "--enter":
        _enter(int(arguments[1]))
        os.execvp(arguments[2], arguments[2:])
    if arguments[0] == "--probe":
        _unshare()
        return
    _serve(socket.socket(fileno=int(arguments[1])))


def _unshare() -> bool:
    """Make the network namespace; return whether a user namespace was needed for it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) == 0:
        return False
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    return True


def _enter(pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    own = os.stat("/proc/self/ns/user").st_ino
    for name, flag in (("user", _CLONE_NEWUSER), ("net", _CLONE_NEWNET)):
        fd = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
        if (name != "user" or os.fstat(fd).st_ino != own) and libc.setns(fd, flag) != 0:
            raise OSError(ctypes.get_errno(), f"setns {name}")
        os.close(fd)


def _configure() -> None:
    """Bring ``lo`` up and make the ranges local, by the old ioctls: netdevice(7)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, 0x8914, struct.pack("16sH14x", b"lo", 1 | 64))  # SIOCSIFFLAGS: up, running
        for number, network in enumerate(_LOCAL_V4, 1):
            text, _, bits = network.partition("/")
            name = f"lo:{number}".encode()
            mask = struct.pack(">I", (0xFFFFFFFF << (32 - int(bits))) & 0xFFFFFFFF)
            for request, packed in ((0x8916, socket.inet_aton(text)), (0x891C, mask)):  # address, netmask
                fcntl.ioctl(sock, request, struct.pack("16sHH4s8x", name, socket.AF_INET, 0, packed))
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sock:
        index = socket.if_nametoindex("lo")
        for text in _LOCAL_V6:
            packed = socket.inet_pton(socket.AF_INET6, text)
            fcntl.ioctl(sock, 0x8916, packed + struct.pack("Ii", 128, index))


def _serve(control: socket.socket) -> None:
    in_user_namespace = _unshare()
    _configure()
    control.send(json.dumps({"user_namespace": in_user_namespace}).encode())
    _answer(control)


def _answer(control: socket.socket) -> None:
    """Make the sockets that are asked for, until the other side hangs up."""
    while packet := control.recv(4096):
        request = json.loads(packet)
        try:
            made = _make(request)
        except OSError as error:
            control.send(json.dumps({"errno": error.errno, "error": str(error)}).encode())
            continue
        fds = array.array("i", [made.fileno()]).tobytes()
        control.sendmsg([b"{}"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        made.close()


def _make(request: dict) -> socket.socket:
    address = (request["ip"], request["port"])
    family = socket.AF_INET6 if ":" in request["ip"] else socket.AF_INET
    kind = socket.SOCK_DGRAM if request["op"] == "udp" else socket.SOCK_STREAM
    sock = socket.socket(family, kind)
    if request["op"] == "connect":
        sock.settimeout(5)
        sock.connect(address)
        sock.settimeout(None)
        return sock
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(address)
    if request["op"] == "listen":
        sock.listen(128)
    return sock


if __name__ == "__main__":
    _main(sys.argv[1:])


# ------------------------------------------------------------------------------------- the test's part


@dataclass
class Received:
    """A request as it reached an origin: ``head`` is the raw bytes with the blank line."""

    head: bytes
    body: bytes

    @property
    def line(self) -> bytes:
        return self.head.split(b"\r\n", 1)[0]

    def header(self, name: str) -> list[bytes]:
        """Return the values of all fields called ``name``."""
        pattern = rb"(?im)^" + re.escape(name.encode()) + rb":[ \t]*(.*?)\r$"
        return re.findall(pattern, self.head)


Handler = Callable[["Origin", socket.socket], None]
Respond = Callable[[Received], bytes]


class Origin:
    """A listening socket in the lab and its threads. ``received`` holds requests, ``data`` the raw bytes."""

    def __init__(self, listener: socket.socket, handler: Handler, respond: Respond | None = None) -> None:
        self.ip, self.port = listener.getsockname()[:2]
        self.respond: Respond = respond or (lambda _request: response(b"hello"))
        self.received: list[Received] = []
        self.data = bytearray()
        self.connections = 0
        self.closed = threading.Event()
        self._listener = listener
        self._handler = handler
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def close(self) -> None:
        """Stop, and wait for the threads."""
        self.closed.set()
        self.drop()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(5)

    def drop(self, *, reset: bool = False) -> None:
        """Close the open connections, with RST if asked."""
        for sock in list(self._open):
            with contextlib.suppress(OSError):
                if reset:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    sock.close()
                else:
                    sock.shutdown(socket.SHUT_RDWR)

    def swap(self, old: socket.socket, new: socket.socket) -> None:
        """Take note that a handler has wrapped its socket."""
        self._open.discard(old)
        self._open.add(new)

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self.closed.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.add(sock)
            self._start(self._run, sock)

    def _run(self, sock: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError, ssl.SSLError):
                self._handler(self, sock)
        finally:
            self._open = {one for one in self._open if one is not sock and one.fileno() >= 0}
            with contextlib.suppress(OSError):
                sock.close()


def response(body: bytes = b"", status: str = "200 OK", *headers: str) -> bytes:
    """Return a response with Content-Length."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def read_request(sock: socket.socket) -> Received | None:
    """Read one request, with its body, the way a plain origin would; None at the end."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = sock.recv(65536)
        if not piece:
            return None
        data += piece
    end = data.index(b"\r\n\r\n") + 4
    request = Received(data[:end], data[end:])
    if request.header("transfer-encoding"):
        while not request.body.endswith(b"0\r\n\r\n"):
            piece = sock.recv(65536)
            if not piece:
                return None
            request.body += piece
        return request
    # As lax as the laxest peer: an origin that reads "0x3" or "3, 3" is what the gate is there for.
    digits = re.search(rb"\d+$", (request.header("content-length") or [b"0"])[0])
    length = int(digits[0]) if digits else 0
    while len(request.body) < length:
        piece = sock.recv(65536)
        if not piece:
            return None
        request.body += piece
    return request


def serve_http(origin: Origin, sock: socket.socket) -> None:
    """Answer requests until the peer closes; a response with ``Connection: close`` ends the connection."""
    while (request := read_request(sock)) is not None:
        origin.received.append(request)
        answer = origin.respond(request)
        sock.sendall(answer)
        if b"connection: close" in answer.split(b"\r\n\r\n", 1)[0].lower():
            return


def serve_echo(origin: Origin, sock: socket.socket) -> None:
    """Send back what comes; pass the end on."""
    while piece := sock.recv(1 << 18):
        origin.data += piece
        sock.sendall(piece)
    sock.shutdown(socket.SHUT_WR)


def serve_sink(origin: Origin, sock: socket.socket) -> None:
    """Keep what comes, and say nothing."""
    while piece := sock.recv(1 << 18):
        origin.data += piece


def wrapped_or_closed(context: ssl.SSLContext, sock: socket.socket) -> ssl.SSLSocket:
    """Shake hands as the server. A peer that leaves at the wrong moment makes ``wrap_socket`` forget a socket."""
    try:
        return context.wrap_socket(sock, server_side=True)
    except OSError as error:
        trace = error.__traceback__
        while trace is not None:
            half_made = trace.tb_frame.f_locals.get("self")
            if isinstance(half_made, ssl.SSLSocket):
                half_made.close()
            trace = trace.tb_next
        raise


def over_tls(context: ssl.SSLContext, inner: Handler) -> Handler:
    """Return a handler that shakes hands first."""

    def handle(origin: Origin, sock: socket.socket) -> None:
        sock.getpeername()  # of a peer that is gone already, wrap_socket would leave an open socket behind
        with wrapped_or_closed(context, sock) as wrapped:
            origin.swap(sock, wrapped)
            inner(origin, wrapped)
            with contextlib.suppress(OSError, ValueError):  # ValueError: the handler has closed it
                wrapped.unwrap()  # an end that is said, so that an answer which ends by it is whole

    return handle


@dataclass
class Dns:
    """The lab's resolver. ``zone`` maps a name to a list of rounds of addresses (the last one stays), or to a word.

    The words are ``servfail``, ``silence``, ``refused``, ``forged`` (an answer to another question, then the true
    one), ``truncated`` (TC over UDP, whole over TCP) and ``cname NAME``.
    """

    zone: dict[str, list[tuple[str, ...]] | str] = field(default_factory=dict)
    queries: list[tuple[str, str]] = field(default_factory=list)
    ttl_s: int = 0
    """Of every answer: 0, so that a test which gives a name another address need not wait for a cache."""
    hold: threading.Event | None = None
    """Answers nothing until this is set, so that a test can have many look-ups under way."""

    def answer(self, wire: bytes, *, tcp: bool) -> list[bytes]:
        """Return the datagrams that answer ``wire``."""
        import dnslib

        request = dnslib.DNSRecord.parse(wire)
        name, rrtype = str(request.q.qname).rstrip(".").lower(), dnslib.QTYPE[request.q.qtype]
        self.queries.append((name, rrtype))
        if self.hold is not None:
            self.hold.wait(10)
        reply = request.reply()
        entry = self.zone.get(name)
        word = entry if isinstance(entry, str) else ""
        if word == "silence":
            return []
        if word in ("servfail", "refused"):
            reply.header.rcode = 2 if word == "servfail" else 5
        elif entry is None:
            reply.header.rcode = 3
        elif word == "truncated" and not tcp:
            reply.header.tc = 1
        else:
            self._fill(reply, name, rrtype)
        packed = [reply.pack()]
        if word == "forged":
            other = dnslib.DNSRecord.question("other.example.org", rrtype).reply()
            other.header.id = request.header.id
            other.add_answer(*dnslib.RR.fromZone("other.example.org 60 A 11.6.6.6"))
            wrong_id = dnslib.DNSRecord.parse(reply.pack())
            wrong_id.header.id ^= 0x5555
            packed = [other.pack(), wrong_id.pack(), b"\x00garbage", *packed]
        return packed

    def _fill(self, reply: Any, name: str, rrtype: str) -> None:
        import dnslib

        entry = self.zone[name]
        if isinstance(entry, str) and entry.startswith("cname "):
            target = entry.split()[1]
            reply.add_answer(*dnslib.RR.fromZone(f"{name} {self.ttl_s} CNAME {target}."))
            name, entry = target, self.zone[target]
        rounds = entry if isinstance(entry, list) else [("11.0.0.5",)]
        addresses = rounds[0]
        if rrtype == "AAAA" and len(rounds) > 1:
            rounds.pop(0)  # both families of one look-up see the same round: A is asked first
        for address in addresses:
            if (":" in address) == (rrtype == "AAAA"):
                family, kind = (socket.AF_INET6, dnslib.AAAA) if ":" in address else (socket.AF_INET, dnslib.A)
                packed = tuple(socket.inet_pton(family, address))
                reply.add_answer(dnslib.RR(name, getattr(dnslib.QTYPE, rrtype), rdata=kind(packed), ttl=self.ttl_s))

    def serve_udp(self, sock: socket.socket) -> None:
        while True:
            try:
                wire, peer = sock.recvfrom(65536)
            except OSError:
                return
            if not wire:
                return
            for packet in self.answer(wire, tcp=False):
                sock.sendto(packet, peer)

    def serve_tcp(self, _origin: Origin, sock: socket.socket) -> None:
        while head := sock.recv(2):
            wire = sock.recv(int.from_bytes(head, "big"))
            for packet in self.answer(wire, tcp=True):
                # In two pieces: a reader that takes one read for one message would fail.
                framed = len(packet).to_bytes(2, "big") + packet
                sock.sendall(framed[:7])
                sock.sendall(framed[7:])


class NetLab:
    """The network namespace, its resolver on 11.0.0.53 and its origins; all end with the ``with`` block."""

    def __init__(self) -> None:
        self.dns = Dns()
        self._closers: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    @staticmethod
    def possible() -> bool:
        """Return whether this machine lets us make a network namespace."""
        argv = [sys.executable, "-S", __file__, "--probe"]
        return subprocess.run(argv, check=False, stderr=subprocess.DEVNULL).returncode == 0

    def __enter__(self) -> Self:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-S", __file__, "--serve", str(theirs.fileno())], pass_fds=[theirs.fileno()]
            )
        self._control = ours
        self._control.settimeout(20)
        try:
            self._begin()
        except BaseException:
            self.close()
            raise
        return self

    def _begin(self) -> None:
        if not self._control.recv(4096):
            raise OSError("no network namespace can be made here")
        udp = self._socket("udp", RESOLVER, 53)
        thread = threading.Thread(target=self.dns.serve_udp, args=(udp,), daemon=True)
        thread.start()

        def stop_udp() -> None:
            with contextlib.suppress(OSError):
                udp.shutdown(socket.SHUT_RDWR)
            thread.join(5)
            udp.close()

        self._closers.append(stop_udp)
        self.origin(RESOLVER, 53, self.dns.serve_tcp)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End everything."""
        while self._closers:
            self._closers.pop()()
        self._control.close()
        self._child.wait(10)

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the argument vector that runs ``argv`` inside the namespace."""
        return [sys.executable, "-S", __file__, "--enter", str(self._child.pid), *argv]

    def add_host(self, name: str, *addresses: str, then: Sequence[tuple[str, ...]] = ()) -> None:
        """Let ``name`` resolve to ``addresses``; ``then`` gives the answers of later look-ups."""
        self.dns.zone[name] = [addresses, *then]

    def connect(self, ip: str, port: int) -> socket.socket:
        """Connect from inside without any gate: what an attack could reach if the gate were not there."""
        return self._socket("connect", ip, port)

    def origin(self, ip: str, port: int, handler: Handler, respond: Respond | None = None) -> Origin:
        """Start an origin."""
        made = Origin(self._socket("listen", ip, port), handler, respond)
        self._closers.append(made.close)
        return made

    def http(self, ip: str, port: int = 80, respond: Respond | None = None) -> Origin:
        """Start an HTTP origin."""
        return self.origin(ip, port, serve_http, respond)

    def echo(self, ip: str, port: int) -> Origin:
        """Start an origin that sends everything back."""
        return self.origin(ip, port, serve_echo)

    def tls(self, ip: str, context: ssl.SSLContext, port: int = 443, inner: Handler = serve_http) -> Origin:
        """Start a TLS origin."""
        return self.origin(ip, port, over_tls(context, inner))

    def _socket(self, op: str, ip: str, port: int) -> socket.socket:
        with self._lock:
            self._control.send(json.dumps({"op": op, "ip": ip, "port": port}).encode())
            packet, fds, _, _ = socket.recv_fds(self._control, 4096, 1)
        if not fds:
            problem = json.loads(packet)
            raise OSError(problem["errno"], problem["error"])
        return socket.socket(fileno=fds[0])
