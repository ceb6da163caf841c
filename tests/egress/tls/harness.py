"""Both ends of TLS for tests: a loop in a thread, and a small proxy on it whose tunnels end in a :class:`TlsStream`."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from stockade.egress._authority import Authority, make_authority
from stockade.egress._loop import GONE, READ, WRITE, Loop
from stockade.egress._mint import Mint
from stockade.egress._stream import READ_BYTES, Stream
from stockade.egress._tls_stream import TlsStream
from stockade.egress.gate import Hello, client_hello

TIMEOUT_S = 30.0
_TLS = 0x16
HOST = "files.test"
OUTSIDE = "outside.test"
"""A host that the authority of the tests may not vouch for."""
PERMITTED = (HOST, "*.wild.test", "192.0.2.7", "2001:db8::7")


def wait(condition: Callable[[], object]) -> None:
    """Wait until ``condition`` holds."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.002)


class LoopThread:
    """A loop that runs in a thread. ``call`` runs a function on it and returns what that returned."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.faults: list[Exception] = []
        self._wake, self._woken = socket.socketpair()
        self._calls: list[Callable[[], None]] = []
        self.loop.watch(self._woken.fileno(), self._on_wake, self.faults.append, READ)
        self._thread = threading.Thread(target=self.loop.run, daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run ``function`` on the loop; an exception of it is raised here."""
        done = threading.Event()
        outcome: list[Any] = []
        problem: list[BaseException] = []

        def run() -> None:
            try:
                outcome.append(function(*arguments))
            except BaseException as error:  # noqa: BLE001 - raised where it was asked for
                problem.append(error)
            done.set()

        self._calls.append(run)
        self._wake.send(b"x")
        assert done.wait(TIMEOUT_S), "the loop does not answer"
        if problem:
            raise problem[0]
        return outcome[0]

    def _on_wake(self, _events: int) -> None:
        self._woken.recv(4096)
        while self._calls:
            self._calls.pop(0)()

    def close(self) -> None:
        self.call(self.loop.stop)
        self._thread.join(TIMEOUT_S)
        self._wake.close()
        self._woken.close()
        self.loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Front(LoopThread):
    """A proxy that answers every tunnel itself: ``context(host)`` greets the client, ``pages`` are served by path.

    Who begins with TLS gets no proxy but the host of its server name, as behind a local fake address.
    ``reached`` holds the host of each connection, ``seen`` ``(host, method, path)`` of each request, ``failed`` the
    texts of failed handshakes.
    """

    def __init__(self, context: Callable[[str], ssl.SSLContext], pages: Mapping[str, bytes]) -> None:
        self.context = context
        self.pages = dict(pages)
        self.seen: list[tuple[str, str, str]] = []
        self.reached: list[str] = []
        self.failed: list[str] = []
        self.live: set[_Served] = set()
        super().__init__()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.listener.setblocking(False)
        self.port = self.listener.getsockname()[1]
        self.call(lambda: self.loop.watch(self.listener.fileno(), self._accept, self.faults.append, READ))

    @property
    def url(self) -> str:
        """The address of the proxy."""
        return f"http://127.0.0.1:{self.port}"

    def _accept(self, _events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            sock, _ = self.listener.accept()
            sock.setblocking(False)
            self.live.add(_Served(self, sock))

    def close(self) -> None:
        for one in list(self.live):
            self.call(one.close)
        super().close()
        self.listener.close()


class _Served:
    """One connection: CONNECT, handshake, requests."""

    def __init__(self, front: Front, sock: socket.socket) -> None:
        self.front = front
        self.host = ""
        self.buffer = b""
        self.stream: Stream | TlsStream = Stream(front.loop, sock, self._event, front.faults.append)
        self.stream.want(read=True)

    def close(self, *, abort: bool = False) -> None:
        self.stream.close(abort=abort)
        self.front.live.discard(self)

    def _event(self, events: int) -> None:
        try:
            if events & WRITE:
                self.stream.flush()
            piece = self.stream.receive() if events & (READ | GONE) else None
        except OSError:
            self.close(abort=True)
            return
        if piece == b"":
            self.close()
        elif piece:
            self.buffer += piece
            if not self.host and self.buffer[0] == _TLS:
                self._hello()
            else:
                self._heads()

    def _hello(self) -> None:
        hello = client_hello(self.buffer)
        if isinstance(hello, Hello):
            self.host = hello.sni[0]
            self._inspect()

    def _inspect(self) -> None:
        initial, self.buffer = self.buffer, b""
        self.front.reached.append(self.host)
        self.stream = TlsStream.server(self.stream, self.front.context(self.host), initial, self._greeted)

    def _heads(self) -> None:
        while not self.stream.closed:
            head, found, rest = self.buffer.partition(b"\r\n\r\n")
            if not found:
                return
            self.buffer = rest
            method, target = head.decode("latin-1").split(" ")[:2]
            if self.host:
                self._answer(method, target, head)
                continue
            self.host = target.rpartition(":")[0].strip("[]")
            self.stream.send(b"HTTP/1.1 200 OK\r\n\r\n")
            self._inspect()
            return

    def _greeted(self, why: str | None) -> None:
        if why is None:
            self.stream.want(read=True)
            return
        self.front.failed.append(why)
        self.close()

    def _answer(self, method: str, target: str, head: bytes) -> None:
        path = target.partition("?")[0]
        self.front.seen.append((self.host, method, path))
        body = self.front.pages.get(path)
        status = "404 Not Found" if body is None else "200 OK"
        body = body or b""
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", f"Content-Type: {_kind(path)}"]
        self.stream.send("\r\n".join(lines).encode() + b"\r\n\r\n" + (b"" if method == "HEAD" else body))
        if b"connection: close" in head.lower():
            self.close()


class Owner:
    """An owner of one end on a loop: notes events, receives while ``greedy``, ``size`` bytes at a time.

    ``peer`` is the other end, a blocking socket.
    """

    def __init__(self, looping: LoopThread, *, greedy: bool = True, size: int = READ_BYTES) -> None:
        self.looping = looping
        self.greedy = greedy
        self.size = size
        self.events: list[int] = []
        self.got = bytearray()
        self.ended = False
        self.problem = ""
        self.told: list[str | None] = []
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.peer = socket.create_connection(listener.getsockname(), TIMEOUT_S)
            ours, _ = listener.accept()
        ours.setblocking(False)
        self.peer.settimeout(TIMEOUT_S)
        self.plain: Stream = looping.call(lambda: Stream(looping.loop, ours, self.event, looping.faults.append))
        self.stream: Any = self.plain

    def serve(self, context: ssl.SSLContext, initial: bytes = b"") -> None:
        """Become a TLS server."""
        self.stream = self.looping.call(lambda: TlsStream.server(self.plain, context, initial, self.told.append))

    def greet(self, context: ssl.SSLContext, host: str = HOST) -> None:
        """Become a TLS client."""
        self.stream = self.looping.call(lambda: TlsStream.client(self.plain, context, host, self.told.append))

    def greeted(self) -> str | None:
        """Wait for the handshake; return what was told."""
        wait(lambda: self.told)
        assert len(self.told) == 1
        return self.told[0]

    def event(self, events: int) -> None:
        self.events.append(events)
        if events & WRITE:
            self.stream.flush()
        if self.greedy and events & (READ | GONE):
            self.take()

    def take(self) -> None:
        """Receive once."""
        try:
            piece = self.stream.receive(self.size)
        except OSError as error:
            self.problem = str(error.strerror)
            self.stream.want(read=False)
            return
        if piece == b"":
            self.ended = True
            self.stream.want(read=False)
        elif piece:
            assert len(piece) <= self.size
            self.got += piece

    def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of the stream on its loop."""
        return self.looping.call(lambda: getattr(self.stream, name)(*arguments, **named))

    def close(self) -> None:
        self.call("close")
        self.peer.close()


def _kind(path: str) -> str:
    if path.endswith("/"):
        return "text/html"
    return "text/plain" if "." in path or "refs" in path else "application/json"


class Run:
    """An authority and its mint, and one that trusts it."""

    def __init__(self, permitted: tuple[str, ...] = PERMITTED) -> None:
        self.authority: Authority = make_authority(permitted, run_id="run-test")
        self.mint = Mint(self.authority.cert_pem, self.authority.key_pem)

    def client(self) -> ssl.SSLContext:
        """A client as strict as they come."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_STRICT
        context.load_verify_locations(cadata=self.authority.cert_pem.decode())
        return context

    def close(self) -> None:
        self.mint.close()
