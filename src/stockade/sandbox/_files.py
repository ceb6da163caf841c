"""Files of a sandbox, read and written from outside through one directory descriptor.

Everything here assumes that the tree belongs to an attacker who is awake. Each path component is opened
relative to the last one and never through a link, so no rename can lead out of the tmpfs; a file counts only
if it is regular and has one name; FIFOs, sockets and devices are never opened for data; sizes, entries and
depth are bounded. Works on a dead sandbox as well: the descriptor keeps its tmpfs alive.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import NamedTuple

from stockade.errors import StockadeError
from stockade.sandbox._syscalls import set_fs_ids
from stockade.sandbox._types import HOME, WORKSPACE, Collected, Skipped

MAX_ENTRIES = 20_000
MAX_DEPTH = 64
MAX_SPELLED = (
    4 << 20
)  # characters of all paths together: 64 directories of 255 bytes stand before every name below them
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# Where the writable directories of a sandbox lie in its tmpfs.
_ROOTS = {WORKSPACE: "workspace", "/tmp": "tmp", HOME: "home"}  # noqa: S108 - a path inside the sandbox


@contextlib.contextmanager
def acting_as(owner: int | None) -> Iterator[None]:
    """On a root-run agent: touch files with the sandbox's own uid (setfsuid(2), of this thread only).

    The tmpfs belongs to a user namespace in which root has no name, so root could not create a file there;
    and root's power over files is the last thing to hold while walking a tree that an attacker arranges.
    """
    if owner is None:
        yield
        return
    set_fs_ids(owner)
    try:
        yield
    finally:
        set_fs_ids(0)


class PathRefused(StockadeError, ValueError):
    """A path that may not be read or written from outside; ``reason`` is a fixed word."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path!r}: {reason.replace('_', ' ')}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Place:
    """A path inside the sandbox, as the writable root that it lies in and the components below it."""

    root: str
    parts: tuple[str, ...]
    text: str


def locate(path: str, *, collect: bool) -> Place:
    """Split an absolute path of the sandbox; ``collect`` refuses HOME, whose content never leaves."""
    pure = PurePosixPath(path)
    if not pure.is_absolute() or "\0" in path or ".." in pure.parts:
        raise PathRefused(path, "not_an_absolute_path_without_dots")
    for prefix, root in _ROOTS.items():
        base = PurePosixPath(prefix)
        if pure == base or base in pure.parents:
            if collect and root == "home":
                raise PathRefused(path, "home_is_never_collected")
            return Place(root, pure.relative_to(base).parts, path)
    raise PathRefused(path, "outside_the_writable_directories")


def _descend(root_fd: int, place: Place, parts: tuple[str, ...], *, make: bool) -> int:
    """Return a descriptor of the directory ``parts`` below the place's root; the caller closes it."""
    try:
        fd = os.open(place.root, _DIRECTORY, dir_fd=root_fd)
    except OSError as error:
        raise _refusal(place.text, error) from error
    try:
        for part in parts:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=fd)
            below = os.open(part, _DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = below
    except OSError as error:
        os.close(fd)
        raise _refusal(place.text, error) from error
    return fd


def _refusal(path: str, error: OSError) -> Exception:
    if error.errno == errno.ELOOP:
        return PathRefused(path, "symbolic_link")
    if error.errno == errno.ENOTDIR:
        # O_DIRECTORY|O_NOFOLLOW on a link answers ENOTDIR too; either way it is no directory of this tree.
        return PathRefused(path, "not_a_directory")
    if error.errno == errno.ENXIO:  # a FIFO without a reader, a socket
        return PathRefused(path, "not_a_regular_file")
    if error.errno in (errno.EACCES, errno.EPERM):
        return PathRefused(path, "unreadable")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return PathRefused(path, "no_space_left_in_the_sandbox")
    if error.errno == errno.ENOENT:
        return FileNotFoundError(errno.ENOENT, "no such file or directory in the sandbox", path)
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.EISDIR):
        return error
    # A lease, a program that runs from it, a name beyond its length: whatever else the tree answers is its owner's
    # doing, and must not look like a fault of the node.
    return PathRefused(path, "not_possible_there")


def _open_regular(name: str, dir_fd: int) -> int | str:
    """Open one name if it is a regular file with one link; else the reason why not."""
    status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    if reason := _unfit(status):
        return reason
    try:
        fd = os.open(name, _FILE, dir_fd=dir_fd)
    except PermissionError:
        return "unreadable"
    except OSError:
        return "changed_while_read"
    again = os.fstat(fd)
    if reason := _unfit(again):
        os.close(fd)
        return reason
    return fd


def _unfit(status: os.stat_result) -> str | None:
    if stat.S_ISLNK(status.st_mode):
        return "symbolic_link"
    if not stat.S_ISREG(status.st_mode):
        return "not_a_regular_file"
    if status.st_nlink != 1:
        return "hard_link"
    return None


