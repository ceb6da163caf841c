"""Isolation cases about using up: output, disk, processes, memory, CPU time.

Each attack is bounded, so that a failing guard costs a second and not the machine. Without the guard, the bounded
attack succeeds: that is shown with a sandbox whose limit is far away, because a plain process would use up the host.
"""

from __future__ import annotations

import json

import pytest

from stockade.sandbox import ExitKind, Fault
from tests.live import MIB

FLOOD = "for _ in range(8):\n os.write(ARGS, b'x' * (1 << 20))\nos._exit(7)"


@pytest.mark.promise("S2.7")
def test_a54_output_flood(owner):
    sandbox = owner.create(output=MIB)
    for stream in (1, 2):
        result = owner.exec(sandbox, owner.probe(FLOOD, stream))
        assert result.exit.kind is ExitKind.OUTPUT_LIMIT
        assert result.exit.fault is Fault.CANDIDATE
        assert len(result.stdout) + len(result.stderr) == MIB
        assert [result.stdout_truncated, result.stderr_truncated] == [stream == 1, stream == 2]
    assert sandbox.ended is None
    owner.destroy(sandbox)
    free = owner.create(output=16 * MIB)
    assert owner.exec(free, owner.probe(FLOOD, 1)).exit.code == 7
    owner.destroy(free)


@pytest.mark.parametrize(
    "source",
    [
        "while True:\n os.write(1, b'x')",
        "os.dup2(1, 2)\nwhile True:\n os.write(2, b'y\\n' * 1000)",
        "os.execvp('yes', ['yes'])",
    ],
    ids=["byte by byte", "both streams", "yes"],
)
def test_a54_endless_output(owner, source):
    sandbox = owner.create(output=65536)
    result = owner.exec(sandbox, owner.probe(source))
    assert result.exit.kind is ExitKind.OUTPUT_LIMIT
    assert len(result.stdout) + len(result.stderr) == 65536
    owner.destroy(sandbox)


def test_a54_input_that_nobody_reads_and_output_closed_early(owner, sandbox):
    data = b"x" * (5 * MIB)
    assert owner.exec(sandbox, ["/bin/true"], stdin=data).exit.code == 0
    assert owner.exec(sandbox, ["/bin/sleep", "60"], stdin=data, timeout_s=0.3).exit.kind is ExitKind.TIMEOUT
    assert owner.exec(sandbox, ["/bin/sh", "-c", "exec >&- 2>&- <&-; exit 3"], stdin=data).exit.code == 3
    assert (
        owner.exec(sandbox, ["/bin/sh", "-c", "exec >&- 2>&-; sleep 60"], timeout_s=0.3).exit.kind is ExitKind.TIMEOUT
    )
    assert owner.exec(sandbox, ["/bin/sh", "-c", "sleep 60 & exit 4"]).exit.code == 4  # a child that holds the pipe


FILL = """
def disk():
    for number in range(ARGS[0]):
        with open(f"/{ARGS[2]}/fill{number}", "wb", 0) as file:
            if file.write(b"x" * (1 << 20)) < 1 << 20:
                raise OSError(errno.ENOSPC, "short")
def inodes():
    for number in range(ARGS[1]):
        os.close(os.open(f"/{ARGS[2]}/n{number}", os.O_CREAT, 0o600))
full = attempt(disk)
[os.unlink(f"/{ARGS[2]}/{name}") for name in os.listdir(f"/{ARGS[2]}")]
say([full, attempt(inodes)])
"""


@pytest.mark.promise("S2.7")
@pytest.mark.parametrize("place", ["workspace", "tmp", "dev/shm", "sandbox/home"])
def test_a55_disk_and_inodes(owner, place):
    """The program gets ENOSPC, as on any full disk; the host's own disk is not touched."""
    tight = owner.create(disk=8 * MIB, inodes=500)
    assert owner.inside(tight, FILL, [32, 2000, place]) == ["ENOSPC", "ENOSPC"]
    assert tight.ended is None
    owner.destroy(tight)


def test_a55_without_the_limit(owner):
    free = owner.create(disk=64 * MIB, inodes=10_000)
    assert owner.inside(free, FILL, [32, 2000, "tmp"]) == ["done", "done"]
    owner.destroy(free)


FORKS = """
made = 0
def fork():
    if os.fork() == 0:
        time.sleep(600)
for _ in range(ARGS[0]):
    answer = attempt(fork)
    if answer != "done":
        break
    made += 1
say([answer, made])
time.sleep(ARGS[1])
os._exit(0)
"""


@pytest.mark.promise("S2.7")
def test_a56_fork_bomb(owner):
    """EAGAIN at the limit; what stays there is ended and named as what it was."""
    tight = owner.create(pids=32)
    result = owner.exec(tight, owner.probe(FORKS, [300, 30]))
    answer, made = json.loads(result.stdout)
    assert answer == "EAGAIN"
    assert made < 32
    assert result.exit.kind is ExitKind.PIDS_LIMIT
    owner.destroy(tight)
    free = owner.create(pids=200)
    assert owner.inside(free, FORKS, [150, 0]) == ["done", 150]
    owner.destroy(free)


