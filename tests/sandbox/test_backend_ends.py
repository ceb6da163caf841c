"""How commands and sandboxes end: timeouts, limits, attacks on the guest agent, freezing."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from stockade.sandbox import Exit, ExitKind, Fault
from stockade.sandbox._proc import descendants
from tests.live import MIB

DAEMON = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.close(1), os.close(2)
        while True:
            with open(ARGS, "a") as file:
                file.write("x")
            time.sleep(0.01)
    os._exit(0)
os.wait()
"""


def size(owner, sandbox, name: str) -> int:
    try:
        return len(owner.run(sandbox.read_file(f"/workspace/{name}", limit_bytes=MIB)))
    except FileNotFoundError:
        return 0


def grows(owner, sandbox, name: str) -> bool:
    """Whether the daemon that writes ``name`` is alive: it grows within a generous while, or not at all."""
    before = size(owner, sandbox, name)
    for _ in range(20):
        owner.run(asyncio.sleep(0.05))
        if size(owner, sandbox, name) > before:
            return True
    return False


def test_a_timeout_ends_the_command_and_all_it_started(owner, sandbox):
    """But neither a command that runs beside it nor what an earlier one left in the background."""
    assert owner.exec(sandbox, owner.probe(DAEMON, "/workspace/server")).exit.code == 0
    assert grows(owner, sandbox, "server")  # a background process survives the end of its command
    owner.run(asyncio.sleep(0.05))  # start times have a grain of 10 ms

    async def both():
        beside = asyncio.ensure_future(sandbox.exec(["/bin/sh", "-c", "sleep 2; echo survived"]))
        await asyncio.sleep(0.1)
        ended = await sandbox.exec(owner.probe(DAEMON + "time.sleep(60)", "/workspace/child"), timeout_s=0.7)
        return ended, await beside

    ended, beside = owner.run(both())
    assert ended.exit.kind is ExitKind.TIMEOUT
    assert ended.exit.fault is Fault.CANDIDATE
    assert "0.7 s" in ended.exit.evidence
    assert (beside.exit.code, beside.stdout) == (0, b"survived\n")
    assert size(owner, sandbox, "child") > 0
    assert not grows(owner, sandbox, "child")
    assert grows(owner, sandbox, "server")
    assert owner.exec(sandbox, ["/bin/true"]).exit.code == 0


def test_a_timeout_against_what_forks_and_exits_for_ever(owner):
    """It is gone before it can be named: the pass that finds nothing must not be the last."""
    sandbox = owner.create()
    source = """
if os.fork() == 0:
    os.setsid()
    os.close(1), os.close(2)
    while True:
        try:
            if os.fork():
                os._exit(0)
        except OSError:
            time.sleep(0.001)
        with open("/workspace/hop", "a") as file:
            file.write("x")
time.sleep(60)
"""
    assert owner.exec(sandbox, owner.probe(source), timeout_s=0.7).exit.kind is ExitKind.TIMEOUT
    assert size(owner, sandbox, "hop") > 0
    assert not grows(owner, sandbox, "hop")
    owner.destroy(sandbox)


