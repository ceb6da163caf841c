"""A live sandbox made of bubblewrap and the guest agent; implements :class:`stockade.sandbox.Sandbox`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from stockade.errors import SandboxFault
from stockade.ids import RolloutId
from stockade.policy import SandboxLimits
from stockade.sandbox import _exec, _files, _proc
from stockade.sandbox._aio import writable
from stockade.sandbox._types import WORKSPACE, Collected, ExecResult, Exit, ExitKind, Usage

_KILL_GRACE_S = 3.0
_DEATH_S = 10.0  # what is being killed may be large: a million mappings take the kernel seconds to clear up
_FREEZE_ROUNDS = 100
_T = TypeVar("_T")


class LiveSandbox:
    """Owns the descriptors of one sandbox. ``on_end`` is called once, with why it ended."""

    def __init__(
        self,
        rollout_id: RolloutId,
        limits: SandboxLimits,
        *,
        env: Mapping[str, str],
        control: socket.socket,
        root_fd: int,
        listener_fds: tuple[int, ...],
        outer_pid: int,
        init_pid: int,
        owner: int | None,
    ) -> None:
        self.rollout_id = rollout_id
        self.limits = limits
        self.root_fd = root_fd
        self.listener_fds = listener_fds
        self.init_pid = init_pid
        self.outer_pid = outer_pid
        self._env = dict(env)
        self._control = control
        self._owner = owner
        self._init_pidfd = os.pidfd_open(init_pid)
        self._ended: Exit | None = None
        self._gone = asyncio.get_running_loop().create_future()
        self._running: dict[int, _exec.Running] = {}
        self._sending = asyncio.Lock()
        self._next_id = 1
        self._oom_kills = _proc.oom_kills()
        self._memory_bytes = 0
        self.frozen = False
        self._destroyed = False
        self._usage = Usage()
        self._started_ns = time.monotonic_ns()
        self.on_gone: Callable[[], None] | None = None
        loop = asyncio.get_running_loop()
        loop.add_reader(control, self._on_message)
        loop.add_reader(self._init_pidfd, self._on_death)
        self._wall = loop.call_later(
            limits.wall_s, self.end, Exit(ExitKind.WALL_LIMIT, evidence=f"{limits.wall_s:g} s allowed")
        )

    @property
    def ended(self) -> Exit | None:
        """Why it ended, or ``None`` while it lives."""
        return self._ended

    # ---- ends

    def end(self, exit_: Exit) -> None:
        """Kill it, for the first reason given; later ones are ignored."""
        if self._ended is None:
            self._ended = exit_
            self._wall.cancel()
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._init_pidfd, signal.SIGKILL)

    def _on_death(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._init_pidfd)
        loop.remove_reader(self._control)
        self._drain_messages()
        self._wall.cancel()
        if self._ended is None:
            self._ended = self._unexplained()
        for running in self._running.values():
            if not running.ended.done():
                running.ended.set_exception(_Gone())
        if not self._gone.done():
            self._gone.set_result(None)
        if self.on_gone is not None:
            self.on_gone()

    def _unexplained(self) -> Exit:
        evidence = "its first process ended and nothing outside had asked for it"
        if _proc.oom_kills() > self._oom_kills:
            # Evidence, not a fault of the node: the count is the whole node's, a program can add to it with kernel
            # memory that nobody measures, and it can end this process itself. It would have its sample masked.
            evidence += f"; the kernel's OOM killer had struck on this node, this held {self._memory_bytes} bytes"
        return Exit(ExitKind.GUEST_LOST, evidence=evidence)

    async def kill(self, exit_: Exit) -> Exit:
        """End it and wait until no process of it is left; returns the reason that stands."""
        self.end(exit_)
        return await self.wait()

    async def wait(self) -> Exit:
        """Wait until every process of it is gone."""
        if self._ended is None:
            await asyncio.shield(self._gone)
        else:
            try:
                await asyncio.wait_for(asyncio.shield(self._gone), _DEATH_S)
            except TimeoutError as error:
                raise SandboxFault(f"{self.rollout_id}: process {self.init_pid} survives SIGKILL") from error
        return self._reason()

    def _reason(self) -> Exit:
        if self._ended is None:
            raise SandboxFault(f"{self.rollout_id}: ended without a reason")
        return self._ended

    async def destroy(self) -> None:
        """Kill what is left and give back every descriptor; the files are gone after it. Idempotent."""
        await self.kill(Exit(ExitKind.CLOSED))
        if self._destroyed:  # closed twice, a number may by then be another sandbox's
            return
        self._destroyed = True
        self._control.close()
        os.close(self._init_pidfd)
        os.close(self.root_fd)
        for fd in self.listener_fds:
            os.close(fd)
        self.listener_fds = ()

    # ---- commands

    async def exec(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float | None = None,
        pipes: tuple[int, int] | None = None,
    ) -> ExecResult:
        """Run one command; see the protocol.

        ``pipes`` become descriptors 3 and 4. They are duplicated before the first suspension, so the caller may
        close its own as soon as this coroutine has begun.
        """
        if self._ended is not None:
            return self._refused()
        running = _exec.Running(self._next_id, asyncio.get_running_loop().create_future())
        self._next_id += 1
        packet, body = _exec.pack(running.exec_id, argv, cwd or WORKSPACE, {**self._env, **(env or {})})
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        budget = _exec.Budget(self.limits.output)
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            ours_in, fds, readers = self._stdio(stdin, budget, over, theirs, ours)
            for pipe in pipes or ():
                fds.append(os.dup(pipe))
                theirs.callback(os.close, fds[-1])
            if body:
                fds.insert(0, _exec.memory_file(body))
                theirs.callback(os.close, fds[0])
            self._running[running.exec_id] = running
            ours.callback(self._running.pop, running.exec_id)
            try:
                await self._send(packet, fds)
            except OSError as error:
                # It is dying, or kept too busy to read: both are in the power of what runs inside, so this is no
                # fault of the node.
                self.end(Exit(ExitKind.GUEST_LOST, evidence=f"its first process takes no commands: {error}"))
                return self._refused()
            ours.pop_all()
        for reader in readers:
            reader.start()
        feeding = None if ours_in is None else asyncio.ensure_future(_exec.feed(ours_in, stdin))
        try:
            return await self._collect(running, readers, over, timeout_s)
        finally:
            self._running.pop(running.exec_id, None)
            for reader in readers:
                reader.close()
            if feeding is not None:
                feeding.cancel()
                await asyncio.gather(feeding, return_exceptions=True)

    def _stdio(
        self,
        stdin: bytes,
        budget: _exec.Budget,
        over: asyncio.Future[None],
        theirs: contextlib.ExitStack,
        ours: contextlib.ExitStack,
    ) -> tuple[int | None, list[int], list[_exec.Reader]]:
        ours_in = None
        if stdin:
            source, ours_in = os.pipe2(os.O_CLOEXEC)
            ours.callback(os.close, ours_in)
        else:
            source = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        theirs.callback(os.close, source)
        fds, readers = [source], []
        for _ in range(2):
            read, sink = os.pipe2(os.O_CLOEXEC)
            ours.callback(os.close, read)
            theirs.callback(os.close, sink)
            readers.append(_exec.Reader(read, budget, over))
            fds.append(sink)
        return ours_in, fds, readers

    async def _collect(
        self, running: _exec.Running, readers: list[_exec.Reader], over: asyncio.Future[None], timeout_s: float | None
    ) -> ExecResult:
        timeout = None
        if timeout_s is not None:
            reason = Exit(ExitKind.TIMEOUT, evidence=f"{timeout_s:g} s allowed for this command")
            timeout = asyncio.get_running_loop().call_later(timeout_s, self._end_one, running, reason)
        flood = Exit(ExitKind.OUTPUT_LIMIT, evidence=f"{self.limits.output} bytes of output allowed")
        over.add_done_callback(lambda future: None if future.cancelled() else self._end_one(running, flood))
        cpu_ns = max_rss = 0
        try:
            status, cpu_ns, max_rss = await asyncio.shield(running.ended)
            exit_ = running.forced or self._as_limit(_exec.exit_of(status), cpu_ns)
        except asyncio.CancelledError:
            # Whoever asked has gone; what was asked for must not go on unseen.
            self._end_one(running, Exit(ExitKind.CLOSED))
            raise
        except _Gone:
            exit_ = running.forced or self._reason()
        finally:
            if timeout is not None:
                timeout.cancel()
            over.cancel()
        for reader in readers:
            reader.finish()
        usage = Usage(time.monotonic_ns() - running.started_ns, cpu_ns, max_rss)
        out, err = readers
        return ExecResult(exit_, bytes(out.data), bytes(err.data), out.truncated, err.truncated, usage)

    def _as_limit(self, exit_: Exit, cpu_ns: int) -> Exit:
        """Name RLIMIT_CPU, which kills a busy process where the watchdog comes late (setrlimit(2))."""
        if exit_.signal in (signal.SIGKILL, signal.SIGXCPU) and cpu_ns > self.limits.cpu_s * 1e9:
            spent = f"{cpu_ns / 1e9:.1f} s of CPU used, {self.limits.cpu_s:g} s allowed"
            return Exit(ExitKind.CPU_LIMIT, evidence=spent)
        return exit_

    def _end_one(self, running: _exec.Running, exit_: Exit) -> None:
        """End one command and all that it started; if the guest cannot, end the sandbox."""
        if running.ended.done() or running.forced is not None:
            return
        running.forced = exit_
        try:
            self._control.send(_exec.HEADER.pack(b"K", running.exec_id, 0, 0, 0))
        except OSError:
            self.end(exit_)
            return

        def check() -> None:
            if not running.ended.done():
                self.end(exit_)

        asyncio.get_running_loop().call_later(_KILL_GRACE_S, check)

    def _refused(self) -> ExecResult:
        return ExecResult(self._reason(), b"", b"", False, False, Usage())

    async def _send(self, packet: bytes, fds: list[int]) -> None:
        async with self._sending:  # the loop wakes one waiter per descriptor: a second would replace the first
            while True:
                try:
                    socket.send_fds(self._control, [packet], fds)
                except BlockingIOError:
                    await asyncio.wait_for(writable(self._control.fileno()), _KILL_GRACE_S)
                else:
                    return

    def _on_message(self) -> None:
        if not self._drain_messages():
            asyncio.get_running_loop().remove_reader(self._control)

    def _drain_messages(self) -> bool:
        while True:
            try:
                message = self._control.recv(256)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not message:
                return False
            self._on_answer(message)

    def _on_answer(self, message: bytes) -> None:
        if message[:1] == b"E" and len(message) == _exec.ENDED.size:
            _, exec_id, status, cpu_ns, max_rss = _exec.ENDED.unpack(message)
            running = self._running.get(exec_id)
            if running is not None and not running.ended.done():
                running.ended.set_result((status, cpu_ns, max_rss))
                total = self._usage
                self._usage = Usage(total.wall_ns, total.cpu_ns + cpu_ns, max(total.max_rss_bytes, max_rss))
        elif message[:1] == b"F" and len(message) == _exec.HEADER.size:
            _, exec_id, _, number, _ = _exec.HEADER.unpack(message)
            running = self._running.get(exec_id)
            if running is not None and not running.ended.done():
                running.forced = Exit(ExitKind.NOT_STARTED, code=126, evidence=f"fork: {os.strerror(number)}")
                running.ended.set_result((126 << 8, 0, 0))

    # ---- files

    async def _on_files(self, work: Callable[[int], _T]) -> _T:
        if self._destroyed:
            raise SandboxFault(f"{self.rollout_id}: its files are gone")
        # A copy: destroyed meanwhile, the number could be the next sandbox's, and the walk go on in there.
        root_fd = os.dup(self.root_fd)

        def run() -> _T:
            try:
                with _files.acting_as(self._owner):
                    return work(root_fd)
            finally:
                os.close(root_fd)

        return await asyncio.to_thread(run)

    async def read_file(self, path: str, *, limit_bytes: int) -> bytes:
        """Read a regular file of the workspace or /tmp."""
        return await self._on_files(lambda root: _files.read_file(root, path, limit_bytes=limit_bytes))

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file; its bytes count against the sandbox's disk."""
        await self._on_files(lambda root: _files.write_file(root, path, data))

    async def put_dir(self, path: str, files: Mapping[str, bytes]) -> None:
        """Write several files below a directory."""
        await self._on_files(lambda root: _files.put_dir(root, path, files))

    async def get_dir(self, path: str, *, limit_bytes: int) -> Collected:
        """Collect the regular files below a directory."""
        return await self._on_files(lambda root: _files.get_dir(root, path, limit_bytes=limit_bytes))

    async def snapshot(self) -> dict[str, str]:
        """Return the state of the workspace as path → size and digest."""
        return await self._on_files(_files.snapshot)

    # ---- the rest

    async def freeze(self) -> None:
        """Stop every process (SIGSTOP cannot be caught) until two passes find the same ones, all stopped.

        A timer that sends SIGCONT wakes a stopped process: the watchdog ends a sandbox in which one runs on.
        """
        before: list[int] = []
        for _ in range(_FREEZE_ROUNDS):
            if self._ended is not None:
                return
            _proc.signal_tree(self.init_pid, signal.SIGSTOP)
            found = sorted(_proc.descendants(self.init_pid))
            if found == before and all(_proc.stopped(pid) for pid in found):
                self.frozen = True
                return
            before = found  # what forks and exits all the time is gone before it can be stopped
            await asyncio.sleep(0.005)
        raise SandboxFault(f"{self.rollout_id}: could not be frozen")

    async def thaw(self) -> None:
        """Let every process go on."""
        self.frozen = False
        _proc.signal_tree(self.init_pid, signal.SIGCONT)

    def note(self, memory_bytes: int, cpu_ns: int) -> None:
        """Take a measurement of the watchdog."""
        peak = max(self._usage.max_rss_bytes, memory_bytes)
        self._memory_bytes = memory_bytes
        self._usage = Usage(0, max(self._usage.cpu_ns, cpu_ns), peak)

    def usage(self) -> Usage:
        """Return what the sandbox has used so far."""
        total = self._usage
        return Usage(time.monotonic_ns() - self._started_ns, total.cpu_ns, total.max_rss_bytes)


class _Gone(Exception):
    """The sandbox ended under a command."""