@pytest.mark.parametrize(
    "source",
    [
        "while True:\n try:\n  os.fork()\n except OSError:\n  pass",
        "import _thread\nwhile True:\n try:\n  _thread.start_new_thread(time.sleep, (600,))\n except RuntimeError:\n  time.sleep(0.01)",
        "while True:\n try:\n  if os.fork() == 0:\n   os._exit(0)\n except OSError:\n  time.sleep(0.01)",
    ],
    ids=["processes", "threads", "zombies"],
)
def test_a56_bombs_that_never_end(owner, source):
    sandbox = owner.create(pids=32, wall_s=20.0)
    result = owner.exec(sandbox, owner.probe(source))
    assert result.exit.kind is ExitKind.PIDS_LIMIT
    assert result.exit.fault is Fault.CANDIDATE
    owner.destroy(sandbox)


def test_a56_orphans_are_reaped(owner, sandbox):
    """A pile of zombies: process 1 reaps whatever is orphaned to it."""
    source = """
for _ in range(100):
    if os.fork() == 0:
        if os.fork() == 0:
            os._exit(0)
        os._exit(0)
    os.wait()
for _ in range(500):
    left = [pid for pid in os.listdir("/proc") if pid.isdigit()]
    if len(left) == 2:
        break
    time.sleep(0.01)
say(len(left))
"""
    assert owner.inside(sandbox, source) == 2


TOUCH = "area = bytearray(1 << 20) * ARGS\nprint('held')\nsys.stdout.flush()\ntime.sleep(5 if ARGS > 100 else 0.3)"
MEMORY = {
    "one process": TOUCH,
    "many processes": "[os.fork() for _ in range(3)]\narea = bytearray(1 << 20) * (ARGS // 8)\ntime.sleep(5)",
    "tmpfs": """
for number in range(ARGS // 16):
    with open(f"/tmp/{number}", "wb") as file:
        file.write(bytes(16 << 20))
time.sleep(5)
""",
    "memory files": """
held = []
for _ in range(ARGS // 16):
    held.append(os.memfd_create("x"))
    os.write(held[-1], bytes(16 << 20))
time.sleep(5)
""",
    "memory file, written and mapped by nobody": """
fd = os.memfd_create("x")
for _ in range(ARGS // 16):
    os.posix_fallocate(fd, 0, 1)
    os.write(fd, bytes(16 << 20))
time.sleep(5)
""",
    "shared anonymous memory": """
import mmap
area = mmap.mmap(-1, ARGS << 20)
for offset in range(0, ARGS << 20, 4096):
    area[offset] = 1
time.sleep(5)
""",
}


@pytest.mark.promise("S2.7")
@pytest.mark.parametrize("source", MEMORY.values(), ids=MEMORY)
def test_a57_memory_bomb(owner, source):
    sandbox = owner.create(memory=128 * MIB, disk=512 * MIB, file_size=512 * MIB)
    result = owner.exec(sandbox, owner.probe(source, 224))
    assert result.exit.kind is ExitKind.MEMORY_LIMIT
    assert result.exit.fault is Fault.CANDIDATE
    assert "allowed" in result.exit.evidence
    owner.destroy(sandbox)


def test_a57_within_the_limit(owner):
    """The same attack with a limit that is far enough away runs to its end."""
    sandbox = owner.create(memory=512 * MIB)
    result = owner.exec(sandbox, owner.probe(TOUCH, 96))
    assert (result.exit.code, result.stdout) == (0, b"held\n")
    assert result.usage.max_rss_bytes > 96 * MIB
    owner.destroy(sandbox)


def test_a57_one_huge_allocation_fails_in_the_program(owner):
    sandbox = owner.create(memory=128 * MIB)
    source = "try:\n bytearray(1 << 40)\nexcept MemoryError:\n say('MemoryError')"
    assert owner.inside(sandbox, source) == "MemoryError"
    assert owner.inside(sandbox, "import resource; say(resource.getrlimit(resource.RLIMIT_MEMLOCK)[1])") <= 8 * MIB
    owner.destroy(sandbox)


def test_a57_watchdog_sees_through_an_undumpable_process(owner):
    """A process that hides its descriptors could hide memory files behind them; as root nothing is hidden."""
    source = """
LIBC.prctl(4, 0, 0, 0, 0)
held = []
for _ in range(ARGS // 16):
    held.append(os.memfd_create("x"))
    os.write(held[-1], bytes(16 << 20))
time.sleep(20)
"""
    sandbox = owner.create(memory=128 * MIB, file_size=512 * MIB)
    assert owner.exec(sandbox, owner.probe(source, 224)).exit.kind is ExitKind.MEMORY_LIMIT
    owner.destroy(sandbox)


@pytest.mark.parametrize("children", [0, 4], ids=["one process", "a tree"])
def test_a58_cpu_hog(owner, children):
    sandbox = owner.create(cpu_s=1.0)
    source = "[os.fork() or os.setsid() for _ in range(2)] if ARGS else None\nwhile True: pass"
    result = owner.exec(sandbox, owner.probe(source, children))
    assert result.exit.kind is ExitKind.CPU_LIMIT
    owner.destroy(sandbox)


def test_a58_cpu_time_of_short_lived_children(owner):
    """Each lives for a moment, and none of them reaches any limit of its own."""
    sandbox = owner.create(cpu_s=1.0)
    source = """
while True:
    if os.fork() == 0:
        end = time.process_time() + 0.05
        while time.process_time() < end:
            pass
        os._exit(0)
    os.wait()
"""
    assert owner.exec(sandbox, owner.probe(source)).exit.kind is ExitKind.CPU_LIMIT
    owner.destroy(sandbox)
