"""One more command in a live sandbox, through the broker's socket: against fork and exec of the same program here."""

from __future__ import annotations

import asyncio
import subprocess

from bench._harness import Variant, arguments, interleave, report, timed
from bench._live import live_run

PER_ROUND = 20  # one command is too short to be told from the clock and the scheduler


async def main() -> None:
    """Measure and print."""
    options = arguments(__doc__ or "", rounds=30)
    async with live_run() as run, run.rollout() as rollout:

        async def outside() -> None:
            for _ in range(PER_ROUND):
                subprocess.run(["/bin/true"], check=True, env={}, stdin=subprocess.DEVNULL)

        async def inside() -> None:
            for _ in range(PER_ROUND):
                await rollout.exec(["/bin/true"])

        async def through_a_shell() -> None:
            for _ in range(PER_ROUND):
                await rollout.exec(command="true")

        series = await interleave(
            [
                Variant("fork and exec outside", timed(outside)),
                Variant("exec in a sandbox", timed(inside)),
                Variant("exec in a sandbox, shell", timed(through_a_shell)),
            ],
            rounds=options.rounds,
        )
    report("exec latency: one command", series, unit="ms", scale=1e3 / PER_ROUND, json_path=options.json)


if __name__ == "__main__":
    asyncio.run(main())
