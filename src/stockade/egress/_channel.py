"""The agent's end of one egress worker: its process and its control socket, for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stockade.egress import _wire
from stockade.egress._wire import Json, Message, WireError
from stockade.errors import StockadeError

ANSWER_S = 10.0
_GRACE_S = 2.0


class ChannelLost(Exception):
    """The worker is gone, or does not answer."""


class Refused(StockadeError):
    """The worker answered a request with an error."""


def worker_environment() -> dict[str, str]:
    """Return the whole environment of a worker: where Python finds this package, and nothing else.

    The package's folder may come from an installation, a checkout or ``PYTHONPATH``; nothing of the agent's
    environment that could carry a secret goes along.
    """
    paths = [str(Path(__file__).resolve().parents[2])]
    paths += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(path)]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONDONTWRITEBYTECODE": "1"}


class Channel:
    """One running worker. ``ended`` is set when it is gone; ``on_news`` gets its unasked messages."""

    def __init__(self, on_news: Callable[[Message], None]) -> None:
        self._on_news = on_news
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._pending: dict[int, asyncio.Future[Message]] = {}
        self._number = 0
        self._sending = asyncio.Lock()
        self._reaper: asyncio.Task[None] | None = None
        self.ended = asyncio.Event()
        self.heard_s = 0.0

    @property
    def pid(self) -> int | None:
        """The process, while there is one."""
        return None if self._process is None else self._process.pid

    async def start(self, prefix: Sequence[str], fds: Sequence[int] = (), **configuration: Json) -> Message:
        """Spawn and configure the worker; return its answer. Raises OSError, ChannelLost, Refused."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            ours.setblocking(False)
            self._control = ours
            # -P: with -m, Python would otherwise import from the current folder first.
            argv = [*prefix, sys.executable, "-sP", "-m", "stockade.egress", "--control-fd", str(theirs.fileno())]
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env=worker_environment(),
                    cwd="/",
                    start_new_session=True,  # Ctrl-C is for the agent, which then ends its workers in order
                )
            except BaseException:
                ours.close()
                raise
        loop = asyncio.get_running_loop()
        loop.add_reader(ours.fileno(), self._readable)
        self._reaper = loop.create_task(self._reap(self._process), name=f"egress worker {self._process.pid}")
        self.heard_s = loop.time()
        return await self.ask("configure", fds, ANSWER_S, **configuration)

    async def ask(self, op: str, fds: Sequence[int] = (), timeout_s: float = ANSWER_S, **fields: Json) -> Message:
        """Send one request and return its answer.

        Raises :class:`Refused` for an error answer and :class:`ChannelLost` when there is none: then the worker
        is killed, because nobody knows what it is doing.
        """
        self._number += 1
        number = self._number
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._pending[number] = answer
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(_wire.encode({"op": op, "id": number, **fields}), fds)
                message = await answer
        except WireError as error:
            raise Refused(f"egress worker: {error}") from error
        except (TimeoutError, OSError) as error:
            self.kill()
            raise ChannelLost(f"no answer to {op}") from error
        finally:
            self._pending.pop(number, None)
        if message.get("ok") is not True:
            raise Refused(f"egress worker: {message.get('error')}")
        return message

    def kill(self) -> None:
        """End the process now."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def aclose(self) -> None:
        """Hang up, which ends the worker; kill it if that takes too long. Returns when it is gone."""
        self._hang_up()
        if self._reaper is None:
            return
        try:
            async with asyncio.timeout(_GRACE_S):
                await self.ended.wait()
        except TimeoutError:
            self.kill()
            await self.ended.wait()
        await asyncio.wait([self._reaper])

    async def _send(self, packet: bytes, fds: Sequence[int]) -> None:
        async with self._sending:
            while True:
                if self._control is None:
                    raise ChannelLost("the worker is gone")
                try:
                    _wire.send(self._control, packet, fds)
                except BlockingIOError:
                    await self._writable(self._control.fileno())
                else:
                    return

    async def _writable(self, fd: int) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_writer(fd, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_writer(fd)

    def _readable(self) -> None:
        """Take every message that is there. A worker that sends nonsense is killed, never obeyed."""
        try:
            while self._control is not None:
                received = _wire.receive(self._control)
                if received is None:
                    self._hang_up()
                    return
                message, fds = received
                for fd in fds:  # a worker has none to give
                    os.close(fd)
                self._take(message)
        except BlockingIOError:
            return
        except (WireError, OSError):
            self._hang_up()
            self.kill()

    def _take(self, message: Message) -> None:
        self.heard_s = asyncio.get_running_loop().time()
        number = message.get("id")
        if isinstance(number, int):
            waiting = self._pending.get(number)
            if waiting is not None and not waiting.done():
                waiting.set_result(message)
        else:
            self._on_news(message)

    def _hang_up(self) -> None:
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._control.close()
            self._control = None
        for waiting in self._pending.values():
            if not waiting.done():
                waiting.set_exception(ChannelLost("the worker is gone"))

    async def _reap(self, process: asyncio.subprocess.Process) -> None:
        try:
            await process.wait()
            self._readable()  # what it said last, usage above all, is still in the socket
        finally:
            self._hang_up()
            self.ended.set()


def answer_table(message: Mapping[str, Json], key: str) -> Message:
    """Return an object of an answer; a worker that omits it is treated as lost."""
    try:
        return _wire.table(message, key)
    except WireError as error:
        raise ChannelLost(str(error)) from error
