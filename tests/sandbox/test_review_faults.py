"""Ends that code inside could bring about, and must not be able to pass off as faults of the node."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import os
import resource
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from stockade.errors import SandboxFault
from stockade.sandbox import Exit, ExitKind, Fault, _files, _holder, _proc, _spawner, _watchdog
from stockade.sandbox._holder import Files, HolderFds
from stockade.sandbox._uids import UidPool
from stockade.sandbox._watchdog import Watchdog
from tests.support import requires_root


def test_a_guest_that_takes_no_commands_is_not_the_nodes_fault(owner, sandbox):
    """What runs inside can keep it busy, and decides when it dies."""
    large = ["/bin/true", "x" * 60_000]

    async def attack():
        os.kill(sandbox.init_pid, signal.SIGSTOP)
        return await asyncio.gather(*(sandbox.exec(large, timeout_s=20) for _ in range(8)))

    results = owner.run(attack())
    assert {result.exit.kind for result in results} == {ExitKind.GUEST_LOST}
    assert {result.exit.fault for result in results} == {Fault.CANDIDATE}


def test_a_guest_that_is_dying_is_not_the_nodes_fault(owner, sandbox):
    """Its socket closes long before its death shows, if there is much to clear up."""

    async def attack():
        sandbox._control.shutdown(socket.SHUT_RDWR)
        return await sandbox.exec(["/bin/true"], timeout_s=20)

    assert owner.run(attack()).exit.kind is ExitKind.GUEST_LOST


LOSE_GUEST = "import resource; resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))"


def test_an_oom_kill_somewhere_masks_nothing(owner, sandbox, monkeypatch):
    """The count is the whole node's, and a program can end the first process of its sandbox by itself."""
    monkeypatch.setattr(_proc, "oom_kills", lambda: sandbox._oom_kills + 1)

    async def attack():
        await sandbox.exec([owner.python, "-I", "-S", "-c", LOSE_GUEST], timeout_s=5)
        return await sandbox.exec(["/bin/true"], timeout_s=5)

    owner.run(attack())
    exit_ = owner.run(sandbox.wait())
    assert (exit_.kind, exit_.fault) == (ExitKind.GUEST_LOST, Fault.CANDIDATE)
    assert "OOM killer" in exit_.evidence


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENAMETOOLONG, "x"), ExitKind.GUEST_LOST),
        (ValueError("x"), ExitKind.GUEST_LOST),
        (OSError(errno.EMFILE, "x"), ExitKind.NODE_FAULT),
    ],
)
def test_a_tree_that_cannot_be_measured_ends_but_masks_nothing(sandbox, monkeypatch, error, kind):
    def fails(_pid):
        raise error

    monkeypatch.setattr(_proc, "footprint", fails)
    found = Watchdog()._judge(sandbox, _watchdog._Rounds())
    assert found is not None
    assert found.kind is kind


def test_the_watchdog_is_never_blind_for_want_of_descriptors(sandbox):
    assert _proc.footprint(sandbox.init_pid).resident_bytes > 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            _proc.footprint(sandbox.init_pid)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_command_that_cannot_get_its_pipes_leaks_none(owner, sandbox):
    async def attack():
        gc.collect()  # what earlier tests left to the collector must not give descriptors back in the middle of this
        before = set(os.listdir("/proc/self/fd"))
        taken: list[int] = []
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
        try:
            with contextlib.suppress(OSError):
                taken.extend(os.dup(0) for _ in range(128))
            for _ in range(5):  # room for one more each time: every step of the preparation fails once
                os.close(taken.pop())
                with pytest.raises(OSError, match="Too many open files"):
                    await sandbox.exec(["/bin/true"], stdin=b"x")
        finally:
            for fd in taken:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert set(os.listdir("/proc/self/fd")) == before
        return await sandbox.exec(["/bin/true"])

    assert owner.run(attack()).exit.code == 0


