"""The store as the agent and operators see it: made, counted, listed, checked, cleared. Never called by a worker.

These read whole directories and may take seconds. All but :func:`prepare_store` need only the directory's descriptor;
as root they work for the store's owner, and trust nothing in it: no link is followed, nothing is opened but regular
files of that owner.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
from collections.abc import Generator, Iterator

import msgspec

from stockade.egress._keys import Asked, parse_key
from stockade.egress._store import BLOBS, INDEX, check_recording
from stockade.egress._store_entry import ENTRY_BYTES, Entry, parse_entry
from stockade.egress._store_files import (
    TEMP_PREFIX,
    Draft,
    Failing,
    StoreFailed,
    check_directory,
    enter,
    open_directory,
    open_file,
)
from stockade.egress._store_serving import PIECE_BYTES
from stockade.egress._store_space import SPACE_NAME, Space, blocks, fresh_space

_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_TEMP = re.compile(re.escape(TEMP_PREFIX) + r"([0-9]{1,3})-[0-9]{1,18}", re.ASCII)


class Listed(msgspec.Struct, frozen=True):
    """One entry of a recording. ``problem`` says what is wrong with it ("": nothing that its size does not show).

    ``asked`` and ``status`` are None for an entry that cannot be read; ``kept_ns`` is when it was kept (Unix time).
    """

    name: str
    asked: Asked | None
    status: int | None
    size: int
    blob: str
    kept_ns: int
    problem: str


class Damage(msgspec.Struct, frozen=True):
    """A file (path below the store) that is not what it must be."""

    path: str
    problem: str


# ---- made


def prepare_store(path: str | os.PathLike[str], uid: int, gid: int) -> int:
    """Make the store at the absolute ``path`` for workers of ``uid``/``gid``, or check it; return its descriptor.

    Nothing that is there is taken over: each directory belongs to ``uid``, is closed to others (0700) and is no link,
    or :class:`StoreFailed` says what to change. Only an empty directory of root's own is given to ``uid``. What is in
    it is counted again, and what killed workers left is removed.
    """
    where = os.path.normpath(os.fspath(path))
    if not os.path.isabs(where):
        raise StoreFailed(f"store: {where} is not an absolute path")
    if os.geteuid() not in (0, uid):
        raise StoreFailed(f"store: only root can prepare it for uid {uid}")
    with contextlib.ExitStack() as opened, Failing(where):
        fd = _claim(where, None, uid, gid)
        opened.callback(os.close, fd)
        for name in (BLOBS, INDEX):
            os.close(_claim(name, fd, uid, gid))
        found = open_file(SPACE_NAME, fd, uid)
        if found is None:
            _write_space(fd, uid, gid)
        else:
            os.close(found[0])
        recount(fd)
        opened.pop_all()
    return fd


def _claim(name: str, parent: int | None, uid: int, gid: int) -> int:
    """Open a directory of ``uid``'s, made if it is missing."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent)
    fd = enter(name, parent)
    try:
        status = os.fstat(fd)
        if status.st_uid == os.geteuid() != uid and not os.listdir(fd):
            os.fchown(fd, uid, gid)
            status = os.fstat(fd)
        check_directory(status, name, uid)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _write_space(parent: int, uid: int, gid: int) -> None:
    draft = Draft(parent, f"{TEMP_PREFIX}{SPACE_NAME}-{os.getpid()}")
    try:
        draft.write(fresh_space())
        os.fchmod(draft.fd, 0o600)
        if os.geteuid() != uid:
            os.fchown(draft.fd, uid, gid)
        draft.publish(SPACE_NAME)  # if another agent was first, its file is as good
    finally:
        draft.close()


# ---- counted


def recount(dir_fd: int) -> int:
    """Look at all files, correct the count, and return it in bytes. Workers may go on writing meanwhile."""
    with contextlib.closing(_space(dir_fd)) as space:
        return _recount(dir_fd, space)


