"""Which system calls an egress worker may make after its lock-down: the one list, with a reason for every group.

Data for people and for ``tools/build_seccomp.py``; the package holds only what is compiled from it, in the folders
``plain`` and ``unix`` of ``src/stockade/egress/_filters``. These differ in one thing: whether a UNIX socket may be
made, for an operator's proxy that is reached by one. No filter, and no Landlock right up to ABI 7, says *which* socket
file may be connected to, and a host has some that are worth much (container engines, D-Bus, SSH agents); so a worker
that needs none can make none.

The list was found by tracing every test of the worker, and each entry was asked for what it is needed. Three answers:

- EPERM where a Python program may try, or a library may probe;
- killed for what nothing in here ever does by mistake: whoever makes such a call has taken the worker over. It ends with
  SIGSYS, the agent sees that, and the rollouts go to a fresh worker;
- ENOSYS for the rest, also for what future kernels will add.

What lies behind a pointer a filter cannot see; open() and its kin are Landlock's business.
"""

from __future__ import annotations

from dataclasses import dataclass

from stockade.sandbox._seccomp_table import Action, Check, Conditional, Group


@dataclass(frozen=True, slots=True)
class Judged(Conditional):
    """One call that answers ``then`` when all tests of any clause hold, and else ``otherwise``."""

    then: Action = Action.ALLOW


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ALLOWED: tuple[Group, ...] = (
    Group(
        "moving bytes",
        Action.ALLOW,
        "What a proxy does, on descriptors that it holds.",
        _words(
            """
            accept accept4 close connect dup epoll_create1 epoll_ctl epoll_pwait epoll_wait getpeername getsockname
            pipe2 poll ppoll read readv recvfrom recvmsg sendfile sendmsg sendto shutdown splice write writev
            """
        ),
    ),
    Group(
        "files of the store, record and memory files",
        Action.ALLOW,
        "Landlock says where: beneath the store's directory, and nowhere. Stat calls it does not rule: they tell sizes "
        "and times, and C libraries need them for descriptors.",
        _words(
            """
            fdatasync flock fstat fsync ftruncate getdents64 linkat lseek lstat memfd_create mkdirat newfstatat openat
            pread64 pwrite64 stat statx unlinkat
            """
        ),
    ),
    Group(
        "memory",
        Action.ALLOW,
        "Own address space only; what makes memory executable is judged below.",
        _words("brk madvise mremap munmap"),
    ),
    Group(
        "the interpreter",
        Action.ALLOW,
        "Locks, signals, sleep and the end of the process.",
        _words(
            """
            clock_getres clock_gettime clock_nanosleep exit exit_group futex getrandom gettimeofday nanosleep
            restart_syscall rt_sigaction rt_sigprocmask rt_sigreturn sched_yield sigaltstack time
            """
        ),
    ),
    Group(
        "facts about oneself",
        Action.ALLOW,
        "Harmless reading: ids, limits, time used.",
        _words("getegid geteuid getgid getpid getppid getrlimit getrusage gettid getuid sysinfo times"),
    ),
)

REFUSED: tuple[Group, ...] = (
    Group(
        "being reached",
        Action.EPERM,
        "A worker accepts on sockets that it was handed; one of its own would be a door into the host.",
        _words("bind listen socketpair"),
    ),
    Group(
        "signals and settings of processes",
        Action.EPERM,
        "Among them the death signal, which must stay: a worker never outlives its agent.",
        _words("kill prctl rt_sigqueueinfo rt_tgsigqueueinfo tgkill tkill"),
    ),
    Group(
        "flags behind a pointer",
        Action.ENOSYS,
        "C libraries fall back to clone and openat, which are judged.",
        _words("clone3 openat2"),
    ),
)

KILLED: tuple[Group, ...] = (
    Group(
        "programs and processes",
        Action.KILL,
        "A worker starts none.",
        _words("execve execveat fork vfork"),
    ),
    Group(
        "other processes",
        Action.KILL,
        "The agent runs under the same uid where it is not root.",
        _words(
            """
            kcmp pidfd_getfd process_madvise process_mrelease process_vm_readv process_vm_writev ptrace
            """
        ),
    ),
    Group(
        "namespaces and mounts",
        Action.KILL,
        "The usual beginning of a way up; Landlock rules neither unshare nor setns.",
        _words(
            """
            chroot fsconfig fsmount fsopen fspick mount mount_setattr move_mount open_tree pivot_root setns umount2
            unshare
            """
        ),
    ),
    Group(
        "kernel programs, rings, page-fault handlers",
        Action.KILL,
        "The usual first and second step of kernel exploits; io_uring makes calls that no filter sees.",
        _words("bpf io_uring_enter io_uring_register io_uring_setup perf_event_open userfaultfd"),
    ),
    Group(
        "keyrings and file handles",
        Action.KILL,
        "Authority that is found by uid and not by descriptor.",
        _words("add_key keyctl name_to_handle_at open_by_handle_at request_key"),
    ),
    Group(
        "the machine",
        Action.KILL,
        "Root's business, and no worker is root in anything but name.",
        _words(
            """
            acct delete_module fanotify_init finit_module init_module ioperm iopl kexec_file_load kexec_load modify_ldt
            quotactl reboot swapoff swapon
            """
        ),
    ),
)

