"""Probes of what the kernel offers: version, namespaces, mounts, seccomp, Landlock, cgroups, KVM."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import re
from pathlib import Path

from stockade.errors import NodeError
from stockade.sandbox import _landlock, _seccomp
from stockade.sandbox._doctor._report import Finding, Status

OLDEST = (5, 11)
"""Overlay in user namespaces, and the cache of seccomp answers (kernelnewbies.org/Linux_5.11)."""

_KVM_GET_API_VERSION, _KVM_API_VERSION = 0xAE00, 12
_PR_GET_SECCOMP = 21
_V2_CONTROLLERS = ("memory", "pids", "cpu")


def read(path: str) -> str:
    """A small file of /proc or /sys without its end of line; OSError if it is not there."""
    return Path(path).read_text(encoding="utf-8", errors="replace").strip()


def read_or(path: str, default: str) -> str:
    """As :func:`read`, with ``default`` where the kernel does not have the file."""
    try:
        return read(path)
    except OSError:
        return default


def kernel() -> Finding:
    """Version of the kernel, and whether it is new enough."""
    release, machine = platform.release(), platform.machine()
    match = re.match(r"(\d+)\.(\d+)", release)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    oldest = ".".join(map(str, OLDEST))
    if version < OLDEST:
        return Finding(
            "kernel",
            Status.LIMITED,
            f"Linux {release} on {machine}; older than {oldest}",
            f"Please run a kernel of version {oldest} or newer on the compute nodes.",
        )
    return Finding("kernel", Status.OK, f"Linux {release} on {machine}")


_USERNS_SWITCHES = (
    ("/proc/sys/user/max_user_namespaces", "0", "user.max_user_namespaces=15000"),
    ("/proc/sys/kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
    ("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
)


def user_namespaces(trial: dict[str, str], who: str) -> Finding:
    """Whether namespaces can be made; ``trial`` is the answer of ``_trial`` run as ``who``."""
    closed = [(path, wanted) for path, shut, wanted in _USERNS_SWITCHES if read_or(path, "") == shut]
    said = ", ".join(f"{path.removeprefix('/proc/sys/').replace('/', '.')}={read(path)}" for path, _ in closed)
    failed = next((trial[name] for name in ("userns", "netns") if trial[name] != "ok"), None)
    if failed is None:
        limit = read_or("/proc/sys/user/max_user_namespaces", "unknown")
        detail = f"made as {who}: user, mount, net, pid, ipc, uts (max_user_namespaces {limit})"
        return Finding("user namespaces", Status.OK, detail, needed=True)
    wanted = " and ".join(setting for _, setting in closed)
    ask = (
        f"Please allow unprivileged user namespaces on the compute nodes (sysctl {wanted})."
        if wanted
        else "Please allow unprivileged user namespaces on the compute nodes; a container's seccomp profile or a "
        "security module refuses them here."
    )
    return Finding(
        "user namespaces", Status.MISSING, "; ".join(filter(None, (f"as {who}: {failed}", said))), ask, needed=True
    )


def tmpfs(trial: dict[str, str]) -> Finding:
    """Whether a workspace of bounded size and inode count can be mounted without privilege."""
    if trial["tmpfs"] == "ok":
        return Finding("sized tmpfs", Status.OK, "size= and nr_inodes= hold in a user namespace", needed=True)
    ask = "Please allow mounting tmpfs in user namespaces on the compute nodes."
    return Finding("sized tmpfs", Status.MISSING, trial["tmpfs"], ask, needed=True)


def overlay(trial: dict[str, str]) -> Finding:
    """Whether overlayfs works in a user namespace; a convenience for image directories."""
    if trial["overlay"] == "ok":
        return Finding("overlay", Status.OK, "works in a user namespace")
    ask = "Please load the overlay module on the compute nodes (kernel 5.11 or newer mounts it without privilege)."
    return Finding("overlay", Status.MISSING, trial["overlay"], ask)


def seccomp() -> Finding:
    """Filter for this machine, and the kernel's actions."""
    try:
        digest = _seccomp.filter_digest()
    except NodeError as error:
        return Finding("seccomp", Status.MISSING, str(error), needed=True)
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_GET_SECCOMP, 0, 0, 0, 0) < 0:
        ask = "Please run a kernel with CONFIG_SECCOMP_FILTER on the compute nodes."
        return Finding("seccomp", Status.MISSING, "not in this kernel", ask, needed=True)
    actions = read("/proc/sys/kernel/seccomp/actions_avail").split()
    lacking = [action for action in ("kill_process", "errno", "user_notif") if action not in actions]
    if lacking:
        ask = "Please run a kernel of version 5.0 or newer on the compute nodes."
        needed = lacking != ["user_notif"]
        status = Status.MISSING if needed else Status.LIMITED
        return Finding("seccomp", status, f"actions without {', '.join(lacking)}", ask, needed=True)
    return Finding("seccomp", Status.OK, f"filter {digest[:19]}…; user notification available", needed=True)


