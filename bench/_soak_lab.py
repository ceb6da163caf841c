"""The internet of the egress soak: origins that count every byte, and the name server that leads to them.

Each rollout has a number, and each of its origins an address that tells kind and number. So an origin knows by the
address that was dialled whose bytes it gets, whatever they say of themselves, and a byte that comes to an address that no
rule allows is seen at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import cast

import trustme

from stockade.egress.gate import Hello, client_hello
from tests.egress.netlab import NetLab

RESOLVER = "11.0.0.54"
OWN = "11.0.0.200"
KINDS = {"plain": 10, "capped": 11, "tun": 12, "raw": 13, "insp": 14, "stuck": 15, "evil": 66}
HTTP_PORT, TLS_PORT, OPAQUE_PORT, RAW_PORT, STUCK_PORT = 80, 8443, 443, 22, 9443
STUCK_S = 1.0
"""How long the origin that never reads does not read, before it takes and counts what is there."""

_PER_NET = 250
_NAME = re.compile(r"(?:[a-z0-9-]+\.)?(plain|capped|tun|raw|insp|stuck|evil)-(\d{1,5})\.soak\.test")
_BY_CODE = {code: kind for kind, code in KINDS.items()}
_PIECE = 1 << 16
_QUESTION_END = 5


def address_of(kind: str, number: int) -> str:
    """Return where an origin of a rollout is."""
    return f"11.{KINDS[kind]}.{number // _PER_NET}.{number % _PER_NET + 1}"


@dataclass(slots=True, eq=False)
class Message:
    """One request, or one tunnel, as it came to an origin. ``key`` is (host kind, path) or (tunnel's name, "")."""

    kind: str
    number: int
    key: str = ""
    bytes_in: int = 0
    whole: bool = False


class Origins:
    """All origins of all rollouts; one asyncio server for each port."""

    def __init__(self, lab: NetLab) -> None:
        self.authority = trustme.CA()
        self.messages: dict[int, list[Message]] = defaultdict(list)
        self.received: Counter[int] = Counter()
        self.sent: Counter[int] = Counter()
        self.open: Counter[int] = Counter()
        self.trespasses: list[str] = []
        """What must never happen: a connection or a question that no rule allows."""
        self._lab = lab
        self._servers: list[asyncio.Server] = []
        self._names: asyncio.DatagramTransport | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen everywhere in the lab."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.authority.issue_cert("*.soak.test").configure_cert(context)
        serve = {
            HTTP_PORT: (self._http, None),
            TLS_PORT: (self._http, context),
            OPAQUE_PORT: (self._echo, None),
            RAW_PORT: (self._echo, None),
            STUCK_PORT: (self._stuck, None),
        }
        for port, (handler, secured) in serve.items():
            sock = self._socket("listen", "0.0.0.0", port)  # noqa: S104 - every address of the lab
            server = await asyncio.start_server(self._guarded(handler), sock=sock, ssl=secured, backlog=4096)
            self._servers.append(server)
        loop = asyncio.get_running_loop()
        udp = self._socket("udp", RESOLVER, 53)
        self._names, _ = await loop.create_datagram_endpoint(lambda: _NameServer(self), sock=udp)

    async def close(self) -> None:
        """End all servers and their connections."""
        for server in self._servers:
            server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for server in self._servers:
            await server.wait_closed()
        if self._names is not None:
            self._names.close()

    async def quiet(self, number: int) -> None:
        """Wait until the rollout has no connection at any origin: all that is on its way has come."""
        async with asyncio.timeout(60):
            while self.open[number]:
                await asyncio.sleep(0.02)

    def forget(self, number: int) -> None:
        """Drop what was counted for a rollout."""
        for table in (self.messages, self.received, self.sent, self.open):
            table.pop(number, None)

    def _socket(self, op: str, ip: str, port: int) -> socket.socket:
        sock = self._lab._socket(op, ip, port)  # noqa: SLF001 - the lab's own origins are threads
        sock.setblocking(False)
        return sock

    def _guarded(self, handler: Callable[[Peer], Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        """Return what asyncio calls for each connection: it knows whose it is, and sees to its end."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            ip = str(writer.get_extra_info("sockname")[0])
            kind, number = _place(ip)
            self.open[number] += 1
            try:
                if kind in ("", "evil"):
                    self.trespasses.append(f"a connection to {ip}")
                    return
                with contextlib.suppress(OSError, ssl.SSLError, asyncio.CancelledError):
                    await handler(Peer(self, reader, writer, kind, number))
            finally:
                writer.transport.abort()
                self.open[number] -= 1
                self._tasks.discard(task)

        return serve

    async def _http(self, peer: Peer) -> None:
        """Answer requests: the last part of the path says how long the answer is, and how it is framed."""
        while (message := await peer.request()) is not None:
            size, _, how = message.key.rpartition("/")[2].partition("-")
            await peer.answer(int(size), chunked=how == "chunked")

    async def _echo(self, peer: Peer) -> None:
        """Send back what comes, and the end as well; the first bytes say which tunnel it is."""
        message = peer.message()
        first = b""
        while piece := await peer.read(message):
            if not message.key:
                first += piece
                message.key = _named(first)
            await peer.write(piece)
        message.whole = True
        peer.writer.write_eof()
        while await peer.read(message):
            pass

    async def _stuck(self, peer: Peer) -> None:
        """Read the hello, then nothing for a while; at the end all that was sent is taken and counted."""
        message = peer.message()
        first = b""
        while not message.key and (piece := await peer.read(message)):
            first += piece
            message.key = _named(first)
        await asyncio.sleep(STUCK_S)
        while await peer.read(message):
            pass


class Peer:
    """One connection of one rollout to one origin; every byte that comes is counted as it comes."""

    def __init__(
        self, origins: Origins, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: str, number: int
    ) -> None:
        self.writer = writer
        self._origins = origins
        self._reader = reader
        self._kind, self._number = kind, number
        self._buffer = b""

    def message(self) -> Message:
        """Begin to count something new."""
        made = Message(self._kind, self._number)
        self._origins.messages[self._number].append(made)
        return made

    async def read(self, message: Message) -> bytes:
        """Return the next bytes, ``b""`` at the end."""
        piece = await self._reader.read(_PIECE)
        self._origins.received[self._number] += len(piece)
        message.bytes_in += len(piece)
        return piece

    async def write(self, data: bytes) -> None:
        """Send; it counts as sent before it is."""
        self._origins.sent[self._number] += len(data)
        self.writer.write(data)
        await self.writer.drain()

    async def request(self) -> Message | None:
        """Read one request with its body; None at the end of the connection."""
        message = self.message()
        message.bytes_in, buffer = len(self._buffer), self._buffer
        self._buffer = b""
        while (end := buffer.find(b"\r\n\r\n") + 4) < 4:
            piece = await self.read(message)
            if not piece:
                if not message.bytes_in:
                    self._origins.messages[self._number].remove(message)
                return None
            buffer += piece
        head, buffer = buffer[:end], buffer[end:]
        message.key = head.split(b" ", 2)[1].decode("ascii")
        while (rest := _after_body(head.lower(), buffer)) is None:
            piece = await self.read(message)
            if not piece:
                return None
            buffer += piece
        self._buffer = buffer[len(buffer) - rest :] if rest else b""
        message.bytes_in -= rest  # that belongs to the next one
        message.whole = True
        return message

    async def answer(self, size: int, *, chunked: bool) -> None:
        """Send a response of ``size`` bytes."""
        framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {size}"
        await self.write(f"HTTP/1.1 200 OK\r\n{framing}\r\n\r\n".encode("ascii"))
        while size:
            piece = b"z" * min(size, _PIECE)
            size -= len(piece)
            await self.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
        if chunked:
            await self.write(b"0\r\n\r\n")


def _after_body(head: bytes, buffer: bytes) -> int | None:
    """Return how many bytes of ``buffer`` lie behind the body, None while it is not whole (bodies hold no CR)."""
    if b"\r\ntransfer-encoding: chunked\r\n" in head:
        if buffer.startswith(b"0\r\n\r\n"):
            return len(buffer) - 5
        end = buffer.find(b"\r\n0\r\n\r\n")
        return None if end < 0 else len(buffer) - end - 7
    length = re.search(rb"\r\ncontent-length: (\d+)\r\n", head)
    size = int(length[1]) if length else 0
    return None if len(buffer) < size else len(buffer) - size


def _named(first: bytes) -> str:
    """Return which tunnel the first bytes belong to: by the name in a ClientHello, or by a line in clear."""
    hello = client_hello(first)
    if isinstance(hello, Hello):
        return hello.sni[0]
    line, newline, _ = first.partition(b"\n")
    return line.decode("ascii", "replace") if newline else ""


def _place(ip: str) -> tuple[str, int]:
    """Return kind and rollout of an origin's address; ``""`` for one that is nobody's."""
    first, code, high, low = map(int, ip.removeprefix("::ffff:").split("."))
    if first != 11 or code not in _BY_CODE:
        return "", 0
    return _BY_CODE[code], high * _PER_NET + low - 1


class _NameServer(asyncio.DatagramProtocol):
    """Knows the names of all origins; a question about one that no rule allows is a trespass (egress case 42)."""

    def __init__(self, origins: Origins) -> None:
        self._origins = origins
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the socket."""
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        """Answer one question."""
        end = data.index(b"\0", 12) + _QUESTION_END
        question, labels, at = data[12:end], [], 12
        while data[at]:
            labels.append(data[at + 1 : at + 1 + data[at]])
            at += 1 + data[at]
        name = b".".join(labels).decode("ascii").lower()
        known = _NAME.fullmatch(name)
        if known is None or known[1] == "evil":
            self._origins.trespasses.append(f"a question about {name}")
        record = b""
        if known is not None and question[-4:-2] == b"\0\1":
            packed = socket.inet_aton(address_of(known[1], int(known[2])))
            record = b"\xc0\x0c\0\x01\0\x01\0\0\0\x1e\0\x04" + packed
        flags = b"\x81\x80" if known is not None else b"\x81\x83"
        counts = b"\0\1" + (b"\0\1" if record else b"\0\0") + b"\0\0\0\0"
        if self._transport is not None:
            self._transport.sendto(data[:2] + flags + counts + question + record, addr)
