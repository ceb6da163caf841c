"""Whole rollouts per second at 1, 8 and 64 in parallel: create, write a program, run it, read its result, close.

Everything is counted: the broker, the record of each rollout and its seal.
"""

from __future__ import annotations

import asyncio
import time

from bench._harness import Measure, Variant, arguments, interleave, report
from bench._live import live_run
from stockade import Run

PROGRAM = b"import sys\nopen('/workspace/out', 'w').write(str(sum(range(1000))))\n"
PER_ROUND = 64


async def one(run: Run) -> None:
    """One rollout from start to end."""
    async with run.rollout() as rollout:
        await rollout.write_file("/workspace/main.py", PROGRAM)
        await rollout.exec(["python3", "-I", "/workspace/main.py"])
        assert await rollout.read_file("/workspace/out") == b"499500"


def at(parallel: int, run: Run) -> Measure:
    """Return a measure of rollouts per second with ``parallel`` at a time."""

    async def measure() -> float:
        count = max(parallel, PER_ROUND // 4 if parallel == 1 else PER_ROUND)
        free = asyncio.Semaphore(parallel)

        async def guarded() -> None:
            async with free:
                await one(run)

        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(guarded())
        return count / (time.perf_counter() - start)

    return measure


async def main() -> None:
    """Measure and print."""
    options = arguments(__doc__ or "", rounds=5)
    async with live_run() as run:
        variants = [Variant(f"{parallel} in parallel", at(parallel, run)) for parallel in (1, 8, 64)]
        series = await interleave(variants, rounds=options.rounds, warm_up=1)
    report("rollouts: per second", series, unit="1/s", more_is_better=True, json_path=options.json)


if __name__ == "__main__":
    asyncio.run(main())