def landlock() -> Finding:
    """ABI of Landlock and what it lacks."""
    level = _landlock.abi()
    ask = "Please enable Landlock on the compute nodes (CONFIG_SECURITY_LANDLOCK and landlock in the lsm= list)."
    if level < 1:
        return Finding("landlock", Status.MISSING, "not enabled: trainers run unconfined", ask)
    missing = _landlock.missing_at(level, scope=True, net=True)
    if missing:
        return Finding("landlock", Status.LIMITED, f"ABI {level}: cannot restrict {', '.join(missing)}")
    return Finding("landlock", Status.OK, f"ABI {level}")


def cgroups() -> Finding:
    """Whether a cgroup of our own can hold memory, processes and CPU."""
    lines = [line.split(":", 2) for line in read("/proc/self/cgroup").splitlines()]
    ask = (
        "Please delegate a cgroup v2 subtree with the memory, pids and cpu controllers to the job's user "
        "(systemd: Delegate=yes; Slurm: ProctrackType=proctrack/cgroup with cgroup v2)."
    )
    unified = next((path for hierarchy, _, path in lines if hierarchy == "0"), None)
    if unified is not None:
        own = _unified_root() + unified.rstrip("/")
        controllers = read_or(f"{own}/cgroup.controllers", "").split()
        writable = all(os.access(f"{own}{name}", os.W_OK) for name in ("", "/cgroup.procs", "/cgroup.subtree_control"))
        lacking = [name for name in _V2_CONTROLLERS if name not in controllers]
        if controllers and writable and not lacking:
            return Finding("cgroup", Status.OK, f"v2, delegated: {own}")
        if any(name in controllers for name in _V2_CONTROLLERS):
            why = f"without {', '.join(lacking)}" if lacking else "not writable for this user"
            return Finding("cgroup", Status.LIMITED, f"v2, {why}: the memory watchdog is used", ask)
    legacy = {name: path for _, names, path in lines for name in names.split(",")}
    mine = [
        name
        for name in ("memory", "pids", "cpu")
        if name in legacy and os.access(f"/sys/fs/cgroup/{name}{legacy[name]}", os.W_OK)
    ]
    if not any(name in legacy for name in ("memory", "pids", "cpu")):
        return Finding("cgroup", Status.MISSING, "no controller is visible: the memory watchdog is used", ask)
    held = f"writable: {', '.join(mine)}" if mine else "none writable"
    return Finding("cgroup", Status.LIMITED, f"v1 ({held}): the memory watchdog is used", ask)


def _unified_root() -> str:
    return "/sys/fs/cgroup" if os.path.exists("/sys/fs/cgroup/cgroup.controllers") else "/sys/fs/cgroup/unified"


def kvm() -> Finding:
    """Whether /dev/kvm opens. That says nothing about guests: nested hosts may offer it and boot none."""
    ask = "Please give the job's user access to /dev/kvm on the compute nodes (group kvm) if microVMs are wanted."
    try:
        fd = os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        return Finding("kvm", Status.MISSING, os.strerror(error.errno or 0), "" if error.errno == errno.ENOENT else ask)
    try:
        version = fcntl.ioctl(fd, _KVM_GET_API_VERSION, 0)
    finally:
        os.close(fd)
    if version != _KVM_API_VERSION:
        return Finding("kvm", Status.MISSING, f"API version {version}")
    return Finding("kvm", Status.LIMITED, "opens; that a guest boots is not proven")
