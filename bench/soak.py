"""Rollouts for minutes on end, some of them hostile, counting what stays behind: ``python -m bench.soak --minutes 10``.

Every hundred rollouts the descendants, descriptors and mounts of this process and the size of the agent are compared with
those after the first hundred. Ends with exit code 1 at the first growth that does not go away.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from typing import NamedTuple

import psutil

from bench._live import live_run
from stockade import Run

PROGRAMS = {
    "ordinary": "print(sum(range(1000)))",
    "daemon": "import os, time\nif not os.fork():\n    os.setsid()\n    time.sleep(600)",
    "flood": "import sys\nwhile True: sys.stdout.write('x' * 65536)",
    "forks": "import os, time\nfor _ in range(500):\n    try:\n        if not os.fork(): time.sleep(600)\n    except OSError: break",
    "killed": "import os\nos.kill(os.getpid(), 9)",
    "files": "import os\nfor n in range(2000): open(f'/workspace/{n}', 'w').close()",
}
PARALLEL = 8
CHECK_EVERY = 96
RSS_GROWTH = 1.5
RSS_CHECKS = 5  # in a row: one batch's floods of output, still in the allocator's hands, are no leak


class Held(NamedTuple):
    """What is held between two batches of rollouts, when no rollout is alive."""

    processes: int
    descriptors: int
    agent_descriptors: int
    mounts: int
    rss_bytes: int


def held() -> Held:
    """Count what this process and its descendants hold now."""
    me = psutil.Process()
    below = me.children(recursive=True)
    return Held(
        processes=len(below),
        descriptors=me.num_fds(),
        agent_descriptors=sum(process.num_fds() for process in below),
        mounts=sum(1 for _ in open("/proc/self/mountinfo", "rb")),
        rss_bytes=sum(process.memory_info().rss for process in below),
    )


async def batch(run: Run, first: int) -> None:
    """Run CHECK_EVERY rollouts, each with one of the programs."""
    free = asyncio.Semaphore(PARALLEL)
    names = list(PROGRAMS)

    async def one(index: int) -> None:
        async with free, run.rollout() as rollout:
            await rollout.exec(["python3", "-I", "-c", PROGRAMS[names[index % len(names)]]], timeout_s=5)

    async with asyncio.TaskGroup() as group:
        for index in range(first, first + CHECK_EVERY):
            group.create_task(one(index))


def grown(before: Held, now: Held) -> list[str]:
    """Return what is held now beyond what was held before."""
    return [
        f"{name}: {was} → {is_}"
        for name, was, is_ in zip(Held._fields, before, now, strict=True)
        if is_ > (was * RSS_GROWTH if name == "rss_bytes" else was)
    ]


async def settled(before: Held) -> list[str]:
    """Return what stays grown for five seconds."""
    for _ in range(50):
        found = grown(before, held())
        if not found:
            return []
        await asyncio.sleep(0.1)
    return found


async def main() -> int:
    """Soak and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    end = time.monotonic() + parser.parse_args().minutes * 60
    async with live_run() as run:
        await batch(run, 0)
        await asyncio.sleep(2)
        before, count, fat = held(), CHECK_EVERY, 0
        while time.monotonic() < end:
            await batch(run, count)
            count += CHECK_EVERY
            found = await settled(before)
            print(f"{count} rollouts, {held()}, load {os.getloadavg()[0]:.1f}", flush=True)
            fat = fat + 1 if any(line.startswith("rss_bytes") for line in found) else 0
            if fat >= RSS_CHECKS or any(not line.startswith("rss_bytes") for line in found):
                print("left behind: " + "; ".join(found), file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
