"""What an egress worker gives up before it reads its first hostile byte.

Order matters: limits and the uid change come first, because a change of credentials resets both the dumpable
flag and the parent-death signal (prctl(2)); the file system goes once every module is imported, and system calls go
last, those that take the rest away among them.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import errno
import os
import resource
import signal
import struct
import sys
from dataclasses import dataclass

from stockade.egress import _filters
from stockade.errors import NodeError

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_CAPBSET_READ, _PR_CAPBSET_DROP = 23, 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_CAP_VERSION_3 = 0x20080522
_MAX_CAPABILITIES = 64

# The same numbers on every architecture (they came after the unified syscall table).
_SYS_LANDLOCK_CREATE_RULESET = 444
_SYS_LANDLOCK_ADD_RULE = 445
_SYS_LANDLOCK_RESTRICT_SELF = 446
_LANDLOCK_CREATE_RULESET_VERSION = 1
_LANDLOCK_RULE_PATH_BENEATH = 1

_FS_RIGHTS_BY_ABI = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""How many ``LANDLOCK_ACCESS_FS_*`` bits each ABI knows (landlock(7)); later ABIs added none up to 7."""
_WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG = 1 << 1, 1 << 2, 1 << 3, 1 << 5, 1 << 7, 1 << 8
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_STORE_RIGHTS = _WRITE_FILE | _READ_FILE | _READ_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _REFER | _TRUNCATE
"""Plain files and folders: nothing to execute, no links by path, no devices, no sockets."""
_BIND_TCP, _NET_ABI = 1, 4
_SCOPE_ABSTRACT_UNIX_AND_SIGNAL = 0b11
_SCOPE_ABI = 6

_SYS_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SECCOMP_SET_MODE_FILTER = 1
_SECCOMP_FILTER_FLAG_SPEC_ALLOW = 4
_INSTRUCTION_BYTES = 8

_UNENFORCED = "unenforced"
_CODECS = ("ascii", "latin-1", "utf-8", "unicode_escape", "idna", "punycode")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


@dataclass(frozen=True, slots=True)
class Lockdown:
    """What holds: ``landlock`` is ``abi-N``, ``seccomp`` the digest of the filter; either may be ``unenforced``.

    As a text it is the first one.
    """

    landlock: str
    seccomp: str

    def __str__(self) -> str:
        return self.landlock


class _FilterProgram(ctypes.Structure):
    """``struct sock_fprog`` of linux/filter.h."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def raise_nofile() -> int:
    """Raise the soft limit of open descriptors to the hard limit; return it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def drop_privileges(uid: int | None, gid: int | None) -> None:
    """As root, become ``uid``/``gid`` with no supplementary groups; raise OSError if that fails.

    ``None`` keeps the identity: an ordinary user has nothing to drop.
    """
    if uid is None or gid is None or os.geteuid() != 0:
        return
    _drop_bounding_set()  # while the capability to do so is still there
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def harden_process() -> None:
    """Hold no capability, start no process, die with the parent, be invisible to ptrace and core dumps.

    Raises OSError. Whoever stays root is root without any of its powers.
    """
    _drop_bounding_set()
    with contextlib.suppress(OSError):  # no ambient capabilities before Linux 4.3
        _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    _drop_capabilities()
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(_PR_SET_DUMPABLE, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def lock_down(store_fd: int | None = None, *, unix: bool = False) -> Lockdown:
    """Deny this process every file but those beneath ``store_fd``, and every system call that it does not need.

    ``store_fd`` is a directory that stays the caller's; ``unix`` allows UNIX sockets to be made, for an operator's proxy
    that is reached by one. ``no_new_privs`` must be set before (see :func:`harden_process`), and there must be one
    thread: both walls are a thread's own. Where the kernel lacks one, the result says so; a filter that is damaged or a
    rule that is refused is an error, NodeError or OSError, and the process must end.
    """
    if len(os.listdir("/proc/self/task")) != 1:
        raise NodeError("a worker with several threads cannot be locked down", hint="lock down before threads start")
    chosen = _filters.load("unix" if unix else "plain")
    return Lockdown(_restrict_files(store_fd), _restrict_calls(chosen))


def _restrict_files(store_fd: int | None) -> str:
    """Handle every right that the kernel knows, and allow none, or what a store needs beneath ``store_fd``.

    A worker that is taken over through its parser finds no file, not even a readable one. Descriptors that are
    already open keep working. Where the kernel knows them, TCP listeners, abstract UNIX sockets and signals to others
    go too.
    """
    abi = _syscall(
        _SYS_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_LANDLOCK_CREATE_RULESET_VERSION)
    )
    if abi < 1:
        return _UNENFORCED
    rights = (1 << _FS_RIGHTS_BY_ABI.get(abi, _FS_RIGHTS_BY_ABI[5])) - 1
    words = [rights]
    if abi >= _NET_ABI:
        # Connecting is not handled: dialling out is the worker's task, the gate decides where to.
        words.append(_BIND_TCP)
    if abi >= _SCOPE_ABI:
        words.append(_SCOPE_ABSTRACT_UNIX_AND_SIGNAL)
    attr = struct.pack(f"={len(words)}Q", *words)
    ruleset = _must(
        "landlock_create_ruleset",
        _syscall(_SYS_LANDLOCK_CREATE_RULESET, ctypes.c_char_p(attr), ctypes.c_size_t(len(attr)), ctypes.c_uint32(0)),
    )
    try:
        if store_fd is not None:
            beneath = struct.pack("=Qi", _STORE_RIGHTS & rights, store_fd)
            rule = (ctypes.c_int(ruleset), ctypes.c_int(_LANDLOCK_RULE_PATH_BENEATH), ctypes.c_char_p(beneath))
            _must("landlock_add_rule", _syscall(_SYS_LANDLOCK_ADD_RULE, *rule, ctypes.c_uint32(0)))
        _must(
            "landlock_restrict_self",
            _syscall(_SYS_LANDLOCK_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0)),
        )
    finally:
        os.close(ruleset)
    return f"abi-{abi}"


