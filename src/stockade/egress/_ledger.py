"""Memory that agent and worker share for one rollout: what it used up, and which names it was told.

A memory file (memfd_create(2)) of fixed size, sealed against shrinking: no worker can make the agent fault by cutting
it off. The worker counts in it as it goes, so a worker that is killed loses not one byte of a budget and not one name
of a fake address; its heir goes on where it stopped. The agent reads it; a taken-over worker can write nonsense here,
as it could have said nonsense before, and each reader checks what it takes.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterator
from typing import cast

from stockade.egress.gate import BUDGET_CELLS, Cells, Host, Malformed, parse_host
from stockade.errors import StockadeError

_CELL_BYTES = 8
_NAME_BYTES = 256
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_PAGE = mmap.PAGESIZE


class LedgerFault(StockadeError, ValueError):
    """The shared memory is not what it must be."""


def make_ledger(*, accounts: int = 1, names: int = 0) -> int:
    """Return the descriptor of a fresh, zeroed ledger for ``accounts`` accounts and ``names`` names."""
    fd = os.memfd_create("stockade-ledger", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, _names_at(accounts) + names * _NAME_BYTES or _PAGE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def live_accounts(places: int) -> int:
    """Return how many accounts' room the cells of ``places`` workers take."""
    return -(-places // BUDGET_CELLS)


def memory_file(name: str, data: bytes) -> int:
    """Return the descriptor of a memory file that holds ``data``, sealed: nobody can change it any more."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_WRITE)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_memory(fd: int) -> bytes:
    """Return all that a sealed memory file holds; raises :class:`LedgerFault` for one that could still change."""
    try:
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE:
            raise LedgerFault("a part of the settings is not sealed")
        return os.pread(fd, os.fstat(fd).st_size, 0)
    except OSError as error:
        raise LedgerFault(f"not a memory file: {error.strerror}") from error


def _names_at(accounts: int) -> int:
    size = accounts * BUDGET_CELLS * _CELL_BYTES
    return -(-size // _PAGE) * _PAGE


class Ledger:
    """One mapped ledger. Raises :class:`LedgerFault` for a descriptor that is none of the given size."""

    __slots__ = ("_accounts", "_cells", "_fd", "_given", "_map", "_names", "_view")

    def __init__(self, fd: int, *, accounts: int = 1, names: int = 0) -> None:
        """Map ``fd``, which stays the caller's."""
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise LedgerFault("the ledger is not sealed")
            size = os.fstat(fd).st_size
        except OSError as error:
            raise LedgerFault(f"not a ledger: {error.strerror}") from error
        if size != (_names_at(accounts) + names * _NAME_BYTES or _PAGE):
            raise LedgerFault(f"a ledger of {size} bytes does not fit these rules")
        self._fd = fd
        self._map = mmap.mmap(fd, size)
        self._view = memoryview(self._map)
        self._cells = self._view[: _names_at(accounts)].cast("q")
        self._given: list[memoryview] = []
        self._accounts, self._names = accounts, names

    def account(self, index: int) -> Cells:
        """Return the cells of account ``index``: 0 is the rollout's, the rules' follow."""
        if not 0 <= index < self._accounts:
            raise IndexError(index)
        return self._give(index * BUDGET_CELLS, BUDGET_CELLS)

    def live(self, places: int) -> Cells:
        """Return one cell for each of ``places`` workers, behind the first account (see :func:`live_accounts`)."""
        return self._give(BUDGET_CELLS, places)

    def _give(self, start: int, count: int) -> Cells:
        cells = self._cells[start : start + count]
        self._given.append(cells)
        return cast("Cells", cells)

    def names(self) -> list[Host]:
        """Return the names in it, in order; raises :class:`LedgerFault` for one that is no host name."""
        found = []
        for index in range(self._names):
            slot = self._slot(index)
            length = slot[0]
            if not length:
                break
            try:
                host = parse_host(bytes(slot[1 : 1 + length]))
            except Malformed as fault:
                raise LedgerFault(f"name {index} in the ledger: {fault.detail}") from fault
            if host.address is not None:
                raise LedgerFault(f"name {index} in the ledger is an address")
            found.append(host)
        return found

    def put_name(self, index: int, host: Host) -> None:
        """Write name ``index``; its length goes last, so that a killed writer leaves no half of one."""
        raw = host.text.encode("ascii")
        slot = self._slot(index)
        slot[1 : 1 + len(raw)] = raw
        slot[0] = len(raw)

    def _slot(self, index: int) -> memoryview:
        start = _names_at(self._accounts) + index * _NAME_BYTES
        return self._view[start : start + _NAME_BYTES]

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other workers out (fcntl(2) record lock: the kernel gives it back if its holder dies)."""
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Unmap it; cells that were given out raise ValueError from now on. Idempotent."""
        for view in (*self._given, self._cells, self._view):
            view.release()
        self._map.close()


def used(fd: int, *, accounts: int, names: int) -> tuple[int, int, int, int]:
    """Return (bytes_out, bytes_in, requests, denied) of a ledger as the agent reads it; negative ones are 0."""
    ledger = Ledger(fd, accounts=accounts, names=names)
    try:
        made, _, _, out, into, requests, denied, _ = (ledger.account(0)[index] for index in range(BUDGET_CELLS))
        return (max(0, out), max(0, into), max(0, requests), max(0, denied)) if made else (0, 0, 0, 0)
    finally:
        ledger.close()
