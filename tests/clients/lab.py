"""The whole product in a network of its own: an agent with its workers and sandboxes, and origins around them.

The agent is started by ``stockade.connect`` in a program inside the namespace, so nothing of it is replaced or told
that this is a test: its workers resolve names at the lab's resolver (operator's file) and dial the lab's origins. The
test itself stays outside and uses the broker's socket.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import io
import json
import marshal
import os
import runpy
import socket
import ssl
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.egress import netlab

if TYPE_CHECKING:
    from stockade.client import Episode, ExecReply

PACKAGES = "/workspace/packages.zip"
PROXY = "127.0.0.1:3128"
_PROXY_VARIABLES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy")


class Way(NamedTuple):
    """How a program in the sandbox comes to the gate."""

    proxied: bool

    @property
    def name(self) -> str:
        """Return a word for it."""
        return "proxied" if self.proxied else "unset"

    def argv(self, *words: str) -> list[str]:
        """Return the words of a command whose environment names the proxy, or does not."""
        if self.proxied:
            return list(words)
        return ["env", *(word for name in _PROXY_VARIABLES for word in ("-u", name)), *words]

    @property
    def recorded(self) -> str | None:
        """Return what the record says of a tunnel that came so."""
        return None if self.proxied else "transparent"


PROXIED, UNSET = WAYS = (Way(proxied=True), Way(proxied=False))
"""By the variables that the sandbox sets, and without them: names resolve inside and every address is met."""


_PROGRAM = """
import asyncio, json, sys
from stockade.client import connect

