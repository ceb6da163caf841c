"""Waiting for a descriptor in the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def readable(fd: int) -> None:
    """Return when ``fd`` can be read; one waiter at a time per descriptor."""
    loop = asyncio.get_running_loop()
    await _until(lambda wake: loop.add_reader(fd, wake), lambda: loop.remove_reader(fd))


async def writable(fd: int) -> None:
    """Return when ``fd`` can be written; one waiter at a time per descriptor."""
    loop = asyncio.get_running_loop()
    await _until(lambda wake: loop.add_writer(fd, wake), lambda: loop.remove_writer(fd))


async def _until(watch: Callable[[Callable[[], None]], None], unwatch: Callable[[], bool]) -> None:
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    watch(wake)
    try:
        await ready
    finally:
        unwatch()
