"""Landlock (landlock(7)): a process takes rights over files, and more, away from itself and its children.

No privilege is needed and nothing undoes it. Used for the trainer, which gets everything it needs and never the
record, index and policy directories of the run; a second wall around other processes.

Three properties to plan with:

- Rules only allow. "All but this directory" is said by allowing its siblings (:func:`around`); siblings that appear
  later are not among them, and the directories in between can be passed through but not listed.
- What is open stays open: descriptors keep the rights they were opened with, so none must be inherited by accident.
- Up to ABI 7 it does not rule connect() to a UNIX socket by its path, chmod(2), chown(2), stat(2) or extended
  attributes. Reaching another process's files through /proc/PID/root or /proc/PID/fd is ruled: both ask for the
  right to trace, which Landlock grants only downwards.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag, StrEnum
from typing import NoReturn

from stockade.errors import NodeError

KNOWN_ABI = 7
"""Newer kernels are used as if they had this one: a right nobody tested is not claimed."""

# One number on every architecture (asm-generic/unistd.h).
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1
_PR_SET_NO_NEW_PRIVS = 38
_ALL_TCP = 0b11
_ALL_SCOPES = 0b11

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class Right(IntFlag):
    """``LANDLOCK_ACCESS_FS_*`` of include/uapi/linux/landlock.h."""

    EXECUTE = 1 << 0
    WRITE_FILE = 1 << 1
    READ_FILE = 1 << 2
    READ_DIR = 1 << 3
    REMOVE_DIR = 1 << 4
    REMOVE_FILE = 1 << 5
    MAKE_CHAR = 1 << 6
    MAKE_DIR = 1 << 7
    MAKE_REG = 1 << 8
    MAKE_SOCK = 1 << 9
    MAKE_FIFO = 1 << 10
    MAKE_BLOCK = 1 << 11
    MAKE_SYM = 1 << 12
    REFER = 1 << 13
    TRUNCATE = 1 << 14
    IOCTL_DEV = 1 << 15


_SINCE = {Right.REFER: 2, Right.TRUNCATE: 3, Right.IOCTL_DEV: 5}
_TCP_SINCE, _SCOPE_SINCE = 4, 6
# The kernel answers EINVAL to a directory's right in a rule for a file.
_OF_FILES = Right.EXECUTE | Right.WRITE_FILE | Right.READ_FILE | Right.TRUNCATE | Right.IOCTL_DEV

_READ = Right.READ_FILE | Right.READ_DIR
_MAKE = Right.MAKE_DIR | Right.MAKE_REG | Right.MAKE_SOCK | Right.MAKE_FIFO | Right.MAKE_SYM
_WRITE = _READ | _MAKE | Right.WRITE_FILE | Right.REMOVE_DIR | Right.REMOVE_FILE | Right.REFER | Right.TRUNCATE


class Access(StrEnum):
    """What may be done beneath a path. Nobody may make device nodes."""

    READ = "read"
    READ_EXEC = "read_exec"
    WRITE = "write"
    """Read, create, change, move, delete; not execute."""
    WRITE_EXEC = "write_exec"
    DEVICES = "devices"
    """Read, write and ioctl on what is there: /dev/null, /dev/nvidia*."""


_RIGHTS = {
    Access.READ: _READ,
    Access.READ_EXEC: _READ | Right.EXECUTE,
    Access.WRITE: _WRITE,
    Access.WRITE_EXEC: _WRITE | Right.EXECUTE,
    Access.DEVICES: _READ | Right.WRITE_FILE | Right.TRUNCATE | Right.IOCTL_DEV,
}


@dataclass(frozen=True, slots=True)
class Rule:
    """Allow ``access`` to ``path`` and all beneath it; links in the path are followed, once, now.

    A path that cannot be opened is an error unless the rule is ``optional``; then it is skipped and named.
    """

    path: str
    access: Access
    optional: bool = False


class Level(StrEnum):
    """How much of what was asked holds."""

    FULL = "full"
    PARTIAL = "partial"
    UNENFORCED = "unenforced"


@dataclass(frozen=True, slots=True)
class Enforcement:
    """What :func:`restrict` achieved: ``missing`` names what this kernel cannot restrict, ``skipped`` optional paths."""

    level: Level
    abi: int
    missing: tuple[str, ...]
    skipped: tuple[str, ...]

    def __bool__(self) -> NoReturn:
        """Refuse: "was it enforced?" has three answers."""
        raise TypeError("an Enforcement has three levels; compare .level")

    def to_json(self) -> dict[str, object]:
        """For reports and records."""
        return {
            "level": str(self.level),
            "abi": self.abi,
            "missing": list(self.missing),
            "skipped": list(self.skipped),
        }


def abi() -> int:
    """The kernel's Landlock ABI, 0 where it is not built in, not enabled at boot, or hidden by a filter."""
    version = _libc.syscall(
        ctypes.c_long(_CREATE_RULESET), None, ctypes.c_size_t(0), ctypes.c_uint(_CREATE_RULESET_VERSION)
    )
    return max(0, int(version))


