"""What is left of a sandbox: nothing, whoever ends it and however."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stockade.ids import new_rollout_id
from stockade.sandbox import ExitKind, Fault, Listeners, Spec
from stockade.sandbox._proc import descendants
from tests.leaks import start_ticks
from tests.live import Owner, limits

OWNER_PROCESS = Path(__file__).with_name("owner_process.py")
FULL = Listeners(transparent_ports=(80, 443, 8080), dns=True)
KINDS = ("user", "pid", "net", "mnt", "ipc", "uts", "cgroup")


def namespaces(pid: int) -> set[str]:
    found = set()
    for kind in KINDS:
        try:
            found.add(os.readlink(f"/proc/{pid}/ns/{kind}"))
        except OSError:
            continue
    return found


def note(spaces: dict[str, int], pid: int) -> None:
    """Write down the namespaces of a living process, with the time: their numbers are given to others later."""
    now = int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))
    spaces.update(dict.fromkeys(namespaces(pid) - namespaces(os.getpid()), now))


def inhabitants(spaces: dict[str, int]) -> list[int]:
    """Return the processes of this machine that have been in one of these namespaces since it was written down."""
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        started = start_ticks(pid)
        if started is not None and any(started <= spaces.get(name, -1) for name in namespaces(pid)):
            found.append(pid)
    return found


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def gone(pids: list[int], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while alive(pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def held() -> dict[str, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
    return found


@pytest.mark.promise("S2.9")
def test_nothing_remains(owner):
    """After fifty sandboxes with listeners, daemons and files: processes, zombies, namespaces, mounts, descriptors, files."""
    spaces: dict[str, int] = {}
    pids: list[int] = []

    async def one() -> None:
        spec = Spec(new_rollout_id(), limits(), trust={"ca.pem": b"x" * 10_000}, proxied=False)
        sandbox = await owner.backend.create(spec, FULL)
        await sandbox.write_file("/workspace/x", b"x" * 100_000)
        await sandbox.exec(["/bin/sh", "-c", "setsid sleep 600 >&- 2>&- & echo started"])
        pids.extend(descendants(sandbox.init_pid))
        pids.append(sandbox.outer_pid)
        note(spaces, sandbox.init_pid)
        await sandbox.destroy()

    owner.run(one())  # what is made once and kept: the memory file of the trust files
    mounts = Path("/proc/self/mountinfo").read_text()
    before, files = held(), sorted(owner.state.rglob("*"))
    spaces.clear()
    pids.clear()
    children = set(descendants(os.getpid()))

    async def ten() -> None:
        await asyncio.gather(*(one() for _ in range(10)))

    for _ in range(5):
        owner.run(ten())
    assert len(pids) >= 150
    assert len(spaces) >= 5
    assert gone(pids)
    assert inhabitants(spaces) == []
    assert set(descendants(os.getpid())) <= children
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert held() == before
    assert sorted(owner.state.rglob("*")) == files
    # A holder's exit reaches the agent over the spawner: a moment later nothing of it is on the books either.
    owner.run(asyncio.sleep(0.3))
    assert owner.backend._live == {}
    assert owner.backend._outer == set()


def test_destroying_twice_closes_nothing_twice(owner):
    sandbox = owner.create()
    owner.run(sandbox.destroy())
    other = owner.create()  # takes the numbers that were given back
    owner.destroy(sandbox)
    assert owner.exec(other, ["/bin/echo", "alive"]).stdout == b"alive\n"
    assert owner.run(other.get_dir("/workspace", limit_bytes=10)).files == {}
    owner.destroy(other)


def test_a_cancelled_create_leaves_nothing(owner):
    """At any moment of its making: a task is cancelled after ever more turns of the loop."""
    owner.destroy(owner.create())
    before, children = held(), set(descendants(os.getpid()))

    async def cancel_after(turns: int) -> bool:
        task = asyncio.ensure_future(owner.backend.create(Spec(new_rollout_id(), limits(), proxied=False), Listeners()))
        for _ in range(turns):
            await asyncio.sleep(0.001)
        task.cancel()
        result = (await asyncio.gather(task, return_exceptions=True))[0]
        if isinstance(result, BaseException):
            assert isinstance(result, asyncio.CancelledError), result
            return True
        await result.destroy()
        return False

    cancelled = [owner.run(cancel_after(turns)) for turns in (0, 1, 2, 3, 5, 8, 13, 21, 34)]
    assert cancelled[0]
    for _ in range(200):
        owner.run(asyncio.sleep(0.02))
        if held() == before and set(descendants(os.getpid())) <= children:
            break
    assert held() == before
    assert set(descendants(os.getpid())) <= children
    if owner.backend._uids is not None:
        assert owner.backend._uids._held == set()


@pytest.mark.promise("S5.2")
@pytest.mark.parametrize("victim", ["owner", "spawner and owner"])
def test_the_owners_death_ends_every_sandbox(tmp_path, victim):
    """SIGKILL, so that nothing of it can act any more: the kernel alone carries it on."""
    with subprocess.Popen(
        [sys.executable, "-B", OWNER_PROCESS, tmp_path, "4"], stdout=subprocess.PIPE, env={**os.environ}, text=True
    ) as process:
        assert process.stdout
        spawner, inits = json.loads(process.stdout.readline())
        pids = [pid for init in inits for pid in descendants(init)]
        spaces: dict[str, int] = {}
        for init in inits:
            note(spaces, init)
        assert set(inits) <= set(inhabitants(spaces))
        assert len(alive([spawner, *pids])) == 1 + len(pids) >= 13
        if victim != "owner":
            os.kill(spawner, signal.SIGKILL)
        process.kill()
        started = time.monotonic()
        process.wait()
        assert gone([spawner, *pids], seconds=10)
        assert time.monotonic() - started < 10
        assert inhabitants(spaces) == []


def test_the_spawners_death_is_the_nodes_fault(tmp_path):
    owner = Owner(tmp_path / "state")
    try:
        sandboxes = [owner.create() for _ in range(3)]
        pids = [pid for sandbox in sandboxes for pid in descendants(sandbox.init_pid)]

        async def attack():
            tasks = [asyncio.ensure_future(sandbox.exec(["/bin/sleep", "60"])) for sandbox in sandboxes]
            await asyncio.sleep(0.2)
            process = owner.backend._spawner._process
            assert process is not None
            os.kill(process.pid, signal.SIGKILL)
            results = await asyncio.gather(*tasks)
            return [result.exit for result in results], [await sandbox.wait() for sandbox in sandboxes]

        commands, ends = owner.run(attack())
        for exit_ in [*commands, *ends]:
            assert exit_.kind is ExitKind.NODE_FAULT
            assert exit_.fault is Fault.INFRASTRUCTURE
        assert gone(pids)
        with pytest.raises(RuntimeError, match="spawner"):
            owner.create()
    finally:
        owner.close()


def test_closing_the_backend_ends_what_is_left(tmp_path):
    owner = Owner(tmp_path / "state")
    sandboxes = [owner.create() for _ in range(3)]
    pids = [pid for sandbox in sandboxes for pid in (*descendants(sandbox.init_pid), sandbox.outer_pid)]
    owner.run(owner.backend.aclose())
    assert gone(pids)
    assert {sandbox.ended.kind for sandbox in sandboxes if sandbox.ended} == {ExitKind.CLOSED}
    owner.close()  # destroys them, which is still in order


def test_a_failed_create_says_why_and_leaves_nothing(owner, tmp_path):
    from stockade.policy import Mount

    before = held()
    mounts = (Mount(source=str(tmp_path / "missing"), target="/data"),)
    with pytest.raises(RuntimeError, match=r"open_tree .*missing: No such file"):
        owner.create(mounts=mounts)
    owner.run(asyncio.sleep(0.2))
    assert held() == before
    sandbox = owner.create()
    assert owner.exec(sandbox, ["/bin/true"]).exit.code == 0
    owner.destroy(sandbox)
