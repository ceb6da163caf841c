"""How full the store is: one small file that all workers of a node count in, without a lock.

::

    cell     0        version (1)
             1        adjustment, written by a recount alone
             2 …      reserved[128]:  what the holder of a place is writing now
             130 …    committed[128]: what the holders of a place have ever added

``adjustment + Σ committed + Σ reserved`` is never below what is there or on its way, and never above ``max_bytes`` when
a byte is written. A worker holds one place by a lock on one byte (fcntl(2), open file description: the kernel drops it
with its holder) and writes its own two cells only. To reserve, it *publishes first and then adds up*: of two that meet
at the limit at least one sees the other. It commits after its file has its name, committed before reserved, and readers
read reserved before committed: what moves from one to the other is counted twice for a moment, never not at all. A
place whose holder was killed passes to the next with its reservation counted as committed; a recount, which looks at
the files, finds what is really there.
"""

from __future__ import annotations

import fcntl
import os
import random
import struct

from stockade.egress._store_files import Failing, StoreFailed, StoreFull

SPACE_NAME = "space"
BLOCK_BYTES = 4096
"""Sizes are counted in blocks of a file system, so that many small files do not hide."""

_PLACES = 128
_CELL = struct.Struct("=q")
_PLACES_ROW = struct.Struct(f"={_PLACES}q")
_VERSION, _ADJUSTMENT = 0, 8
_RESERVED = 16
_COMMITTED = _RESERVED + _PLACES_ROW.size
SPACE_BYTES = _COMMITTED + _PLACES_ROW.size
_FORMAT = 1
_MOST = 1 << 60
_RECOUNT_BYTE = 1 << 16
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of fcntl(2): type, whence, start, length, pid


def blocks(size: int) -> int:
    """Return ``size`` in bytes rounded up to whole blocks."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def fresh_space() -> bytes:
    """Return the content of a space file of an empty store."""
    return _CELL.pack(_FORMAT).ljust(SPACE_BYTES, b"\0")


class Space:
    """One process's view of the space file ``fd``, which becomes its own. Every method may raise StoreFailed."""

    __slots__ = ("_committed", "_fd", "_max", "_place", "_reserved", "serial")

    def __init__(self, fd: int, max_bytes: int) -> None:
        self._fd = fd
        self._max = max_bytes
        self._place: int | None = None
        self._committed = 0
        self._reserved = 0
        self.serial = 0

    def temp_name(self) -> str:
        """Return a name that no other live process uses: it begins with the place's number."""
        self.serial += 1
        return f"tmp-{self._hold()}-{self.serial}"

    def reserve(self, size: int) -> None:
        """Take ``size`` bytes (whole blocks), or raise :class:`StoreFull`."""
        place = self._hold()
        self._put(_RESERVED + place * _CELL.size, self._reserved + size)
        self._reserved += size
        try:
            reserved = sum(self._row(_RESERVED))  # before what is committed: see above
            if reserved + self.used() > self._max:
                raise StoreFull("store: it is full", hint="raise store.max_bytes, or remove a recording")
        except BaseException:
            self.release(size)
            raise

    def release(self, size: int, *, used: int = 0) -> None:
        """Give ``size`` reserved bytes back, of which ``used`` now lie in files that have their names."""
        if self._fd < 0:
            return  # closed: its place gave everything back already
        place = self._hold()
        if used:
            self._committed += used
            self._put(_COMMITTED + place * _CELL.size, self._committed)
        self._reserved -= size
        self._put(_RESERVED + place * _CELL.size, self._reserved)

    def used(self) -> int:
        """Return what lies in files that have their names, in bytes, as far as its writers lived to say so."""
        with Failing("its space file"):
            raw = os.pread(self._fd, _RESERVED, 0)
        if len(raw) != _RESERVED or _CELL.unpack_from(raw, _VERSION)[0] != _FORMAT:
            raise _damaged()
        adjustment: int = _CELL.unpack_from(raw, _ADJUSTMENT)[0]
        return max(0, adjustment + self.committed())

    def committed(self) -> int:
        """Return what all places ever added."""
        return sum(self._row(_COMMITTED))

    def adjust(self, value: int) -> None:
        """Set the adjustment (a recount)."""
        self._put(_ADJUSTMENT, value)

    def bury(self) -> None:
        """Forget what dead holders reserved. For a recount only.

        The files of the dead are as they will stay: a scan that begins now sees each of them that has its name.
        """
        for place in range(_PLACES):
            if self.dead(place):
                if self._row(_RESERVED)[place]:
                    self._put(_RESERVED + place * _CELL.size, 0)
                self.leave(place)

    def dead(self, place: int) -> bool:
        """Take ``place`` and say whether that went; while it is held here, nobody writes under its names."""
        return 0 <= place < _PLACES and self._lock(place, fcntl.F_WRLCK)

    def leave(self, place: int) -> None:
        """Give a place taken by :meth:`dead` back."""
        self._lock(place, fcntl.F_UNLCK)

    def alone(self) -> bool:
        """Take every place, and say whether all of them were free: nobody else can write then until :meth:`close`."""
        return all(self.dead(place) for place in range(_PLACES))

    def counting(self) -> bool:
        """Become the only one that recounts, until :meth:`close`; say whether nobody else is."""
        return self._lock(_RECOUNT_BYTE, fcntl.F_WRLCK)

    def close(self) -> None:
        """Leave; what is still reserved is given back."""
        if self._fd >= 0:
            fd, place = self._fd, self._place
            try:
                if place is not None and self._reserved:
                    self._put(_RESERVED + place * _CELL.size, 0)
            finally:
                self._fd, self._place, self._reserved = -1, None, 0
                os.close(fd)

    def _hold(self) -> int:
        """Return this process's place, taken when it first writes: who only replays needs none."""
        if self._place is None:
            start = random.randrange(_PLACES)  # noqa: S311 - spreads workers, hides nothing
            for step in range(_PLACES):
                place = (start + step) % _PLACES
                if self._lock(place, fcntl.F_WRLCK):
                    self._inherit(place)
                    break
            else:
                raise StoreFailed(f"store: {_PLACES} workers write in it already")
        assert self._place is not None  # noqa: S101 - for the type checker
        return self._place

    def _inherit(self, place: int) -> None:
        left = self._row(_RESERVED)[place]
        self._committed = self._row(_COMMITTED)[place]
        if left:
            # Its holder was killed, perhaps just after its file got its name.
            self._committed += left
            self._put(_COMMITTED + place * _CELL.size, self._committed)
            self._put(_RESERVED + place * _CELL.size, 0)
        self._place = place

    def _row(self, offset: int) -> tuple[int, ...]:
        with Failing("its space file"):
            raw = os.pread(self._fd, _PLACES_ROW.size, offset)
        if len(raw) != _PLACES_ROW.size:
            raise _damaged()
        row: tuple[int, ...] = _PLACES_ROW.unpack(raw)
        if min(row) < 0 or max(row) > _MOST:
            raise _damaged()
        return row

    def _put(self, offset: int, value: int) -> None:
        with Failing("its space file"):
            os.pwrite(self._fd, _CELL.pack(value), offset)

    def _lock(self, byte: int, kind: int) -> bool:
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
        except (BlockingIOError, PermissionError):
            return False
        except OSError as error:
            raise StoreFailed(f"store: its space file: {error.strerror}") from error
        return True


def _damaged() -> StoreFailed:
    return StoreFailed("store: its space file is damaged", hint="end every agent that uses it, and remove the file")
