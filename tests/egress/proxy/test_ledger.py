"""What outlives a worker: budgets to the byte, limits of rules, and which name each fake address means."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest

from stockade.egress import EgressPool, Role
from stockade.egress._ledger import Ledger, LedgerFault, make_ledger, used
from stockade.egress.gate import BUDGET_CELLS
from stockade.events import Context
from stockade.ids import new_rollout_id
from tests.egress.netlab import NetLab, Origin, response, serve_sink
from tests.egress.proxy.guestnet import GuestNet
from tests.egress.proxy.harness import Attached, Client, Worker, rules
from tests.egress.proxy.sites import IP, LIMITS, Sites, ask, policy
from tests.egress.proxy.test_dns_inside import addresses, question
from tests.egress.proxy.test_dns_inside import ask as ask_name
from tests.egress.proxy.test_pool import play

T = TypeVar("T")
POLICY = policy(
    "{host: plain.test, methods: [GET, POST], ports: [80]}",
    "{host: read.test, methods: [GET, POST]}",
    "{host: raw.test, tcp: true, ports: [22]}",
    '{host: "*.wild.test"}',
    limits=LIMITS,
)
PIPE_BYTES = 1 << 20
"""More than lies in the worker's pipes and buffers of one direction at any time."""


@pytest.fixture(scope="module")
def sites(lab: NetLab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    made = Sites(lab, tmp_path_factory.mktemp("record"), worker=False)
    lab.add_host("raw.test", IP)
    lab.add_host("plain.test", IP)
    yield made
    made.close()


@pytest.fixture(scope="module")
def plain(lab: NetLab) -> Origin:
    return lab.http(IP, 80)


@pytest.fixture
def guest() -> Iterator[GuestNet]:
    with GuestNet() as made:
        yield made


async def attach(
    pool: EgressPool, folder: Path, text: str = POLICY, *, sockets: Mapping[int, Role] | None = None
) -> Attached:
    """Attach a fresh rollout that may be looked into."""
    rollout_id = new_rollout_id()
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    path = folder / f"{rollout_id}.egress.jsonl"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    attached = Attached(None, rollout_id, listener.getsockname(), path, listener, fd)  # type: ignore[arg-type]
    await pool.attach(
        rollout_id,
        context=Context("run-test", rollout_id, "sha256:" + "0" * 64),
        rules=rules(text, inspection=True),
        sockets={listener.fileno(): Role.PROXY, **(sockets or {})},
        record=fd,
        record_path=path,
    )
    return attached


def run(sites: Sites, folder: Path, act: Callable[[EgressPool], Awaitable[T]], **options: Any) -> T:
    """Run ``act`` with a pool that may look into TLS."""
    return play(sites.lab, folder, lambda scene: act(scene.pool), equipment=sites.equipment, **options)


async def killed(pool: EgressPool) -> None:
    """Kill the only worker, and wait for its heir."""
    (pid,) = pool.pids
    os.kill(pid, signal.SIGKILL)
    for _ in range(1000):
        await asyncio.sleep(0.02)
        if pool.pids not in ([], [pid]) and (await pool.stats()).workers:
            return
    raise AssertionError("no heir")


@pytest.mark.promise("S3.10")
def test_a_quiet_moment_is_counted_exactly(sites: Sites, plain: Origin, tmp_path: Path) -> None:
    echo = sites.lab.echo(IP, 22)

    def pour(rollout: Attached) -> Client:
        client = rollout.connect()
        assert client.connect("raw.test", 22).status == 200
        for _ in range(30):
            client.send(b"x" * 65536).take(65536)
        return client

    async def act(pool: EgressPool) -> None:
        rollout = await attach(pool, tmp_path)
        client = await asyncio.to_thread(pour, rollout)
        before = pool.usage(rollout.rollout_id)
        assert (before.bytes_out, before.bytes_in) == (30 * 65536, 30 * 65536)
        await killed(pool)
        assert await asyncio.to_thread(client.rest) == b""
        client.sock.close()
        assert pool.usage(rollout.rollout_id) == before
        again = await asyncio.to_thread(pour, rollout)
        again.sock.close()
        usage = (await pool.detach(rollout.rollout_id)).usage
        assert (usage.bytes_out, usage.bytes_in, usage.requests) == (60 * 65536, 60 * 65536, 2)
        rollout.close()

    run(sites, tmp_path, act)
    echo.close()


@pytest.mark.promise("S3.10")
def test_killed_in_the_middle_of_an_upload_nothing_left_uncounted(sites: Sites, tmp_path: Path) -> None:
    """What the site has got is counted, and what is counted beyond it was under way."""
    sink = sites.lab.origin(IP, 22, serve_sink)

    def pour(rollout: Attached) -> None:
        with rollout.connect() as client, contextlib.suppress(OSError):
            assert client.connect("raw.test", 22).status == 200
            while True:
                client.send(b"x" * 65536)

    async def act(pool: EgressPool) -> None:
        rollout = await attach(pool, tmp_path)
        uploads = [asyncio.create_task(asyncio.to_thread(pour, rollout)) for _ in range(2)]
        while len(sink.data) < 8 << 20:
            await asyncio.sleep(0.01)
        await killed(pool)
        await asyncio.gather(*uploads)
        await asyncio.sleep(0.2)  # what was in the kernel's buffers has arrived
        usage = (await pool.detach(rollout.rollout_id)).usage
        assert 0 <= usage.bytes_out - len(sink.data) <= 2 * PIPE_BYTES
        rollout.close()

    run(sites, tmp_path, act)
    sink.close()


@pytest.mark.promise("S3.10")
def test_killed_in_the_middle_of_an_inspected_download(sites: Sites, tmp_path: Path) -> None:
    """What the client has got is counted; the heir goes on from there and ends at the cap."""
    site = sites.site("read.test")
    site.respond = lambda _request: response(bytes(6 << 20))
    cap = 16 << 20
    text = POLICY.replace("bytes_in: 256 MiB", f"bytes_in: {cap}")

    def fetch(rollout: Attached, got: list[int], enough: threading.Event) -> None:
        with contextlib.suppress(OSError, EOFError), sites.inside(rollout, "read.test") as client:
            for _ in range(8):
                client.send(b"GET /x HTTP/1.1\r\nHost: read.test\r\n\r\n")
                left = 6 << 20
                while left > 0:
                    piece = client.sock.recv(1 << 16)
                    if not piece:
                        return
                    got[0] += len(piece)
                    left -= len(piece)
                    if got[0] > 8 << 20:
                        enough.set()

    async def act(pool: EgressPool) -> None:
        rollout = await attach(pool, tmp_path, text)
        got, enough = [0], threading.Event()
        download = asyncio.create_task(asyncio.to_thread(fetch, rollout, got, enough))
        await asyncio.to_thread(enough.wait, 30)
        await killed(pool)
        await download
        counted = pool.usage(rollout.rollout_id).bytes_in
        assert 0 <= counted - got[0] <= PIPE_BYTES
        rest, more = [0], threading.Event()
        await asyncio.to_thread(fetch, rollout, rest, more)
        usage = (await pool.detach(rollout.rollout_id)).usage
        assert usage.bytes_in == cap
        assert got[0] + rest[0] <= cap
        rollout.close()

    run(sites, tmp_path, act)
    site.close()


def test_requests_and_limits_of_rules_go_on(sites: Sites, plain: Origin, tmp_path: Path) -> None:
    text = policy(
        "{host: plain.test, methods: [GET], ports: [80], limits: {requests_per_minute: 4}}",
        "{host: raw.test, tcp: true, ports: [22], limits: {bytes_out: 1000, connections: 1}}",
        limits="{requests_per_minute: 12, bytes_out: 1 MiB}",
    )
    echo = sites.lab.echo(IP, 22)

    def get(rollout: Attached) -> int:
        with rollout.connect() as client:
            return client.get("http://plain.test/x").status

    def pour(rollout: Attached, size: int) -> int:
        with rollout.connect() as client, contextlib.suppress(OSError, EOFError):
            reply = client.connect("raw.test", 22)
            if reply.status == 200:
                client.send(b"x" * size)
                return len(client.rest() if size > 600 else client.take(size))
            return -reply.status
        return 0

    async def act(pool: EgressPool) -> None:
        rollout = await attach(pool, tmp_path, text)
        assert [await asyncio.to_thread(get, rollout) for _ in range(3)] == [200] * 3
        assert await asyncio.to_thread(pour, rollout, 600) == 600
        hanging = rollout.connect()
        await asyncio.to_thread(hanging.connect, "raw.test", 22)
        await killed(pool)
        hanging.sock.close()
        assert [await asyncio.to_thread(get, rollout) for _ in range(2)] == [200, 429], "the rule's own"
        assert await asyncio.to_thread(pour, rollout, 601) <= 400, "and the connection of the dead is given back"
        usage = pool.usage(rollout.rollout_id)
        statuses = [await asyncio.to_thread(get, rollout) for _ in range(8)]
        assert set(statuses) == {429}
        assert pool.usage(rollout.rollout_id).requests == usage.requests + 8
        await pool.detach(rollout.rollout_id)
        rollout.close()

    run(sites, tmp_path, act)
    echo.close()


@pytest.mark.promise("S3.10")
def test_fake_addresses_mean_the_same_names_after_a_crash(
    sites: Sites, plain: Origin, guest: GuestNet, tmp_path: Path
) -> None:
    plain.received.clear()
    names = ["plain.test", "a.wild.test", "raw.test", "b.wild.test"]

    async def act(pool: EgressPool) -> None:
        rollout = await attach(pool, tmp_path, sockets=guest.sockets)

        def learn(some: list[str]) -> list[str]:
            return [addresses(ask_name(guest, question(name)))[0] for name in some]

        def fetch(address: str) -> bytes:
            with Client(guest.connect(address, 80)) as client:
                body: bytes = ask(client, "plain.test").body
                return body

        before = await asyncio.to_thread(learn, names)
        assert len(set(before)) == 4
        await killed(pool)
        # Connected to before anybody asks again: the client has the address in its own cache.
        assert await asyncio.to_thread(fetch, before[0]) == b"hello"
        assert await asyncio.to_thread(learn, names[::-1]) == before[::-1]
        (fresh,) = await asyncio.to_thread(learn, ["c.wild.test"])
        assert fresh not in before
        await killed(pool)
        assert await asyncio.to_thread(learn, [*names, "c.wild.test"]) == [*before, fresh]
        await pool.detach(rollout.rollout_id)
        assert plain.received[0].header("host") == [b"plain.test"]
        rollout.close()

    run(sites, tmp_path, act)


# ---- memory that is not what it must be


@pytest.mark.parametrize(
    "cells", [(1, -1, 0, 0, 0, 0, 0, 0), (1, 0, 0, -5, 0, 0, 0, 0), (2, 0, 0, 0, 0, 0, 0, 0), (0, 0, 0, 9, 0, 0, 0, 0)]
)
def test_a_damaged_ledger_refills_no_budget(cells: tuple[int, ...], worker: Worker) -> None:
    """The worker will not go on with it; and what the agent reads of it is never negative."""
    compiled = rules(POLICY)
    attached = worker.attach(POLICY)
    ledger = make_ledger(names=compiled.limits.names)
    os.pwrite(ledger, struct.pack(f"={BUDGET_CELLS}q", *cells), 0)
    attached.ledger, kept = ledger, attached.ledger
    os.close(kept)
    other = new_rollout_id()
    answer = worker.ask_attach(attached, compiled, {attached.listener.fileno(): Role.PROXY}, rollout_id=other)
    assert "not the cells of an account" in answer["error"]
    assert min(used(ledger, accounts=1, names=compiled.limits.names)) >= 0


def test_names_that_are_none_are_refused(worker: Worker) -> None:
    compiled = rules(POLICY)
    attached = worker.attach(POLICY)
    for raw in (b"\x09bad\x00name!", b"\x08127.0.0.1"[:1] + b"127.0.0.1"[:8], b"\xff" + b"a" * 255):
        ledger = make_ledger(names=compiled.limits.names)
        os.pwrite(ledger, raw, os.fstat(ledger).st_size - compiled.limits.names * 256)
        os.close(attached.ledger)
        attached.ledger = ledger
        other = new_rollout_id()
        answer = worker.ask_attach(attached, compiled, {attached.listener.fileno(): Role.PROXY}, rollout_id=other)
        assert "in the ledger" in answer["error"], answer


def test_a_ledger_cannot_be_cut_off_under_the_agents_feet() -> None:
    ledger = make_ledger(accounts=2, names=3)
    for change in (lambda: os.ftruncate(ledger, 0), lambda: os.ftruncate(ledger, 1 << 20)):
        with pytest.raises(PermissionError):
            change()
    plain = os.memfd_create("not-sealed")
    for fd, names in ((plain, 3), (ledger, 4)):
        with pytest.raises(LedgerFault):
            Ledger(fd, accounts=2, names=names)
    os.close(plain)
    os.close(ledger)


def test_usage_is_there_while_the_worker_hangs(sites: Sites, plain: Origin, tmp_path: Path) -> None:
    """The agent reads it out of memory; nobody need answer."""

    async def act(pool: EgressPool) -> None:
        rollout = await attach(pool, tmp_path)

        def get() -> int:
            with rollout.connect() as client:
                return client.get("http://plain.test/x").status

        assert await asyncio.to_thread(get) == 200
        (pid,) = pool.pids
        os.kill(pid, signal.SIGSTOP)
        usage = pool.usage(rollout.rollout_id)
        os.kill(pid, signal.SIGCONT)
        assert (usage.requests, usage.denied) == (1, 0)
        assert usage.bytes_out == len(plain.received[-1].head)
        await pool.detach(rollout.rollout_id)
        rollout.close()

    run(sites, tmp_path, act)
