"""CPU time and memory of a process and its descendants, as the kernel counts them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

_CPUCLOCK_SCHED = 2
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def tree(*roots: int) -> list[int]:
    """Return ``roots`` and all their living descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            fields = _stat(int(entry))
        except OSError:  # it has ended since
            continue
        children.setdefault(int(fields[1]), []).append(int(entry))
    found = list(roots)
    for pid in found:
        found += children.get(pid, [])
    return found


def cpu_s(pids: Iterable[int]) -> float:
    """Return the CPU seconds, user and system, that ``pids`` have used so far."""
    return sum(_cpu_s(pid) for pid in pids)


def _cpu_s(pid: int) -> float:
    # The clock of another process (clock_getcpuclockid(3)): the scheduler's own nanoseconds, as in /proc/PID/schedstat,
    # but with all threads in it, also those that have ended.
    try:
        return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)
    except OSError:
        pass
    try:
        fields = _stat(pid)
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def memory_kib(pids: Iterable[int]) -> int:
    """Return the proportional set size of ``pids``, or their resident size where that cannot be read."""
    return sum(_memory_kib(pid) for pid in pids)


def _memory_kib(pid: int) -> int:
    for name, key in (("smaps_rollup", "Pss:"), ("status", "VmRSS:")):
        try:
            text = Path(f"/proc/{pid}/{name}").read_text()
        except OSError:
            continue
        for line in text.splitlines():
            if line.startswith(key):
                return int(line.split()[1])
    return 0


def _stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` after the name, which may hold anything: state, parent, …"""
    text = Path(f"/proc/{pid}/stat").read_text()
    return text[text.rindex(")") + 2 :].split()


def pressure_s() -> float:
    """Return for how many seconds some task of this machine has waited for a CPU; 0 where the kernel does not say."""
    try:
        line = Path("/proc/pressure/cpu").read_text().splitlines()[0]
    except OSError:
        return 0.0
    return int(line.rpartition("total=")[2]) / 1e6
