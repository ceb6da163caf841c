"""What is counted for metrics: by workers in closed words, by the pool beyond the life of a worker."""

from __future__ import annotations

import os
import signal
import ssl
from pathlib import Path

import pytest

from stockade.egress import COUNTED, Settings, StoreSettings, prepare_store
from tests.egress.netlab import NetLab
from tests.egress.proxy.harness import Worker
from tests.egress.proxy.sites import Sites, ask, eventually, policy
from tests.egress.proxy.test_pool import Scene, get, play


def counts(worker: Worker) -> dict[str, int]:
    """Return what a worker has counted beside its four fixed numbers."""
    told = worker.ask("stats")
    return {name: told[name] for name in told if name in COUNTED}


def test_decisions_and_handshakes_are_counted_by_kind_and_end(lab: NetLab, tmp_path: Path) -> None:
    with Sites(lab, tmp_path) as sites:
        sites.site("read.test")
        rollout = sites.attach()
        with sites.inside(rollout, "read.test") as client:
            assert ask(client, "read.test").status == 200
            assert ask(client, "read.test", method="POST", body=b"x").status == 403
        with rollout.connect() as client:
            assert client.connect("other.test").status == 403
        assert counts(sites.worker) == {
            "tunnel allowed": 1,
            "tunnel host_not_allowed": 1,
            "request allowed": 1,
            "request method_not_allowed": 1,
            "tls client done": 1,
            "tls upstream done": 1,
        }
        stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # it trusts nobody
        with pytest.raises(ssl.SSLError):
            sites.inside(rollout, "read.test", context=stranger)
        eventually(lambda: counts(sites.worker).get("tls client failed") == 1)
        told = sites.worker.ask("stats")
        assert set(told) - {"id", "ok", "rollouts", "connections", "queries", "faults"} <= set(COUNTED)


def test_what_comes_out_of_the_store_is_a_hit(lab: NetLab, tmp_path: Path) -> None:
    (tmp_path / "record").mkdir()
    fd = prepare_store(tmp_path / "store", os.getuid(), os.getgid())
    try:
        origin = lab.http("11.0.0.77")
        lab.add_host("kept.test", "11.0.0.77")
        settings = Settings(store=StoreSettings(1 << 20))
        with Sites(lab, tmp_path / "record", settings=settings, store=fd) as sites:
            rollout = sites.attach(policy("{host: kept.test, ports: [80]}", mode="record"))
            with rollout.connect() as client:
                for path in ("/a", "/b", "/a", "/a"):
                    assert client.get(f"http://kept.test{path}").status == 200
            assert origin.connections == 1
            told = counts(sites.worker)
            assert (told["store hit"], told["store miss"], told["request allowed"]) == (2, 2, 4)
    finally:
        os.close(fd)


def test_counts_survive_the_worker_and_bytes_the_rollout(lab: NetLab, tmp_path: Path) -> None:
    lab.http("11.0.0.5", 80)

    async def act(scene: Scene) -> None:
        rollout = await scene.attach()
        assert (await get(rollout)).status == 200
        first = await scene.pool.stats()
        assert first.counts == {"request allowed": 1}
        used = scene.pool.usage(rollout.rollout_id)
        assert (first.bytes_out, first.bytes_in) == (used.bytes_out, used.bytes_in) != (0, 0)
        os.kill(scene.pool.pids[0], signal.SIGKILL)
        assert (await get(rollout)).status == 200
        second = await scene.pool.stats()
        assert second.counts == {"request allowed": 2}
        assert second.queries >= first.queries
        await scene.pool.detach(rollout.rollout_id)
        last = await scene.pool.stats()
        assert (last.bytes_out, last.bytes_in) == (2 * first.bytes_out, 2 * first.bytes_in)
        assert (last.rollouts, last.restarts, last.counts) == (0, 1, second.counts)
        rollout.close()

    play(lab, tmp_path, act)
