"""Requests, tunnels and bulk through the egress worker: against a direct connection from the same kind of client.

The gate has no switch for tests, so this re-runs itself in a network namespace of its own, where a public address
(11.0.0.1) is local, an origin speaks HTTP and TLS, and a small resolver answers for it. Nothing leaves the namespace. The
client is bench/_load.py in both cases: outside, and in a sandbox through the proxy.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import trustme
from dnslib import QTYPE, RR, A
from dnslib.server import BaseResolver, DNSLogger, DNSServer

from bench._harness import Measure, Variant, arguments, interleave, report
from bench._live import live_run
from stockade import Episode

ADDRESS = "11.0.0.1"
NAME = "origin.bench.example"
HTTP_PORT, TLS_PORT, DNS_PORT = 8080, 8443, 5353
MARKER = "STOCKADE_BENCH_NAMESPACE"
BLOCK = b"x" * (1 << 18)
LOADS = {"requests": 500, "connects": 100, "bulk": 256 << 20}

POLICY = f"""\
version: 1
egress:
  allow:
    - {{host: {NAME}, methods: [GET], paths: ["/small"], ports: [{HTTP_PORT}]}}
    - {{host: {NAME}, ports: [{TLS_PORT}]}}
  limits: {{requests_per_minute: 1000000, bytes_out: 1 GiB, bytes_in: 1 TiB, total: 60 min}}
sandbox: {{memory: 512 MiB, wall: 60 min}}
data: {{private: false}}
"""
OPERATOR = f"""\
version: 1
resolvers: ["{ADDRESS}:{DNS_PORT}"]
"""


class Origin(BaseHTTPRequestHandler):
    """Answers ``/small`` and ``/bytes/N``."""

    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # head and small body leave in one packet …
    disable_nagle_algorithm = True  # … and at once: delayed acknowledgements would be all that is measured

    def do_GET(self) -> None:
        """Send the body that the path asks for."""
        length = int(self.path.rpartition("/")[2]) if self.path.startswith("/bytes/") else 64
        self.send_response(200)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        while length > 0:
            self.wfile.write(BLOCK[:length])
            length -= len(BLOCK)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it
        """Stay silent."""


class OneName(BaseResolver):  # type: ignore[misc]  # dnslib has no types
    """Answers every A question with the origin's address."""

    def resolve(self, request: Any, handler: Any) -> Any:  # noqa: ARG002 - the base class asks for it
        """Return the reply to ``request``."""
        reply = request.reply()
        if request.q.qtype == QTYPE.A:
            reply.add_answer(RR(request.q.qname, QTYPE.A, rdata=A(ADDRESS), ttl=1))
        return reply


def enter_namespace() -> None:
    """Run this program again in a network namespace whose ``lo`` has a public address; does not return."""
    for program in ("unshare", "ip"):
        if shutil.which(program) is None:
            raise SystemExit(f"bench.proxy needs the program {program!r} (util-linux, iproute2)")
    flags = ["--net"] if os.geteuid() == 0 else ["--net", "--user", "--map-current-user", "--keep-caps"]
    # A local route, not an address of an interface: the gate refuses what the node itself is called.
    setup = f'ip link set lo up && ip route add local {ADDRESS}/32 dev lo && exec "$@"'
    words = ["unshare", *flags, "--", "/bin/sh", "-c", setup, "sh", sys.executable, "-m", "bench.proxy", *sys.argv[1:]]
    os.environ[MARKER] = "1"
    os.execvp(words[0], words)


def serve(folder: Path) -> Path:
    """Start origin and resolver in threads; return the path of the certificate authority's file."""
    authority = trustme.CA()
    certificate = authority.issue_cert(NAME)
    path = folder / "ca.pem"
    authority.cert_pem.write_to_path(str(path))
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(context)
    for port in (HTTP_PORT, TLS_PORT):
        server = ThreadingHTTPServer((ADDRESS, port), Origin)
        if port == TLS_PORT:
            # The handshake belongs to the connection's own thread, not to the one that accepts.
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    DNSServer(OneName(), address=ADDRESS, port=DNS_PORT, logger=DNSLogger(log="error")).start_thread()
    return path


def load_words(mode: str, script: str, authority: str) -> list[str]:
    """Return the client's command line, without a proxy."""
    port = HTTP_PORT if mode == "requests" else TLS_PORT
    return ["python3", script, mode, NAME, str(port), authority, str(LOADS[mode])]


def direct(mode: str, authority: Path) -> Measure:
    """Return a measure of a direct connection from outside any sandbox."""
    words = load_words(mode, str(Path(__file__).with_name("_load.py")), str(authority))
    # No name service in this namespace: the client is told the address by a hosts file of its own mount namespace.
    hosts = authority.with_name("hosts")
    hosts.write_text(f"127.0.0.1 localhost\n{ADDRESS} {NAME}\n")
    inner = f'mount --bind "{hosts}" /etc/hosts && exec "$@"'
    wrapped = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"]), "/bin/sh", "-c", inner, "sh"]

    async def measure() -> float:
        done = await asyncio.to_thread(subprocess.run, [*wrapped, *words], check=True, capture_output=True)
        return float(done.stdout)

    return measure


def through(mode: str, rollout: Episode) -> Measure:
    """Return a measure of the same client in a sandbox, through the worker."""
    words = [*load_words(mode, "/workspace/load.py", "/workspace/ca.pem"), "127.0.0.1:3128"]

    async def measure() -> float:
        result = await rollout.exec(words, timeout_s=300)
        assert not result.stderr, result.stderr
        return float(result.stdout)

    return measure


async def main() -> None:
    """Measure and print."""
    options = arguments(__doc__ or "", rounds=7)
    if MARKER not in os.environ:
        enter_namespace()
    with tempfile.TemporaryDirectory(prefix="sk-bench-") as folder:
        authority = serve(Path(folder))
        async with live_run(POLICY, operator=OPERATOR) as run, run.rollout() as rollout:
            await rollout.write_file("/workspace/load.py", Path(__file__).with_name("_load.py").read_bytes())
            await rollout.write_file("/workspace/ca.pem", authority.read_bytes())
            for mode, title, unit, scale in (
                ("requests", "proxy requests: one kept-alive connection", "µs", 1e6 / LOADS["requests"]),
                ("connects", "proxy tunnels: connect, TLS handshake, one request", "ms", 1e3 / LOADS["connects"]),
                ("bulk", "proxy bulk: 1 GiB by tunnel", "s", (1 << 30) / LOADS["bulk"]),
            ):
                variants = [Variant("direct", direct(mode, authority)), Variant("worker", through(mode, rollout))]
                series = await interleave(variants, rounds=options.rounds, warm_up=1)
                report(title, series, unit=unit, scale=scale)


if __name__ == "__main__":
    asyncio.run(main())