def _recount(dir_fd: int, space: Space) -> int:
    if not space.counting():
        return space.used()  # somebody else counts at this moment
    space.bury()
    # What is committed from here on may be seen or not, and is counted in any case: twice at worst.
    before = space.committed()
    space.adjust(_size_of(dir_fd, space) - before)
    return space.used()


def _size_of(dir_fd: int, space: Space) -> int:
    owner, total = os.fstat(dir_fd).st_uid, 0
    with contextlib.ExitStack() as opened:
        for directory in _directories(dir_fd, owner, opened):
            for name in os.listdir(directory):
                temp = _TEMP.fullmatch(name)
                # What somebody is writing is counted here and as reserved: once too often, until the next count.
                if temp and _remove_dead(name, int(temp[1]), directory, space):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                    total += blocks(status.st_size) if stat.S_ISREG(status.st_mode) else 0
    return total


def _remove_dead(name: str, place: int, directory: int, space: Space) -> bool:
    """Remove a half-written file if its writer is gone; return whether it was."""
    if not space.dead(place):
        return False
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)
    space.leave(place)
    return True


def _directories(dir_fd: int, owner: int, opened: contextlib.ExitStack) -> Iterator[int]:
    """Open the directories that hold files, one after the other."""
    blobs, index = (_part(name, dir_fd, owner, opened) for name in (BLOBS, INDEX))
    yield blobs
    for name in _recordings(index):
        directory = open_directory(name, index, owner)
        if directory is not None:
            try:
                yield directory
            finally:
                os.close(directory)


def _part(name: str, dir_fd: int, owner: int, opened: contextlib.ExitStack) -> int:
    fd = open_directory(name, dir_fd, owner)
    if fd is None:
        raise StoreFailed("store: it was not prepared")
    opened.callback(os.close, fd)
    return fd


def _space(dir_fd: int) -> Space:
    with Failing("its space file"):
        found = open_file(SPACE_NAME, dir_fd, os.fstat(dir_fd).st_uid, os.O_RDWR)
    if found is None:
        raise StoreFailed("store: it was not prepared")
    return Space(found[0], 0)


# ---- listed


def recordings(dir_fd: int) -> list[str]:
    """Return the names of the recordings, sorted."""
    with contextlib.ExitStack() as opened, Failing("its index"):
        return _recordings(_part(INDEX, dir_fd, os.fstat(dir_fd).st_uid, opened))


def _recordings(index: int) -> list[str]:
    found = []
    for name in os.listdir(index):
        with contextlib.suppress(ValueError):
            found.append(check_recording(name))
    return sorted(found)


def entries(dir_fd: int, recording: str = "default") -> Generator[Listed]:
    """Return the entries of a recording in the order of their names; a damaged one is listed with its problem.

    Bodies are not read, only looked at (see :func:`check`). Raises ValueError for a name that no recording has.
    """
    check_recording(recording)
    with contextlib.ExitStack() as opened, Failing(f"recording {recording}"):
        owner = os.fstat(dir_fd).st_uid
        blobs, index = (_part(name, dir_fd, owner, opened) for name in (BLOBS, INDEX))
        directory = open_directory(recording, index, owner)
        if directory is None:
            return
        opened.callback(os.close, directory)
        for name in sorted(os.listdir(directory)):
            if not name.startswith(TEMP_PREFIX):
                yield _listed(name, directory, blobs, owner)


def _listed(name: str, directory: int, blobs: int, owner: int) -> Listed:
    kept_ns, entry = 0, None
    try:
        entry, kept_ns = _read_entry(name, directory, owner)
        problem = _blob_problem(entry, blobs, owner)
    except (StoreFailed, OSError) as error:
        problem = str(error)
    if entry is None:
        return Listed(name, None, None, 0, "", kept_ns, problem)
    return Listed(name, parse_key(entry.key), entry.head.status, entry.size, entry.blob, kept_ns, problem)


