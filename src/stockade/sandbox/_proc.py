"""What the kernel tells about the processes of a sandbox, read from outside (proc(5)).

All members of a pid namespace are descendants of its process 1, whatever they fork or orphan, so the tree is
found from that one pid through ``/proc/PID/task/TID/children``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)
"""What a process that ended meanwhile answers. A want of descriptors is not among them: the watchdog would be blind."""


class Footprint(NamedTuple):
    """Sum over a tree: resident bytes, tasks (threads), CPU nanoseconds with that of reaped children."""

    resident_bytes: int
    tasks: int
    cpu_ns: int
    pids: tuple[int, ...]


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)


def descendants(root: int) -> Iterator[int]:
    """Yield ``root`` and all that descend from it; processes that end meanwhile are left out."""
    pending = [root]
    while pending:
        pid = pending.pop()
        yield pid
        with contextlib.suppress(*_GONE):
            for task in os.listdir(f"/proc/{pid}/task"):
                pending.extend(int(child) for child in _read(f"/proc/{pid}/task/{task}/children").split())


def footprint(root: int) -> Footprint:
    """Measure the tree below ``root``. Resident bytes count shared pages once per process: an upper bound."""
    resident = tasks = cpu = 0
    pids = []
    for pid in descendants(root):
        with contextlib.suppress(*_GONE, IndexError, ValueError):
            fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
            cpu += sum(int(field) for field in fields[11:15])
            tasks += int(fields[17])
            resident += int(fields[21]) * _PAGE
            pids.append(pid)
    return Footprint(resident, tasks, cpu * _TICK_NS, tuple(pids))


def proportional_bytes(pids: tuple[int, ...]) -> int:
    """Sum of proportional set sizes: what the tree really holds, shared pages split among their users.

    Dearer than :func:`footprint`, so it is asked for only when that bound has been crossed. A process that
    cannot be read (it is ending, or hides itself) counts with its full resident size.
    """
    total = 0
    for pid in pids:
        try:
            rollup = _read(f"/proc/{pid}/smaps_rollup")
            total += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith(b"Pss:")) * 1024
        except (OSError, StopIteration, ValueError, IndexError):
            with contextlib.suppress(OSError, IndexError, ValueError):
                total += int(_read(f"/proc/{pid}/statm").split()[1]) * _PAGE
    return total


def memory_file_bytes(pids: tuple[int, ...], *, most: int | None = None) -> int | None:
    """Bytes of memory files (memfd_create(2)) that these processes hold open; None if they hold too much to look at.

    They are nobody's resident memory until mapped: without this a program could hold any amount of it. ``most`` bounds
    the descriptors looked at: a program decides how many there are, and so how long this takes.
    Raises PermissionError where a process hides its descriptors (undumpable): the caller must fail closed.
    """
    seen: dict[tuple[int, int], int] = {}
    looked = 0
    for pid in pids:
        try:
            names = os.listdir(f"/proc/{pid}/fd")
        except (FileNotFoundError, ProcessLookupError):
            continue
        looked += len(names)
        if most is not None and looked > most:
            return None
        for name in names:
            path = f"/proc/{pid}/fd/{name}"
            try:
                if os.readlink(path).startswith("/memfd:"):
                    status = os.stat(path)
                    seen[status.st_dev, status.st_ino] = status.st_blocks * 512
            except PermissionError:
                raise
            except OSError:  # closed meanwhile; or a directory so deep that the kernel cannot spell it: no memory file
                continue
    return sum(seen.values())


def signal_tree(root: int, number: int) -> int:
    """Send a signal to all below and including ``root``; returns how many were reached."""
    count = 0
    for pid in descendants(root):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            count += 1
    return count


def stopped(pid: int) -> bool:
    """Whether a process is stopped, or gone."""
    try:
        return _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[0] in (b"T", b"t", b"Z", b"X")
    except (OSError, IndexError):
        return True


def oom_kills() -> int:
    """How often the kernel's OOM killer struck on this node since boot (``/proc/vmstat``)."""
    with contextlib.suppress(OSError, ValueError):
        for line in _read_all("/proc/vmstat").splitlines():
            if line.startswith(b"oom_kill "):
                return int(line.split()[1])
    return 0


def _read_all(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
