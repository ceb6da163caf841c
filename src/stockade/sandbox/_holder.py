"""What a forked child of the spawner does before it becomes bubblewrap.

The holder makes the user, network and mount namespaces *first*, so that they belong to a user namespace
which is the parent of the sandbox's own: code that wins every capability in the sandbox still gets EPERM on
the network and on the mounts made here. In order:

1. as root: open what only root can open (detached mounts of sources and of the isolator), then become the
   sandbox's own unprivileged uid;
2. user, mount and network namespaces with a one-line identity map;
3. one tmpfs with a size and an inode limit that holds everything the sandbox can write, and ``/etc``;
4. ``lo`` up, every address local where that is asked for, the listeners bound, their descriptors and that of the tmpfs sent to the node agent;
5. exec of the isolator by descriptor, with an empty environment and its options on a descriptor:
   ``/proc/1/environ`` shows what a program was *started* with, so ``--clearenv`` would come too late.

Runs in a process forked from the spawner: standard library only, and it never returns.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from typing import NamedTuple, NoReturn

from stockade.sandbox import _anyip, _etc
from stockade.sandbox import _syscalls as sys_

# The private mount namespace hides whatever lies here on the host; no sandbox binds anything from it.
_SCRATCH_CANDIDATES = ("/mnt", "/media", "/srv", "/sys")
WRITABLE = ("workspace", "tmp", "home", "shm")
_OOM_SCORE = 900  # The kernel's OOM killer must take a sandbox before the trainer or the agent.
_USER_LIMITS = {"max_net_namespaces": 1, "max_inotify_instances": 16, "max_cgroup_namespaces": 4}

CONTROL_FD, ARGS_FD, FILTER_FD, INFO_FD = 3, 4, 5, 6
_BWRAP_FD = 10


class HolderFds(NamedTuple):
    """Descriptors that came with a request, in this order; ``trust`` only if there are trust files (then ≥ 0)."""

    report: int
    control: int
    args: int
    filter: int
    info: int
    stderr: int
    bwrap: int
    trust: int = -1


class Plan(NamedTuple):
    """What a request asks for (see :mod:`stockade.sandbox._spawner` for the wire form)."""

    uid: int | None
    size_bytes: int
    inodes: int
    listeners: tuple[tuple[str, int], ...]
    mounts: tuple[tuple[str, str], ...]
    cpus: tuple[int, ...]
    bwrap_tree: str | None
    bwrap_in_tree: str
    command: tuple[str, ...]
    transparent_ports: tuple[int, ...] = ()
    dns: bool = False
    trust: tuple[tuple[str, int], ...] = ()
    """Name and size of each trust file; their bytes follow each other in the memory file ``HolderFds.trust``."""


def scratch_path() -> str:
    """Return where the tmpfs of every sandbox is mounted, in the holder's own mount namespace."""
    for path in _SCRATCH_CANDIDATES:
        if os.path.isdir(path):
            return path
    raise OSError(f"none of {', '.join(_SCRATCH_CANDIDATES)} exists to mount the workspace on")


class Files(NamedTuple):
    """What every sandbox gets a copy of: the files of ``/etc`` by relative path, and the guest agent."""

    etc: dict[str, bytes]
    guest: bytes


def run(plan: Plan, fds: HolderFds, files: Files) -> NoReturn:
    """Become the sandbox; on any failure report it and exit with 125."""
    report = socket.socket(fileno=fds.report)
    try:
        _hold(plan, fds, files, report)
    except BaseException as error:  # noqa: BLE001 - whatever it was, the parent must hear of it
        text = f"{type(error).__name__}: {error}"
        try:
            report.send(json.dumps({"error": text}).encode())
        except OSError:  # the descriptors are already in their places: only stderr is left
            with contextlib.suppress(OSError):
                os.write(2, text.encode())
    os._exit(125)


def _hold(plan: Plan, fds: HolderFds, files: Files, report: socket.socket) -> None:
    os.setsid()
    _raise_oom_score()
    if plan.cpus:
        os.sched_setaffinity(0, plan.cpus)
    scratch = scratch_path()
    trees: dict[str, int] = {}
    if plan.uid is not None:
        trees = _open_trees(plan)  # only root reaches a source under a 0700 home
        _drop(plan.uid)
    _namespaces()
    if plan.uid is None:
        trees = _open_trees(plan)
    _mounts(plan, scratch, files, trees)
    _write_trust(plan, fds.trust, f"{scratch}/etc/{_etc.TRUST_FOLDER}")
    root = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    sys_.loopback_up()
    listeners = [_listen(address, port) for address, port in plan.listeners]
    if plan.transparent_ports or plan.dns:
        listeners += _anyip.open_listeners(plan.transparent_ports, dns=plan.dns)
    message = json.dumps({"pid": os.getpid(), "listeners": len(listeners)}).encode()
    socket.send_fds(report, [message], [root, *(sock.fileno() for sock in listeners)])
    if report.recv(1) != b"g":
        raise OSError("the node agent went away")
    _lower_limits()
    bwrap: int | str = fds.bwrap
    if plan.bwrap_tree is not None:
        # Its shared libraries lie beside it: only a path that this uid can walk lets ld.so find them.
        bwrap = f"{scratch}/tools/{plan.bwrap_in_tree}"
    _arrange_fds(fds, keep=bwrap if isinstance(bwrap, int) else None)
    argv = ["bwrap", "--args", str(ARGS_FD), "--", *plan.command]
    os.execve(_BWRAP_FD if isinstance(bwrap, int) else bwrap, argv, {})


