"""A worker under test, driven over its control socket, and clients that speak bytes."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from stockade.egress import Equipment, Role, Settings, _wire
from stockade.egress._channel import worker_environment
from stockade.egress._ledger import make_ledger, memory_file
from stockade.egress.gate import Rules
from stockade.ids import new_rollout_id
from stockade.policy import load_operator, parse_policy
from tests.egress.netlab import RESOLVER, WORKER_OWN, NetLab

TIMEOUT_S = 15.0

POLICY = """
version: 1
egress:
  allow:
    - {host: plain.example.org, methods: [GET, HEAD, POST, PUT], paths: ["/**"], ports: [80, 8080]}
    - {host: other.example.org, methods: [GET], paths: ["/public/**"], ports: [80]}
    - {host: tunnel.example.org, ports: [443]}
    - {host: "*.wild.example.org", ports: [443]}
  limits: {requests_per_minute: 6000, bytes_out: 64 MiB, bytes_in: 256 MiB, bytes_out_per_request: 16 MiB}
"""


def rules(policy: str = POLICY, **options: Any) -> Rules:
    """Return the rules of a policy text; ``options`` are those of :meth:`Rules.from_policy`."""
    return Rules.from_policy(parse_policy(policy, source="test.yaml"), load_operator(None), **options)


@dataclass
class Attached:
    """One rollout on the worker: where its clients connect, and its record."""

    worker: Worker
    rollout_id: str
    address: tuple[str, int]
    record: Path
    listener: socket.socket
    record_fd: int
    ledger: int = -1

    def connect(self) -> Client:
        """Return a client inside the sandbox."""
        return Client(socket.create_connection(self.address, TIMEOUT_S))

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Return what is on record; a line that is just being written is not."""
        whole = self.record.read_text("ascii").rpartition("\n")[0]
        found = [json.loads(line) for line in whole.splitlines()]
        return [event for event in found if kind is None or event["kind"] == kind]

    def wait(self, kind: str, count: int = 1) -> list[dict[str, Any]]:
        """Wait until ``count`` events of ``kind`` are on record; return them."""
        deadline = time.monotonic() + TIMEOUT_S
        while len(found := self.events(kind)) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count} {kind}: {self.events()}"
            time.sleep(0.01)
        return found

    def last(self, kind: str = "net.end") -> dict[str, Any]:
        """Wait for one event of ``kind`` and return the last one."""
        return self.wait(kind)[-1]

    def close(self) -> None:
        """Close what the agent would keep. Idempotent."""
        self.listener.close()
        if self.record_fd >= 0:
            os.close(self.record_fd)
            self.record_fd = -1
        if self.ledger >= 0:
            os.close(self.ledger)
            self.ledger = -1


