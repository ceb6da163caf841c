"""The agent's side: workers that crash, rollouts that must not notice more than a closed connection."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from stockade.egress import EgressFault, EgressPool
from stockade.egress._pool import CRASHES
from stockade.egress._slot import host_addresses
from stockade.errors import RecordError
from stockade.events import Context, recover_head
from stockade.ids import new_rollout_id
from tests.egress.netlab import RESOLVER, WORKER_OWN, NetLab, Origin
from tests.egress.proxy import hellos
from tests.egress.proxy.harness import POLICY, Attached, Client, Reply, rules

URL = "http://plain.example.org/x"
HOST = "tunnel.example.org"
T = TypeVar("T")


@pytest.fixture(scope="module")
def origin(lab: NetLab) -> Origin:
    return lab.http("11.0.0.5", 80)


@pytest.fixture(scope="module")
def echo(lab: NetLab) -> Origin:
    return lab.echo("11.0.0.5", 443)


@dataclass
class Scene:
    """A pool, and what it called back."""

    pool: EgressPool
    folder: Path
    broken: list[str]
    faults: list[tuple[str, str]]

    async def attach(self, policy: str = POLICY) -> Attached:
        """Attach a fresh rollout."""
        rollout_id = new_rollout_id()
        listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        path = self.folder / f"{rollout_id}.egress.jsonl"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        attached = Attached(None, rollout_id, listener.getsockname(), path, listener, fd)  # type: ignore[arg-type]
        context = Context("run-test", rollout_id, "sha256:" + "0" * 64)
        await self.pool.attach(
            rollout_id,
            context=context,
            rules=rules(policy),
            listener=listener.fileno(),
            record=fd,
            record_path=path,
        )
        return attached


def play(lab: NetLab, folder: Path, act: Callable[[Scene], Awaitable[T]], **options: Any) -> T:
    """Run ``act`` with a pool in the lab."""

    @contextlib.asynccontextmanager
    async def scene() -> AsyncIterator[Scene]:
        broken: list[str] = []
        faults: list[tuple[str, str]] = []
        async with EgressPool(
            resolvers=[RESOLVER],
            own_addresses=lambda: [WORKER_OWN],
            prefix=lab.command([]),
            on_broken=lambda rollout_id, _why: broken.append(rollout_id),
            on_fault=lambda rollout_id, why: faults.append((rollout_id, why)),
            **{"workers": 1, **options},
        ) as pool:
            yield Scene(pool, folder, broken, faults)

    async def main() -> T:
        async with scene() as made:
            return await act(made)

    return asyncio.run(main())


async def get(rollout: Attached, url: str = URL) -> Reply:
    """GET through the pool without stopping its event loop."""

    def work() -> Reply:
        with rollout.connect() as client:
            return client.get(url)

    return await asyncio.to_thread(work)


@pytest.mark.promise("S3.2")
def test_rollouts_are_spread_and_keep_apart(lab: NetLab, tmp_path: Path, origin: Origin) -> None:
    async def act(scene: Scene) -> None:
        rollouts = [await scene.attach() for _ in range(4)]
        for rollout in rollouts:
            assert (await get(rollout)).status == 200
        stats = await scene.pool.stats()
        assert (stats.workers, stats.rollouts, stats.restarts) == (2, 4, 0)
        assert len(set(scene.pool.pids)) == 2
        for rollout in rollouts:
            head, usage = await scene.pool.detach(rollout.rollout_id)
            assert head.sealed
            assert head == recover_head(rollout.record)
            assert (usage.requests, usage.denied) == (1, 0)
            seal = rollout.events()[-1]
            assert (seal["kind"], seal["requests"], seal["requests_denied"]) == ("rollout.sealed", 1, 0)
            assert seal["bytes_out"] == usage.bytes_out > 0
            assert {event["rollout_id"] for event in rollout.events()} == {rollout.rollout_id}
            rollout.close()

    play(lab, tmp_path, act, workers=2)


@pytest.mark.promise("S3.10")
def test_a_crashed_worker_is_replaced_and_the_chain_goes_on(
    lab: NetLab, tmp_path: Path, origin: Origin, echo: Origin
) -> None:
    async def act(scene: Scene) -> None:
        rollout = await scene.attach()
        assert (await get(rollout)).status == 200
        tunnel = rollout.connect()
        hello = hellos.made(HOST.encode())
        assert (await asyncio.to_thread(tunnel.connect, HOST)).status == 200
        assert await asyncio.to_thread(tunnel.send(hello).take, len(hello)) == hello
        (pid,) = scene.pool.pids
        os.kill(pid, signal.SIGKILL)
        # A client that comes while no worker lives waits in the listener's queue.
        assert (await get(rollout)).status == 200
        assert await asyncio.to_thread(tunnel.rest) == b""
        tunnel.sock.close()
        assert scene.pool.pids != [pid]
        assert (await scene.pool.stats()).restarts == 1
        head, _ = await scene.pool.detach(rollout.rollout_id)
        events = rollout.events()
        assert [event["seq"] for event in events] == list(range(1, head.seq + 1))
        assert [later["prev"] for later in events[1:]] == [earlier["hash"] for earlier in events[:-1]]
        numbers = [event["connection_id"] for event in events if event["kind"] == "net.request"]
        assert len(set(numbers)) == 2
        assert not scene.faults
        rollout.close()

    play(lab, tmp_path, act)


def test_a_crash_does_not_refill_the_budget(lab: NetLab, tmp_path: Path, origin: Origin, echo: Origin) -> None:
    cap = 400_000
    policy = POLICY.rsplit("  limits:", 1)[0] + f"  limits: {{requests_per_minute: 6000, bytes_out: {cap}}}\n"

    def pour(client: Client, size: int) -> None:
        hello = hellos.made(HOST.encode())
        assert client.connect(HOST).status == 200
        client.send(hello)
        client.send(b"x" * size)
        client.take(size + len(hello))

    async def act(scene: Scene) -> None:
        rollout = await scene.attach(policy)
        with rollout.connect() as client:
            await asyncio.to_thread(pour, client, 300_000)
            client.send(b"y")
            await asyncio.sleep(1.3)  # the last report is in
            os.kill(scene.pool.pids[0], signal.SIGKILL)
        with rollout.connect() as client, pytest.raises((EOFError, OSError)):
            await asyncio.to_thread(pour, client, 300_000)
        usage = (await scene.pool.detach(rollout.rollout_id)).usage
        assert usage.bytes_out == cap
        rollout.close()

    play(lab, tmp_path, act)


def test_a_crash_right_after_much_was_spent_forgets_little(lab: NetLab, tmp_path: Path, echo: Origin) -> None:
    cap = 8 << 20
    policy = POLICY.rsplit("  limits:", 1)[0] + f"  limits: {{bytes_out: {cap}, bytes_in: {cap}}}\n"

    def pour(client: Client) -> int:
        hello = hellos.made(HOST.encode())
        assert client.connect(HOST).status == 200
        client.send(hello).take(len(hello))
        for _ in range(100):
            client.send(b"x" * 65536).take(65536)
        return len(hello) + 100 * 65536

    async def act(scene: Scene) -> None:
        rollout = await scene.attach(policy)
        with rollout.connect() as client:
            spent = await asyncio.to_thread(pour, client)
            os.kill(scene.pool.pids[0], signal.SIGKILL)
        usage = (await scene.pool.detach(rollout.rollout_id)).usage
        assert spent - usage.bytes_out < cap // 16 + (2 << 20)
        rollout.close()

    play(lab, tmp_path, act)


@pytest.mark.promise("S3.10")
def test_a_torn_line_is_cut_off_before_the_chain_goes_on(lab: NetLab, tmp_path: Path, origin: Origin) -> None:
    async def act(scene: Scene) -> None:
        rollout = await scene.attach()
        assert (await get(rollout)).status == 200
        os.kill(scene.pool.pids[0], signal.SIGKILL)
        os.write(rollout.record_fd, b'{"torn":')
        assert (await get(rollout)).status == 200
        await scene.pool.detach(rollout.rollout_id)
        events = rollout.events()
        assert [later["prev"] for later in events[1:]] == [earlier["hash"] for earlier in events[:-1]]
        rollout.close()

    play(lab, tmp_path, act)


def test_a_revoked_rollout_stays_revoked_after_a_crash(lab: NetLab, tmp_path: Path, origin: Origin) -> None:
    async def act(scene: Scene) -> None:
        rollout, other = await scene.attach(), await scene.attach()
        await scene.pool.revoke(rollout.rollout_id)
        os.kill(scene.pool.pids[0], signal.SIGKILL)
        assert (await get(rollout)).reason == "revoked"
        assert (await get(other)).status == 200
        for one in (rollout, other):
            await scene.pool.detach(one.rollout_id)
            one.close()

    play(lab, tmp_path, act)


@pytest.mark.promise("S6.4")
def test_revoke_all_cuts_every_tunnel_within_a_second(lab: NetLab, tmp_path: Path, echo: Origin) -> None:
    def open_tunnel(client: Client) -> None:
        assert client.connect(HOST).status == 200
        hello = hellos.made(HOST.encode())
        client.send(hello).take(len(hello))

    async def act(scene: Scene) -> None:
        rollouts = [await scene.attach() for _ in range(8)]
        clients = [rollout.connect() for rollout in rollouts for _ in range(4)]
        await asyncio.gather(*(asyncio.to_thread(open_tunnel, client) for client in clients))
        begin = time.monotonic()
        assert await scene.pool.revoke_all() == len(clients)
        for client in clients:
            assert await asyncio.to_thread(client.rest) == b""
        assert time.monotonic() - begin < 1
        for client in clients:
            client.sock.close()
        for rollout in rollouts:
            await scene.pool.detach(rollout.rollout_id)
            assert {event["reason"] for event in rollout.events("net.end")} == {"revoked"}
            rollout.close()

    play(lab, tmp_path, act, workers=2)


def test_a_stopped_worker_cannot_delay_a_revocation(lab: NetLab, tmp_path: Path, echo: Origin) -> None:
    async def act(scene: Scene) -> None:
        rollout = await scene.attach()
        with rollout.connect() as client:
            assert (await asyncio.to_thread(client.connect, HOST)).status == 200
            os.kill(scene.pool.pids[0], signal.SIGSTOP)
            begin = time.monotonic()
            await scene.pool.revoke(rollout.rollout_id)
            assert await asyncio.to_thread(client.rest) == b""
            assert time.monotonic() - begin < 1.5
        assert (await get(rollout)).reason == "revoked"
        await scene.pool.detach(rollout.rollout_id)
        rollout.close()

    play(lab, tmp_path, act)


def test_three_crashes_make_an_infrastructure_fault(lab: NetLab, tmp_path: Path, origin: Origin) -> None:
    async def act(scene: Scene) -> None:
        rollout = await scene.attach()
        for _ in range(CRASHES):
            deadline = time.monotonic() + 10
            while not (pids := scene.pool.pids) or not (await scene.pool.stats()).workers:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)
            os.kill(pids[0], signal.SIGKILL)
            while scene.pool.pids == pids and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
        while not scene.faults:
            await asyncio.sleep(0.02)
        assert scene.faults[0][0] == rollout.rollout_id
        with pytest.raises(EgressFault):
            await scene.pool.detach(rollout.rollout_id)
        rollout.listener.close()
        with pytest.raises(ConnectionRefusedError):
            rollout.connect()
        rollout.close()

    play(lab, tmp_path, act)


def test_a_record_that_was_tampered_with_is_not_gone_on_with(lab: NetLab, tmp_path: Path, origin: Origin) -> None:
    async def act(scene: Scene) -> None:
        rollout, other = await scene.attach(), await scene.attach()
        assert (await get(rollout)).status == 200
        lines = rollout.record.read_bytes()
        rollout.record.write_bytes(lines.replace(b'"severity":0', b'"severity":1'))
        os.kill(scene.pool.pids[0], signal.SIGKILL)
        assert (await get(other)).status == 200
        assert [rollout_id for rollout_id, _ in scene.faults] == [rollout.rollout_id]
        await scene.pool.detach(other.rollout_id)
        rollout.close()
        other.close()

    play(lab, tmp_path, act)


def test_detach_refuses_a_record_that_is_not_the_workers(lab: NetLab, tmp_path: Path, origin: Origin) -> None:
    async def act(scene: Scene) -> None:
        rollout = await scene.attach()
        assert (await get(rollout)).status == 200
        rollout.wait("net.end")
        whole = rollout.record.read_bytes()
        os.truncate(rollout.record, whole.index(b"\n") + 1)
        with pytest.raises(RecordError, match="not what its worker wrote"):
            await scene.pool.detach(rollout.rollout_id)
        rollout.close()

    play(lab, tmp_path, act)


def test_attach_refuses_a_record_that_is_no_chain(lab: NetLab, tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        path = tmp_path / "junk"
        path.write_bytes(b"junk\n")
        listener = socket.create_server(("127.0.0.1", 0))
        fd = os.open(path, os.O_RDWR | os.O_APPEND)
        context = Context("run-test", "ep_x", "d")
        with pytest.raises(RecordError):
            await scene.pool.attach(
                "ep_x", context=context, rules=rules(), listener=listener.fileno(), record=fd, record_path=path
            )
        with pytest.raises(EgressFault):
            scene.pool.usage("ep_x")
        listener.close()
        os.close(fd)

    play(lab, tmp_path, act)


def test_a_pool_that_cannot_start_says_so(lab: NetLab, tmp_path: Path) -> None:
    async def main() -> None:
        pool = EgressPool(resolvers=["not an address"], prefix=lab.command([]))
        with pytest.raises(EgressFault, match="resolver"):
            await pool.start()
        pool = EgressPool(resolvers=[], prefix=["/bin/false"])
        with pytest.raises(EgressFault):
            await pool.start()

    asyncio.run(main())


def test_the_workers_environment_holds_nothing_of_ours(
    lab: NetLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")

    async def act(scene: Scene) -> None:
        for pid in scene.pool.pids:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            names = {entry.split(b"=")[0] for entry in environment.split(b"\0") if entry}
            assert names <= {b"PYTHONPATH", b"PYTHONDONTWRITEBYTECODE", b"LC_CTYPE"}
            assert b"s3cret" not in environment

    play(lab, tmp_path, act)


def test_own_addresses_are_this_hosts() -> None:
    found = host_addresses()
    assert "127.0.0.1" in found
    assert not any("%" in address for address in found)
