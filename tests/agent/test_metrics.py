"""What a Prometheus server reads of a run: counts that never go back, labels out of closed lists, and only where it may."""

from __future__ import annotations

import asyncio
import socket
import stat
import sys
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from stockade.agent import exposition, read_metrics
from stockade.agent._metrics import open_metrics
from stockade.client import Run, RunOptions
from stockade.egress import COUNTED, PoolStats
from stockade.egress._slot import Slot, summed
from stockade.egress.gate import Reason
from stockade.errors import ConfigError, NodeError
from stockade.runs import state_dir
from tests.agents import SMALL, events_of, write_policy

pytestmark = pytest.mark.anyio

POLICY = SMALL + "egress: {allow: [{host: allowed.example, methods: [GET]}]}\n"
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(text: str | bytes) -> Samples:
    """Return the values of a text by name and labels."""
    plain = text.decode() if isinstance(text, bytes) else text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(plain)
        for sample in family.samples
    }


def stats(**changed: object) -> PoolStats:
    fields = dict.fromkeys(("workers", "rollouts", "connections", "queries", "faults", "restarts"), 0)
    return PoolStats(**{**fields, "landlock": "abi-7", "seccomp": "sha256:" + "0" * 64, **changed})  # type: ignore[arg-type]


def decisions(found: Samples) -> dict[tuple[str, str], float]:
    table = {}
    for (name, labels), value in found.items():
        if name == "stockade_egress_decisions_total":
            words = dict(labels)
            table[words["kind"], words["reason"]] = value
    return table


# ---- the text


def test_every_count_has_its_place():
    counts = {name: number for number, name in enumerate(COUNTED, 1)}
    found = samples(exposition(stats(workers=2, queries=7, bytes_out=11, bytes_in=13, counts=counts), "run-1"))
    assert found["stockade_egress_workers", ()] == 2
    assert found["stockade_egress_dns_queries_total", ()] == 7
    assert found["stockade_egress_bytes_total", (("direction", "out"),)] == 11
    assert found["stockade_egress_bytes_total", (("direction", "in"),)] == 13
    assert decisions(found)["request", "allowed"] == counts["request allowed"]
    assert len(decisions(found)) == 4 * len(Reason)
    hit = found["stockade_egress_store_lookups_total", (("result", "hit"),)]
    assert hit == counts["store hit"]
    done = found["stockade_egress_tls_handshakes_total", (("result", "done"), ("side", "client"))]
    assert done == counts["tls client done"]
    assert all(value in found.values() for value in counts.values())
    info = next(labels for (name, labels) in found if name == "stockade_egress_info")
    assert dict(info) == {"run_id": "run-1", "landlock": "abi-7", "seccomp": "sha256:" + "0" * 64}


def test_an_idle_pool_has_series_that_are_zero_and_no_decisions():
    found = samples(exposition(stats(), "run-1"))
    assert decisions(found) == {}
    assert found["stockade_egress_store_lookups_total", (("result", "miss"),)] == 0
    assert found["stockade_egress_worker_restarts_total", ()] == 0


WORDS = st.one_of(st.sampled_from(sorted(COUNTED)), st.text(max_size=30))


@given(
    st.dictionaries(WORDS, st.one_of(st.integers(-5, 1 << 70), st.text(max_size=5), st.booleans(), st.none())),
    st.text(max_size=80),
)
def test_no_label_is_what_a_worker_makes_up(answer: dict[str, object], level: str):
    slot = Slot(landlock=level, seccomp=level)
    slot.ready.set()
    text = exposition(summed([slot], [answer], restarts=0), "run-1")
    usual = {word for counted in COUNTED.values() for word in counted.labels} | {"run-1", "unknown", "in", "out"}
    for _, labels in samples(text):
        for name, value in labels:
            assert value in usual or name in ("landlock", "seccomp")
            assert value.isascii()
            assert "\n" not in value
    assert all(value >= 0 for value in samples(text).values())


@given(st.lists(st.dictionaries(st.sampled_from(["queries", "faults", *COUNTED][:9]), st.integers(0, 9)), max_size=9))
def test_counts_never_go_back_whatever_a_worker_says_and_however_often_it_ends(answers: list[dict[str, int]]):
    slot, before = Slot(), 0
    for number, answer in enumerate(answers):
        now = summed([slot], [answer], restarts=0)
        total = now.queries + now.faults + sum(now.counts.values())
        assert total >= before
        before = total
        if number % 3 == 2:
            slot.succeed()


def test_without_its_library_one_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    for ask in (lambda: exposition(stats(), "run-1"), lambda: open_metrics("127.0.0.1:0")):
        with pytest.raises(NodeError, match="need prometheus-client") as caught:
            ask()
        assert "stockade[metrics]" in str(caught.value.hint)


# ---- where it is read


