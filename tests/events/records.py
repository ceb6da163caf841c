"""Small records to read, verify and spoil."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from stockade.events import ChainHead, ChainWriter, Context, EventVerdict, Producer, Value, chain_name
from stockade.ids import RUN_SCOPE, RolloutId

RUN_ID = "run-20260101-000000-abcdef"
DIGEST = f"sha256:{'0' * 64}"
SECOND_NS = 1_000_000_000
START_NS = 1_767_225_600 * SECOND_NS

REQUEST: dict[str, Value] = {
    "http.request.method": "GET",
    "server.address": "abc.test",
    "server.port": 80,
    "url.path": "/simple/six/",
    "reason": "allowed",
}


def rollout_id(number: int) -> RolloutId:
    return RolloutId(f"ep_{number:022d}")


@contextmanager
def open_writer(
    node: Path,
    rollout: str,
    producer: Producer,
    *,
    start: ChainHead | None = None,
    times: Iterator[int] | None = None,
    run_id: str = RUN_ID,
) -> Iterator[ChainWriter]:
    path = node / chain_name(RolloutId(rollout), producer)
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    ticks = times if times is not None else count(START_NS, SECOND_NS)
    try:
        yield ChainWriter(fd, Context(run_id, rollout, DIGEST), producer, start=start, clock_ns=lambda: next(ticks))
    finally:
        os.close(fd)


def write_rollout(node: Path, number: int, *, commands: int = 1, requests: int = 1) -> dict[Producer, ChainHead]:
    """Write the chains of one rollout, sealed, and return their heads."""
    heads = {}
    times = count(START_NS + number * 100 * SECOND_NS, SECOND_NS)
    rollout = rollout_id(number)
    with (
        open_writer(node, rollout, Producer.BROKER, times=times) as broker,
        open_writer(node, rollout, Producer.EGRESS, times=times) as egress,
    ):
        broker.append("rollout.start", backend="bubblewrap", role="rollout")
        for exec_id in range(commands):
            broker.append("process.exec", {"process.command_args": ["python3", "solution.py"]}, exec_id=exec_id)
            broker.append("process.exit", {"process.exit.code": 0}, exec_id=exec_id, exit="exited")
        for _ in range(requests):
            egress.append("net.request", REQUEST, verdict=EventVerdict.ALLOWED)
            egress.append("net.end", reason="completed", bytes_in=2048, bytes_out=120)
        broker.append("rollout.end", exit="exited")
        heads[Producer.BROKER] = broker.seal()
        heads[Producer.EGRESS] = egress.seal()
    return heads


def make_run(root: Path, *, rollouts: int = 1, node: str = "node-1", commands: int = 1, requests: int = 1) -> Path:
    """Write a whole run that verifies, and return its directory."""
    run_dir = root / RUN_ID
    (run_dir / "events").mkdir(parents=True, exist_ok=True)
    manifest = b"layout: 1\n"
    (run_dir / "manifest.yaml").write_bytes(manifest)
    add_node(run_dir, node, range(rollouts), commands=commands, requests=requests)
    return run_dir


def add_node(run_dir: Path, node: str, rollouts: range, *, commands: int = 1, requests: int = 1) -> Path:
    directory = run_dir / "events" / node
    directory.mkdir()
    digest = f"sha256:{hashlib.sha256((run_dir / 'manifest.yaml').read_bytes()).hexdigest()}"
    with open_writer(directory, RUN_SCOPE, Producer.CONTROL) as run:
        run.append("run.start", manifest_digest=digest)
        for number in rollouts:
            heads = write_rollout(directory, number, commands=commands, requests=requests)
            run.append_sealed_rollout(rollout_id(number), heads)
        run.append("run.end", reason="completed")
        run.seal()
    return directory


def chain_files(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "events").rglob("*.jsonl"))
