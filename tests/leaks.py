"""What a test session may leave behind: nothing. The bookkeeping behind tests/conftest.py.

Only what belongs to this session is looked at: its own descriptors, its descendants, mounts in its own mount table and
files in its own temporary folder, because other sessions may share the machine. A process whose parent died is no
longer a descendant; so descendants are noted, with their namespaces, at every test's end, and at the session's end
no noted process and no process in a noted namespace may be alive.
"""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import NamedTuple

GRACE_S = 3.0
"""How long a closed resource may take to disappear: a killed pid namespace is reaped by the kernel, not by us."""

_BENIGN_DESCRIPTORS = ("/dev/urandom", "/dev/random", "/dev/null")  # opened once by libraries, kept for good
_BENIGN_PROCESSES = ("multiprocessing.resource_tracker",)  # started once by the standard library, ends with us
_NAMESPACES = ("user", "pid", "net", "mnt")


class Process(NamedTuple):
    """A process that cannot be mistaken for a later one with the same number."""

    pid: int
    start_ticks: int


class Snapshot(NamedTuple):
    """What this process holds at one moment."""

    descriptors: dict[int, str]
    processes: frozenset[Process]
    mounts: frozenset[str]


def take() -> Snapshot:
    """Return what this process holds now."""
    return Snapshot(_descriptors(), frozenset(descendants()), frozenset(_mounts()))


def new_since(before: Snapshot, *, all_mounts: bool, own: str) -> list[str]:
    """Return one line for each thing held now and not in ``before``, after collecting garbage and a short grace.

    ``all_mounts`` counts every new mount; otherwise only those whose mount point contains ``own``.
    """
    deadline = time.monotonic() + GRACE_S
    while True:
        gc.collect()
        found = _difference(before, take(), all_mounts=all_mounts, own=own)
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def _difference(before: Snapshot, now: Snapshot, *, all_mounts: bool, own: str) -> list[str]:
    lines = [
        f"descriptor {fd}: {target}"
        for fd, target in now.descriptors.items()
        if before.descriptors.get(fd) != target and target not in _BENIGN_DESCRIPTORS
    ]
    lines += [
        f"process {process.pid}: {describe(process.pid)}"
        for process in now.processes - before.processes
        if not any(name in describe(process.pid) for name in _BENIGN_PROCESSES)
    ]
    lines += [f"mount {point}" for point in now.mounts - before.mounts if all_mounts or own in point]
    return lines


def _descriptors() -> dict[int, str]:
    found: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the listing's own descriptor
            continue
    return found


def _mounts() -> list[str]:
    return [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]


def descendants() -> list[Process]:
    """Return this process's descendants, zombies too: an unreaped child is a leak."""
    found: list[Process] = []
    queue = [os.getpid()]
    while queue:
        for pid in _children(queue.pop()):
            ticks = start_ticks(pid)
            if ticks is not None:
                found.append(Process(pid, ticks))
                queue.append(pid)
    return found


def _children(pid: int) -> list[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        return [
            int(child)
            for thread in threads
            for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
        ]
    except OSError:
        return []


def start_ticks(pid: int) -> int | None:
    """Return when ``pid`` started, in clock ticks after boot, or None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return int(stat.rpartition(b")")[2].split()[19])


def is_zombie(pid: int) -> bool:
    """Return whether ``pid`` has ended and waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
    except OSError:
        return False


def describe(pid: int) -> str:
    """Return the command line of ``pid``, or what is left of it."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
        return line or Path(f"/proc/{pid}/comm").read_text().strip() + " (no command line: a zombie?)"
    except OSError:
        return "(gone)"


class Ledger:
    """The processes and namespaces that this session was seen to make."""

    def __init__(self) -> None:
        self._home = _namespaces("self")
        self._processes: set[Process] = set()
        self._namespaces: set[str] = set()

    def note(self) -> None:
        """Write down the descendants of this moment and the namespaces they are in."""
        for process in descendants():
            if process not in self._processes:
                self._processes.add(process)
                self._namespaces |= _namespaces(process.pid) - self._home

    def survivors(self) -> list[str]:
        """Return one line for each noted process, or process in a noted namespace, that is still alive."""
        deadline = time.monotonic() + GRACE_S
        while True:
            alive = [
                f"process {pid}: {describe(pid)}"
                for pid in (int(name) for name in os.listdir("/proc") if name.isdigit())
                if pid != os.getpid() and self._is_ours(pid)
            ]
            if not alive or time.monotonic() > deadline:
                return alive
            time.sleep(0.1)

    def _is_ours(self, pid: int) -> bool:
        ticks = start_ticks(pid)
        # A zombie that is not our child has ended; reaping it is init's duty, which not every container's does.
        if ticks is None or is_zombie(pid) or any(name in describe(pid) for name in _BENIGN_PROCESSES):
            return False
        return Process(pid, ticks) in self._processes or bool(_namespaces(pid) & self._namespaces)


def _namespaces(pid: int | str) -> set[str]:
    found: set[str] = set()
    for name in _NAMESPACES:
        try:
            found.add(os.readlink(f"/proc/{pid}/ns/{name}"))
        except OSError:
            continue
    return found
