"""What the sandboxes of the egress soak do: the traffic of a rollout, good and bad, by every way in.

An action knows what must come of it. What a dead worker cut short is no fault; an answer that is wrong, a refusal that
did not come, or bytes that are not those of the origin are.
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
import ssl
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from bench._soak_lab import OPAQUE_PORT, RAW_PORT, STUCK_PORT, TLS_PORT
from stockade.egress.gate import TLS_ACCESS_DENIED
from tests.egress.proxy import hellos
from tests.egress.proxy.guestnet import GuestNet

HANG_S = 120.0
"""No action may last so long, whatever is killed: the limits of a rollout end each of them within 20 s."""
CUT = (OSError, EOFError, ssl.SSLError)
_REFUSED = range(400, 600)
_CROWD = (
    "rate_limited",
    "too_many_connections",
    "too_many_names",
    "bytes_out_exceeded",
    "bytes_in_exceeded",
    "revoked",
)
"""Refusals that any request may meet: the rollout has used up what it may use."""
_ACTION: ContextVar[str] = ContextVar("action")


class Wrong(Exception):
    """An answer that must not be."""


@dataclass(eq=False)
class Guest:
    """The code inside one sandbox. ``done`` holds the keys of what came back whole, ``got`` counts origins' bytes."""

    number: int
    address: tuple[str, int]
    trust: ssl.SSLContext
    chance: random.Random
    net: GuestNet | None = None
    done: set[str] = field(default_factory=set)
    wins: Counter[str] = field(default_factory=Counter)
    got: int = 0
    tokens: int = 0

    def whole(self, key: str) -> None:
        """Note that something came back whole, and by which action."""
        self.done.add(key)
        self.wins[_ACTION.get()] += 1

    def host(self, kind: str) -> str:
        """Return the name of one of its origins."""
        return f"{kind}-{self.number}.soak.test"

    def token(self) -> str:
        """Return something that was not said before."""
        self.tokens += 1
        return f"t{self.tokens}"

    async def connect(self) -> Wire:
        """Connect to its proxy."""
        reader, writer = await asyncio.open_connection(*self.address)
        return Wire(reader, writer)


class Wire:
    """One connection of a client; anything that is not there raises EOFError."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        """Send all of it."""
        self.writer.write(data)
        await self.writer.drain()

    async def reply(self, guest: Guest, *, tunnel: bool = False) -> tuple[int, str, int]:
        """Read one response; return its status, the gate's reason (``""``: the origin's own) and the body's size."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status = int(head.split(" ", 2)[1])
        reason = re.search(r"(?i)\r\nx-stockade-reason: (\w+)\r\n", head)
        if tunnel and status == 200:
            return status, "", 0
        if "\r\ntransfer-encoding: chunked\r\n" in head.lower():
            size = 0
            while line := int(await self.reader.readuntil(b"\r\n"), 16):
                size += len(await self.reader.readexactly(line))
                await self.reader.readexactly(2)
            await self.reader.readexactly(2)
        else:
            length = re.search(r"(?i)\r\ncontent-length: (\d+)\r\n", head)
            size = int(length[1]) if length else 0
            await self._skip(size)
        if reason is None:
            guest.got += size
        return status, reason[1] if reason else "", size

    async def _skip(self, size: int) -> None:
        while size:
            piece = await self.reader.read(min(size, 1 << 16))
            if not piece:
                raise EOFError
            size -= len(piece)

    async def rest(self) -> int:
        """Read to the end; return how many bytes there were."""
        size = 0
        while piece := await self.reader.read(1 << 16):
            size += len(piece)
        return size

    def reset(self) -> None:
        """Close with RST."""
        sock = self.writer.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def close(self) -> None:
        """Close."""
        self.writer.close()


def check(guest: Guest, key: str, size: int, reply: tuple[int, str, int]) -> bool:
    """Take a reply to something allowed: the origin's own answer, or a limit. Return whether it was the former."""
    status, reason, body = reply
    if status == 200 and not reason:
        if body != size:
            raise Wrong(f"{key}: {body} bytes instead of {size}")
        if key:
            guest.whole(key)
        return True
    if reason in _CROWD or (reason == "request_too_large" and status == 413):
        return False
    if reason in ("upstream_failed", "upstream_tls", "resolve_failed", "client_tls"):
        raise EOFError  # an origin's backlog, or a resolver's patience: this is a busy machine
    raise Wrong(f"{key}: {status} {reason}")


