"""Watching the processes that made rollouts: when one dies, by whatever signal, its rollouts end.

A pidfd becomes readable at the very moment of death and cannot be confused with a process that got the same
number later; a time-out would leave model-written code running for as long as it is set.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable


class Owners:
    """Calls ``gone(pid)`` once for each watched process that died."""

    def __init__(self, gone: Callable[[int], None]) -> None:
        self._gone = gone
        self._pidfds: dict[int, int] = {}

    def watch(self, pid: int) -> bool:
        """Watch ``pid``; returns False if it is dead already."""
        if pid in self._pidfds:
            return True
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        self._pidfds[pid] = fd
        asyncio.get_running_loop().add_reader(fd, self._died, pid)
        return True

    def __contains__(self, pid: int) -> bool:
        """Whether ``pid`` is watched, and so alive."""
        return pid in self._pidfds

    def _died(self, pid: int) -> None:
        self._drop(pid)
        self._gone(pid)

    def _drop(self, pid: int) -> None:
        fd = self._pidfds.pop(pid)
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)

    def close(self) -> None:
        """Stop watching."""
        for pid in list(self._pidfds):
            self._drop(pid)
