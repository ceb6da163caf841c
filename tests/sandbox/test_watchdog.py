"""The watchdog looks at everybody, also beside one who makes looking dear."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from stockade.sandbox import Exit, ExitKind, _proc
from stockade.sandbox._proc import memory_file_bytes
from tests import live

HOARD = """
import os, resource, time
for _ in range(40):
    if os.fork() == 0:
        held = [os.dup(0) for _ in range(900)]
        time.sleep(60)
        os._exit(0)
time.sleep(60)
"""


def test_the_number_of_descriptors_looked_at_is_bounded() -> None:
    assert memory_file_bytes((os.getpid(),), most=10_000) is not None
    assert memory_file_bytes((os.getpid(),), most=1) is None


@pytest.mark.timeout(120)
def test_a_hoard_of_descriptors_is_not_looked_at_in_the_event_loop(
    owner: live.Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program decides how many there are; looked at in the loop, they would hold up every other rollout."""
    looks: list[tuple[bool, int | None, int | None]] = []

    def spied(pids: tuple[int, ...], *, most: int | None = None) -> int | None:
        found = memory_file_bytes(pids, most=most)
        looks.append((threading.current_thread() is threading.main_thread(), most, found))
        return found

    monkeypatch.setattr(_proc, "memory_file_bytes", spied)
    hoarder = owner.create(open_files=1024, memory=512 << 20)

    async def hoard() -> None:
        running = asyncio.create_task(hoarder.exec(["python3", "-c", HOARD], timeout_s=60))
        while not any(not in_loop for in_loop, _, _ in looks):
            assert not running.done()
            await asyncio.sleep(0.05)
        await hoarder.kill(Exit(ExitKind.CLOSED))
        await running

    owner.run(hoard())
    assert all(most is not None for in_loop, most, _ in looks if in_loop)
    assert any(found is None for in_loop, _, found in looks if in_loop), "given up in the loop, taken up in a thread"