def test_a_walk_does_not_go_on_in_the_next_sandbox(owner, monkeypatch):
    """Destroyed under a collection, the number of its directory is the next one's."""
    walking, go_on = threading.Event(), threading.Event()
    real = _files.read_file

    def slow(root_fd, path, *, limit_bytes):
        walking.set()
        go_on.wait(20)
        return real(root_fd, path, limit_bytes=limit_bytes)

    monkeypatch.setattr(_files, "read_file", slow)
    first = owner.create()
    number = first.root_fd

    async def attack():
        await first.write_file("/workspace/secret", b"first")
        reading = asyncio.ensure_future(first.read_file("/workspace/secret", limit_bytes=100))
        await asyncio.to_thread(walking.wait, 20)
        await first.destroy()
        made = [await owner.make() for _ in range(3)]
        taken = [sandbox for sandbox in made if sandbox.root_fd == number]
        for sandbox in made:
            await sandbox.write_file("/workspace/secret", b"another's")
        go_on.set()
        return await reading, taken

    data, taken = owner.run(attack())
    assert data == b"first"
    assert taken, "no sandbox got the number: the test showed nothing"
    with pytest.raises(SandboxFault, match="files are gone"):
        owner.run(first.read_file("/workspace/secret", limit_bytes=100))
    owner.destroy(first)


MAPPINGS = """
import os, time
libc = LIBC
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
count = 60_000
start = libc.mmap(None, count * 4096, 0, 0x22, -1, 0)
for page in range(0, count, 2):
    libc.mprotect(start + page * 4096, 4096, 1)
for _ in range(20):
    if os.fork() == 0:
        time.sleep(60)
print("made", flush=True)
time.sleep(60)
"""


def test_a_tree_that_is_slow_to_clear_up_is_waited_for(owner):
    sandbox = owner.create(memory=1 << 30)

    async def attack():
        running = asyncio.ensure_future(sandbox.exec(owner.probe(MAPPINGS)))
        async with asyncio.timeout(30):
            while len(_proc.footprint(sandbox.init_pid).pids) < 22:
                await asyncio.sleep(0.05)
        exit_ = await sandbox.kill(Exit(ExitKind.CLOSED))
        await running
        return exit_

    assert owner.run(attack()).kind is ExitKind.CLOSED
    owner.destroy(sandbox)


def test_a_spawner_that_may_not_fork_says_so_and_lives(monkeypatch):
    """Sandboxes share their container's limit on processes: one that fills it must not end every other."""

    def fails():
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fails)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    report, report_there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    before = len(os.listdir("/proc/self/fd"))
    with ours, theirs, report, report_there:
        null = os.open("/dev/null", os.O_RDWR)
        fds = [report_there.fileno(), *[null] * (len(HolderFds._fields) - 1)]
        socket.send_fds(ours, [b"{}"], fds)
        os.close(null)
        assert _spawner._serve(theirs, Files({}, b""))
        assert "Resource temporarily unavailable" in json.loads(report.recv(4096))["error"]
        assert len(os.listdir("/proc/self/fd")) == before


def test_the_oom_score_is_never_lowered():
    """In a container of the lowest class it starts at 1000, and to lower it takes a capability: no start was possible."""
    requires_root()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
            os.setresuid(65534, 65534, 65534)
            _holder._raise_oom_score()
            status = 0 if Path("/proc/self/oom_score_adj").read_text("ascii").strip() == "1000" else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_an_empty_range_of_uids_is_one_clear_line(tmp_path):
    pool = UidPool(tmp_path / "lock", 0x7000_0000, 0)
    with pytest.raises(SandboxFault, match="every uid of the range is in use"):
        pool.take()


def test_a_node_whose_watchdog_would_be_blind_is_not_usable(owner, monkeypatch):
    """A root without CAP_SYS_PTRACE cannot look into its sandboxes: each command was ended as one that hides."""

    def hidden(_pids):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(_proc, "memory_file_bytes", hidden)
    begun = time.monotonic()
    found = owner.run(owner.backend.probe())
    assert not found.usable
    assert "cannot be measured" in found.missing
    assert "CAP_SYS_PTRACE" in found.hint
    assert time.monotonic() - begun < 30
