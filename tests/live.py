"""A backend and its sandboxes for tests: real ones, small, on an event loop that runs while a test waits for it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from stockade.ids import new_rollout_id
from stockade.policy import Mount, SandboxLimits
from stockade.sandbox import NO_LISTENERS, BubblewrapBackend, ExecResult, Listeners, LiveSandbox, Spec
from tests.support import requires

MIB = 1 << 20
UIDS = (0x7000_0000, 65_536)
SMALL = SandboxLimits(
    memory=256 * MIB,
    pids=64,
    disk=64 * MIB,
    inodes=4096,
    file_size=32 * MIB,
    open_files=256,
    output=MIB,
).model_copy(update={"wall_s": 120.0, "cpu_s": 60.0})
PATIENCE_S = 60.0
"""The longest that a test waits for anything: several times what a busy machine needs."""

PRELUDE = """
import ctypes, errno, json, os, signal, socket, stat, sys, time
LIBC = ctypes.CDLL(None, use_errno=True)
ARGS = json.loads(sys.argv[1])
def attempt(work, *arguments):
    # What came of it: the text it returned, "done", or the name of the error.
    try:
        result = work(*arguments)
    except OSError as error:
        return errno.errorcode.get(error.errno, type(error).__name__)
    return result if isinstance(result, str) else "done"
def libc(name, *arguments):
    if getattr(LIBC, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)
def say(value):
    sys.stdout.write(json.dumps(value))
    sys.stdout.flush()
"""
_T = TypeVar("_T")


def limits(**changed: object) -> SandboxLimits:
    """Return :data:`SMALL` with changes; names as in :class:`SandboxLimits`."""
    return SMALL.model_copy(update=changed)


def plain(source: str, arguments: object = None, *, timeout_s: float = PATIENCE_S, **options: Any) -> Any:
    """Run a probe as a plain child process: no guard at all."""
    done = subprocess.run(
        ["/usr/bin/env", "python3", "-I", "-S", "-B", "-c", PRELUDE + source, json.dumps(arguments)],
        capture_output=True,
        timeout=timeout_s,
        check=False,
        **options,
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


class Owner:
    """Owns a backend, as an agent does. Synchronous for the tests: the loop runs inside :meth:`run`."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.state.mkdir(mode=0o700, exist_ok=True)
        self._runner = asyncio.Runner()
        self.backend = BubblewrapBackend(state, uids=UIDS)
        self._made: list[LiveSandbox] = []
        found = self.run(self.backend.probe())
        if not found.usable:
            self.close()
            requires(False, f"no sandbox can be made here: {found.missing}")
        self.python = found.interpreter

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine to its end."""

        async def bounded() -> _T:
            return await asyncio.wait_for(work, PATIENCE_S)

        return self._runner.run(bounded())

    async def make(
        self,
        *,
        mounts: tuple[Mount, ...] = (),
        listeners: Listeners = NO_LISTENERS,
        env: Mapping[str, str] | None = None,
        proxied: bool = False,
        **changed: object,
    ) -> LiveSandbox:
        """Make a sandbox with small limits; it is destroyed with the owner at the latest."""
        spec = Spec(new_rollout_id(), limits(**changed), mounts=mounts, env=env or {}, proxied=proxied)
        sandbox = await self.backend.create(spec, listeners)
        self._made.append(sandbox)
        return sandbox

    def create(self, **options: Any) -> LiveSandbox:
        """:meth:`make`, from synchronous code."""
        return self.run(self.make(**options))

    def exec(self, sandbox: LiveSandbox, argv: Sequence[str], **options: Any) -> ExecResult:
        """Run one command."""
        return self.run(sandbox.exec(argv, **options))

    def probe(self, source: str, arguments: object = None) -> list[str]:
        """Return the command line of a probe for the sandbox's own Python."""
        return [self.python, "-I", "-S", "-B", "-c", PRELUDE + source, json.dumps(arguments)]

    def inside(self, sandbox: LiveSandbox, source: str, arguments: object = None, **options: Any) -> Any:
        """Run a probe in the sandbox and return what it said."""
        result = self.exec(sandbox, self.probe(source, arguments), **options)
        assert result.exit.code == 0, (result.exit, result.stderr.decode("utf-8", "replace"))
        return json.loads(result.stdout)

    def destroy(self, sandbox: LiveSandbox) -> None:
        """Destroy one of this owner's sandboxes."""
        self._made.remove(sandbox)
        self.run(sandbox.destroy())

    def close(self) -> None:
        """Destroy what is left and end the backend."""
        try:
            while self._made:
                self.destroy(self._made[-1])
            self.run(self.backend.aclose())
        finally:
            self._runner.close()


def processes_with(marker: str) -> list[int]:
    """Return the pids of all processes of this machine whose command line holds ``marker``."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                line = Path(f"/proc/{name}/cmdline").read_bytes()
            except OSError:
                continue
            if marker.encode() in line:
                found.append(int(name))
    return found