class Worker:
    """The real worker process, inside the lab."""

    def __init__(
        self,
        lab: NetLab,
        folder: Path,
        *,
        file_size: int | None = None,
        nofile: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        settings: Settings | None = None,
        equipment: Equipment | None = None,
    ) -> None:
        self.folder = folder
        self.news: list[dict[str, Any]] = []
        self._number = 0
        self._attached: list[Attached] = []
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(TIMEOUT_S)

        def limit() -> None:
            if file_size is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
            if nofile is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (nofile, nofile))

        with theirs:
            argv = [sys.executable, "-m", "stockade.egress", "--control-fd", str(theirs.fileno())]
            self.process = subprocess.Popen(
                lab.command(argv),
                pass_fds=[theirs.fileno()],
                env=worker_environment(),
                preexec_fn=limit,  # noqa: PLW1509 - the limits of one child, set before any thread could mind
            )
        settings = settings or Settings()
        self.ready = self._configure(
            msgspec.structs.replace(settings, resolvers=(RESOLVER,)), equipment or Equipment(), uid=uid, gid=gid
        )

    def _configure(self, settings: Settings, equipment: Equipment, **ids: int | None) -> dict[str, Any]:
        memory = {name: memory_file(name, data) for name, data in equipment.memory_parts().items()}
        parts = dict(memory)
        if equipment.store >= 0:
            parts["store"] = equipment.store
        try:
            return self.ask(
                "configure",
                list(parts.values()),
                settings=msgspec.json.encode(settings).decode(),
                parts=list(parts),
                place=0,
                places=1,
                own_addresses=[WORKER_OWN],
                **ids,
            )
        finally:
            for fd in memory.values():
                os.close(fd)

    def ask(self, op: str, fds: Sequence[int] = (), **fields: Any) -> dict[str, Any]:
        """Send one request and return its answer; news that come before it are kept."""
        self._number += 1
        _wire.send(self.control, _wire.encode({"op": op, "id": self._number, **fields}), fds)
        while True:
            received = _wire.receive(self.control)
            assert received is not None, "the worker hung up"
            message: dict[str, Any] = dict(received[0])
            if message.get("id") == self._number:
                return message
            self.news.append(message)

    def attach(
        self, policy: str | Rules = POLICY, *, sockets: Mapping[int, Role] | None = None, **fields: Any
    ) -> Attached:
        """Attach a fresh rollout, by a listener of its own unless other ``sockets`` are given."""
        rollout_id = new_rollout_id()
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        record = self.folder / f"{rollout_id}.egress.jsonl"
        fd = os.open(record, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        attached = Attached(self, rollout_id, listener.getsockname(), record, listener, fd)
        self._attached.append(attached)
        compiled = rules(policy) if isinstance(policy, str) else policy
        answer = self.ask_attach(attached, compiled, sockets or {listener.fileno(): Role.PROXY}, **fields)
        assert answer.get("ok"), answer
        return attached

    def ask_attach(
        self, attached: Attached, compiled: Rules, sockets: Mapping[int, Role], **fields: Any
    ) -> dict[str, Any]:
        """Send the descriptors of one rollout; return the answer."""
        context = {"run_id": "run-test", "rollout_id": attached.rollout_id, "policy_digest": "sha256:" + "0" * 64}
        if attached.ledger < 0:
            attached.ledger = make_ledger(accounts=1 + len(compiled.rule_limits), names=compiled.limits.names)
        document = memory_file("rules", compiled.to_json().encode())
        try:
            return self.ask(
                "attach",
                (attached.record_fd, attached.ledger, document, *sockets),
                **{"rollout_id": attached.rollout_id, "context": context, "chain_start": None, "revoked": False}
                | {"roles": [role.value for role in sockets.values()]}
                | fields,
            )
        finally:
            os.close(document)

    def close(self) -> None:
        """Hang up: the worker must end by itself."""
        self.control.close()
        self.process.wait(10)
        for attached in self._attached:
            attached.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass
class Reply:
    """A response as a client read it."""

    status: int
    head: bytes
    body: bytes

    @property
    def reason(self) -> str:
        """The value of X-Stockade-Reason, or ``""``."""
        for line in self.head.split(b"\r\n"):
            name, _, value = line.partition(b":")
            if name.lower() == b"x-stockade-reason":
                return value.strip().decode()
        return ""


class Client:
    """A socket and a buffer."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sock.settimeout(TIMEOUT_S)
        self._buffer = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.sock.close()

    def send(self, data: bytes) -> Self:
        """Send all of ``data``."""
        self.sock.sendall(data)
        return self

    def reply(self, *, head: bool = False) -> Reply:
        """Read one response with its body."""
        raw = self._until(b"\r\n\r\n")
        status = int(raw.split(b" ", 2)[1])
        lower = raw.lower()
        if head or status in (204, 304) or 100 <= status < 200:
            return Reply(status, raw, b"")
        if b"transfer-encoding: chunked" in lower:
            return Reply(status, raw, self._chunks())
        for line in lower.split(b"\r\n"):
            if line.startswith(b"content-length:"):
                return Reply(status, raw, self.take(int(line[15:])))
        if raw.startswith(b"HTTP/1.1 200 Connection established"):
            return Reply(status, raw, b"")
        return Reply(status, raw, self.rest())

    def connect(self, host: str, port: int = 443) -> Reply:
        """Ask for a tunnel."""
        return self.send(f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode()).reply()

    def get(self, url: str, *headers: str) -> Reply:
        """Send a GET in absolute form and read the response."""
        host = url.split("/")[2]
        lines = [f"GET {url} HTTP/1.1", f"Host: {host}", *headers]
        return self.send("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n").reply()

    def rest(self) -> bytes:
        """Read to the end; a reset is an end too."""
        with contextlib.suppress(ConnectionResetError, EOFError):
            while True:
                self._more()
        return self.take(len(self._buffer))

    def ended(self) -> bool:
        """Read to the end and return whether it was a clean one (FIN, not RST)."""
        try:
            while self.sock.recv(65536):
                pass
        except ConnectionResetError:
            return False
        return True

    def take(self, size: int) -> bytes:
        """Read exactly ``size`` bytes."""
        while len(self._buffer) < size:
            self._more()
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    def _until(self, mark: bytes) -> bytes:
        while mark not in self._buffer:
            self._more()
        data = self.take(self._buffer.index(mark))
        self.take(len(mark))
        return data

    def _chunks(self) -> bytes:
        body = b""
        while True:
            size = int(self._until(b"\r\n"), 16)
            body += self.take(size)
            assert self.take(2) == b"\r\n"
            if size == 0:
                return body

    def _more(self) -> None:
        piece = self.sock.recv(1 << 18)
        if not piece:
            raise EOFError(f"closed after {bytes(self._buffer[:200])!r}")
        self._buffer += piece


def post(url: str, body: bytes, *headers: str) -> bytes:
    """Return a POST in absolute form."""
    host = url.split("/")[2]
    lines = [f"POST {url} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


@contextlib.contextmanager
def running(lab: NetLab, folder: Path, **options: Any) -> Iterator[Worker]:
    """Run a worker of one's own."""
    with Worker(lab, folder, **options) as worker:
        yield worker
