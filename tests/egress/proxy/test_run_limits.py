"""Limits of a whole run, shared by rollouts of several workers (case 105)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from stockade.egress import EgressPool, Settings
from stockade.egress.gate import RuleLimits
from tests.egress.netlab import RESOLVER, NetLab, Origin
from tests.egress.proxy.harness import Attached, Client
from tests.egress.proxy.sites import IP, LIMITS, policy
from tests.egress.proxy.test_ledger import attach, killed
from tests.egress.proxy.test_pool import play

T = TypeVar("T")
POLICY = policy(
    "{host: plain.test, methods: [GET], ports: [80]}", "{host: raw.test, tcp: true, ports: [22]}", limits=LIMITS
)
URL = "http://plain.test/x"


@pytest.fixture(scope="module")
def plain(lab: NetLab) -> Origin:
    lab.add_host("plain.test", IP)
    lab.add_host("raw.test", IP)
    return lab.http(IP, 80)


@pytest.fixture(scope="module")
def echo(lab: NetLab, plain: Origin) -> Origin:
    return lab.echo(IP, 22)


def run(
    lab: NetLab, folder: Path, limits: RuleLimits, act: Callable[[EgressPool], Awaitable[T]], workers: int = 2
) -> T:
    settings = Settings(resolvers=(RESOLVER,), run_limits=limits)
    return play(lab, folder, lambda scene: act(scene.pool), settings=settings, workers=workers)


def get(rollout: Attached) -> Any:
    with rollout.connect() as client:
        return client.get(URL)


async def rollouts(pool: EgressPool, folder: Path, count: int) -> list[Attached]:
    return [await attach(pool, folder, POLICY) for _ in range(count)]


async def leave(pool: EgressPool, attached: list[Attached]) -> None:
    for one in attached:
        await pool.detach(one.rollout_id)
        one.close()


def test_egress_case_105_requests_are_exact_over_two_workers(lab: NetLab, plain: Origin, tmp_path: Path) -> None:
    """As many as the bucket holds and what it gained meanwhile, whoever asks at the same time."""
    rate = 20

    async def act(pool: EgressPool) -> None:
        attached = await rollouts(pool, tmp_path, 4)
        assert len(set(pool.pids)) == 2
        begin = time.monotonic()

        def hammer(rollout: Attached) -> list[Any]:
            return [get(rollout) for _ in range(10)]

        answers = await asyncio.gather(*(asyncio.to_thread(hammer, one) for one in attached for _ in range(2)))
        passed_s = time.monotonic() - begin
        replies = [reply for batch in answers for reply in batch]
        good = sum(reply.status == 200 for reply in replies)
        assert rate <= good <= rate + int(passed_s * rate / 60) + 1
        assert {reply.status for reply in replies} == {200, 429}
        refused = next(reply for reply in replies if reply.status == 429)
        assert refused.reason == "rate_limited"
        assert b"\r\nRetry-After: " in refused.head
        used = [pool.usage(one.rollout_id) for one in attached]
        assert sum(one.requests for one in used) == 80
        assert sum(one.denied for one in used) == 80 - good
        await leave(pool, attached)

    run(lab, tmp_path, RuleLimits(requests_per_minute=rate), act)


def test_egress_case_105_a_crash_refills_nothing(lab: NetLab, plain: Origin, tmp_path: Path) -> None:
    async def act(pool: EgressPool) -> None:
        (rollout,) = await rollouts(pool, tmp_path, 1)
        begin = time.monotonic()
        statuses = [(await asyncio.to_thread(get, rollout)).status for _ in range(3)]
        await killed(pool)
        statuses += [(await asyncio.to_thread(get, rollout)).status for _ in range(4)]
        gained = int((time.monotonic() - begin) * 4 / 60) + 1
        assert 4 <= statuses.count(200) <= 4 + gained
        assert 429 in statuses
        await leave(pool, [rollout])

    run(lab, tmp_path, RuleLimits(requests_per_minute=4), act, workers=1)


def test_egress_case_105_connections_are_counted_over_two_workers(
    lab: NetLab, plain: Origin, echo: Origin, tmp_path: Path
) -> None:
    async def act(pool: EgressPool) -> None:
        attached = await rollouts(pool, tmp_path, 4)

        def hold(rollout: Attached) -> tuple[Client, int]:
            client = rollout.connect()
            return client, client.connect("raw.test", 22).status

        held = [await asyncio.to_thread(hold, attached[number % 4]) for number in range(7)]
        assert [status for _, status in held] == [200] * 5 + [429] * 2
        for client, _ in held[:2] + held[5:]:
            client.sock.close()
        await asyncio.to_thread(attached[0].wait, "net.end", 1)
        await asyncio.to_thread(attached[1].wait, "net.end", 1)
        held = held[2:5] + [await asyncio.to_thread(hold, attached[number % 4]) for number in range(3)]
        assert [status for _, status in held[3:]] == [200, 200, 429]
        for client, _ in held:
            client.sock.close()
        await leave(pool, attached)

    run(lab, tmp_path, RuleLimits(connections=5), act)


def test_egress_case_105_the_connections_of_a_dead_worker_are_given_back(
    lab: NetLab, plain: Origin, echo: Origin, tmp_path: Path
) -> None:
    async def act(pool: EgressPool) -> None:
        attached = await rollouts(pool, tmp_path, 2)

        def hold(rollout: Attached) -> tuple[Client, int]:
            client = rollout.connect()
            return client, client.connect("raw.test", 22).status

        first = [await asyncio.to_thread(hold, one) for one in attached]
        pids = list(pool.pids)
        os.kill(pids[0], signal.SIGKILL)
        while pids[0] in pool.pids or (await pool.stats()).workers < 2:
            await asyncio.sleep(0.02)
        second = [await asyncio.to_thread(hold, attached[0]) for _ in range(2)]
        assert [status for _, status in (*first, *second)] == [200, 200, 200, 429]
        for client, _ in (*first, *second):
            client.sock.close()
        await leave(pool, attached)

    run(lab, tmp_path, RuleLimits(connections=2), act)


@pytest.mark.parametrize("up", [True, False])
def test_egress_case_105_bytes_are_shared_by_all(
    *, up: bool, lab: NetLab, plain: Origin, echo: Origin, tmp_path: Path
) -> None:
    """Each worker may be in the middle of one read when another takes the last byte; none goes beyond that."""
    cap = 2_000_000

    def pour(rollout: Attached) -> None:
        with rollout.connect() as client, contextlib.suppress(OSError, EOFError):
            assert client.connect("raw.test", 22).status == 200
            for _ in range(60):
                client.send(b"x" * 65536).take(65536)

    async def act(pool: EgressPool) -> None:
        attached = await rollouts(pool, tmp_path, 4)
        await asyncio.gather(*(asyncio.to_thread(pour, one) for one in attached))
        ends = [await asyncio.to_thread(one.last) for one in attached]
        assert {end["reason"] for end in ends} == {"bytes_out_exceeded" if up else "bytes_in_exceeded"}
        used = [pool.usage(one.rollout_id) for one in attached]
        assert cap <= sum(one.bytes_out if up else one.bytes_in for one in used) <= cap + (256 << 10)
        await asyncio.to_thread(pour, attached[0])
        assert attached[0].wait("net.end", 2)[-1]["bytes_out" if up else "bytes_in"] == 0
        await leave(pool, attached)

    run(lab, tmp_path, RuleLimits(bytes_out=cap) if up else RuleLimits(bytes_in=cap), act)


def test_without_limits_of_the_run_rollouts_are_on_their_own(lab: NetLab, plain: Origin, tmp_path: Path) -> None:
    async def act(pool: EgressPool) -> None:
        attached = await rollouts(pool, tmp_path, 2)
        for one in attached:
            assert [(await asyncio.to_thread(get, one)).status for _ in range(5)] == [200] * 5
        await leave(pool, attached)

    run(lab, tmp_path, RuleLimits(), act)
