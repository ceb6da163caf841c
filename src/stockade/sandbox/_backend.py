"""The bubblewrap backend: from a :class:`Spec` to a :class:`LiveSandbox`."""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import functools
import io
import itertools
import json
import math
import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stockade.errors import NodeError, SandboxFault
from stockade.policy import SandboxLimits
from stockade.sandbox import _etc, _exec, _proc, _seccomp, _tools
from stockade.sandbox._aio import readable
from stockade.sandbox._holder import FILTER_FD, INFO_FD, HolderFds, Plan, scratch_path
from stockade.sandbox._live import LiveSandbox
from stockade.sandbox._spawn import Spawner
from stockade.sandbox._types import HOME, PROXY_PORT, WORKSPACE, Capabilities, Exit, ExitKind, Listeners, Spec
from stockade.sandbox._uids import UidPool
from stockade.sandbox._watchdog import Watchdog

_START_TIMEOUT_S = 20.0
_STARTS_PER_CPU = 2
_LOOKS = 200
_OWN_INODES = 64  # what the holder itself puts into the tmpfs
_OWN_BYTES = 1 << 20
_PAGE = 4096
_FDS = 128  # the directory and the listeners, at most; the kernel takes 253 in one message (SCM_MAX_FD)
_INSIDE_ID = "1000"

BASE_ENV = {
    "PATH": _tools.PATH,
    "HOME": HOME,
    "USER": "sandbox",
    "LANG": "C.UTF-8",
    "TMPDIR": "/tmp",  # noqa: S108 - the sandbox's own
}
_PROXY = f"http://127.0.0.1:{PROXY_PORT}"
PROXY_ENV = {
    **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"), _PROXY),
    # Loopback only: any other exemption would name a direct path, and there is none.
    **dict.fromkeys(("no_proxy", "NO_PROXY"), "127.0.0.1,localhost"),
}


