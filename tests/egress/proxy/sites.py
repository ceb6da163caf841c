"""A worker that can look into TLS, sites with certificates that it trusts, and clients that trust the run's authority."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import trustme

from stockade.egress import Equipment, Role, Settings, make_authority
from stockade.egress.gate import Rules
from tests.egress.netlab import Handler, NetLab, Origin, serve_http
from tests.egress.proxy.harness import TIMEOUT_S, Attached, Client, Worker, rules

PERMITTED = ("*.test", "11.0.0.99")
IP = "11.0.0.80"
"""Where the sites are that a test does not place elsewhere."""

LIMITS = "{requests_per_minute: 6000, bytes_out: 64 MiB, bytes_in: 256 MiB, bytes_out_per_request: 16 MiB}"

SITES = f"""
version: 1
egress:
  allow:
    - {{host: read.test, read_only: true}}
    - {{host: api.test, methods: [GET, POST], paths: ["/v1/**"], ports: [443, 8443]}}
    - {{host: "*.wild.test", methods: [GET]}}
    - {{host: open.test, ports: [443]}}
    - {{host: clear.test, methods: [GET], paths: ["/public/**"], ports: [80]}}
    - {{host: 11.0.0.99, methods: [GET], ports: [443]}}
  limits: {LIMITS}
"""


def policy(*allow: str, deny: tuple[str, ...] = (), limits: str = LIMITS, mode: str = "live", more: str = "") -> str:
    """Return the text of a policy with these rules."""
    lines = ["version: 1", "egress:", f"  mode: {mode}", "  allow:", *(f"    - {rule}" for rule in allow)]
    if deny:
        lines += ["  deny:", *(f"    - {rule}" for rule in deny)]
    return "\n".join([*lines, f"  limits: {limits}", *([f"  {more}"] if more else []), ""])


class Sites:
    """The worker with its authority, and the authority of the sites."""

    def __init__(
        self, lab: NetLab, folder: Path, *, settings: Settings | None = None, worker: bool = True, **parts: Any
    ) -> None:
        self.lab = lab
        self.authority = make_authority(PERMITTED, run_id="run-test")
        self.roots = trustme.CA()
        self.equipment = Equipment(
            **{
                "authority_cert": self.authority.cert_pem,
                "authority_key": self.authority.key_pem,
                "roots": self.roots.cert_pem.bytes(),
                **parts,
            }
        )
        self.settings = settings or Settings()
        self.folder = folder
        self._workers: list[Worker] = []
        if worker:
            self.start()

    @property
    def worker(self) -> Worker:
        """The first worker."""
        return self._workers[0]

    def start(self, **options: Any) -> Worker:
        """Start one more worker with the same settings."""
        options = {"settings": self.settings, "equipment": self.equipment, **options}
        worker = Worker(self.lab, self.folder, **options)
        self._workers.append(worker)
        return worker

    def attach(
        self,
        text: str = SITES,
        *,
        worker: Worker | None = None,
        sockets: Mapping[int, Role] | None = None,
        **options: Any,
    ) -> Attached:
        """Attach a rollout that may be looked into."""
        compiled: Rules = rules(text, **{"inspection": True, **options})
        return (worker or self.worker).attach(compiled, sockets=sockets)

    def context(self, *names: str, **options: Any) -> ssl.SSLContext:
        """Return what a site called ``names`` greets its clients with."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.roots.issue_cert(*names, **options).configure_cert(made)
        return made

    def site(
        self, *names: str, ip: str = IP, port: int = 443, inner: Handler = serve_http, context: Any = None
    ) -> Origin:
        """Open a site that speaks TLS; its names lead to ``ip``."""
        for name in names:
            if not name[0].isdigit():
                self.lab.add_host(name, ip)
        return self.lab.tls(ip, context or self.context(*names), port, inner)

    def client_context(self) -> ssl.SSLContext:
        """Return the trust of a client in the sandbox: the run's authority alone."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_STRICT
        context.load_verify_locations(cadata=self.authority.cert_pem.decode())
        return context

    def tls(self, sock: socket.socket, host: str, context: ssl.SSLContext | None = None) -> Client:
        """Shake hands as a client that wants ``host``; an end that is not said, or a reset, raises ssl.SSLError."""
        sock.settimeout(TIMEOUT_S)
        context = context or self.client_context()
        return Client(context.wrap_socket(sock, server_hostname=host, suppress_ragged_eofs=False))

    def inside(self, rollout: Attached, host: str, port: int = 443, context: ssl.SSLContext | None = None) -> Client:
        """Return a client inside a tunnel to ``host`` that is looked into."""
        client = rollout.connect()
        reply = client.connect(host, port)
        assert reply.status == 200, reply
        return self.tls(client.sock, host, context)

    def close(self) -> None:
        """End the workers."""
        while self._workers:
            self._workers.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def ask(client: Client, host: str, path: str = "/", *lines: str, method: str = "GET", body: bytes = b"") -> Any:
    """Send one request in origin form, and return the reply."""
    head = [f"{method} {path} HTTP/1.1", f"Host: {host}", *lines]
    if body:
        head.append(f"Content-Length: {len(body)}")
    client.send("\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + body)
    return client.reply(head=method == "HEAD")


def nothing_left(rollout: Attached) -> bool:
    """Return whether not one byte went out for this rollout."""
    return all(not event.get("bytes_out") for event in rollout.events("net.end"))


def rss_kib(pid: int) -> int:
    """Return the resident memory of a process, in KiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError(f"process {pid} has no memory")


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def eventually(check: Any, timeout_s: float = TIMEOUT_S) -> None:
    """Wait until ``check()`` is true."""
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)
