"""The few system calls that the standard library does not wrap.

Only what the spawner, the holder and the node agent need; every wrapper raises :class:`OSError` with the
name of the call. Imported by the spawner, so: standard library only, nothing heavy.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import stat
import struct

CLONE_NEWNS = 0x0002_0000
CLONE_NEWUSER = 0x1000_0000
CLONE_NEWNET = 0x4000_0000

MS_NOSUID = 2
MS_NODEV = 4
MS_REC = 0x4000
MS_PRIVATE = 0x4_0000

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4

# Same numbers on every architecture since Linux 5.1 unified the table (asm-generic/unistd.h).
_SYS_OPEN_TREE = 428
_SYS_MOVE_MOUNT = 429

_OPEN_TREE_CLONE = 1
_AT_SYMLINK_NOFOLLOW = 0x100
_AT_RECURSIVE = 0x8000
_AT_FDCWD = -100
_MOVE_MOUNT_F_EMPTY_PATH = 4

_SIOCGIFFLAGS = 0x8913
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    """``unshare(2)``."""
    _check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """``mount(2)``."""
    result = _libc.mount(
        source.encode(),
        target.encode(),
        None if kind is None else kind.encode(),
        ctypes.c_ulong(flags),
        None if options is None else options.encode(),
    )
    _check(result, f"mount {target}")


def prctl(option: int, value: int) -> None:
    """``prctl(2)`` with one argument."""
    zero = ctypes.c_ulong(0)
    _check(_libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero), f"prctl {option}")


def open_tree(path: str) -> int:
    """Return a descriptor of a detached copy of the mount tree at ``path`` (``open_tree(2)``, Linux 5.2).

    The last component is not followed if it is a link: a link swapped in between check and mount would
    otherwise choose what the sandbox sees (the class of CVE-2024-42472).
    """
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_RECURSIVE | _AT_SYMLINK_NOFOLLOW
    result = _check(_libc.syscall(_SYS_OPEN_TREE, _AT_FDCWD, os.fsencode(path), flags), f"open_tree {path}")
    if stat.S_ISLNK(os.fstat(result).st_mode):  # a link can be mounted, and whoever walks over it follows it
        os.close(result)
        raise OSError(errno.ELOOP, f"open_tree {path}: is a symbolic link")
    return result


def move_mount(tree: int, target: str) -> None:
    """Attach a detached mount tree at ``target`` (``move_mount(2)``)."""
    result = _libc.syscall(_SYS_MOVE_MOUNT, tree, b"", _AT_FDCWD, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH)
    _check(result, f"move_mount {target}")


def loopback_up() -> None:
    """Bring ``lo`` up in the calling process's network namespace (netdevice(7))."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
        request = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack("16xH14x", fcntl.ioctl(probe, _SIOCGIFFLAGS, request))
        fcntl.ioctl(probe, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


def die_with_parent(parent: int) -> None:
    """Be killed when the parent thread ends; ``parent`` is the pid that the caller believes in.

    The check after the call closes the window in which the parent dies first and the signal never comes.
    """
    prctl(PR_SET_PDEATHSIG, 9)
    if os.getppid() != parent:
        os._exit(125)


def set_fs_ids(uid: int) -> None:
    """Set the calling thread's file-system uid and gid (setfsuid(2)); they report failure only when asked again."""
    _libc.setfsgid(uid)
    _libc.setfsuid(uid)
    if _libc.setfsuid(-1) != uid or _libc.setfsgid(-1) != uid:
        raise PermissionError(f"setfsuid {uid}")