async def main():
    policy, runs, operator = sys.argv[1:]
    async with connect(policy, runs=runs, operator=operator) as run:
        print(json.dumps({"directory": str(run.directory), **run.environment}), flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""


class Decision(NamedTuple):
    """The part of a decision's event that a test states in full."""

    kind: str
    verdict: str
    host: str | None
    port: int | None
    reason: str


def tunnel(host: str, reason: str = "allowed", port: int = 443) -> Decision:
    """Return the decision about a CONNECT."""
    return Decision("net.connect", "allowed" if reason == "allowed" else "denied", host, port, reason)


def request(host: str | None, reason: str = "allowed", port: int | None = 80) -> Decision:
    """Return the decision about a plain request."""
    return Decision("net.request", "allowed" if reason == "allowed" else "denied", host, port, reason)


class Lab(netlab.NetLab):
    """A lab in which an ordinary user stays who they are: an agent that sees uid 0 would want root's uids."""

    def __enter__(self) -> Self:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            argv = [sys.executable, "-S", __file__, "--serve", str(theirs.fileno())]
            self._child = subprocess.Popen(argv, pass_fds=[theirs.fileno()])
        self._control = ours
        self._control.settimeout(20)
        try:
            self._begin()
        except BaseException:
            self.close()
            raise
        return self

    def reaches(self, ip: str, port: int = 80) -> bool:
        """Return whether whoever stands in the namespace without a sandbox gets an answer from an HTTP origin."""
        with contextlib.suppress(OSError), self.connect(ip, port) as sock:
            sock.sendall(b"GET /data.bin HTTP/1.1\r\nHost: anybody\r\n\r\n")
            return sock.recv(12) == b"HTTP/1.1 200"
        return False

    def trusting(self, context: ssl.SSLContext, *ips: str, respond: netlab.Respond) -> list[netlab.Origin]:
        """Start an HTTP and an HTTPS origin on each address."""
        plain = [self.http(ip, 80, respond) for ip in ips]
        secret = [self.tls(ip, context) for ip in ips]
        for origin in secret:
            origin.respond = respond
        return plain + secret


class Circle:
    """One run of an agent inside the lab; ends, and must verify, with the ``with`` block."""

    def __init__(
        self,
        lab: Lab,
        folder: Path,
        policy: str,
        ca: bytes,
        *,
        operator: str = "",
        resolver: str = netlab.RESOLVER,
    ) -> None:
        """``ca`` signs the origins' certificates; ``operator`` are more lines of the operator's file."""
        self.lab = lab
        (folder / "ca.pem").write_bytes(ca)
        (folder / "policy.yaml").write_text(policy, "utf-8")
        lines = ["version: 1", f'resolvers: ["{resolver}"]', f"extra_roots: {folder / 'ca.pem'}", operator]
        (folder / "operator.yaml").write_text("\n".join(lines) + "\n", "utf-8")
        words = [str(folder / "policy.yaml"), str(folder / "runs"), str(folder / "operator.yaml")]
        root = Path(__file__).resolve().parents[2]
        self._process = subprocess.Popen(
            lab.command([sys.executable, "-c", _PROGRAM, *words]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])},
            start_new_session=True,
        )
        self._told: Mapping[str, str] = {}

    def __enter__(self) -> Self:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._end()
            raise AssertionError("the agent did not start; its message stands above")
        self._told = json.loads(line)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        from stockade.events import verify_run

        self._end()
        if kind is None:
            report = verify_run(self.directory)
            assert report.ok, report.problems

    def _end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            assert self._process.wait(60) == 0, "the program that owns the run failed"
        finally:
            self._process.kill()
            self._process.wait(10)
            self._process.stdout.close()

    @property
    def directory(self) -> Path:
        """Where the run's record is."""
        return Path(self._told["directory"])

    @contextlib.asynccontextmanager
    async def rollout(
        self,
        *,
        role: Literal["rollout", "grading"] = "rollout",
        env: Mapping[str, str] | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> AsyncIterator[Episode]:
        """Open a rollout, and close it."""
        from stockade.client import BrokerClient

        socket_path, token = (self._told[f"STOCKADE_BROKER_{name}"] for name in ("SOCKET", "TOKEN"))
        async with (
            BrokerClient(socket_path, token) as client,
            await client.create(role=role, env=env, files=files) as rollout,
        ):
            yield rollout

    def events(self, rollout: Episode, *kinds: str) -> list[dict[str, Any]]:
        """Return what the egress worker put on record for a rollout that is closed."""
        [path] = (self.directory / "events").rglob(f"{rollout.id}.egress.jsonl")
        events = [json.loads(line) for line in path.read_text("ascii").splitlines()]
        assert {event["rollout_id"] for event in events} == {rollout.id}
        assert events[-1]["kind"] == "rollout.sealed"
        return [event for event in events if event["kind"] in kinds]

    def decisions(self, rollout: Episode) -> list[Decision]:
        """Return every decision, in order; each permission has its end on record."""
        found = self.events(rollout, "net.request", "net.connect")
        allowed = sorted(event["id"] for event in found if event["verdict"] == "allowed")
        assert sorted(event["request_id"] for event in self.ends(rollout)) == allowed
        return [
            Decision(event["kind"], event["verdict"], event["server.address"], event["server.port"], event["reason"])
            for event in found
        ]

    def ways(self, rollout: Episode) -> set[str | None]:
        """Return the ways by which tunnels and requests came; None for the two of the proxy's protocol."""
        return {event.get("way") for event in self.events(rollout, "net.request", "net.connect")}

    def names(self, rollout: Episode) -> list[tuple[str | None, str]]:
        """Return the names that were asked for inside, with the reason of each answer; addresses are checked."""
        found = self.events(rollout, "net.dns")
        for event in found:
            given = event.get("network.peer.address")
            assert (given is not None) == (event["verdict"] == "allowed"), event
            assert given is None or given.startswith("198.18."), event
        return [(event["dns.question.name"], event["reason"]) for event in found]

    def ends(self, rollout: Episode) -> list[dict[str, Any]]:
        """Return the ``net.end`` events."""
        return self.events(rollout, "net.end")


def said(reply: ExecReply) -> str:
    """Return what a command wrote, for a look at it and for the message of a failed assertion."""
    return (reply.stdout + reply.stderr).decode("utf-8", "replace")


def ok(reply: ExecReply) -> bytes:
    """Return the standard output of a command that must have succeeded."""
    assert reply.return_code == 0, (reply.exit, reply.evidence, said(reply))
    return reply.stdout


@functools.cache
def packed(*names: str) -> bytes:
    """Return installed distributions, file by file as their RECORD lists them, as one importable archive.

    They are the packages that pip installed, unchanged; what is not installed is left out. A mount of site-packages would
    do as well, but a mount of the host counts as private data, and a policy with a way out refuses that. Beside each
    module stands what it compiles to, because a program from an archive would compile all of it in every run; another
    version of Python inside passes over that (PEP 552, unchecked).
    """
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name in names:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                for file in importlib.metadata.distribution(name).files or ():
                    source = Path(str(file.locate()))
                    if ".." not in file.parts and source.suffix in (".py", ".pem", "") and source.is_file():
                        archive.write(source, str(file))
                        if source.suffix == ".py":
                            code = marshal.dumps(compile(source.read_bytes(), str(file), "exec", dont_inherit=True))
                            head = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + bytes(8)
                            archive.writestr(f"{file}c", head + code)
    return out.getvalue()


def _as_oneself() -> None:
    """Make the user namespace, where one is needed, with the one map that keeps the uid."""
    import ctypes

    uid, gid = os.getuid(), os.getgid()
    if uid == 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x10000000) != 0:  # CLONE_NEWUSER
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


if __name__ == "__main__":
    _as_oneself()  # every capability is ours in it, so the network namespace needs no other
    runpy.run_path(netlab.__file__, run_name="__main__")
