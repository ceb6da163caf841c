"""The words that every backend speaks: what to make, what came back, how it ended.

A backend is two coroutines (``probe``, ``create``), a sandbox nine; whoever uses them learns nothing of
bubblewrap, gVisor or virtual machines. Sizes are bytes, times are seconds as ``_s`` or nanoseconds as ``_ns``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NoReturn, Protocol

from stockade.ids import RolloutId
from stockade.policy import Mount, SandboxLimits

WORKSPACE = "/workspace"
HOME = "/sandbox/home"
PROXY_PORT = 3128
DNS_PORT = 53
TRANSPARENT_PORTS = 64
TRUST = "/etc/stockade-trust"  # _etc.TRUST_FOLDER
_NAME_BYTES = 255


class ExitKind(StrEnum):
    """How a command or a sandbox ended. Closed: whoever meets another value must treat it as a node fault."""

    EXITED = "exited"
    SIGNALED = "signaled"
    NOT_STARTED = "not_started"
    TIMEOUT = "timeout"
    WALL_LIMIT = "wall_limit"
    CPU_LIMIT = "cpu_limit"
    MEMORY_LIMIT = "memory_limit"
    PIDS_LIMIT = "pids_limit"
    OUTPUT_LIMIT = "output_limit"
    CLOSED = "closed"
    STOPPED = "stopped"
    OWNER_GONE = "owner_gone"
    GUEST_LOST = "guest_lost"
    NODE_FAULT = "node_fault"


class Fault(StrEnum):
    """Whose fault an end was, as attested from *outside* the sandbox."""

    CANDIDATE = "candidate"
    INFRASTRUCTURE = "infrastructure"
    STOPPED = "stopped"


_LIMITS = frozenset(
    {
        ExitKind.TIMEOUT,
        ExitKind.WALL_LIMIT,
        ExitKind.CPU_LIMIT,
        ExitKind.MEMORY_LIMIT,
        ExitKind.PIDS_LIMIT,
        ExitKind.OUTPUT_LIMIT,
    }
)
_FAULTLESS = frozenset({ExitKind.EXITED, ExitKind.SIGNALED, ExitKind.NOT_STARTED, ExitKind.CLOSED})


def fault_of(kind: ExitKind) -> Fault | None:
    """Return whose fault an end of ``kind`` is; ``None`` where it is nobody's.

    Only limits of the policy are the candidate's. ``GUEST_LOST`` counts as the candidate's too: code inside
    must find no way to have its own sample masked, and nothing outside has failed.
    """
    if kind in _FAULTLESS:
        return None
    if kind in _LIMITS or kind is ExitKind.GUEST_LOST:
        return Fault.CANDIDATE
    if kind in (ExitKind.STOPPED, ExitKind.OWNER_GONE):
        return Fault.STOPPED
    return Fault.INFRASTRUCTURE


@dataclass(frozen=True, slots=True)
class Exit:
    """One end, with the evidence that a person needs to believe it."""

    kind: ExitKind
    code: int | None = None
    signal: int | None = None
    evidence: str = ""

    @property
    def fault(self) -> Fault | None:
        """Whose fault it was."""
        return fault_of(self.kind)

    @property
    def return_code(self) -> int:
        """The code as a shell would show it: 128 + signal for a killed program."""
        if self.code is not None:
            return self.code
        return 128 + (self.signal or 9)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a command used: wall clock as seen outside; CPU and memory as the kernel told pid 1 inside."""

    wall_ns: int = 0
    cpu_ns: int = 0
    max_rss_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What came of one command. It has no truth value: ``exit`` says how it ended, ``stdout`` what it said."""

    exit: Exit
    stdout: bytes
    stderr: bytes
    stdout_truncated: bool
    stderr_truncated: bool
    usage: Usage

    def __bool__(self) -> NoReturn:
        raise TypeError("an ExecResult has no truth value; look at .exit")


@dataclass(frozen=True, slots=True)
class Skipped:
    """A name in the workspace that was not collected, and why (``reason`` is a fixed word)."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Collected:
    """Regular files of a directory, by path relative to it, and what was left out."""

    files: Mapping[str, bytes]
    skipped: Sequence[Skipped] = ()