def _raise_oom_score() -> None:
    path = "/proc/self/oom_score_adj"
    with open(path, encoding="ascii") as score:
        # Never lower it: that takes a capability, and a container of the lowest class starts with 1000.
        if int(score.read()) >= _OOM_SCORE:
            return
    with open(path, "w", encoding="ascii") as score:
        score.write(str(_OOM_SCORE))


def _open_trees(plan: Plan) -> dict[str, int]:
    trees = {target: sys_.open_tree(source) for source, target in plan.mounts}
    if plan.bwrap_tree is not None:
        trees["tools"] = sys_.open_tree(plan.bwrap_tree)
    return trees


def _drop(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    # A process that changed its uid is undumpable until it execs: its /proc files would belong to root and
    # the uid map below could not be written.
    sys_.prctl(sys_.PR_SET_DUMPABLE, 1)


def _namespaces() -> None:
    uid, gid = os.geteuid(), os.getegid()
    sys_.unshare(sys_.CLONE_NEWUSER | sys_.CLONE_NEWNS | sys_.CLONE_NEWNET)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def _mounts(plan: Plan, scratch: str, files: Files, trees: dict[str, int]) -> None:
    sys_.mount("none", "/", None, sys_.MS_REC | sys_.MS_PRIVATE)
    options = f"size={plan.size_bytes},nr_inodes={plan.inodes},mode=0755"
    sys_.mount("stockade", scratch, "tmpfs", sys_.MS_NOSUID | sys_.MS_NODEV, options)
    for name in (*WRITABLE, "mounts", "tools", "etc", "guest"):
        os.mkdir(f"{scratch}/{name}", 0o700 if name in WRITABLE else 0o755)
    for name, data in (files.etc | _etc.WITH_DNS if plan.dns else files.etc).items():
        folder = os.path.dirname(f"{scratch}/etc/{name}")
        if not os.path.isdir(folder):
            os.mkdir(folder, 0o755)
        _write(f"{scratch}/etc/{name}", data)
    _write(f"{scratch}/guest/agent.py", files.guest)
    for name, tree in trees.items():
        target = f"{scratch}/{name}"
        if not os.path.isdir(target):
            # Whether the source is a file or a directory shows only on the opened tree itself.
            if os.path.isdir(f"/proc/self/fd/{tree}"):
                os.mkdir(target)
            else:
                os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        sys_.move_mount(tree, target)
        os.close(tree)


def _write(path: str, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    os.write(fd, data)
    os.close(fd)


def _write_trust(plan: Plan, source: int, folder: str) -> None:
    """Copy the trust files of the run, which all its sandboxes share, out of the memory file."""
    if not plan.trust:
        return
    os.mkdir(folder, 0o755)
    offset = 0
    for name, size in plan.trust:
        fd = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        end = offset + size
        while offset < end:
            copied = os.sendfile(fd, source, offset, end - offset)
            if copied == 0:
                raise OSError(f"the trust files end at {offset} bytes")
            offset += copied
        os.close(fd)


def _listen(address: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((address, port))
    sock.listen(_anyip.BACKLOG)
    sock.setblocking(False)
    return sock


def _lower_limits() -> None:
    # Per user namespace and inherited by all below it: nothing inside can pile up kernel objects of the uid.
    for name, value in _USER_LIMITS.items():
        # Older kernels lack some of them.
        with contextlib.suppress(FileNotFoundError), open(f"/proc/sys/user/{name}", "w", encoding="ascii") as file:
            file.write(str(value))


def _arrange_fds(fds: HolderFds, keep: int | None) -> None:
    """Give each descriptor its fixed number, close everything else."""
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    wanted = [(null, 0), (null, 1), (fds.stderr, 2), (fds.control, CONTROL_FD), (fds.args, ARGS_FD)]
    wanted += [(fds.filter, FILTER_FD), (fds.info, INFO_FD)]
    if keep is not None:
        wanted.append((keep, _BWRAP_FD))
    # First out of the way of the target numbers, then into place.
    high = [(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64), number) for fd, number in wanted]
    for fd, number in high:
        os.dup2(fd, number, inheritable=number != _BWRAP_FD)
    os.closerange(INFO_FD + 1, _BWRAP_FD)
    os.closerange(_BWRAP_FD + (keep is not None), 1 << 20)
