"""The Python API: the README's example, the façade without async, and errors that say whose fault it was."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import stockade
from stockade.client import BrokerClient, Peer
from stockade.errors import AgentGone, BrokerError
from tests.agents import PLAIN, assert_sealed, events_of, open_run, write_policy
from tests.support import ROOT

pytestmark = pytest.mark.anyio


def test_the_readme_example_runs_as_it_stands(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    write_policy(tmp_path, PLAIN)
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "src"), **_state()}
    done = subprocess.run(
        [sys.executable, "-c", example], cwd=tmp_path, capture_output=True, timeout=100, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    assert b"exited b'45\\n'" in done.stdout


def _state() -> dict[str, str]:
    import os

    return {name: os.environ[name] for name in ("STOCKADE_STATE", "TMPDIR", "HOME")}


def test_without_async(tmp_path: Path) -> None:
    with stockade.connect_sync(write_policy(tmp_path), runs=tmp_path / "runs") as run:
        with run.rollout(task_id="sync", files={"/workspace/a": b"1"}) as rollout:
            rollout.write_file("/workspace/b", b"2")
            rollout.put_dir("/workspace/d", {"c": b"3"})
            reply = rollout.exec(["sh", "-c", "cat a b d/c; cat"], stdin=b"4")
            assert (reply.stdout, reply.return_code, reply.exit) == (b"1234", 0, "exited")
            assert rollout.read_file("/workspace/b") == b"2"
            assert set(rollout.get_dir("/workspace").files) == {"a", "b", "d/c"}
            assert rollout.close() == rollout.close()
        directory = run.directory
    assert_sealed(directory)
    with pytest.raises(RuntimeError, match="with block"):
        run.rollout()


def test_without_async_an_error_of_the_start_is_raised(tmp_path: Path) -> None:
    with pytest.raises(stockade.PolicyError, match=r"nope\.yaml"), stockade.connect_sync(tmp_path / "nope.yaml"):
        pytest.fail("the run started")


async def test_a_reply_has_no_truth_value(broker_client: BrokerClient) -> None:
    async with await broker_client.create() as rollout:
        reply = await rollout.exec(["false"])
        with pytest.raises(TypeError, match="no truth value"):
            bool(reply)
        with pytest.raises(ValueError, match="either argv or command"):
            await rollout.exec(["true"], command="true")


async def test_bytes_survive_both_ways(broker_client: BrokerClient) -> None:
    data = bytes(range(256)) * 4096
    async with await broker_client.create(files={"/workspace/in": data}) as rollout:
        reply = await rollout.exec(["cat", "in"])
        assert reply.stdout == data[: 1 << 20]
        assert await rollout.read_file("/workspace/in") == data
        echoed = await rollout.exec(["cat"], stdin=data)
        assert echoed.stdout == data


async def test_when_the_agent_is_gone_the_client_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_run(tmp_path)
    await run.start()
    environment = run.environment
    await run.close()
    async with BrokerClient(environment["STOCKADE_BROKER_SOCKET"], environment["STOCKADE_BROKER_TOKEN"]) as client:
        with pytest.raises(AgentGone, match="does not answer") as caught:
            await client.create()
        assert "start the run again" in str(caught.value)
    for name in environment:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(AgentGone, match="is not set"):
        BrokerClient.from_environment()


async def test_a_refusal_carries_its_code(broker_client: BrokerClient) -> None:
    async with await broker_client.create() as rollout:
        with pytest.raises(BrokerError) as caught:
            await rollout.read_file("/etc/passwd")
        assert (caught.value.code, caught.value.status) == ("invalid_request", 400)
        with pytest.raises(BrokerError, match="home is never collected"):
            await rollout.read_file("/sandbox/home/x")


async def test_many_pairs_at_once_keep_apart(broker_client: BrokerClient) -> None:
    """Descriptors of joined commands must never be mixed up, however many start in the same instant."""
    import asyncio

    async def pair(number: int) -> bytes:
        asking = f"import os; os.write(4, b'{number:04d}'); print(os.read(3, 9).decode())"
        answering = "import os; os.write(4, os.read(3, 9)[::-1])"
        first = await broker_client.create(role="grading")
        second = await broker_client.create(role="grading")
        async with first, second:
            reply = await first.exec(["python3", "-c", asking], peer=Peer(second, ["python3", "-c", answering]))
        return reply.stdout

    numbers = range(1000, 1012)
    assert await asyncio.gather(*map(pair, numbers)) == [f"{str(number)[::-1]}\n".encode() for number in numbers]


async def test_waivers_and_exemptions_are_on_the_record(tmp_path: Path) -> None:
    import datetime as dt

    until = dt.datetime.now(tz=dt.UTC).date() + dt.timedelta(days=10)
    policy = (
        "version: 1\negress: {allow: [{host: example.com}]}\ndata: {private: true}\n"
        f"waivers: [{{waives: trifecta, person: A. Person, reason: synthetic records only, expires: {until}}}]\n"
    )
    operator = tmp_path / "operator.yaml"
    operator.write_text(
        'version: 1\nunsafe_allow_cidrs: [{cidr: 10.20.0.0/24, reason: "package mirror"}]\n', encoding="utf-8"
    )
    async with open_run(tmp_path, policy, operator=operator) as run:
        pass
    (waiver,) = events_of(run.directory, "stage.waiver")
    assert (waiver["person"], waiver["expires"]) == ("A. Person", until.isoformat())
    (exemption,) = events_of(run.directory, "operator.exemption")
    assert exemption["values"] == ["10.20.0.0/24"]
    assert "10.20.0.0/24" in (run.directory / "manifest.yaml").read_text("utf-8")
    from stockade.runs import write_report

    page = write_report(run.directory).html.read_text("utf-8")
    assert "10.20.0.0/24" in page
    assert "A. Person" in page