@pytest.mark.parametrize(
    "text",
    [
        "",
        "9464",
        "localhost:9464",
        "127.0.0.1",
        "127.0.0.1:",
        "127.0.0.1:x",
        "127.0.0.1:65536",
        "1.2.3:9",
        "[::1:9]",
        "::1:9",
    ],
)
def test_what_is_no_address(text: str):
    with pytest.raises(ConfigError, match="not an address"):
        open_metrics(text)


@pytest.mark.parametrize("text", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0"])
def test_only_loopback_unless_told_otherwise(text: str):
    with pytest.raises(ConfigError, match="reached from elsewhere") as caught:
        open_metrics(text)
    assert "--unsafe-metrics-anywhere" in str(caught.value.hint)


def test_a_port_that_is_taken_is_named():
    with open_metrics("127.0.0.1:0") as first, pytest.raises(ConfigError, match="in use"):
        open_metrics(f"127.0.0.1:{first.getsockname()[1]}")
    with open_metrics("0.0.0.0:0", anywhere=True) as sock:
        assert sock.getsockname()[0] == "0.0.0.0"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


async def test_a_live_run_is_read_on_loopback_and_on_its_own_socket(tmp_path: Path):
    port = free_port()
    options = RunOptions(policy=write_policy(tmp_path, POLICY), runs=tmp_path / "runs", metrics=f"127.0.0.1:{port}")
    script = (
        "import urllib.request as u\n"
        "for url in ('http://denied.example/x', 'http://denied.example/y'):\n"
        "    try: u.urlopen(url)\n"
        "    except OSError: pass\n"
    )
    async with Run(options) as run, run.rollout() as rollout:
        await rollout.exec(["python3", "-c", script])
        async with httpx.AsyncClient(trust_env=False) as client:
            answer = await client.get(f"http://127.0.0.1:{port}/metrics")
            assert (await client.get(f"http://127.0.0.1:{port}/episodes")).status_code == 404
            assert (await client.post(f"http://127.0.0.1:{port}/metrics")).status_code == 405
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        found = samples(answer.text)
        assert decisions(found) == {("request", "host_not_allowed"): 2}
        assert found["stockade_egress_rollouts", ()] == 1
        assert "denied.example" not in answer.text
        card = state_dir() / "agents" / f"{run.run_id}.json"
        assert stat.S_IMODE(card.stat().st_mode) == 0o600
        again = await asyncio.to_thread(read_metrics, run.run_id)
        assert decisions(samples(again)) == decisions(found)
        # The token of the metrics opens nothing else, and the broker's opens no metrics.
        token = card.read_text().split('"token": "')[1].split('"')[0]
        await _only_metrics(run, token)
    assert not card.exists()
    with pytest.raises(NodeError, match="no agent of run"):
        read_metrics(run.run_id)
    [start] = events_of(run.directory, "run.start")
    assert start["unsafe"] == []


async def _only_metrics(run: Run, token: str) -> None:
    from stockade.client._broker import AUTH_HEADER

    transport = httpx.AsyncHTTPTransport(uds=run.environment["STOCKADE_BROKER_SOCKET"])
    async with httpx.AsyncClient(transport=transport, base_url="http://agent", trust_env=False) as client:
        assert (await client.get("/metrics", headers={AUTH_HEADER: token})).status_code == 200
        assert (await client.get("/health", headers={AUTH_HEADER: token})).status_code == 401
        broker = run.environment["STOCKADE_BROKER_TOKEN"]
        assert (await client.get("/health", headers={AUTH_HEADER: broker})).status_code == 200
        for headers in ({}, {AUTH_HEADER: broker}):
            assert (await client.get("/metrics", headers=headers)).status_code == 401


async def test_metrics_for_everybody_are_a_dangerous_option_on_record(tmp_path: Path):
    where = f"0.0.0.0:{free_port()}"
    options = RunOptions(policy=write_policy(tmp_path, POLICY), runs=tmp_path / "runs", metrics=where)
    with pytest.raises(ConfigError, match="reached from elsewhere"):
        await Run(options).start()
    assert not (tmp_path / "runs").exists()
    opened = RunOptions(options.policy, options.runs, metrics=where, unsafe_metrics_anywhere=True)
    async with Run(opened) as run:
        pass
    [start] = events_of(run.directory, "run.start")
    assert start["unsafe"] == [f"unsafe_metrics_anywhere {where}"]


async def test_a_card_of_an_agent_that_was_killed_is_no_agent(tmp_path: Path):
    async with Run(RunOptions(policy=write_policy(tmp_path, POLICY), runs=tmp_path / "runs")) as run:
        card = state_dir() / "agents" / f"{run.run_id}.json"
        kept = card.read_bytes()
    card.write_bytes(kept)
    try:
        with pytest.raises(NodeError, match="no agent of run"):
            read_metrics(run.run_id)
        card.write_bytes(b"nonsense")
        with pytest.raises(NodeError, match="cannot be read"):
            read_metrics(run.run_id)
    finally:
        card.unlink()
