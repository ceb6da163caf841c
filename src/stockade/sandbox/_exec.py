"""One command in a live sandbox: what is sent to the guest, what is read back, when it is ended.

The command's output comes over pipes straight from the command to this process: the guest copies nothing and
could not keep up with a flood anyway. Reading stops at the output limit, and the command with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stockade.sandbox._aio import writable
from stockade.sandbox._types import Exit, ExitKind

HEADER = struct.Struct("<cQIIB")
ENDED = struct.Struct("<cQiQQ")
_INLINE_BYTES = 1 << 16  # well under the default socket buffer
_CHUNK = 1 << 16
_F_SETPIPE_SZ = 1031


def pack(exec_id: int, argv: Sequence[str], cwd: str, env: Mapping[str, str]) -> tuple[bytes, bytes]:
    """Return (packet, body to put in a memory file); one of them carries the words. Raises ValueError on NUL."""
    words = [*argv, cwd, *(f"{name}={value}" for name, value in env.items())]
    if any("\0" in word for word in words) or any("=" in name or not name for name in env) or not argv:
        raise ValueError("a NUL byte in a command, or a bad variable name")
    body = b"\0".join(word.encode("utf-8", "surrogateescape") for word in words)
    header = HEADER.pack(b"X", exec_id, len(argv), len(env), 0)
    if len(body) <= _INLINE_BYTES:
        return header + body, b""
    return header, body


def memory_file(data: bytes) -> int:
    """Return a descriptor of a sealed memory file at offset 0."""
    fd = os.memfd_create("stockade", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(os.dup(fd), "wb") as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return fd


@dataclass(slots=True)
class Budget:
    """Output bytes that both streams of one command may still send."""

    left: int


@dataclass(slots=True)
class Reader:
    """Reads one pipe up to the shared budget; ``over`` is called once when it is spent."""

    fd: int
    budget: Budget
    over: asyncio.Future[None]
    data: bytearray = field(default_factory=bytearray)
    truncated: bool = False
    done: bool = False

    def start(self) -> None:
        """Begin to read whenever the loop finds the pipe readable."""
        os.set_blocking(self.fd, False)
        asyncio.get_running_loop().add_reader(self.fd, self.read)

    def read(self) -> bool:
        """Read what is there (at most a chunk); returns whether more may follow at once."""
        try:
            chunk = os.read(self.fd, _CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            self.close()
            return False
        if len(chunk) > self.budget.left:
            chunk, self.truncated = chunk[: self.budget.left], True
        self.budget.left -= len(chunk)
        self.data += chunk
        if self.truncated:
            self.close()
            if not self.over.done():
                self.over.set_result(None)
        return not self.done

    def finish(self) -> None:
        """Take what the ended command left in the pipe; a background child may still hold the other end."""
        while not self.done and self.read():
            pass
        self.close()

    def close(self) -> None:
        """Stop reading."""
        if not self.done:
            self.done = True
            asyncio.get_running_loop().remove_reader(self.fd)
            os.close(self.fd)


async def feed(fd: int, data: bytes) -> None:
    """Write ``data`` to a pipe without blocking the loop, then close it; a reader that left is no error."""
    os.set_blocking(fd, False)
    with contextlib.suppress(OSError):  # only a larger buffer: fewer turns of the loop
        fcntl.fcntl(fd, _F_SETPIPE_SZ, 1 << 20)
    view = memoryview(data)
    try:
        while view:
            try:
                view = view[os.write(fd, view) :]
            except BlockingIOError:
                await writable(fd)
    except BrokenPipeError:
        return
    finally:
        os.close(fd)


@dataclass(slots=True)
class Running:
    """A command that the guest has been asked to run."""

    exec_id: int
    ended: asyncio.Future[tuple[int, int, int]]
    started_ns: int = field(default_factory=time.monotonic_ns)
    forced: Exit | None = None
    """Why it was ended from outside, if it was."""


def exit_of(status: int) -> Exit:
    """Translate a wait status (wait(2))."""
    if os.WIFSIGNALED(status):
        return Exit(ExitKind.SIGNALED, signal=os.WTERMSIG(status))
    return Exit(ExitKind.EXITED, code=os.WEXITSTATUS(status))
