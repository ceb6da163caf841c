"""The network that is measured in: a namespace with a public address, an origin, a resolver, and the compiled clients.

The gate has no switch for tests and refuses loopback, so the origin must have a public address. Nothing leaves the
namespace: it has no interface but ``lo``.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import trustme

ORIGIN = "11.0.0.1"
RESOLVER = "11.0.0.53"
SILENT = "11.0.0.66"
"""Accepts connections and never reads from them."""
OWN = "11.0.0.200"
"""What the worker is told are this host's addresses; nobody asks for it."""

PLAIN = "plain.bench.example"
TUNNEL = "tunnel.bench.example"
INSPECTED = "inspected.bench.example"
STORED = "stored.bench.example"
SILENT_NAME = "silent.bench.example"
NAMES = (PLAIN, TUNNEL, INSPECTED, STORED, SILENT_NAME)

MARKER = "STOCKADE_BENCH_EGRESS_NAMESPACE"
SIZES = {"1k": 1 << 10, "10m": 10 << 20, "64m": 1 << 26, "1g": 1 << 30}

_NEEDED = {
    "unshare": "util-linux",
    "setpriv": "util-linux",
    "ip": "iproute2",
    "nginx": "nginx-light",
    "cc": "gcc and libc6-dev",
}


LEASH = ("setpriv", "--pdeathsig", "TERM")
"""Put before a program that must not outlive this one, even if this one is killed; squid slips it by changing its user."""


class Missing(Exception):
    """Something that the benchmark needs is not on this machine."""


def check() -> None:
    """Raise :class:`Missing` if this machine cannot run the benchmark at all."""
    for program, package in _NEEDED.items():
        if program_path(program) is None:
            raise Missing(f"bench.egress needs the program {program!r} (Debian: {package})")


def program_path(name: str) -> str | None:
    """Return where ``name`` lies, also if an ordinary user's PATH leaves out the system's folders."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))


def enter_namespace(arguments: list[str]) -> None:
    """Run this program again in a network namespace of its own; does not return."""
    flags = ["--net"] if os.geteuid() == 0 else ["--net", "--user", "--map-current-user", "--keep-caps"]
    # A local route, not an address of an interface: the gate refuses what the node itself is called.
    setup = 'ip link set lo up && ip route add local 11.0.0.0/24 dev lo && exec "$@"'
    words = ["unshare", *flags, "--", "/bin/sh", "-c", setup, "sh", sys.executable, "-m", "bench.egress", *arguments]
    os.environ[MARKER] = "1"
    os.execvp(words[0], words)


def build_load(folder: Path) -> Path:
    """Compile the clients; raises :class:`Missing` with what the compiler said."""
    program = folder / "load"
    source = Path(__file__).with_name("load.c")
    words = ["cc", "-O2", "-o", str(program), str(source), "-lssl", "-lcrypto"]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise Missing(f"bench.egress cannot compile its clients (Debian: gcc, libssl-dev):\n{done.stderr}")
    return program


class Cores:
    """Which core the proxies get, and which one everything else; no pinning where there is only one, or no taskset."""

    def __init__(self) -> None:
        cores = sorted(os.sched_getaffinity(0))
        self.pinned = len(cores) > 1 and shutil.which("taskset") is not None
        self.load, self.proxy = cores[0], cores[-1]
        self.prefix = ["taskset", "-c", str(self.proxy)] if self.pinned else []

    def settle(self) -> None:
        """Put this process, and the children it will have, on the load's core."""
        if self.pinned:
            os.sched_setaffinity(0, {self.load})