class BubblewrapBackend:
    """Makes sandboxes with bubblewrap, as an ordinary user or, as root, each under a uid of its own.

    ``uids`` is the range (first, count) that root may hand out; ``state_dir`` holds locks and staged copies.
    """

    name = "bubblewrap"

    def __init__(self, state_dir: Path, *, uids: tuple[int, int]) -> None:
        self._state_dir = state_dir
        self._uids = UidPool(state_dir / "uids.lock", *uids) if os.geteuid() == 0 else None
        self._spawner = Spawner(self._on_exit, self._on_lost)
        self._watchdog = Watchdog()
        self._live: dict[int, LiveSandbox] = {}
        self._outer: set[int] = set()
        self._trust: tuple[dict[str, bytes], int] | None = None
        self._turn = itertools.count()
        # A burst of starts must queue here, where it waits without a clock running: all of them at once would
        # share the CPUs until every one had timed out.
        self._starts = asyncio.Semaphore(_STARTS_PER_CPU * len(os.sched_getaffinity(0)))
        self._found: tuple[_tools.Bubblewrap, _tools.Interpreter] | None = None

    async def probe(self) -> Capabilities:
        """Make a sandbox and run ``true`` in it: the only proof that counts."""
        from stockade.ids import new_rollout_id

        try:
            await self.start()
            spec = Spec(new_rollout_id(), SandboxLimits(), proxied=False)
            # With all that a rollout may ask of the namespace: a kernel without policy routing must show here.
            sandbox = await self.create(spec, Listeners((), transparent_ports=(80, 443), dns=True))
            try:
                result = await sandbox.exec(["/bin/true"], timeout_s=10)
                await _look_into(sandbox)
            finally:
                await sandbox.destroy()
            if result.exit.return_code != 0:
                raise SandboxFault(f"true ended with {result.exit}")
        except (NodeError, SandboxFault) as error:
            return Capabilities(self.name, usable=False, missing=error.message, hint=error.hint or "")
        tool, python = self._tools
        return Capabilities(
            self.name,
            usable=True,
            version=tool.version,
            interpreter=python.path,
            per_sandbox_uid=self._uids is not None,
        )

    async def start(self) -> None:
        """Find the tools and start the spawner; idempotent. Raises NodeError."""
        if self._found is None:
            self._found = await asyncio.to_thread(
                lambda: (_tools.find_bubblewrap(), _tools.find_interpreter(self._state_dir))
            )
            await self._spawner.start()

    async def create(self, spec: Spec, listeners: Listeners) -> LiveSandbox:
        """Make one sandbox; it is alive and answers when this returns. Raises SandboxFault."""
        await self.start()
        async with self._starts:
            return await self._create_one(spec, listeners)

    async def _create_one(self, spec: Spec, listeners: Listeners) -> LiveSandbox:
        uid = None if self._uids is None else self._uids.take()
        try:
            sandbox = await asyncio.wait_for(self._create(spec, listeners, uid), _START_TIMEOUT_S)
        except BaseException as error:
            self._give_back(uid)
            if isinstance(error, TimeoutError):
                raise SandboxFault(
                    f"{spec.rollout_id}: no answer from a new sandbox in {_START_TIMEOUT_S:g} s"
                ) from error
            raise
        sandbox.on_gone = functools.partial(self._give_back, uid)
        self._watchdog.add(sandbox)
        return sandbox

    def _give_back(self, uid: int | None) -> None:
        if uid is not None and self._uids is not None:
            self._uids.give_back(uid)

    async def _create(self, spec: Spec, listeners: Listeners, uid: int | None) -> LiveSandbox:
        with contextlib.ExitStack() as temporary, contextlib.ExitStack() as kept:
            control, control_there = _pair(kept, temporary)
            report, report_there = _pair(temporary, temporary)
            info, info_there = _pipe(temporary)
            errors, errors_there = _pipe(temporary)
            fds = HolderFds(
                report=report_there.fileno(),
                control=control_there.fileno(),
                args=_memory(temporary, self._arguments(spec)),
                filter=_memory(temporary, _seccomp.filter_bytes()),
                info=info_there.fileno(),
                stderr=errors_there.fileno(),
                bwrap=temporary.enter_context(io.FileIO(self._tools[0].path)).fileno(),
                trust=self._trust_file(temporary, spec.trust),
            )
            plan = self._plan(spec, listeners, uid)
            await self._spawner.spawn(plan, fds)
            for there in (control_there, report_there, info_there, errors_there):
                there.close()  # so that the child's end is seen here as end of file
            try:
                message, passed = await _receive(report)
                for fd in passed:
                    kept.callback(os.close, fd)
                if "error" in message:
                    raise SandboxFault(f"cannot make the namespaces: {message['error']}", hint="see: stockade doctor")
                if len(passed) != 1 + message["listeners"]:
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                outer = message["pid"]
                self._outer.add(outer)
                outer_pidfd = os.pidfd_open(outer)
                kept.callback(_kill, outer_pidfd)
                report.send(b"g")
                init = await _child_pid(info)
                await _ready(control)
                sandbox = LiveSandbox(
                    spec.rollout_id,
                    spec.limits,
                    env={**BASE_ENV, **self._tools[1].env, **(PROXY_ENV if spec.proxied else {}), **spec.env},
                    control=control,
                    root_fd=passed[0],
                    listener_fds=tuple(passed[1:]),
                    outer_pid=outer,
                    init_pid=init,
                    owner=uid,
                )
            except (OSError, EOFError, ValueError) as error:
                if isinstance(error, SandboxFault):
                    raise
                said = (errors.read(1 << 16) or b"").decode("utf-8", "replace").strip()[-400:]
                raise SandboxFault(
                    f"the sandbox did not start: {said or error}", hint="see: stockade doctor"
                ) from error
            kept.pop_all()  # the sandbox's now
            os.close(outer_pidfd)
        self._live[outer] = sandbox
        return sandbox

    @property
    def _tools(self) -> tuple[_tools.Bubblewrap, _tools.Interpreter]:
        if self._found is None:
            raise SandboxFault("the backend was not started")
        return self._found

    def _plan(self, spec: Spec, listeners: Listeners, uid: int | None) -> Plan:
        tool, python = self._tools
        mounts = [(mount.source, f"mounts/{index}") for index, mount in enumerate(spec.mounts)]
        if python.source is not None:
            mounts.append((python.source, "mounts/python"))
        return Plan(
            uid=uid,
            # The files of the sandbox's own must not be at the cost of what the policy lets it write.
            size_bytes=spec.limits.disk + _OWN_BYTES + sum(len(data) + _PAGE for data in spec.trust.values()),
            inodes=spec.limits.inodes + _OWN_INODES + len(spec.trust),
            listeners=listeners.addresses,
            mounts=tuple(mounts),
            cpus=self._cpus(spec.limits.cpus),
            # As an ordinary user the path itself can be walked, and a descriptor is enough.
            bwrap_tree=tool.tree if uid is not None else None,
            bwrap_in_tree=tool.in_tree,
            command=(python.path, "-I", "-S", "-B", "/sandbox/agent.py", *_guest_limits(spec.limits)),
            transparent_ports=listeners.transparent_ports,
            dns=listeners.dns,
            trust=tuple((name, len(data)) for name, data in spec.trust.items()),
        )

    def _trust_file(self, stack: contextlib.ExitStack, trust: Mapping[str, bytes]) -> int:
        """Return a descriptor of the trust files, one after the other; -1 without any.

        All sandboxes of a run trust the same, half a megabyte: the memory file is made once and kept.
        """
        if not trust:
            return -1
        if self._trust is None or self._trust[0] != trust:
            self._forget_trust()
            self._trust = (dict(trust), _exec.memory_file(b"".join(trust.values())))
        fd = os.dup(self._trust[1])  # a copy: another run's files may replace it while this one is sent
        stack.callback(os.close, fd)
        return fd

    def _forget_trust(self) -> None:
        if self._trust is not None:
            os.close(self._trust[1])
            self._trust = None

    def _cpus(self, wanted: float) -> tuple[int, ...]:
        """Spread sandboxes over the CPUs of this job. Affinity, not a quota: a program may widen it again."""
        own = sorted(os.sched_getaffinity(0))
        count = max(1, math.ceil(wanted))
        if count >= len(own):
            return ()
        first = next(self._turn) * count
        return tuple(own[(first + index) % len(own)] for index in range(count))

    def _arguments(self, spec: Spec) -> bytes:
        scratch = scratch_path()
        words = [
            *("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
            *("--disable-userns", "--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"),
            *("--uid", _INSIDE_ID, "--gid", _INSIDE_ID, "--hostname", "sandbox", "--clearenv"),
            *("--info-fd", str(INFO_FD), "--seccomp", str(FILTER_FD)),
            *("--ro-bind", "/usr", "/usr"),
        ]
        for name in ("bin", "sbin", "lib", "lib32", "lib64"):
            path = f"/{name}"
            if os.path.islink(path):
                words += ["--symlink", os.readlink(path), path]
            elif os.path.isdir(path):
                words += ["--ro-bind", path, path]
        words += ["--proc", "/proc", "--dev", "/dev", "--bind", f"{scratch}/etc", "/etc"]
        for path in _etc.SHARED:
            words += ["--ro-bind-try", path, path]
        for name, target in (("workspace", WORKSPACE), ("tmp", "/tmp"), ("home", HOME), ("shm", "/dev/shm")):  # noqa: S108
            words += ["--bind", f"{scratch}/{name}", target]
        words += ["--ro-bind", f"{scratch}/guest/agent.py", "/sandbox/agent.py"]
        if self._tools[1].source is not None:
            words += ["--ro-bind", f"{scratch}/mounts/python", _tools.STAGED_PYTHON]
        for name, value in self._tools[1].env.items():
            words += ["--setenv", name, value]
        for index, mount in enumerate(spec.mounts):
            words += ["--ro-bind", f"{scratch}/mounts/{index}", mount.target]
        for path in ("/etc", "/dev", "/"):
            words += ["--remount-ro", path]
        words += ["--chdir", WORKSPACE]
        return b"\0".join(os.fsencode(word) for word in words) + b"\0"

    def _on_exit(self, pid: int, _status: int) -> None:
        self._live.pop(pid, None)
        self._outer.discard(pid)

    def _on_lost(self) -> None:
        for sandbox in list(self._live.values()):
            sandbox.end(Exit(ExitKind.NODE_FAULT, evidence="the spawner of this agent ended"))

    async def aclose(self) -> None:
        """Kill every sandbox and end the spawner."""
        for sandbox in list(self._live.values()):
            sandbox.end(Exit(ExitKind.CLOSED))
        await self._watchdog.aclose()
        await self._spawner.aclose()
        self._forget_trust()
        if self._uids is not None:
            self._uids.close()


async def _look_into(sandbox: LiveSandbox) -> None:
    """Raise unless the watchdog will see a command; blind, it would take each for one that hides, or see none at all."""
    command = asyncio.ensure_future(sandbox.exec(["/bin/sleep", "5"], timeout_s=5))
    try:
        for _ in range(_LOOKS):
            await asyncio.sleep(0.01)
            found = tuple(pid for pid in _proc.descendants(sandbox.init_pid) if pid != sandbox.init_pid)
            with contextlib.suppress(PermissionError):  # between its fork and its exec
                if found:
                    _proc.memory_file_bytes(found)
                    return
    finally:
        command.cancel()
        await asyncio.gather(command, return_exceptions=True)
    raise SandboxFault(
        "the processes of a sandbox cannot be measured",
        hint="run as root, the agent needs CAP_SYS_PTRACE; the kernel needs CONFIG_PROC_CHILDREN",
    )


def _guest_limits(limits: SandboxLimits) -> list[str]:
    """Hard limits of each command: what one process may do; the watchdog keeps those of the tree."""
    table: Mapping[str, int] = {
        "NPROC": limits.pids,
        "NOFILE": limits.open_files,
        "FSIZE": limits.file_size,
        "CPU": math.ceil(limits.cpu_s) + 2,  # the watchdog, which counts the whole tree, comes first
        "DATA": limits.memory * 2,  # stops one huge allocation between two looks of the watchdog
        "CORE": 1,  # 0 does not stop a dump into a pipe, to a root process of the host; 1 does (core(5), fs/coredump.c)
        "MEMLOCK": 8 << 20,
        "MSGQUEUE": 1 << 16,
        "NICE": 0,
        "RTPRIO": 0,
    }
    return [f"{name}={value}" for name, value in table.items()]


def _pair(ours_in: contextlib.ExitStack, theirs_in: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours_in.enter_context(ours), theirs_in.enter_context(theirs)


def _pipe(stack: contextlib.ExitStack) -> tuple[io.FileIO, io.FileIO]:
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(ours, False)
    return stack.enter_context(io.FileIO(ours, "rb")), stack.enter_context(io.FileIO(theirs, "wb"))


def _memory(stack: contextlib.ExitStack, data: bytes) -> int:
    fd = _exec.memory_file(data)
    stack.callback(os.close, fd)
    return fd


def _kill(pidfd: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)


async def _receive(report: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The holder's answer: what it made, or what went wrong, with the descriptors it hands out."""
    await readable(report.fileno())
    # Not socket.recv_fds: it drops its flags (seen in Python 3.11), and no child of the agent may inherit a sandbox's own.
    data, ancillary, _, _ = report.recvmsg(1 << 16, socket.CMSG_SPACE(4 * _FDS), socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) // 4 * 4])
    if not data:
        raise EOFError("the holder ended without a word")
    return json.loads(data), list(fds)


async def _child_pid(info: io.FileIO) -> int:
    """The pid of the guest as bubblewrap tells it, in pieces, on ``--info-fd``."""
    text = b""
    while not text.rstrip().endswith(b"}"):
        await readable(info.fileno())
        piece = info.read(4096)
        if not piece:
            raise EOFError("bubblewrap ended before the sandbox was made")
        text += piece
    return int(json.loads(text)["child-pid"])


async def _ready(control: socket.socket) -> None:
    await readable(control.fileno())
    if control.recv(16) != b"R":
        raise EOFError("the guest agent did not start")