def handled(level: int) -> Right:
    """Every right that ABI ``level`` can restrict. A right not handled is a right everybody keeps."""
    if level < 1:
        return Right(0)
    return Right(sum(right for right in Right if _SINCE.get(right, 1) <= level))


def around(root: str, hidden: Sequence[str], access: Access) -> tuple[Rule, ...]:
    """Rules that allow ``root`` but nothing in or above the ``hidden`` paths beneath it.

    Links are left out: what they point to is allowed under its own name, and one may point to what is hidden.
    Everything is judged by its real path, now.
    """
    root = os.path.realpath(root)
    paths = [os.path.realpath(path) for path in hidden]
    if any(_within(root, path) for path in paths):
        return ()
    if not any(_within(path, root) for path in paths):
        return (Rule(root, access, optional=True),)
    try:
        with os.scandir(root) as entries:
            names = sorted(entry.name for entry in entries if not entry.is_symlink())
    except OSError:
        return ()  # what cannot be listed cannot be allowed piece by piece
    return tuple(rule for name in names for rule in around(os.path.join(root, name), paths, access))


def _within(path: str, parent: str) -> bool:
    return os.path.commonpath([path, parent]) == parent


def restrict(rules: Sequence[Rule], *, scope: bool, net: bool = False, max_abi: int = KNOWN_ABI) -> Enforcement:
    """Restrict the calling process, for good, to ``rules``; also sets no_new_privs.

    ``scope`` shuts signals to, and abstract UNIX sockets of, processes outside; ``net`` shuts all binding and
    connecting of TCP sockets. ``max_abi`` uses a newer kernel like an older one.

    Landlock restricts one thread, so this is refused (NodeError) where there are several. NodeError also for a
    required path that cannot be opened, and when the kernel refuses; the process is then NOT restricted and must end.
    """
    if len(os.listdir("/proc/self/task")) != 1:
        raise NodeError(
            "Landlock restricts one thread, and this process has several", hint="restrict before threads start"
        )
    level = min(abi(), max_abi, KNOWN_ABI)
    opened, skipped = _open(rules)
    try:
        if level >= 1:
            _enforce(opened, level, scope=scope, net=net)
        else:
            _no_new_privs()
    finally:
        for fd, _ in opened:
            os.close(fd)
    missing = missing_at(level, scope=scope, net=net)
    state = Level.UNENFORCED if level < 1 else Level.PARTIAL if missing else Level.FULL
    return Enforcement(state, max(0, level), missing, skipped)


def _open(rules: Sequence[Rule]) -> tuple[list[tuple[int, Access]], tuple[str, ...]]:
    opened: list[tuple[int, Access]] = []
    skipped: list[str] = []
    for rule in rules:
        try:
            opened.append((os.open(rule.path, os.O_PATH | os.O_CLOEXEC), Access(rule.access)))
        except OSError as error:
            if rule.optional:
                skipped.append(rule.path)
                continue
            for fd, _ in opened:
                os.close(fd)
            raise NodeError(f"cannot allow {rule.path}: {error.strerror}") from error
    return opened, tuple(skipped)


def missing_at(level: int, *, scope: bool, net: bool) -> tuple[str, ...]:
    """What a kernel of ABI ``level`` cannot restrict, of all that :func:`restrict` would be asked to."""
    wanted = {
        "files": 1,
        "truncation of files": _SINCE[Right.TRUNCATE],
        "ioctl on devices": _SINCE[Right.IOCTL_DEV],
        **({"TCP": _TCP_SINCE} if net else {}),
        **({"signals and abstract sockets": _SCOPE_SINCE} if scope else {}),
    }
    return tuple(what for what, since in wanted.items() if level < since)


def _enforce(opened: Sequence[tuple[int, Access]], level: int, *, scope: bool, net: bool) -> None:
    rights = handled(level)
    words = [rights, *([_ALL_TCP if net else 0] if level >= _TCP_SINCE else [])]
    words += [_ALL_SCOPES if scope else 0] if level >= _SCOPE_SINCE else []
    attributes = struct.pack(f"={len(words)}Q", *words)  # struct landlock_ruleset_attr as long as this ABI knows it
    ruleset = _call(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))
    try:
        for fd, access in opened:
            allowed = _RIGHTS[access] & rights
            if not stat.S_ISDIR(os.fstat(fd).st_mode):
                allowed &= _OF_FILES
            beneath = struct.pack("=Qi", allowed, fd)  # struct landlock_path_beneath_attr, packed
            _call(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_RULE_PATH_BENEATH), beneath, ctypes.c_uint(0))
        _no_new_privs()
        _call(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint(0))
    finally:
        os.close(ruleset)


def _no_new_privs() -> None:
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), *[ctypes.c_ulong(0)] * 3) != 0:
        raise NodeError("the kernel refuses no_new_privs")


def _call(number: int, *arguments: object) -> int:
    result = int(_libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        raise NodeError(f"the kernel refuses a Landlock rule: {os.strerror(ctypes.get_errno())}")
    return result
