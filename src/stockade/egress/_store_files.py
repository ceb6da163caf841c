"""Files of the store: opened below a directory descriptor, never through a link, and never half there.

A file is written without a name (``O_TMPFILE``) and gets its name in one step, linkat(2), which fails if the name is
taken. So what has a name is whole, and what has a name never changes. The directory that the file is made in is the one
that it is named in: Landlock lets nobody without ``REFER`` link from one directory to another, and before its ABI 2
nobody at all.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from types import TracebackType
from typing import ClassVar

from stockade.egress.gate import Reason
from stockade.errors import StockadeError

TEMP_PREFIX = "tmp-"
"""Names of files that are being written, where the file system has no unnamed ones."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_MODE = 0o400  # not even its owner changes what has a name
_OPEN_TO_OTHERS = 0o077
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)

Identity = tuple[int, int, int, int]
"""Device, inode, time of the last change in ns, size: no content changes without one of them."""


class StoreFault(StockadeError):
    """The store cannot do what was asked; ``reason`` is what the record says."""

    reason: ClassVar[Reason] = Reason.STORE_FAILED


class StoreFailed(StoreFault):
    """Something in the store is not what it must be, or cannot be read or written."""


class StoreFull(StoreFault):
    """There is no room for it."""

    reason: ClassVar[Reason] = Reason.STORE_FULL


class Failing:
    """``with Failing("…"):`` turns OSError into :class:`StoreFailed`, or :class:`StoreFull` for lack of space."""

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Translate."""
        if isinstance(error, OSError):
            kind = StoreFull if error.errno in _FULL else StoreFailed
            raise kind(f"store: {self._what}: {error.strerror or error}") from error


def identity(status: os.stat_result) -> Identity:
    """Return what a file is told apart by."""
    return status.st_dev, status.st_ino, status.st_ctime_ns, status.st_size


def open_directory(name: str, parent: int, owner: int) -> int | None:
    """Open a directory of ``owner``'s that is closed to others; None if there is none. Raises OSError, StoreFailed."""
    try:
        fd = enter(name, parent)
    except FileNotFoundError:
        return None
    try:
        check_directory(os.fstat(fd), name, owner)
    except BaseException:
        os.close(fd)
        raise
    return fd


def enter(name: str, parent: int | None) -> int:
    """Open a directory, whoever owns it, but through no link. Raises OSError, StoreFailed."""
    try:
        return os.open(name, _DIRECTORY, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise StoreFailed(f"store: {name} is a link, or no directory") from error
        raise


def check_directory(status: os.stat_result, name: str, owner: int) -> None:
    """Raise :class:`StoreFailed` unless it belongs to ``owner`` alone."""
    if status.st_uid != owner:
        raise StoreFailed(f"store: {name} belongs to uid {status.st_uid}, not to uid {owner}")
    if status.st_mode & _OPEN_TO_OTHERS:
        raise StoreFailed(f"store: {name} is open to other users", hint=f"run: chmod 700 {name}")


def open_file(name: str, parent: int, owner: int, flags: int = os.O_RDONLY) -> tuple[int, os.stat_result] | None:
    """Open a regular file of ``owner``'s; None if there is none. Raises OSError, and StoreFailed for anything else.

    It is looked at before it is opened: to open a device is to do something to it already.
    """
    try:
        _check_file(os.stat(name, dir_fd=parent, follow_symlinks=False), name, owner)
        fd = os.open(name, flags | _FILE, dir_fd=parent)
    except FileNotFoundError:
        return None
    try:
        status = os.fstat(fd)
        _check_file(status, name, owner)
    except BaseException:
        os.close(fd)
        raise
    return fd, status


def _check_file(status: os.stat_result, name: str, owner: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise StoreFailed(f"store: {name} is no regular file")
    if status.st_uid != owner:
        raise StoreFailed(f"store: {name} belongs to uid {status.st_uid}, not to uid {owner}")


class Draft:
    """A file that is being written in the directory ``parent`` (which stays the caller's). Raises OSError.

    ``temp`` is its name until it is published, used only where the file system knows no unnamed files.
    """

    __slots__ = ("_name", "_parent", "fd")

    def __init__(self, parent: int, temp: str, *, unnamed: bool = True) -> None:
        self._parent = parent
        self._name: str | None = None
        self.fd = _unnamed(parent) if unnamed else -1
        if self.fd < 0:
            self.fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, _MODE, dir_fd=parent)
            self._name = temp

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append all of ``data``."""
        view = memoryview(data)
        while view:
            view = view[os.write(self.fd, view) :]

    def publish(self, name: str) -> bool:
        """Give the file its name; return whether it was still free. Nothing is ever replaced."""
        try:
            if self._name is None:
                # The link of /proc is followed to the inode (open(2), O_TMPFILE); there is no path to go astray on.
                os.link(f"/proc/self/fd/{self.fd}", name, dst_dir_fd=self._parent, follow_symlinks=True)
            else:
                os.link(self._name, name, src_dir_fd=self._parent, dst_dir_fd=self._parent, follow_symlinks=False)
        except FileExistsError:
            return False
        self._forget_name()
        return True

    def close(self) -> None:
        """Close it; without :meth:`publish` nothing is left of it. Idempotent."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)
            self._forget_name()

    def _forget_name(self) -> None:
        if self._name is not None:
            name, self._name = self._name, None
            with contextlib.suppress(OSError):  # whoever counts the store next removes it
                os.unlink(name, dir_fd=self._parent)


def _unnamed(parent: int) -> int:
    """Return an unnamed file in ``parent`` that can be given a name later, or -1 where there are none such."""
    try:
        fd = os.open(".", os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, _MODE, dir_fd=parent)
    except OSError as error:
        if error.errno in _NO_TMPFILE:
            return -1
        raise
    try:
        found = os.stat(f"/proc/self/fd/{fd}")
        reachable = os.path.samestat(found, os.fstat(fd))
    except OSError:
        reachable = False
    if not reachable:  # no /proc here, or somebody else's
        os.close(fd)
        return -1
    return fd