def test_cancelling_a_command_ends_it(owner, sandbox):
    async def cancelled():
        task = asyncio.ensure_future(sandbox.exec(owner.probe("time.sleep(60)")))
        await asyncio.sleep(0.3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for _ in range(200):
            if len(list(descendants(sandbox.init_pid))) == 1:
                return True
            await asyncio.sleep(0.02)
        return False

    assert owner.run(cancelled())
    assert owner.exec(sandbox, ["/bin/true"]).exit.code == 0


def test_wall_limit(owner):
    sandbox = owner.create(wall_s=1.0)
    result = owner.exec(sandbox, ["/bin/sleep", "60"])
    assert result.exit.kind is ExitKind.WALL_LIMIT
    assert result.exit.fault is Fault.CANDIDATE
    assert owner.run(sandbox.wait()).kind is ExitKind.WALL_LIMIT
    owner.destroy(sandbox)


@pytest.mark.parametrize(
    ("changed", "source", "kind"),
    [
        ({"cpu_s": 1.0}, "while True: pass", ExitKind.CPU_LIMIT),
        ({"memory": 96 * MIB}, "area = bytearray(1 << 20) * 150\ntime.sleep(60)", ExitKind.MEMORY_LIMIT),
        ({"pids": 24}, "while True:\n try: os.fork()\n except OSError: pass", ExitKind.PIDS_LIMIT),
        ({"output": 4096}, "while True: os.write(1, b'log line\\n')", ExitKind.OUTPUT_LIMIT),
        ({"wall_s": 1.0}, "signal.pause()", ExitKind.WALL_LIMIT),
    ],
    ids=lambda value: value.value if isinstance(value, ExitKind) else "",
)
def test_each_limit_is_reported_as_what_it_was(owner, changed, source, kind):
    sandbox = owner.create(**changed)
    result = owner.exec(sandbox, owner.probe(source))
    assert result.exit.kind is kind
    assert result.exit.fault is Fault.CANDIDATE
    assert result.exit.evidence
    owner.destroy(sandbox)


def test_the_first_reason_stands(owner):
    sandbox = owner.create()
    sandbox.end(Exit(ExitKind.STOPPED, evidence="first"))
    assert owner.run(sandbox.kill(Exit(ExitKind.CLOSED))).evidence == "first"
    assert sandbox.ended is not None
    assert sandbox.ended.fault is Fault.STOPPED
    owner.destroy(sandbox)


@pytest.mark.parametrize("number", [number for number in range(1, 65) if number not in (32, 33)])
def test_no_signal_from_inside_ends_the_guest(owner, signalled, number):
    result = owner.exec(signalled, ["/bin/sh", "-c", f"kill -{number} 1"])
    assert result.exit.code == 0
    assert owner.exec(signalled, ["/bin/true"]).exit.code == 0
    assert signalled.ended is None


@pytest.fixture(scope="module")
def signalled(owner):
    sandbox = owner.create()
    yield sandbox
    owner.destroy(sandbox)


ATTACKS_ON_THE_GUEST = {
    "ptrace": "libc('ptrace', 16, 1, None, None)",
    "write its memory": "os.open('/proc/1/mem', os.O_RDWR)",
    "take its socket": "os.open('/proc/1/fd/3', os.O_RDWR)",
    "forge an answer on descriptor 3": "os.write(3, b'E' + bytes(28))",
    "forge an answer on any descriptor": "[os.write(fd, b'E' + bytes(28)) for fd in range(3, 300)]",
    "close what was inherited": "os.close(3)",
}


@pytest.mark.parametrize("source", ATTACKS_ON_THE_GUEST.values(), ids=ATTACKS_ON_THE_GUEST)
def test_attacks_on_the_guest_fail(owner, sandbox, source):
    assert owner.inside(sandbox, f"say(attempt(lambda: {source}))") in ("EPERM", "EACCES", "EBADF")
    assert owner.exec(sandbox, ["/bin/echo", "alive"]).stdout == b"alive\n"


def test_flooding_the_guest_with_children(owner, sandbox):
    """Orphans by the thousand, each a SIGCHLD to pid 1: the answers that count still come."""
    source = "for _ in range(300):\n if os.fork() == 0:\n  os.setsid(); (os.fork() if ARGS else 0); os._exit(0)\n os.wait()\nsay(1)"
    assert owner.inside(sandbox, source, 1) == 1
    assert owner.exec(sandbox, ["/bin/echo", "alive"]).stdout == b"alive\n"


@pytest.mark.parametrize("name", ["NOFILE", "NPROC", "AS", "DATA", "FSIZE", "CPU", "STACK"])
def test_starving_the_guest_is_never_the_nodes_fault(owner, name):
    """prlimit(2) of the same uid reaches pid 1. That harms the attacker's own sandbox, and must not mask its sample."""
    sandbox = owner.create()
    source = "import resource; resource.prlimit(1, getattr(resource, 'RLIMIT_' + ARGS), (0, 0)); say(1)"

    async def attack():
        results = []
        for _ in range(3):
            results.append(await sandbox.exec(owner.probe(source, name), timeout_s=5))
            results.append(await sandbox.exec(["/bin/echo", "x" * 100_000], timeout_s=5))
        return results

    for result in owner.run(attack()):
        assert result.exit.fault in (None, Fault.CANDIDATE), result.exit
    owner.destroy(sandbox)


def test_a_descriptor_the_kernel_cannot_name_is_not_the_nodes_fault(owner, sandbox):
    """A directory deeper than PATH_MAX makes readlink of its descriptor fail: the watchdog must go on."""
    source = """
fd = os.open("/workspace", os.O_RDONLY)
for depth in range(30):
    os.mkdir("d" * 200, dir_fd=fd)
    fd = os.open("d" * 200, os.O_RDONLY, dir_fd=fd)
time.sleep(0.5)
say(1)
"""
    assert owner.inside(sandbox, source) == 1


def test_freeze_and_thaw(owner, sandbox):
    assert owner.exec(sandbox, owner.probe(DAEMON, "/workspace/daemon")).exit.code == 0
    assert grows(owner, sandbox, "daemon")
    owner.run(sandbox.freeze())
    assert not grows(owner, sandbox, "daemon")
    owner.run(sandbox.write_file("/workspace/while_frozen", b"x"))

    async def meanwhile():
        task = asyncio.ensure_future(sandbox.exec(["/bin/echo", "late"]))
        await asyncio.sleep(0.2)
        early = task.done()
        await sandbox.thaw()
        return early, await task

    early, result = owner.run(meanwhile())
    assert not early
    assert result.stdout == b"late\n"
    assert grows(owner, sandbox, "daemon")


def test_freeze_catches_a_fork_bomb(owner):
    sandbox = owner.create(pids=200)

    async def attack():
        task = asyncio.ensure_future(
            sandbox.exec(owner.probe("while True:\n try: os.fork()\n except OSError: time.sleep(1)"))
        )
        await asyncio.sleep(0.3)
        await sandbox.freeze()
        before = sorted(descendants(sandbox.init_pid))
        await asyncio.sleep(0.5)
        after = sorted(descendants(sandbox.init_pid))
        sandbox.end(Exit(ExitKind.CLOSED))
        await task
        return before == after

    assert owner.run(attack())
    owner.destroy(sandbox)


TIMER = """
signal.signal(signal.SIGCONT, lambda *_: None)
signal.signal(signal.SIGALRM, lambda *_: None)
class Event(ctypes.Structure):
    _fields_ = [("value", ctypes.c_void_p), ("signo", ctypes.c_int), ("notify", ctypes.c_int), ("pad", ctypes.c_char * 48)]
class Spec(ctypes.Structure):
    _fields_ = [("every_s", ctypes.c_long), ("every_ns", ctypes.c_long), ("first_s", ctypes.c_long), ("first_ns", ctypes.c_long)]
timer = ctypes.c_void_p()
libc("timer_create", 0, ctypes.byref(Event(None, signal.SIGCONT, 0)), ctypes.byref(timer))
libc("timer_settime", timer, 0, ctypes.byref(Spec(0, 20_000_000, 0, 20_000_000)), None)
print("armed", flush=True)
while True:
    with open("/workspace/ran", "a") as file:
        file.write("x")
    time.sleep(0.001)
"""


def test_a_timer_that_wakes_a_frozen_process_ends_the_sandbox(owner):
    """timer_create(2) with SIGCONT continues a stopped process, whoever stopped it."""
    sandbox = owner.create()

    async def attack():
        task = asyncio.ensure_future(sandbox.exec(owner.probe(TIMER)))
        for _ in range(200):
            await asyncio.sleep(0.05)
            if len(await sandbox.snapshot()):
                break
        await sandbox.freeze()
        return (await task).exit

    exit_ = owner.run(attack())
    assert exit_.kind is ExitKind.GUEST_LOST
    assert exit_.fault is Fault.CANDIDATE
    owner.destroy(sandbox)


def test_the_guests_death_is_seen(owner):
    sandbox = owner.create()

    async def attack():
        task = asyncio.ensure_future(sandbox.exec(["/bin/sleep", "60"]))
        await asyncio.sleep(0.2)
        os.kill(sandbox.init_pid, signal.SIGKILL)
        return await task

    result = owner.run(attack())
    assert result.exit.kind is ExitKind.GUEST_LOST
    assert result.exit.fault is Fault.CANDIDATE
    owner.destroy(sandbox)