def denied(what: str, reply: tuple[int, str, int]) -> None:
    """Take a reply to something that must not be."""
    status, reason, _ = reply
    if status not in _REFUSED or not reason:
        raise Wrong(f"{what}: {status} {reason or 'from the origin'}")


def _get(host: str, path: str, *, origin: bool = False) -> bytes:
    target = path if origin else f"http://{host}{path}"
    return f"GET {target} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: soak\r\n\r\n".encode("ascii")


async def gets(guest: Guest) -> None:
    """Fetch several things on one connection, pipelined or one after the other; the last one may be forbidden."""
    wire, host = await guest.connect(), guest.host("plain")
    try:
        asked = []
        for _ in range(guest.chance.randint(1, 4)):
            size = guest.chance.choice((0, 100, 5_000, 70_000, 400_000))
            asked.append((f"/ok/{guest.token()}/{size}{guest.chance.choice(('', '-chunked'))}", size))
        if guest.chance.random() < 0.3:
            await wire.send(b"".join(_get(host, path) for path, _ in asked))
            for path, size in asked:
                if not check(guest, path, size, await wire.reply(guest)):
                    return
            return
        for path, size in asked:
            await wire.send(_get(host, path))
            if not check(guest, path, size, await wire.reply(guest)):
                return
        await wire.send(_get(host, f"/no/{guest.token()}/1"))
        denied("a path that no rule has", await wire.reply(guest))
    finally:
        wire.close()


async def uploads(guest: Guest, kind: str = "plain") -> None:
    """Send a body, with a length or in chunks."""
    wire, host = await guest.connect(), guest.host(kind)
    try:
        path, size = f"/ok/{guest.token()}/10", guest.chance.choice((0, 10, 9_000, 60_000))
        head = f"POST http://{host}{path} HTTP/1.1\r\nHost: {host}\r\n"
        if guest.chance.random() < 0.5:
            await wire.send(f"{head}Content-Length: {size}\r\n\r\n".encode("ascii") + b"u" * size)
        else:
            await wire.send(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode("ascii"))
            for at in range(0, size, 7_000):
                piece = b"u" * min(7_000, size - at)
                await wire.send(b"%x;x=y\r\n%b\r\n" % (len(piece), piece))
                await asyncio.sleep(guest.chance.choice((0, 0.02)))
            await wire.send(b"0\r\nX-T: z\r\n\r\n")
        check(guest, path, 10, await wire.reply(guest))
    finally:
        wire.close()


async def capped(guest: Guest) -> None:
    """Send to the host whose rule has limits of its own."""
    await uploads(guest, "capped")


async def never_reads(guest: Guest) -> None:
    """Ask for much, read nothing of it, and hang up the hard way."""
    wire = await guest.connect()
    await wire.send(_get(guest.host("plain"), f"/ok/{guest.token()}/{8 << 20}"))
    await asyncio.sleep(guest.chance.uniform(0.2, 1.5))
    wire.reset()


async def resets(guest: Guest) -> None:
    """Stop in the middle of a head, or of a body."""
    wire, host = await guest.connect(), guest.host("plain")
    head = f"POST http://{host}/ok/{guest.token()}/0 HTTP/1.1\r\nHost: {host}\r\nContent-Length: 5000\r\n\r\n"
    await wire.send(head.encode("ascii")[: guest.chance.choice((20, 4096))] + b"u" * guest.chance.choice((0, 2500)))
    await asyncio.sleep(guest.chance.uniform(0, 0.3))
    wire.reset()


async def _echoed(guest: Guest, wire: Wire, name: str, first: bytes) -> None:
    """Send through an open tunnel, half-close it, and take the same back."""
    size = guest.chance.choice((0, 100, 40_000, 300_000))
    body = b"".join((first, guest.chance.randbytes(size)))
    sending = asyncio.ensure_future(_pour(wire, body))
    try:
        back = bytearray()
        while piece := await wire.reader.read(1 << 16):
            back += piece
        guest.got += len(back)
        if back == TLS_ACCESS_DENIED:
            return  # what a client is told that knows of no proxy: the rollout has used up its requests
        if not body.startswith(back):
            raise Wrong(f"{name}: other bytes came back")
        if len(back) == len(body):
            guest.whole(name)
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        wire.close()