class Lab:
    """Origin, resolver, a silent peer, and the certificates; call from inside the namespace."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = trustme.CA()
        self.roots = folder / "roots.pem"
        self.authority.cert_pem.write_to_path(str(self.roots))
        self._stopping: list[socket.socket] = []
        self._origin = self._start_origin()
        names = self._bound(socket.SOCK_DGRAM, RESOLVER, 53)
        threading.Thread(target=self._answer_names, args=(names,), daemon=True).start()
        silent = self._bound(socket.SOCK_STREAM, SILENT, 443)
        silent.listen(4096)
        self._stopping.append(silent)

    def close(self) -> None:
        """End what was started."""
        self._origin.terminate()
        self._origin.wait(10)
        for sock in self._stopping:
            sock.close()

    def bytes_sent(self) -> int:
        """Return how many bytes the origin has sent so far, as its log says; for the store."""
        log = self.folder / "sent.log"
        return sum(int(line) for line in log.read_text().split()) if log.exists() else 0

    def _start_origin(self) -> subprocess.Popen[bytes]:
        site = self.folder / "site"
        site.mkdir()
        for name, size in SIZES.items():
            with (site / name).open("wb") as file:
                file.truncate(size)
        certificate = self.authority.issue_cert(*NAMES)
        pem = self.folder / "origin.pem"
        certificate.private_key_and_cert_chain_pem.write_to_path(str(pem))
        temporary = " ".join(
            f"{kind}_temp_path {self.folder}/temp-{kind};"
            for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        settings = self.folder / "nginx.conf"
        # Session tickets as nginx has them by default: a proxy that can resume with an origin may, as it could outside.
        settings.write_text(f"""\
daemon off; worker_processes 1; pid {self.folder}/nginx.pid; error_log {self.folder}/nginx.log;
{"user root;" if os.geteuid() == 0 else ""}
events {{ worker_connections 8000; }}
http {{
  log_format sent $body_bytes_sent; access_log off; {temporary}
  sendfile on; keepalive_timeout 900; keepalive_requests 100000000; default_type application/octet-stream;
  ssl_certificate {pem}; ssl_certificate_key {pem}; ssl_session_cache off;
  server {{ listen {ORIGIN}:80 backlog=4096; listen {ORIGIN}:443 ssl backlog=4096; root {site}; open_file_cache max=16; }}
  server {{
    listen {ORIGIN}:80; listen {ORIGIN}:443 ssl; server_name {STORED}; root {site}; access_log {self.folder}/sent.log sent;
    location / {{ try_files /10m =404; }}
  }}
}}
""")
        program = program_path("nginx")
        assert program is not None, "checked before"
        words = [*LEASH, program, "-c", str(settings)]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for_port(ORIGIN, 80, process)
        return process

    def _bound(self, kind: socket.SocketKind, address: str, port: int) -> socket.socket:
        sock = socket.socket(socket.AF_INET, kind)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
        return sock

    @staticmethod
    def _answer_names(sock: socket.socket) -> None:
        """Answer each A question: header, question and one address. Every other type has no record."""
        silent = b"\x06silent"
        while True:
            query, peer = sock.recvfrom(4096)
            end = query.index(b"\0", 12) + 5
            question = query[12:end]
            wanted = question[-4:-2] == b"\0\x01"
            address = (
                SILENT if question.lower().startswith(silent) else ORIGIN
            )  # resolvers mix the case of what they ask
            record = b"\xc0\x0c\0\x01\0\x01\0\0\0\x3c\0\x04" + socket.inet_aton(address) if wanted else b""
            head = query[:2] + b"\x81\x80\0\x01" + (b"\0\x01" if wanted else b"\0\0") + b"\0\0\0\0"
            sock.sendto(head + question + record, peer)


def wait_for_port(address: str, port: int, process: subprocess.Popen[bytes], limit_s: float = 30) -> None:
    """Wait until somebody listens; raises RuntimeError if ``process`` ends or the time is over."""
    end = time.monotonic() + limit_s
    while process.poll() is None and time.monotonic() < end:
        try:
            socket.create_connection((address, port), 1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError(f"{process.args!r} does not listen on {address}:{port}")


def free_port() -> int:
    """Return a port of loopback that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])
