"""What an egress worker gives up before it reads its first hostile byte.

Order matters: limits and the uid change come first, because a change of credentials resets both the dumpable
flag and the parent-death signal (prctl(2)); the file system goes last, once every module is imported.
"""

from __future__ import annotations

import codecs
import ctypes
import os
import resource
import signal
import struct
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38

# The same numbers on every architecture (they came after the unified syscall table).
_SYS_LANDLOCK_CREATE_RULESET = 444
_SYS_LANDLOCK_RESTRICT_SELF = 446
_LANDLOCK_CREATE_RULESET_VERSION = 1

_FS_RIGHTS_BY_ABI = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""How many ``LANDLOCK_ACCESS_FS_*`` bits each ABI knows (landlock(7)); later ABIs added none up to 7."""
_SCOPE_ABSTRACT_UNIX_AND_SIGNAL = 0b11
_SCOPE_ABI = 6

_CODECS = ("ascii", "latin-1", "utf-8", "unicode_escape", "idna", "punycode")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


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
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def harden_process() -> None:
    """Die with the parent, gain no privilege by exec, and be invisible to ptrace and core dumps."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(_PR_SET_DUMPABLE, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def lock_down() -> str:
    """Deny this process every file access by Landlock; return ``"abi-N"`` or ``"unenforced"``.

    The rule set handles every file system right that the kernel knows and allows none, so a worker that is
    taken over through its parser finds no file, not even a readable one. Descriptors that are already open
    keep working. Where the kernel knows scopes, abstract UNIX sockets and signals to others go too.
    ``no_new_privs`` must be set before (see :func:`harden_process`).
    """
    abi = _libc.syscall(
        ctypes.c_long(_SYS_LANDLOCK_CREATE_RULESET),
        None,
        ctypes.c_size_t(0),
        ctypes.c_uint32(_LANDLOCK_CREATE_RULESET_VERSION),
    )
    if abi < 1:
        return "unenforced"
    rights = (1 << _FS_RIGHTS_BY_ABI.get(abi, _FS_RIGHTS_BY_ABI[5])) - 1
    attr = struct.pack("=Q", rights)
    if abi >= _SCOPE_ABI:
        # handled_access_net stays 0: dialling out is the worker's task, the gate decides where to.
        attr = struct.pack("=QQQ", rights, 0, _SCOPE_ABSTRACT_UNIX_AND_SIGNAL)
    ruleset = _libc.syscall(
        ctypes.c_long(_SYS_LANDLOCK_CREATE_RULESET),
        ctypes.c_char_p(attr),
        ctypes.c_size_t(len(attr)),
        ctypes.c_uint32(0),
    )
    if ruleset < 0:
        return "unenforced"
    try:
        done = _libc.syscall(ctypes.c_long(_SYS_LANDLOCK_RESTRICT_SELF), ctypes.c_int(ruleset), ctypes.c_uint32(0))
    finally:
        os.close(ruleset)
    return f"abi-{abi}" if done == 0 else "unenforced"


def preload_codecs() -> None:
    """Load the codecs that this process may come to need: Python imports each on first use, from a file."""
    for name in _CODECS:
        codecs.lookup(name)


def forget_paths() -> None:
    """Stop later imports from looking at the disk: after :func:`lock_down` they could only fail oddly."""
    sys.path.clear()
    sys.path_importer_cache.clear()
    sys.meta_path[:] = [finder for finder in sys.meta_path if "PathFinder" not in repr(finder)]


def _prctl(option: int, value: int) -> None:
    args = (ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))
    if _libc.prctl(ctypes.c_int(option), *args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")
