"""Unprivileged uids that a root-run agent lends to its sandboxes, one at a time.

Two sandboxes under one uid could signal and trace each other if one of them left its namespaces. Several
agents may run on a node, so each uid is one locked byte of a shared file: the kernel drops the lock with its
holder, and nothing has to be unlinked, which would let two holders lock two files of one name.
"""

from __future__ import annotations

import fcntl
import os
import random
import struct
from pathlib import Path

from stockade.errors import SandboxFault

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of fcntl(2): type, whence, start, length, pid


class UidPool:
    """Lends uids of ``first … first + count - 1``; the lock file lies in a directory that is the agent's."""

    def __init__(self, lock_file: Path, first: int, count: int) -> None:
        self._path = lock_file
        self._first = first
        self._count = count
        self._fd: int | None = None
        self._held: set[int] = set()

    def take(self) -> int:
        """Return a uid that nobody else on this node holds. Raises SandboxFault when all are taken."""
        start = random.randrange(max(1, self._count))  # noqa: S311 - spreads agents over the range, hides nothing
        for step in range(self._count):
            index = (start + step) % self._count
            if index not in self._held and self._lock(index, fcntl.F_WRLCK):
                self._held.add(index)
                return self._first + index
        raise SandboxFault("every uid of the range is in use", hint="raise uid_range.count in the operator's file")

    def give_back(self, uid: int) -> None:
        """Return a uid after every process under it is gone."""
        index = uid - self._first
        if index in self._held:
            self._held.remove(index)
            self._lock(index, fcntl.F_UNLCK)

    def _lock(self, index: int, kind: int) -> bool:
        if self._fd is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(self._path, flags, 0o600)
        try:
            # An open-file-description lock: a POSIX lock would vanish with any other close of the file.
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, index, 1, 0))
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Drop every lock."""
        self._held.clear()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
