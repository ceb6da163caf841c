"""Which system calls code in a sandbox may make: the one list, with a reason for every group.

This module is data for people and for ``tools/build_seccomp.py``; nothing reads it at run time. The
compiled filters lie in ``_filters/``. What is named nowhere answers ENOSYS, the answer of a kernel
that is too old: a call that a future kernel adds is shut until somebody puts it here, and libcs take
it as the cue to fall back. EPERM says that the call is known and refused.

Arguments are judged by their LOW 32 bits, because that is what the kernel looks at: a filter that
compares all 64 bits refuses ``0x5412`` and lets ``0x100005412`` through (snapd's CVE-2019-7303).
What lies behind a pointer a filter cannot judge (seccomp(2)): such calls are allowed or refused whole.

Case numbers (A19 …) are those of the isolation attack tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

LOW_32 = 0xFFFFFFFF


class Action(StrEnum):
    """What the kernel does with a call."""

    ALLOW = "allow"
    EPERM = "eperm"
    EINVAL = "einval"
    ENOSYS = "enosys"
    KILL = "kill"


@dataclass(frozen=True, slots=True)
class Group:
    """Calls that share one unconditional answer and the reason for it."""

    title: str
    action: Action
    why: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Check:
    """True when ``low32(argument) & mask`` is one of ``values`` (or, with ``among=False``, none)."""

    argument: int
    values: tuple[int, ...]
    mask: int = LOW_32
    among: bool = True


@dataclass(frozen=True, slots=True)
class Conditional:
    """One call that is allowed when all tests of any clause hold, and else answers ``otherwise``."""

    name: str
    why: str
    clauses: tuple[tuple[Check, ...], ...]
    otherwise: Action = Action.EPERM


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ALLOWED: tuple[Group, ...] = (
    Group(
        "files",
        Action.ALLOW,
        "Paths are bounded by the mount table and Landlock, sizes by the sized workspace.",
        _words(
            """
            access chdir chmod chown close close_range copy_file_range creat dup dup2 dup3 faccessat faccessat2
            fadvise64 fallocate fchdir fchmod fchmodat fchown fchownat fcntl fdatasync fgetxattr flistxattr
            flock fremovexattr fsetxattr fstat fstatfs fsync ftruncate futimesat getcwd getdents getdents64
            getxattr inotify_add_watch inotify_init inotify_init1 inotify_rm_watch lchown lgetxattr link linkat
            listxattr llistxattr lremovexattr lseek lsetxattr lstat memfd_create mkdir mkdirat newfstatat open
            openat pipe pipe2 pread64 preadv preadv2 pwrite64 pwritev pwritev2 read readahead readlink
            readlinkat readv removexattr rename renameat renameat2 rmdir sendfile setxattr splice stat statfs
            statx symlink symlinkat sync_file_range tee truncate umask unlink unlinkat utime utimensat utimes
            vmsplice write writev
            """
        ),
    ),
    Group(
        "waiting",
        Action.ALLOW,
        "Every event loop needs them; they act on descriptors that the program holds.",
        _words(
            """
            epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 poll ppoll
            pselect6 select signalfd signalfd4 timerfd_create timerfd_gettime timerfd_settime
            """
        ),
    ),
    Group(
        "memory",
        Action.ALLOW,
        "Own address space only; locking is bounded by RLIMIT_MEMLOCK, size by the memory limit.",
        _words(
            """
            brk get_mempolicy madvise membarrier mincore mlock mlock2 mlockall mmap mprotect mremap msync
            munlock munlockall munmap pkey_alloc pkey_free pkey_mprotect
            """
        ),
    ),
    Group(
        "processes, threads and signals",
        Action.ALLOW,
        "The pid namespace is the border: nothing outside it has a number in here.",
        _words(
            """
            alarm arch_prctl execve execveat exit exit_group fork futex futex_waitv get_robust_list getcpu
            getitimer getpgid getpgrp getpid getppid getpriority getrlimit getrusage getsid gettid ioprio_get
            ioprio_set kill pause pidfd_open pidfd_send_signal prlimit64 restart_syscall rseq rt_sigaction
            rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait
            rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getattr
            sched_getparam sched_getscheduler sched_rr_get_interval sched_setparam sched_yield set_robust_list
            set_tid_address setitimer setpgid setpriority setrlimit setsid sigaltstack tgkill times tkill vfork
            wait4 waitid
            """
        ),
    ),
    Group(
        "reading clocks, sleeping",
        Action.ALLOW,
        "Reading only; setting a clock is refused below.",
        _words(
            """
            clock_getres clock_gettime clock_nanosleep gettimeofday nanosleep time timer_create timer_delete
            timer_getoverrun timer_gettime timer_settime
            """
        ),
    ),
    Group(
        "identity",
        Action.ALLOW,
        "One uid is mapped, no capability is held and no_new_privs is set: nothing to gain.",
        _words(
            """
            capget capset getegid geteuid getgid getgroups getresgid getresuid getuid setfsgid setfsuid setgid
            setgroups setregid setresgid setresuid setreuid setuid
            """
        ),
    ),
    Group(
        "sockets that socket() let through",
        Action.ALLOW,
        "The family was judged when the socket was made; the network namespace holds lo alone.",
        _words(
            """
            accept accept4 bind connect getpeername getsockname getsockopt listen recvfrom recvmmsg recvmsg
            sendmmsg sendmsg sendto setsockopt shutdown
            """
        ),
    ),
    Group(
        "facts of the system",
        Action.ALLOW,
        "Harmless reading that start-up code of every language does.",
        _words("getrandom sysinfo uname"),
    ),
    Group(
        "POSIX message queues",
        Action.ALLOW,
        "Own ipc namespace, bytes bounded by RLIMIT_MSGQUEUE.",
        _words("mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedsend mq_unlink"),
    ),
    Group(
        "restricting oneself",
        Action.ALLOW,
        "A program that sandboxes itself further may; it can only lose rights.",
        _words("landlock_add_rule landlock_create_ruleset landlock_restrict_self"),
    ),
)

ANSWERED_ENOSYS: tuple[Group, ...] = (
    Group(
        "flags behind a pointer",
        Action.ENOSYS,
        "The filter cannot read clone3's CLONE_NEW* or openat2's flags; libcs fall back (A28).",
        _words("clone3 openat2"),
    ),
    Group(
        "io_uring",
        Action.ENOSYS,
        "Does system calls that neither this filter nor a command log sees; many kernel bugs (A31).",
        _words("io_uring_enter io_uring_register io_uring_setup"),
    ),
    Group(
        "the new mount interface",
        Action.ENOSYS,
        "Reaches fs_context parsers such as the one of CVE-2022-0185 (A30); no program needs it here.",
        _words("fsconfig fsmount fsopen fspick mount_setattr move_mount open_tree"),
    ),
    Group(
        "kernel AIO",
        Action.ENOSYS,
        "Takes from fs.aio-max-nr, one pool for the whole machine; users fall back to threads.",
        _words("io_cancel io_destroy io_getevents io_pgetevents io_setup io_submit"),
    ),
    Group(
        "flushing whole file systems",
        Action.ENOSYS,
        "sync() writes back the host's file systems too; a loop of it stalls the neighbours.",
        _words("sync syncfs"),
    ),
    Group(
        "acting on other processes' memory",
        Action.ENOSYS,
        "process_madvise and process_mrelease serve resource managers, not programs.",
        _words("process_madvise process_mrelease"),
    ),
)

REFUSED: tuple[Group, ...] = (
    Group(
        "namespaces and roots",
        Action.EPERM,
        "A nested user namespace hands out every capability over new kernel surface (A28, A29).",
        _words("chroot pivot_root setns unshare"),
    ),
    Group(
        "mounts",
        Action.EPERM,
        "CVE-2021-3493, CVE-2023-0386 and their kin start with a mount (A30).",
        _words("mount swapoff swapon umount2"),
    ),
    Group(
        "other processes",
        Action.EPERM,
        "Debugging interfaces read and rewrite whatever runs under the same uid (A26).",
        _words("kcmp pidfd_getfd process_vm_readv process_vm_writev ptrace"),
    ),
    Group(
        "kernel programs, counters, page-fault handlers",
        Action.EPERM,
        "bpf, perf and userfaultfd are the usual first and second step of kernel exploits (A32).",
        _words("bpf perf_event_open userfaultfd"),
    ),
    Group(
        "keyrings",
        Action.EPERM,
        "Keys are found by uid, across namespaces; the quota is the uid's as well (A8, A27).",
        _words("add_key keyctl request_key"),
    ),
    Group(
        "file handles",
        Action.EPERM,
        "open_by_handle_at reaches files outside the mount table (A33, the 'shocker' escape).",
        _words("name_to_handle_at open_by_handle_at"),
    ),
    Group(
        "System V IPC",
        Action.EPERM,
        "Segments, queues and sets live on with no process mapping them: the memory watchdog, which "
        "sums processes, would not see them.",
        _words("msgctl msgget msgrcv msgsnd semctl semget semop semtimedop shmat shmctl shmdt shmget"),
    ),
    Group(
        "memory no one may see",
        Action.EPERM,
        "memfd_secret hides pages even from the kernel and pins them.",
        _words("memfd_secret"),
    ),
    Group(
        "NUMA placement",
        Action.EPERM,
        "Moves load onto memory nodes of other jobs; a history of bugs; reading stays allowed.",
        _words("mbind migrate_pages move_pages set_mempolicy set_mempolicy_home_node"),
    ),
    Group(
        "scheduling",
        Action.EPERM,
        "Where there is no cgroup, affinity is what holds a sandbox to its CPUs; sched_setattr hides "
        "its policy behind a pointer (A58).",
        _words("sched_setaffinity sched_setattr"),
    ),
    Group(
        "clocks",
        Action.EPERM,
        "Setting time is for the host (A63); adjtimex's mode lies behind a pointer.",
        _words("adjtimex clock_adjtime clock_settime settimeofday"),
    ),
    Group(
        "the machine",
        Action.EPERM,
        "Root's business everywhere; a second wall behind the missing capabilities (A32).",
        _words(
            """
            acct delete_module fanotify_init fanotify_mark finit_module init_module ioperm iopl kexec_file_load
            kexec_load lookup_dcookie modify_ldt quotactl quotactl_fd reboot setdomainname sethostname syslog
            vhangup
            """
        ),
    ),
)

# include/uapi/linux/sched.h. CLONE_NEWTIME (0x80) lies in clone()'s exit-signal bits: no effect here.
CLONE_NEW = 0x7E020000

AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
SOCK_STREAM, SOCK_DGRAM, SOCK_RAW, SOCK_SEQPACKET = 1, 2, 3, 5
_SOCK_TYPE_MASK = 0xF
_IPPROTO_DEFAULT, _IPPROTO_TCP, _IPPROTO_UDP, _NETLINK_ROUTE = 0, 6, 17, 0
_UNIX_TYPES = Check(1, (SOCK_STREAM, SOCK_DGRAM, SOCK_SEQPACKET), _SOCK_TYPE_MASK)

TIOCSTI, TIOCLINUX, TIOCSETD = 0x5412, 0x541C, 0x5423

_S_IFMT, _S_IFREG, _S_IFIFO, _S_IFSOCK = 0o170000, 0o100000, 0o010000, 0o140000
_MADE = (0, _S_IFREG, _S_IFIFO, _S_IFSOCK)

SCHED_OTHER, SCHED_BATCH, SCHED_IDLE, _RESET_ON_FORK = 0, 3, 5, 0x40000000

_SECCOMP_STRICT, _SECCOMP_FILTER, _SECCOMP_ACTION_AVAIL, _NEW_LISTENER = 0, 1, 2, 0x8

# include/uapi/linux/prctl.h. Left out on purpose: 31/32 task perf events, 35 PR_SET_MM,
# 57/58 IO_FLUSHER, 59 syscall user dispatch, 62 core scheduling.
_PRCTL = (
    *(1, 2, 3, 4, 7, 8, 13, 14, 15, 16, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 33, 34),
    *(36, 37, 38, 39, 40, 41, 42, 45, 46, 47, 50, 51, 52, 53, 54, 55, 56, 60, 61, 63, 64, 65, 66),
    0x53564D41,  # PR_SET_VMA: names for memory areas
    0x41555856,  # PR_GET_AUXV
    0x59616D61,  # PR_SET_PTRACER: without ptrace it has no effect
)

CONDITIONAL: tuple[Conditional, ...] = (
    Conditional(
        "clone",
        "Threads and processes, but no new namespace (A28).",
        ((Check(0, (0,), CLONE_NEW),),),
    ),
    Conditional(
        "socket",
        "UNIX, TCP, UDP and NETLINK_ROUTE (libc's getaddrinfo reads addresses with it). No raw or "
        "packet socket, no vsock, ALG, RDS, TIPC, XDP, SCTP, netfilter netlink (A19, A29).",
        (
            (Check(0, (AF_UNIX,)), _UNIX_TYPES),
            (
                Check(0, (AF_INET, AF_INET6)),
                Check(1, (SOCK_STREAM, SOCK_DGRAM), _SOCK_TYPE_MASK),
                Check(2, (_IPPROTO_DEFAULT, _IPPROTO_TCP, _IPPROTO_UDP)),
            ),
            (
                Check(0, (AF_NETLINK,)),
                Check(1, (SOCK_RAW, SOCK_DGRAM), _SOCK_TYPE_MASK),
                Check(2, (_NETLINK_ROUTE,)),
            ),
        ),
    ),
    Conditional(
        "socketpair",
        "Only UNIX sockets come in pairs; TIPC's pairs are kernel surface.",
        ((Check(0, (AF_UNIX,)), _UNIX_TYPES),),
    ),
    Conditional(
        "ioctl",
        "TIOCSTI and TIOCLINUX type into somebody else's terminal (A36, CVE-2017-5226); TIOCSETD "
        "loads line disciplines (CVE-2017-2636, CVE-2023-6546).",
        ((Check(1, (TIOCSTI, TIOCLINUX, TIOCSETD), among=False),),),
    ),
    Conditional(
        "mknod",
        "Files, FIFOs and sockets; no device nodes, overlay whiteouts included.",
        ((Check(1, _MADE, _S_IFMT),),),
    ),
    Conditional("mknodat", "As mknod.", ((Check(2, _MADE, _S_IFMT),),)),
    Conditional(
        "personality",
        "Asking (0xffffffff) and the native one; the others weaken address randomisation and NX.",
        ((Check(0, (0, 0xFFFFFFFF)),),),
    ),
    Conditional(
        "prctl",
        "Options on the list; others answer as on a kernel that does not know them.",
        ((Check(0, _PRCTL),),),
        otherwise=Action.EINVAL,
    ),
    Conditional(
        "sched_setscheduler",
        "No real-time and no deadline policy (A58).",
        ((Check(1, (SCHED_OTHER, SCHED_BATCH, SCHED_IDLE), LOW_32 & ~_RESET_ON_FORK),),),
    ),
    Conditional(
        "seccomp",
        "Programs may sandbox themselves. No listener: user notification belongs to the supervisor "
        "outside, and only one may exist.",
        (
            (Check(0, (_SECCOMP_STRICT, _SECCOMP_ACTION_AVAIL)),),
            (Check(0, (_SECCOMP_FILTER,)), Check(1, (0,), _NEW_LISTENER)),
        ),
    ),
)

GROUPS: tuple[Group, ...] = (*ALLOWED, *ANSWERED_ENOSYS, *REFUSED)
DEFAULT = Action.ENOSYS