@dataclass(frozen=True, slots=True)
class Spec:
    """One sandbox to make."""

    rollout_id: RolloutId
    limits: SandboxLimits
    mounts: tuple[Mount, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    proxied: bool = True
    """Whether the environment names the proxy; a sandbox without network gets none."""
    trust: Mapping[str, bytes] = field(default_factory=dict)
    """Files of ``/etc/stockade-trust`` by plain name, mode 0644. ``env`` is what points programs at them."""

    def __post_init__(self) -> None:
        """Refuse names that are no plain file names."""
        for name in self.trust:
            if not name or name in (".", "..") or "/" in name or "\0" in name or len(os.fsencode(name)) > _NAME_BYTES:
                raise ValueError(f"not a plain file name: {name!r}")


@dataclass(frozen=True, slots=True)
class Listeners:
    """What to bind inside the empty network namespace; the descriptors come out with the sandbox.

    Their order in :attr:`Sandbox.listener_fds`: one TCP listener per entry of ``addresses``; one per entry of
    ``transparent_ports``, which takes every connection to that port, whatever its address; with ``dns`` the UDP and
    the TCP socket of port 53, under every address as well. Raises ValueError for what cannot be bound together.
    """

    addresses: tuple[tuple[str, int], ...] = (("127.0.0.1", PROXY_PORT),)
    transparent_ports: tuple[int, ...] = ()
    dns: bool = False

    def __post_init__(self) -> None:
        """Refuse what the kernel would refuse in the middle of a start."""
        ports = (*self.transparent_ports, *((DNS_PORT,) if self.dns else ()))
        if len(self.transparent_ports) > TRANSPARENT_PORTS:
            raise ValueError(f"more than {TRANSPARENT_PORTS} transparent ports")
        if any(not 0 < port < 1 << 16 for port in ports):
            raise ValueError("a transparent port is not in 1 … 65535")
        if len({*ports, *(port for _, port in self.addresses)}) != len(ports) + len({p for _, p in self.addresses}):
            raise ValueError("a port is named twice, or is that of an address too")


NO_LISTENERS = Listeners(())


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do *on this node*, as measured by ``probe``; ``missing`` says why it cannot run."""

    name: str
    usable: bool
    missing: str = ""
    hint: str = ""
    version: str = ""
    interpreter: str = ""
    per_sandbox_uid: bool = False


class Sandbox(Protocol):
    """A live sandbox. Every coroutine may raise :class:`stockade.errors.SandboxFault`."""

    @property
    def rollout_id(self) -> RolloutId: ...
    @property
    def listener_fds(self) -> tuple[int, ...]: ...
    @property
    def ended(self) -> Exit | None: ...

    async def exec(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float | None = None,
        pipes: tuple[int, int] | None = None,
    ) -> ExecResult: ...
    async def read_file(self, path: str, *, limit_bytes: int) -> bytes: ...
    async def write_file(self, path: str, data: bytes) -> None: ...
    async def put_dir(self, path: str, files: Mapping[str, bytes]) -> None: ...
    async def get_dir(self, path: str, *, limit_bytes: int) -> Collected: ...
    async def freeze(self) -> None: ...
    async def thaw(self) -> None: ...
    async def kill(self, exit_: Exit) -> Exit: ...
    def usage(self) -> Usage: ...
    async def wait(self) -> Exit: ...
    async def destroy(self) -> None: ...


class Backend(Protocol):
    """A mechanism that makes sandboxes."""

    @property
    def name(self) -> str: ...

    async def probe(self) -> Capabilities: ...
    async def start(self) -> None: ...
    async def create(self, spec: Spec, listeners: Listeners) -> Sandbox: ...
    async def aclose(self) -> None: ...
