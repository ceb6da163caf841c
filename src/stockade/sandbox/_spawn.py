"""The node agent's side of the spawner: start it, send it requests, learn who ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from stockade.errors import SandboxFault
from stockade.sandbox._aio import writable
from stockade.sandbox._holder import HolderFds, Plan
from stockade.sandbox._spawner import REQUEST_BYTES

_SOURCE = str(Path(__file__).resolve().parents[2])
_START = f"import sys; sys.path.insert(0, {_SOURCE!r}); from stockade.sandbox._spawner import main; main()"


class Spawner:
    """A running spawner process; ``on_exit(pid, wait_status)`` is called for each holder that ended."""

    def __init__(self, on_exit: Callable[[int, int], None], on_lost: Callable[[], None]) -> None:
        self._on_exit = on_exit
        self._on_lost = on_lost
        self._socket: socket.socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._sending = asyncio.Lock()

    async def start(self) -> None:
        """Start the process. It dies with the thread that called this: call it from the main thread."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        fd = theirs.fileno()
        with theirs:
            # -I -S: no user site, no .pth file; on a root-run agent this process holds root.
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-B", "-c", f"import os; os.dup2({fd}, 3); {_START}"),
                str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,
                env={"LANG": "C.UTF-8"},
                pass_fds=(fd,),
                start_new_session=True,
            )
        self._socket = ours
        asyncio.get_running_loop().add_reader(ours, self._readable)

    def _readable(self) -> None:
        if self._socket is None:
            return
        try:
            data = self._socket.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._detach()
            self._on_lost()
            return
        message = json.loads(data)
        self._on_exit(message["exited"], message["status"])

    async def spawn(self, plan: Plan, fds: HolderFds) -> None:
        """Ask for one holder; its answer comes on ``fds.report``. The descriptors stay the caller's."""
        if self._socket is None:
            raise SandboxFault("the spawner of this agent has ended", hint="start the run again")
        data = json.dumps(plan._asdict()).encode()
        if len(data) > REQUEST_BYTES:
            raise SandboxFault("the request for a sandbox is too large", hint="use fewer mounts")
        async with self._sending:  # the loop wakes one waiter per descriptor: a second would replace the first
            await self._send(self._socket, data, [fd for fd in fds if fd >= 0])

    @staticmethod
    async def _send(to: socket.socket, data: bytes, fds: list[int]) -> None:
        while True:
            try:
                socket.send_fds(to, [data], fds)
            except BlockingIOError:
                await writable(to.fileno())
            except OSError as error:
                raise SandboxFault(f"the spawner does not answer: {error}") from error
            else:
                return

    def _detach(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None

    async def aclose(self) -> None:
        """End the spawner and, with it, whatever sandbox is left."""
        self._detach()
        if self._process is not None:
            with contextlib.suppress(TimeoutError, ProcessLookupError):
                await asyncio.wait_for(self._process.wait(), 2)
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()