def _read_entry(name: str, directory: int, owner: int) -> tuple[Entry, int]:
    found = open_file(name, directory, owner)
    if found is None:
        raise StoreFailed("store: an entry is gone")
    fd, status = found
    try:
        raw = os.read(fd, ENTRY_BYTES + 1)
    finally:
        os.close(fd)
    entry = parse_entry(raw)
    if hashlib.sha256(entry.key).hexdigest() != name:
        raise StoreFailed("store: an entry is not what its name says")
    return entry, status.st_mtime_ns


def _blob_problem(entry: Entry, blobs: int, owner: int) -> str:
    if not entry.size:
        return ""
    found = open_file(entry.blob, blobs, owner)
    if found is None:
        return f"store: blob {entry.blob[:12]} is gone"
    os.close(found[0])
    return "" if found[1].st_size == entry.size else f"store: blob {entry.blob[:12]} is damaged"


# ---- checked and cleared


def check(dir_fd: int, *, remove: bool = False) -> Iterator[Damage]:
    """Read everything and return what is damaged; with ``remove``, take it away so that it can be kept anew.

    Bodies come first, so that entries whose body was just removed are found as well. :func:`recount` afterwards.
    """
    owner = os.fstat(dir_fd).st_uid
    with contextlib.ExitStack() as opened, Failing("a check"):
        blobs, index = (_part(name, dir_fd, owner, opened) for name in (BLOBS, INDEX))
        for name in sorted(os.listdir(blobs)):
            problem = "" if name.startswith(TEMP_PREFIX) else _body_problem(name, blobs, owner)
            if problem:
                yield _damage(BLOBS, name, blobs, problem, remove=remove)
        for recording in _recordings(index):
            directory = open_directory(recording, index, owner)
            if directory is None:
                continue
            opened.callback(os.close, directory)
            for name in sorted(os.listdir(directory)):
                problem = "" if name.startswith(TEMP_PREFIX) else _listed(name, directory, blobs, owner).problem
                if problem:
                    yield _damage(f"{INDEX}/{recording}", name, directory, problem, remove=remove)


def _body_problem(name: str, blobs: int, owner: int) -> str:
    try:
        found = open_file(name, blobs, owner) if _DIGEST.fullmatch(name) else None
        if found is None:
            return "no digest for a name"
        digest = hashlib.sha256()
        try:
            while piece := os.read(found[0], PIECE_BYTES):
                digest.update(piece)
        finally:
            os.close(found[0])
    except (StoreFailed, OSError) as error:
        return str(error)
    return "" if digest.hexdigest() == name else "its content is not what its name says"


def _damage(place: str, name: str, directory: int, problem: str, *, remove: bool) -> Damage:
    if remove:
        with contextlib.suppress(IsADirectoryError, FileNotFoundError):
            os.unlink(name, dir_fd=directory)
    return Damage(f"{place}/{name}", problem)


def discard(dir_fd: int, recording: str) -> int:
    """Empty a recording and remove the bodies that no other one needs; return what is then used, in bytes.

    Its directory stays, for workers that have it open. Raises StoreFailed while any worker has written and still
    lives: it could be about to refer to such a body.
    """
    check_recording(recording)
    owner = os.fstat(dir_fd).st_uid
    with contextlib.closing(_space(dir_fd)) as space, contextlib.ExitStack() as opened, Failing("a removal"):
        if not space.alone():
            raise StoreFailed("store: workers are using it", hint="end the runs that record first")
        blobs, index = (_part(name, dir_fd, owner, opened) for name in (BLOBS, INDEX))
        directory = open_directory(recording, index, owner)
        if directory is not None:
            opened.callback(os.close, directory)
            for name in os.listdir(directory):
                os.unlink(name, dir_fd=directory)
        needed = {entry.blob for name in _recordings(index) for entry in entries(dir_fd, name)}
        for name in os.listdir(blobs):
            if name not in needed:
                os.unlink(name, dir_fd=blobs)
        return _recount(dir_fd, space)


# Their names outside this room, where nobody can tell what they speak of.
check_store, recount_store = check, recount
list_recordings, list_entries, discard_recording = recordings, entries, discard
