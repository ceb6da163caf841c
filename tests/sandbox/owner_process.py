"""An owner of a backend in a process of its own, for tests that kill it: ``python owner_process.py STATE COUNT``.

Makes COUNT sandboxes, each with a command and a daemon in it, prints the pids of their first processes and of the
spawner as JSON, then waits for ever.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from stockade.ids import new_rollout_id  # noqa: E402
from stockade.sandbox import NO_LISTENERS, BubblewrapBackend, Spec  # noqa: E402
from tests.live import SMALL, UIDS  # noqa: E402


async def main() -> None:
    backend = BubblewrapBackend(Path(sys.argv[1]), uids=UIDS)
    sandboxes = [
        await backend.create(Spec(new_rollout_id(), SMALL, proxied=False), NO_LISTENERS)
        for _ in range(int(sys.argv[2]))
    ]
    running = []
    for sandbox in sandboxes:
        await sandbox.exec(["/bin/sh", "-c", "setsid sleep 600 >&- 2>&- &"])
        running.append(asyncio.ensure_future(sandbox.exec(["/bin/sleep", "600"])))
    await asyncio.sleep(0.2)
    process = backend._spawner._process
    assert process is not None
    sys.stdout.write(json.dumps([process.pid, [sandbox.init_pid for sandbox in sandboxes]]) + "\n")
    sys.stdout.flush()
    await asyncio.gather(*running)


asyncio.run(main())