async def _pour(wire: Wire, body: bytes) -> None:
    await wire.send(body)
    wire.writer.write_eof()


async def _asked(guest: Guest, name: str, port: int) -> Wire | None:
    """Ask for a tunnel by CONNECT or SOCKS5; None where a limit said no."""
    wire = await guest.connect()
    try:
        if guest.chance.random() < 0.5:
            await wire.send(f"CONNECT {name}:{port} HTTP/1.1\r\nHost: {name}:{port}\r\n\r\n".encode("ascii"))
            opened = check(guest, "", 0, await wire.reply(guest, tunnel=True))
        else:
            opened = await _socks(wire, name, port)
    except BaseException:
        wire.close()
        raise
    if opened:
        return wire
    wire.close()
    return None


async def _socks(wire: Wire, name: str, port: int) -> bool:
    await wire.send(b"\5\1\0")
    if await wire.reader.readexactly(2) != b"\5\0":
        raise EOFError  # turned away before anything was asked: too many connections
    await wire.send(b"\5\1\0\3" + bytes((len(name),)) + name.encode("ascii") + port.to_bytes(2, "big"))
    return (await wire.reader.readexactly(10))[1] == 0


async def tunnels(guest: Guest) -> None:
    """Open a tunnel that nobody looks into, by a name of its own."""
    name = f"{guest.token()}.{guest.host('tun')}"
    wire = await _asked(guest, name, OPAQUE_PORT)
    if wire is not None:
        await _echoed(guest, wire, name, hellos.made(name.encode("ascii")))


async def raw(guest: Guest) -> None:
    """Send bytes that are nothing in particular, where a tcp rule says so."""
    name = f"{guest.token()}.{guest.host('raw')}"
    wire = await _asked(guest, name, RAW_PORT)
    if wire is not None:
        await _echoed(guest, wire, name, name.encode("ascii") + b"\n")


async def stuck(guest: Guest) -> None:
    """Send into a tunnel whose origin never reads."""
    name = f"{guest.token()}.{guest.host('stuck')}"
    wire = await _asked(guest, name, STUCK_PORT)
    if wire is None:
        return
    wire.writer.write(hellos.made(name.encode("ascii")) + guest.chance.randbytes(300_000))
    await asyncio.sleep(guest.chance.uniform(0.1, 0.8))
    wire.reset()


async def transparent(guest: Guest) -> None:
    """Ask for a name, and connect to its address, as a client does that knows of no proxy."""
    if guest.net is None:
        await tunnels(guest)
        return
    clear = guest.chance.random() < 0.5
    name = guest.host("plain") if clear else f"{guest.token()}.{guest.host('tun')}"
    ip = await asyncio.to_thread(_looked_up, guest.net, name)
    if ip is None:
        return
    sock = await asyncio.to_thread(guest.net.connect, ip, 80 if clear else OPAQUE_PORT)
    sock.setblocking(False)
    wire = Wire(*await asyncio.open_connection(sock=sock))
    if not clear:
        await _echoed(guest, wire, name, hellos.made(name.encode("ascii")))
        return
    try:
        path = f"/ok/{guest.token()}/500"
        await wire.send(_get(name, path, origin=True))
        check(guest, path, 500, await wire.reply(guest))
    finally:
        wire.close()


def _looked_up(net: GuestNet, name: str) -> str | None:
    """Ask the sandbox's own name server; None for no answer, which is all that a killed worker gives."""
    labels = b"".join(bytes((len(label),)) + label for label in name.encode("ascii").split(b"."))
    query = b"\x53\x4b\1\0\0\1\0\0\0\0\0\0" + labels + b"\0\0\1\0\1"
    with net.datagrams() as sock:
        sock.settimeout(3)
        try:
            sock.send(query)
            answer = sock.recv(4096)
        except OSError:
            return None
    return socket.inet_ntoa(answer[-4:]) if answer[3] & 0xF == 0 and answer[7] else None


