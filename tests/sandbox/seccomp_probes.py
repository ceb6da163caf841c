"""Runs inside bubblewrap: one system call of each kind through libc's syscall(), in a child of its own.

``python3 -I - NUMBERS`` with the numbers as one JSON argument. Prints ``{probe: errno}``, 0 for success.
The arguments are chosen to be harmless and, where the kernel would say EPERM by itself, to fail earlier with another
answer, so that EPERM tells who answered.
"""

from __future__ import annotations

import ctypes
import json
import os
import pty
import struct
import sys

NR: dict[str, int] = json.loads(sys.argv[1])
LIBC = ctypes.CDLL(None, use_errno=True)
SIGCHLD = 17
NEWUSER, NEWNET = 0x10000000, 0x40000000
HERE = -100
BAD = 1  # a pointer into the first page: EFAULT
BUFFER = ctypes.create_string_buffer(8192)
BUF = ctypes.addressof(BUFFER)
TEXT = {name: ctypes.create_string_buffer(name.encode()) for name in ("tmpfs", "/dev/shm", "/nowhere", "user", "node")}
P = {name: ctypes.addressof(buffer) for name, buffer in TEXT.items()}


def terminal(request: int) -> int:
    """An ioctl with a byte on the terminal that the caller owns, as a login shell's child would."""
    _, slave = pty.openpty()
    os.setsid()
    LIBC.ioctl(slave, 0x540E, 0)
    return call("ioctl", slave, request, BUF)


def clone3_user() -> int:
    struct.pack_into("<11Q", BUFFER, 0, NEWUSER, 0, 0, 0, SIGCHLD, 0, 0, 0, 0, 0, 0)
    return call("clone3", BUF, 88)


def listener() -> int:
    """seccomp(SET_MODE_FILTER, NEW_LISTENER) with a filter that allows everything."""
    LIBC.prctl(38, 1, 0, 0, 0)
    code = ctypes.create_string_buffer(struct.pack("=HBBI", 6, 0, 0, 0x7FFF0000))
    program = ctypes.create_string_buffer(struct.pack("=HxxxxxxQ", 1, ctypes.addressof(code)))
    return call("seccomp", 1, 8, ctypes.addressof(program))


def priority_zero(policy: int) -> int:
    struct.pack_into("<i", BUFFER, 0, 0)
    return call("sched_setscheduler", 0, policy, BUF)


def call(name: str, *arguments: int) -> int:
    words = [ctypes.c_long(value) for value in arguments]
    result = LIBC.syscall(ctypes.c_long(NR[name]), *words)
    if result == 0 and name in ("clone", "clone3"):
        os._exit(0)
    return 0 if result >= 0 else ctypes.get_errno()


