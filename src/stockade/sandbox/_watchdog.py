"""Limits of a whole tree, kept from outside where no cgroup is given.

``setrlimit`` bounds one process; a program that forks has as many times its limit. So every sandbox's tree is
measured several times a second and ended when it is over: memory as the sum of proportional set sizes, of its
tmpfs (which holds every file it can write) and of open memory files; CPU time including reaped children; and
the number of tasks, whose hard bound is RLIMIT_NPROC inside the user namespace, but a fork bomb at that bound
would go on for ever.

What it cannot see: CPU time of children whose parent ignores SIGCHLD (the kernel drops it); kernel memory such as
socket buffers; pages of a shared memory object that no process has mapped at the moment and no descriptor leads to (a
memory file in flight between sockets, what is left of a shared mapping after most of it was unmapped). A cgroup sees
all of them; without one, wall time bounds the first, and the kernel's OOM killer, which takes sandboxes first, the rest.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from dataclasses import dataclass
from typing import Protocol

from stockade.policy import SandboxLimits
from stockade.sandbox import _proc
from stockade.sandbox._types import Exit, ExitKind

PERIOD_S = 0.05
_STARVED_ROUNDS = 8  # rounds at the task limit before it is a bomb and not a burst
# A command is undumpable, as the guest is, between its fork and its exec: short commands one after the other, or one on
# a busy machine, are met like that several times in a row.
_HIDDEN_ROUNDS = 20
_AT_ONCE = 2000  # descriptors looked at in the event loop; a tree with more is looked at in a thread
_SCAN_SHARE = 10  # and then for at most a tenth of the time


class Watched(Protocol):
    """What the watchdog needs of a live sandbox."""

    limits: SandboxLimits
    root_fd: int
    init_pid: int
    frozen: bool

    @property
    def ended(self) -> Exit | None: ...
    def end(self, exit_: Exit) -> None: ...
    def note(self, memory_bytes: int, cpu_ns: int) -> None: ...


@dataclass(slots=True)
class _Rounds:
    """What is remembered of one sandbox: for how many rounds it has been at its task limit or hidden something, what
    its memory files held when last looked at, and the look that is under way or due.
    """

    starved: int = 0
    hidden: int = 0
    memory_files: int = 0
    scan: asyncio.Task[None] | None = None
    scan_at: float = 0.0


async def _scan(commands: tuple[int, ...], rounds: _Rounds) -> None:
    """Look at a tree with very many descriptors without holding up everybody else."""
    begun = time.monotonic()
    try:
        found = await asyncio.to_thread(_proc.memory_file_bytes, commands)
        rounds.memory_files, rounds.hidden = found or 0, 0
    except PermissionError:
        rounds.hidden += 1
    finally:
        now = time.monotonic()
        rounds.scan, rounds.scan_at = None, now + _SCAN_SHARE * (now - begun)


class Watchdog:
    """Measures every registered sandbox each :data:`PERIOD_S`."""

    def __init__(self) -> None:
        self._watched: dict[Watched, _Rounds] = {}
        self._task: asyncio.Task[None] | None = None

    def add(self, sandbox: Watched) -> None:
        """Watch ``sandbox`` until it ends."""
        self._watched[sandbox] = _Rounds()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="watchdog")

    async def aclose(self) -> None:
        """Stop watching."""
        scans = [rounds.scan for rounds in self._watched.values() if rounds.scan is not None]
        self._watched.clear()
        tasks = [task for task in (self._task, *scans) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        while self._watched:
            for sandbox, rounds in list(self._watched.items()):
                if sandbox.ended is not None:
                    self._watched.pop(sandbox, None)
                    continue
                exit_ = self._judge(sandbox, rounds)
                if exit_ is not None:
                    sandbox.end(exit_)
                await asyncio.sleep(0)
            await asyncio.sleep(PERIOD_S)

    def _look_at_memory_files(self, commands: tuple[int, ...], rounds: _Rounds) -> None:
        if rounds.scan is not None or time.monotonic() < rounds.scan_at:
            return
        try:
            found = _proc.memory_file_bytes(commands, most=_AT_ONCE)
        except PermissionError:
            rounds.hidden += 1
            return
        if found is None:
            rounds.scan = asyncio.create_task(_scan(commands, rounds), name="memory files")
        else:
            rounds.memory_files, rounds.hidden = found, 0

    def _judge(self, sandbox: Watched, rounds: _Rounds) -> Exit | None:
        try:
            return self._measure(sandbox, rounds)
        except Exception as error:  # noqa: BLE001 - a tree that cannot be measured is not within its limits
            # Only a want of descriptors is surely this process's own; anything else the tree may have arranged, and a
            # fault of the node would mask its sample.
            own = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
            kind = ExitKind.NODE_FAULT if own else ExitKind.GUEST_LOST
            return Exit(kind, evidence=f"cannot measure the sandbox: {error}")

    def _measure(self, sandbox: Watched, rounds: _Rounds) -> Exit | None:
        limits = sandbox.limits
        found = _proc.footprint(sandbox.init_pid)
        if sandbox.frozen and not all(_proc.stopped(pid) for pid in found.pids):
            return Exit(ExitKind.GUEST_LOST, evidence="a process of it ran on while it was frozen")
        disk = os.fstatvfs(sandbox.root_fd)
        files = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
        commands = tuple(pid for pid in found.pids if pid != sandbox.init_pid)
        self._look_at_memory_files(commands, rounds)
        if rounds.hidden >= _HIDDEN_ROUNDS:
            return Exit(ExitKind.MEMORY_LIMIT, evidence="a process hides its descriptors from the watchdog")
        files += rounds.memory_files
        memory = found.resident_bytes + files
        if memory > limits.memory:
            memory = _proc.proportional_bytes(found.pids) + files
        sandbox.note(memory, found.cpu_ns)
        if memory > limits.memory:
            return Exit(ExitKind.MEMORY_LIMIT, evidence=f"{memory} bytes held, {limits.memory} allowed")
        if found.cpu_ns > limits.cpu_s * 1e9:
            spent = found.cpu_ns / 1e9
            return Exit(ExitKind.CPU_LIMIT, evidence=f"{spent:.1f} s of CPU used, {limits.cpu_s:g} s allowed")
        rounds.starved = rounds.starved + 1 if found.tasks >= limits.pids else 0
        if rounds.starved >= _STARVED_ROUNDS:
            return Exit(ExitKind.PIDS_LIMIT, evidence=f"{found.tasks} tasks for long, {limits.pids} allowed")
        return None
