"""The store: answers of the internet, kept by what was asked for and shared by rollouts, workers and runs.

::

    space                        how full it is (see _store_space)
    blobs/<sha256>               bodies, each once
    index/<recording>/<sha256 of the key>

Nothing in it is ever changed: a file gets its name when it is whole, and no name is given twice, so what one rollout
fetched is out of every other one's reach. Everything that comes out is checked again. What this does not stop is a
worker that was taken over: it owns the files, and may keep lies under names that nobody used before. Everything is
reached through the directory's descriptor; all calls are short enough for the loop (nothing is ever synced to disk: an
entry that a power cut damaged is found when it is read, and ``check`` of _store_tool removes it).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from dataclasses import dataclass

from stockade.egress._recording import Recording
from stockade.egress._store_entry import ENTRY_BYTES, parse_entry
from stockade.egress._store_files import (
    Draft,
    Failing,
    StoreFailed,
    StoreFault,
    StoreFull,
    check_directory,
    identity,
    open_directory,
    open_file,
)
from stockade.egress._store_serving import PIECE_BYTES, Serving, Verified
from stockade.egress._store_space import SPACE_NAME, Space
from stockade.egress.gate import Headers, ResponseHead

__all__ = [
    "PIECE_BYTES",
    "Recording",
    "Serving",
    "Store",
    "StoreFailed",
    "StoreFault",
    "StoreFull",
    "Stored",
    "check_recording",
]

BLOBS, INDEX = "blobs", "index"
_RECORDING = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?", re.ASCII)


def check_recording(name: str) -> str:
    """Return the name of a recording, or raise ValueError: it becomes the name of a directory."""
    if not _RECORDING.fullmatch(name):
        raise ValueError("not the name of a recording")
    return name


@dataclass(frozen=True, slots=True)
class Stored:
    """An answer in the store. ``blob`` is the hex digest of its body, ``size`` the body's bytes."""

    head: ResponseHead
    blob: str
    size: int
    store: Store

    @property
    def status(self) -> int:
        """The status code."""
        return self.head.status

    @property
    def headers(self) -> Headers:
        """The header lines, without framing."""
        return self.head.headers

    def open(self) -> Serving:
        """Begin to serve it. Raises :class:`StoreFailed` if the body is not there or is not of its size."""
        if not self.size:
            return Serving(self.head, self.blob, 0, self.store.known, None)
        found = self.store.open_blob(self.blob)
        if found is None:
            raise StoreFailed(f"store: blob {self.blob[:12]} is gone")
        fd, status = found
        if status.st_size != self.size:
            os.close(fd)
            raise StoreFailed(f"store: blob {self.blob[:12]} is damaged")
        return Serving(self.head, self.blob, self.size, self.store.known, (fd, identity(status)))


class Store:
    """The store in the directory ``dir_fd`` (prepared by the agent, and the caller's still).

    Not more than ``max_bytes`` lie in it, whichever processes write. Whoever owns the directory must own all that is in
    it: a worker may open the store as root before it becomes that user, but not write before. Only StoreFailed and
    StoreFull come out of its methods.
    """

    __slots__ = ("_blobs", "_entries", "_index", "_name", "_owner", "_unnamed", "known", "space")

    def __init__(self, dir_fd: int, max_bytes: int, recording: str = "default") -> None:
        self._name = check_recording(recording)
        self._entries: int | None = None
        self._unnamed = True
        self.known = Verified()
        with contextlib.ExitStack() as opened, Failing("its directory"):
            status = os.fstat(dir_fd)
            self._owner = status.st_uid
            check_directory(status, "the directory", self._owner)
            self._blobs = self._open_part(BLOBS, dir_fd, opened)
            self._index = self._open_part(INDEX, dir_fd, opened)
            found = open_file(SPACE_NAME, dir_fd, self._owner, os.O_RDWR)
            if found is None:
                raise StoreFailed("store: it was not prepared")
            self.space = Space(found[0], max_bytes)
            opened.callback(self.space.close)
            self.space.used()
            opened.pop_all()

    def _open_part(self, name: str, dir_fd: int, opened: contextlib.ExitStack) -> int:
        fd = open_directory(name, dir_fd, self._owner)
        if fd is None:
            raise StoreFailed("store: it was not prepared")
        opened.callback(os.close, fd)
        return fd

    # ---- what the worker asks

    def lookup(self, key: bytes) -> Stored | None:
        """Return the answer that is kept for ``key``, or None.

        Raises :class:`StoreFailed` for an entry that is damaged, cut off, or somebody else's.
        """
        with Failing("an entry"):
            directory = self._recording(make=False)
            found = None if directory is None else open_file(_entry_name(key), directory, self._owner)
            if found is None:
                return None
            fd, status = found
            try:
                if status.st_size > ENTRY_BYTES:
                    raise StoreFailed("store: an entry is damaged")
                raw = os.read(fd, ENTRY_BYTES)
            finally:
                os.close(fd)
        entry = parse_entry(raw, key)
        return Stored(entry.head, entry.blob, entry.size, self)

    def begin(self, key: bytes, head: ResponseHead) -> Recording:
        """Begin to keep an answer; raise StoreFull if its body is announced as larger than the room that is left."""
        return Recording(self, key, head)

    def close(self) -> None:
        """Close what was opened. Recordings that are not committed are lost."""
        self.space.close()
        for fd in (self._blobs, self._index, self._entries):
            if fd is not None:
                os.close(fd)

    # ---- for recordings and answers of this store

    def has(self, key: bytes) -> bool:
        """Say whether something is kept for ``key``. Raises OSError."""
        directory = self._recording(make=False)
        if directory is None:
            return False
        try:
            os.stat(_entry_name(key), dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def open_blob(self, digest: str) -> tuple[int, os.stat_result] | None:
        """Open a body for reading."""
        with Failing(f"blob {digest[:12]}"):
            return open_file(digest, self._blobs, self._owner)

    def blob_size(self, digest: str) -> int:
        """Return the size of a body, -1 if there is none."""
        found = self.open_blob(digest)
        if found is None:
            return -1
        os.close(found[0])
        return found[1].st_size

    def draft_blob(self) -> Draft:
        """Return a new file among the bodies. Raises OSError."""
        return self._draft(self._blobs)

    def publish_entry(self, key: bytes, raw: bytes) -> bool:
        """Write an entry; return False if there is one. Raises OSError."""
        directory = self._recording(make=True)
        if directory is None:
            raise StoreFailed("store: the directory of the recording is gone")
        draft = self._draft(directory)
        try:
            draft.write(raw)
            return draft.publish(_entry_name(key))
        finally:
            draft.close()

    def _draft(self, directory: int) -> Draft:
        return Draft(directory, self.space.temp_name(), unnamed=self._unnamed)

    def _recording(self, *, make: bool) -> int | None:
        """Return the directory of the recording, opened once."""
        if self._entries is None:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self._name, 0o700, dir_fd=self._index)
            self._entries = open_directory(self._name, self._index, self._owner)
        return self._entries


def _entry_name(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()