def _restrict_calls(chosen: _filters.Filter | None) -> str:
    number = _SYS_SECCOMP.get(os.uname().machine)
    if chosen is None or number is None:
        return _UNENFORCED
    program = _FilterProgram(len(chosen.program) // _INSTRUCTION_BYTES, chosen.program)
    # SPEC_ALLOW first: before Linux 5.16 a filter without it turns on mitigations against code that was brought along.
    # None runs in here, and they slow the interpreter down. Before 4.17 the flag is unknown.
    for flags in (_SECCOMP_FILTER_FLAG_SPEC_ALLOW, 0):
        operation = (ctypes.c_uint(_SECCOMP_SET_MODE_FILTER), ctypes.c_uint(flags))
        if _syscall(number, *operation, ctypes.byref(program)) == 0:
            return chosen.digest
    if ctypes.get_errno() in (errno.ENOSYS, errno.EINVAL):  # a kernel without seccomp filters
        return _UNENFORCED
    raise _error("seccomp")


def preload_codecs() -> None:
    """Load what this process may come to need from files: codecs, which Python imports on first use, and the filters.

    Raises :class:`NodeError` for a filter that is damaged.
    """
    for name in _CODECS:
        codecs.lookup(name)
    for variant in _filters.VARIANTS:
        _filters.load(variant)


def forget_paths() -> None:
    """Stop later imports from looking at the disk: after :func:`lock_down` they could only fail oddly."""
    sys.path.clear()
    sys.path_importer_cache.clear()
    sys.meta_path[:] = [finder for finder in sys.meta_path if "PathFinder" not in repr(finder)]


def _drop_bounding_set() -> None:
    """Take every capability out of reach of a later exec, as far as this process may; who may not holds none."""
    for capability in range(_MAX_CAPABILITIES):
        held = _libc.prctl(ctypes.c_int(_PR_CAPBSET_READ), ctypes.c_ulong(capability), *_zeros(3))
        if held < 0:  # past the last one that this kernel knows
            return
        try:
            if held:
                _prctl(_PR_CAPBSET_DROP, capability)
        except PermissionError:
            return


def _drop_capabilities() -> None:
    """Empty the effective, permitted and inheritable sets (capget(2)); raises OSError."""
    header = struct.pack("=Ii", _CAP_VERSION_3, 0)
    _must("capset", _libc.capset(ctypes.c_char_p(header), ctypes.c_char_p(bytes(2 * 3 * 4))))


def _prctl(option: int, value: int) -> None:
    _must(f"prctl({option})", _libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), *_zeros(3)))


def _zeros(count: int) -> list[ctypes.c_ulong]:
    return [ctypes.c_ulong(0)] * count


def _syscall(number: int, *arguments: object) -> int:
    return int(_libc.syscall(ctypes.c_long(number), *arguments))


def _must(what: str, result: int) -> int:
    if result < 0:
        raise _error(what)
    return result


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")