PROBES = {
    # A19
    "socket-packet": lambda: call("socket", 17, 3, 0),
    "socket-raw-inet": lambda: call("socket", 2, 3, 255),
    "socket-raw-inet6": lambda: call("socket", 10, 3, 58),
    "socket-vsock": lambda: call("socket", 40, 1, 0),
    "socket-alg": lambda: call("socket", 38, 5, 0),
    "socket-tipc": lambda: call("socket", 30, 5, 0),
    "socket-xdp": lambda: call("socket", 44, 3, 0),
    "socket-rds": lambda: call("socket", 21, 5, 0),
    "socket-sctp": lambda: call("socket", 2, 1, 132),
    "socket-netfilter": lambda: call("socket", 16, 3, 12),
    "socketpair-tipc": lambda: call("socketpair", 30, 5, 0, BUF),
    # A26
    "ptrace": lambda: call("ptrace", 0, 0, 0, 0),
    "process_vm_readv": lambda: call("process_vm_readv", os.getpid(), 0, 0, 0, 0, 0),
    "process_vm_writev": lambda: call("process_vm_writev", os.getpid(), 0, 0, 0, 0, 0),
    "pidfd_getfd": lambda: call("pidfd_getfd", -1, 0, 0),
    "kcmp": lambda: call("kcmp", os.getpid(), os.getpid(), 1, 0, 0),
    # A27
    "add_key": lambda: call("add_key", P["user"], P["user"], BUF, 4, -2),
    "request_key": lambda: call("request_key", P["user"], P["user"], 0, 0),
    "keyctl": lambda: call("keyctl", 0, -2, 1),
    # A28, A29
    "unshare-user": lambda: call("unshare", NEWUSER),
    "unshare-user-net": lambda: call("unshare", NEWUSER | NEWNET),
    "clone-user": lambda: call("clone", NEWUSER | SIGCHLD, 0, 0, 0, 0),
    "clone3-user": clone3_user,
    "setns": lambda: call("setns", -1, 0),
    # A30
    "mount-tmpfs": lambda: call("mount", P["tmpfs"], P["/dev/shm"], P["tmpfs"], 0, 0),
    "umount2": lambda: call("umount2", P["/nowhere"], 0),
    "fsopen": lambda: call("fsopen", P["tmpfs"], 0),
    "fspick": lambda: call("fspick", HERE, P["/dev/shm"], 0),
    "open_tree": lambda: call("open_tree", HERE, P["/dev/shm"], 0),
    "move_mount": lambda: call("move_mount", -1, BAD, -1, BAD, 0),
    "mount_setattr": lambda: call("mount_setattr", HERE, P["/dev/shm"], 0, BUF, 32),
    "chroot": lambda: call("chroot", P["/dev/shm"]),
    "pivot_root": lambda: call("pivot_root", P["/nowhere"], P["/nowhere"]),
    # A31
    "io_uring_setup": lambda: call("io_uring_setup", 1, BUF),
    "io_uring_enter": lambda: call("io_uring_enter", -1, 0, 0, 0, 0, 0),
    # A32
    "bpf": lambda: call("bpf", 0, 0, 8192),
    "perf_event_open": lambda: call("perf_event_open", BUF, 0, -1, -1, -1),
    "userfaultfd": lambda: call("userfaultfd", 1),
    "quotactl": lambda: call("quotactl", 0x80000163, 0, 0, 0),
    "fanotify_init": lambda: call("fanotify_init", 0x200, 0),
    "memfd_secret": lambda: call("memfd_secret", 0),
    "reboot": lambda: call("reboot", 0, 0, 0, 0),
    "sethostname": lambda: call("sethostname", P["/dev/shm"], 4),
    "acct": lambda: call("acct", 0),
    "swapon": lambda: call("swapon", P["/nowhere"], 0),
    "init_module": lambda: call("init_module", 0, 0, P["/nowhere"]),
    "kexec_load": lambda: call("kexec_load", 0, 0, 0, 0xFFFF),
    "lookup_dcookie": lambda: call("lookup_dcookie", 0, BUF, 0),
    "syslog": lambda: call("syslog", 99, 0, 0),
    "mbind": lambda: call("mbind", 0, 4096, 99, 0, 0, 0),
    "set_mempolicy": lambda: call("set_mempolicy", 0, 0, 0),
    "shmget": lambda: call("shmget", 0, 4096, 0o600),
    "semget": lambda: call("semget", 0, 1, 0o600),
    "msgget": lambda: call("msgget", 0, 0o600),
    "personality": lambda: call("personality", 0x0040000),
    "openat2": lambda: call("openat2", HERE, P["/dev/shm"], BUF, 24),
    "io_setup": lambda: call("io_setup", 1, BUF),
    "mknod-whiteout": lambda: call("mknodat", HERE, P["node"], 0o020600, 0),
    "seccomp-listener": listener,
    "process_madvise": lambda: call("process_madvise", -1, 0, 0, 0, 0),
    # A33
    "name_to_handle_at": lambda: call("name_to_handle_at", HERE, P["/dev/shm"], BUF, BUF + 64, 0),
    "open_by_handle_at": lambda: call("open_by_handle_at", -1, BAD, 0),
    # A36
    "tiocsti": lambda: terminal(0x5412),
    "tiocsti-upper-bits": lambda: terminal(0x1_0000_5412),
    "tioclinux": lambda: terminal(0x541C),
    "tiocsetd": lambda: terminal(0x5423),
    # A58
    "sched_fifo": lambda: priority_zero(1),
    "sched_setattr": lambda: call("sched_setattr", 0, BAD, 0),
    "sched_setaffinity": lambda: call("sched_setaffinity", 0, 0, BUF),
    # A63
    "clock_settime": lambda: call("clock_settime", 0, BAD),
    "settimeofday": lambda: call("settimeofday", BAD, 0),
    "adjtimex": lambda: call("adjtimex", BUF),
    "clock_adjtime": lambda: call("clock_adjtime", 0, BUF),
}


def main() -> None:
    answers = {}
    for name, probe in PROBES.items():
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, str(probe()).encode())
            os._exit(0)
        os.close(writer)
        os.waitpid(child, 0)
        answers[name] = int(os.read(reader, 16) or -1)
        os.close(reader)
    sys.stdout.write(json.dumps(answers))


main()