def read_file(root_fd: int, path: str, *, limit_bytes: int) -> bytes:
    """Return the content of a regular file. Raises PathRefused, FileNotFoundError, IsADirectoryError."""
    place = locate(path, collect=True)
    if not place.parts:
        raise IsADirectoryError(f"{path} is a directory")
    folder = _descend(root_fd, place, place.parts[:-1], make=False)
    try:
        opened = _open_regular(place.parts[-1], folder)
    except OSError as error:
        raise _refusal(path, error) from error
    finally:
        os.close(folder)
    if isinstance(opened, str):
        raise PathRefused(path, opened)
    return _read_all(opened, path, limit_bytes)


def _read_all(fd: int, path: str, limit_bytes: int) -> bytes:
    with open(fd, "rb") as file:
        if os.fstat(fd).st_size > limit_bytes:
            raise PathRefused(path, "too_large")
        data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:  # it grew while it was read
        raise PathRefused(path, "too_large")
    return data


def write_file(root_fd: int, path: str, data: bytes) -> None:
    """Write a regular file, making its parents."""
    place = locate(path, collect=False)
    if not place.parts:
        raise IsADirectoryError(f"{path} is a directory")
    folder = _descend(root_fd, place, place.parts[:-1], make=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(place.parts[-1], flags, 0o644, dir_fd=folder)
    except OSError as error:
        raise _refusal(path, error) from error
    finally:
        os.close(folder)
    with open(fd, "wb") as file:
        if reason := _unfit(os.fstat(fd)):
            raise PathRefused(path, reason)
        try:
            os.ftruncate(fd, 0)
            file.write(data)
            file.flush()
        except OSError as error:
            raise _refusal(path, error) from error


def put_dir(root_fd: int, path: str, files: Mapping[str, bytes]) -> None:
    """Write several files below ``path``, a directory that is made if missing."""
    place = locate(path, collect=False)
    os.close(_descend(root_fd, place, place.parts, make=True))
    for name, data in files.items():
        write_file(root_fd, f"{path.rstrip('/')}/{name}", data)


def get_dir(root_fd: int, path: str, *, limit_bytes: int) -> Collected:
    """Collect the regular files below ``path``: at most ``limit_bytes`` in all; the rest is named in ``skipped``."""
    files: dict[str, bytes] = {}
    skipped: list[Skipped] = []
    left = limit_bytes
    for found in walk(root_fd, path):
        if isinstance(found, Skipped):
            skipped.append(found)
            continue
        name, fd, size = found
        try:
            data = _read_all(os.dup(fd), name, left)
        except PathRefused as refused:
            skipped.append(Skipped(name, refused.reason if size <= limit_bytes else "too_large"))
            continue
        left -= len(data)
        files[name] = data
    return Collected(files, tuple(skipped))


class Opened(NamedTuple):
    """A regular file of :func:`walk`; its descriptor is closed when the walk goes on: finish with it first."""

    path: str
    fd: int
    size_bytes: int


def walk(root_fd: int, path: str) -> Iterator[Opened | Skipped]:
    r"""Yield each regular file below ``path`` opened, and each other name with the reason why not.

    Names that are not UTF-8 come as ``\udcXX`` escapes of their bytes (PEP 383): kept, not guessed.
    """
    place = locate(path, collect=True)
    pending: list[tuple[str, ...]] = [()]  # names, not descriptors: a wide tree must not exhaust them
    seen = spelled = 0
    while pending:
        below = pending.pop()
        try:
            folder = _descend(root_fd, place, place.parts + below, make=False)
        except (OSError, PathRefused):
            if not below:
                raise
            yield Skipped("/".join(below), "changed_while_read")
            continue
        try:
            for name in sorted(os.listdir(folder)):
                seen += 1
                spelled += sum(map(len, below)) + len(below) + len(name)
                if seen > MAX_ENTRIES or spelled > MAX_SPELLED:
                    yield Skipped("/".join(below) or ".", "too_many_entries")
                    return
                found = _visit((*below, name), folder, pending)
                try:
                    if found is not None:
                        yield found
                finally:
                    if isinstance(found, Opened):
                        os.close(found.fd)
        finally:
            os.close(folder)


def _visit(parts: tuple[str, ...], folder: int, pending: list[tuple[str, ...]]) -> Opened | Skipped | None:
    full, name = "/".join(parts), parts[-1]
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            if len(parts) >= MAX_DEPTH:
                return Skipped(full, "too_deep")
            pending.append(parts)
            return None
        opened = _open_regular(name, folder)
        if isinstance(opened, str):
            return Skipped(full, opened)
        return Opened(full, opened, os.fstat(opened).st_size)
    except OSError:
        return Skipped(full, "changed_while_read")


def snapshot(root_fd: int, *, digest_bytes: int = 1 << 20) -> dict[str, str]:
    """Return path → ``size:sha256`` of the workspace; of a larger file only the first ``digest_bytes`` count."""
    table = {}
    for found in walk(root_fd, WORKSPACE):
        if isinstance(found, Opened):
            with open(os.dup(found.fd), "rb") as file:
                digest = hashlib.sha256(file.read(digest_bytes)).hexdigest()
            table[found.path] = f"{found.size_bytes}:{digest}"
    return table