# include/uapi/linux/sched.h
CLONE_THREAD = 0x00010000
PROT_EXEC = 4

AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10
SOCK_STREAM, SOCK_DGRAM = 1, 2
_SOCK_TYPE_MASK = 0xF
_IPPROTO_DEFAULT, _IPPROTO_TCP, _IPPROTO_UDP = 0, 6, 17

_SOL_SOCKET, _SOL_TCP = 1, 6
_SOCKET_OPTIONS = (2, 7, 8, 9, 13)  # SO_REUSEADDR, SO_SNDBUF, SO_RCVBUF, SO_KEEPALIVE, SO_LINGER
_TCP_OPTIONS = (1, 3, 4, 5, 6, 12, 18)  # NODELAY, CORK, KEEPIDLE, KEEPINTVL, KEEPCNT, QUICKACK, USER_TIMEOUT

_FIONBIO, _FIONREAD, _FIOCLEX, _FIONCLEX = 0x5421, 0x541B, 0x5451, 0x5450

# include/uapi/{asm-generic/fcntl.h,linux/fcntl.h}. Left out on purpose: F_SETOWN and F_SETSIG send signals to others.
_FCNTL = (
    *(0, 1, 2, 3, 4),  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL
    *(5, 6, 7, 36, 37, 38),  # record locks: of a process, and of an open file
    *(1030, 1031, 1032, 1033, 1034),  # F_DUPFD_CLOEXEC, F_SETPIPE_SZ, F_GETPIPE_SZ, F_ADD_SEALS, F_GET_SEALS
)

_INET = (
    Check(0, (AF_INET, AF_INET6)),
    Check(1, (SOCK_STREAM, SOCK_DGRAM), _SOCK_TYPE_MASK),
    Check(2, (_IPPROTO_DEFAULT, _IPPROTO_TCP, _IPPROTO_UDP)),
)
_UNIX = (Check(0, (AF_UNIX,)), Check(1, (SOCK_STREAM,), _SOCK_TYPE_MASK))

_CONDITIONAL: tuple[Conditional, ...] = (
    Conditional(
        "mmap",
        "No executable memory: code that was written into the worker cannot be run as such.",
        ((Check(2, (0,), PROT_EXEC),),),
    ),
    Conditional("mprotect", "As mmap.", ((Check(2, (0,), PROT_EXEC),),)),
    Judged(
        "clone",
        "No thread is needed, but a library may try; a process is never made.",
        ((Check(0, (CLONE_THREAD,), CLONE_THREAD),),),
        otherwise=Action.KILL,
        then=Action.EPERM,
    ),
    Conditional(
        "ioctl",
        "Blocking or not, bytes waiting, close on exec.",
        ((Check(1, (_FIONBIO, _FIONREAD, _FIOCLEX, _FIONCLEX)),),),
    ),
    Conditional("fcntl", "Flags, copies, locks, pipe sizes, seals.", ((Check(1, _FCNTL),),)),
    Conditional("getsockopt", "Of sockets and TCP.", ((Check(1, (_SOL_SOCKET, _SOL_TCP)),),)),
    Conditional(
        "setsockopt",
        "Buffers, keep-alive, linger, TCP's timing. No socket filters, no upper-layer protocols, no netfilter.",
        (
            (Check(1, (_SOL_SOCKET,)), Check(2, _SOCKET_OPTIONS)),
            (Check(1, (_SOL_TCP,)), Check(2, _TCP_OPTIONS)),
        ),
    ),
    Conditional("prlimit64", "Of oneself.", ((Check(0, (0,)),),)),
)

GROUPS: tuple[Group, ...] = (*ALLOWED, *REFUSED, *KILLED)
CONDITIONAL: dict[str, tuple[Conditional, ...]] = {
    "plain": (*_CONDITIONAL, Conditional("socket", "TCP and UDP, nothing else.", (_INET,))),
    "unix": (
        *_CONDITIONAL,
        Conditional("socket", "TCP, UDP, and UNIX streams to the operator's proxy.", (_INET, _UNIX)),
    ),
}
"""The judged calls of each variant."""
DEFAULT = Action.ENOSYS
