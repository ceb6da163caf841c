"""Probes of the node around us: network configuration, state directory, memory, CPUs, limits."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

from stockade.sandbox._doctor._kernel import read, read_or
from stockade.sandbox._doctor._report import Finding, Status

_NETWORK_FILE_SYSTEMS = frozenset(
    {
        *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse.ceph", "cifs", "smb3", "smbfs", "afs", "panfs"),
        *("wekafs", "pvfs2", "orangefs", "glusterfs", "fuse.glusterfs", "fuse.sshfs", "9p", "virtiofs", "fuse.s3fs"),
    }
)
_GIB = 1 << 30
_FEW_PROCESSES, _FEW_FILES = 1024, 1024


def internet() -> Finding:
    """Resolvers and default routes as configured. No address outside is contacted."""
    servers = [
        words[1]
        for line in read_or("/etc/resolv.conf", "").splitlines()
        if (words := line.split())[:1] == ["nameserver"] and len(words) > 1
    ]
    routes = []
    rows = [line.split() for line in read_or("/proc/net/route", "").splitlines()[1:]]
    if any(len(row) > 7 and row[1] == row[7] == "00000000" for row in rows):
        routes.append("IPv4")
    rows = [line.split() for line in read_or("/proc/net/ipv6_route", "").splitlines()]
    if any(len(row) > 9 and set(row[0]) == {"0"} and row[1] == "00" and row[9] != "lo" for row in rows):
        routes.append("IPv6")
    detail = f"default route: {', '.join(routes) or 'none'}; resolvers: {', '.join(servers) or 'none'}; nothing was contacted"
    if routes and servers:
        return Finding("internet", Status.OK, detail)
    ask = "Please tell us which proxy or mirror the compute nodes may use; they have no way out of their own."
    return Finding("internet", Status.LIMITED if routes or servers else Status.MISSING, detail, ask)


def mount_of(path: str) -> tuple[str, str]:
    """``(mount point, file system type)`` of the mount that holds ``path``, by /proc/self/mountinfo."""
    best = ("/", "unknown")
    for line in read("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), left.split(" ")[4])
        beneath = path == point or path.startswith(point.rstrip("/") + "/")
        if beneath and len(point) >= len(best[0]):  # of two mounts on one point, the later one is on top
            best = (point, right.split(" ")[0])
    return best


def state_directory(path: Path) -> Finding:
    """File system of the directory for indexes and locks: it must be the node's own."""
    existing = path.expanduser().absolute()
    while not existing.exists():
        existing = existing.parent
    real = os.path.realpath(existing)
    point, kind = mount_of(real)
    free = os.statvfs(real)
    detail = f"{path} on {kind} ({point}), {free.f_bavail * free.f_frsize / _GIB:.1f} GiB free"
    if kind in _NETWORK_FILE_SYSTEMS:
        ask = "Please name a node-local scratch directory for jobs; it goes into STOCKADE_STATE."
        return Finding("state directory", Status.LIMITED, f"{detail}: a network file system is not used for it", ask)
    if not os.access(real, os.W_OK | os.X_OK):
        return Finding("state directory", Status.MISSING, f"{detail}: not writable; set STOCKADE_STATE")
    return Finding("state directory", Status.OK, detail)


def _meminfo() -> dict[str, int]:
    rows = (line.split() for line in read("/proc/meminfo").splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) > 1}


def _cgroup_limit(v2: str, v1: str) -> int | None:
    """The tightest limit on the way from our cgroup to the root, as far as it is visible."""
    limits: list[int] = []
    for line in read_or("/proc/self/cgroup", "").splitlines():
        hierarchy, names, path = line.split(":", 2)
        controller = v1.partition(".")[0]
        if hierarchy == "0":
            root, file = "/sys/fs/cgroup", v2
        elif controller in names.split(","):
            root, file = f"/sys/fs/cgroup/{controller}", v1
        else:
            continue
        for parent in (Path(path), *Path(path).parents):
            value = read_or(f"{root}{parent}/{file}", "max")
            if value.isdecimal():
                limits.append(int(value))
    return min(limits, default=None)


def memory() -> Finding:
    """Memory of the node and of our cgroup."""
    facts = _meminfo()
    limit = _cgroup_limit("memory.max", "memory.limit_in_bytes")
    detail = f"{facts['MemTotal'] / _GIB:.1f} GiB, {facts['MemAvailable'] / _GIB:.1f} available"
    if limit is not None and limit < facts["MemTotal"]:
        detail += f"; this job may use {limit / _GIB:.1f} GiB"
    return Finding("memory", Status.OK, detail)


def swap() -> Finding:
    """Swap hides memory from a watchdog that sums resident pages."""
    total = _meminfo()["SwapTotal"]
    if not total:
        return Finding("swap", Status.OK, "none")
    detail = f"{total / _GIB:.1f} GiB: swapped pages do not count against a sandbox's memory where no cgroup is given"
    return Finding("swap", Status.LIMITED, detail, "Please switch swap off on the compute nodes, or delegate a cgroup.")


def cpus() -> Finding:
    """CPUs that this process may use."""
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 0
    return Finding("cpus", Status.OK, f"{usable} usable of {present}")


def processes() -> Finding:
    """How many processes and threads fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    bounds = {
        "ulimit -u": None if hard == resource.RLIM_INFINITY else hard,
        "kernel.pid_max": int(read_or("/proc/sys/kernel/pid_max", "0")) or None,
        "kernel.threads-max": int(read_or("/proc/sys/kernel/threads-max", "0")) or None,
        "cgroup pids": _cgroup_limit("pids.max", "pids.max"),
    }
    known = {name: value for name, value in bounds.items() if value is not None}
    least = min(known, key=lambda name: known[name], default="")
    detail = ", ".join(f"{name} {value}" for name, value in known.items()) or "no limit"
    if soft not in (hard, resource.RLIM_INFINITY):
        detail += f" (soft {soft})"
    if least and known[least] < _FEW_PROCESSES:
        ask = f"Please raise the process limit of jobs on the compute nodes ({least}) to a few thousand."
        return Finding("processes", Status.LIMITED, detail, ask)
    return Finding("processes", Status.OK, detail)


def open_files() -> Finding:
    """How many descriptors a process may hold; each live sandbox takes about ten of the agent."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    detail = f"{soft} soft, {hard} hard"
    if hard != resource.RLIM_INFINITY and hard <= _FEW_FILES:
        ask = "Please raise the hard limit of open files for jobs (ulimit -Hn) to 65536 or more."
        return Finding("open files", Status.LIMITED, detail, ask)
    return Finding("open files", Status.OK, detail)