async def inspected(guest: Guest) -> None:
    """Requests inside TLS that ends at the gate."""
    host = guest.host("insp")
    wire = await _asked(guest, host, TLS_PORT)
    if wire is None:
        return
    try:
        await wire.writer.start_tls(guest.trust, server_hostname=host)
        where = f"{host}:{TLS_PORT}"
        for _ in range(guest.chance.randint(1, 3)):
            size = guest.chance.choice((0, 3_000, 100_000))
            path = f"/ok/{guest.token()}/{size}"
            await wire.send(_get(where, path, origin=True))
            if not check(guest, path, size, await wire.reply(guest)):
                return
        await wire.send(_get(where, f"/no/{guest.token()}/1", origin=True))
        denied("a path inside TLS that no rule has", await wire.reply(guest))
    finally:
        wire.writer.transport.abort()


async def forbidden(guest: Guest) -> None:
    """Ask for what no rule allows; nothing may come of it."""
    number, host = guest.number, guest.host("plain")
    evil = f"x.evil-{number}.soak.test"
    heads = (
        _get(evil, "/ok/a/1"),
        _get(f"evil-{number}.soak.test", "/ok/a/1"),
        _get("169.254.169.254", "/latest"),
        _get(f"{host}:8080", "/ok/a/1"),
        f"CONNECT {evil}:443 HTTP/1.1\r\nHost: {evil}:443\r\n\r\n".encode("ascii"),
        "CONNECT 10.0.0.5:443 HTTP/1.1\r\nHost: 10.0.0.5:443\r\n\r\n".encode("ascii"),
        f"DELETE http://{host}/ok/a/1 HTTP/1.1\r\nHost: {host}\r\n\r\n".encode("ascii"),
        f"GET http://{host}/ok/a/1 HTTP/1.1\r\nHost: {evil}\r\n\r\n".encode("ascii"),
        f"POST http://{host}/ok/a/1 HTTP/1.1\r\nHost: {host}\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n".encode("ascii"),
        f"GET https://{host}/ok/a/1 HTTP/1.1\r\nHost: {host}\r\n\r\n".encode("ascii"),
    )  # fmt: skip
    wire = await guest.connect()
    try:
        if guest.chance.random() < 0.7:
            head = guest.chance.choice(heads)
            await wire.send(head)
            denied(head.decode("ascii"), await wire.reply(guest))
        elif await _socks(wire, evil, 443):
            raise Wrong("SOCKS5 to a name that no rule has")
    finally:
        wire.close()


async def fronting(guest: Guest) -> None:
    """Open an allowed tunnel and say another name in it, or no TLS at all."""
    name = f"{guest.token()}.{guest.host('tun')}"
    wire = await _asked(guest, name, OPAQUE_PORT)
    if wire is None:
        return
    try:
        other = f"x.evil-{guest.number}.soak.test".encode("ascii")
        await wire.send(guest.chance.choice((hellos.made(other), hellos.made(), b"SSH-2.0-x\r\n")) + b"secret")
        if await wire.rest():
            raise Wrong("a tunnel answered though its first flight was wrong")
    finally:
        wire.close()


ACTIONS: dict[str, tuple[int, Callable[[Guest], Awaitable[None]]]] = {
    "gets": (6, gets),
    "uploads": (4, uploads),
    "capped": (2, capped),
    "tunnels": (5, tunnels),
    "raw": (2, raw),
    "inspected": (3, inspected),
    "transparent": (3, transparent),
    "forbidden": (5, forbidden),
    "fronting": (2, fronting),
    "never_reads": (1, never_reads),
    "stuck": (1, stuck),
    "resets": (2, resets),
}
"""By name: how often, and what."""


async def act(guest: Guest, tally: Counter[str], wrong: list[str]) -> None:
    """Do one thing, and note what came of it."""
    name = guest.chance.choices(list(ACTIONS), [weight for weight, _ in ACTIONS.values()])[0]
    tally[name] += 1
    _ACTION.set(name)
    try:
        async with asyncio.timeout(HANG_S):
            await ACTIONS[name][1](guest)
    except Wrong as error:
        wrong.append(f"rollout {guest.number}, {name}: {error}")
    except TimeoutError:
        wrong.append(f"rollout {guest.number}, {name}: still going after {HANG_S:g} s")
    except CUT:
        tally["(cut short)"] += 1
