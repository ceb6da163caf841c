from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from stockade.errors import RecordError
from stockade.events import ChainWriter, Event, Producer, chain_name, is_run_sealed, iter_events
from stockade.ids import RUN_SCOPE
from tests.events.records import START_NS, add_node, make_run, open_writer, rollout_id


def summary(events: Iterator[Event]) -> list[tuple[object, object]]:
    return [(event["rollout_id"], event["seq"]) for event in events]


def test_a_run_is_read_in_the_order_of_time(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, rollouts=3, commands=3, requests=3)
    add_node(run_dir, "node-2", range(10, 12))
    events = list(iter_events(run_dir))
    times = [int(str(event["time"])) for event in events]
    assert times == sorted(times)
    assert len(events) == 2 * 3 + 3 + 3 * (9 + 7) + 2 + 2 * (5 + 3)
    assert len({event["hash"] for event in events}) == len(events)


def test_one_rollout_and_some_kinds(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, rollouts=3)
    chosen = list(iter_events(run_dir, rollout=rollout_id(1), kinds={"net.request", "rollout.start"}))
    assert [(event["rollout_id"], event["kind"]) for event in chosen] == [
        (rollout_id(1), "rollout.start"),
        (rollout_id(1), "net.request"),
    ]
    assert list(iter_events(run_dir, rollout=rollout_id(9))) == []
    assert {event["rollout_id"] for event in iter_events(run_dir, rollout=RUN_SCOPE)} == {RUN_SCOPE}


def test_long_lines_and_many_pieces(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    with open_writer(run_dir / "events/node-1", rollout_id(5), Producer.BROKER, times=count(1)) as writer:
        for size in (3, 5_000, 100_000, 900_000, 10, 64 << 10):
            writer.append("run.end", reason="x" * size)
        for _ in range(500):
            writer.append("run.end", reason="x" * 1000)
    events = list(iter_events(run_dir, rollout=rollout_id(5)))
    assert [event["seq"] for event in events] == list(range(1, 507))


def test_more_chains_than_a_process_may_open(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, rollouts=60)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (50, hard))
    try:
        events = list(iter_events(run_dir))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(events) == 60 * (5 + 3 + 1) + 3


def test_a_line_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    path = run_dir / "events/node-1" / chain_name(rollout_id(0), Producer.BROKER)
    whole = path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    for cut in range(1, len(last) + 1, 10):
        path.write_bytes(whole[:-cut])
        assert len(list(iter_events(run_dir, rollout=rollout_id(0)))) == 7


@pytest.mark.parametrize("bad", [b"garbage\n", b"{}\n", b'{"time":"x"}\n', b"\xff\n", b"x" * (1 << 20)])
def test_a_line_that_is_no_event_is_named(tmp_path: Path, bad: bytes) -> None:
    run_dir = make_run(tmp_path)
    path = run_dir / "events/node-1" / chain_name(rollout_id(0), Producer.EGRESS)
    first = path.read_bytes().splitlines(keepends=True)[0]
    path.write_bytes(first + bad)
    with pytest.raises(RecordError, match=rf"events/node-1/{path.name}:2: "):
        list(iter_events(run_dir))


def test_links_and_fifos_are_not_read(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    path = run_dir / "events/node-1" / chain_name(rollout_id(0), Producer.EGRESS)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RecordError, match="cannot be read"):
        list(iter_events(run_dir))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RecordError, match="not a regular file"):
        list(iter_events(run_dir))


def test_no_run_and_no_record(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no run directory"):
        list(iter_events(tmp_path / "missing"))
    with pytest.raises(RecordError, match="holds no record"):
        list(iter_events(tmp_path))


# ----------------------------------------------------------------------------------------- following


class _Live:
    """A run that goes on: each look of the follower lets one more thing happen."""

    def __init__(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.node = run_dir / "events/node-1"
        self.steps: list[object] = []
        monkeypatch.setattr("stockade.events._read.time.sleep", self._step)

    def _step(self, _seconds: float) -> None:
        step = self.steps.pop(0)
        assert callable(step)
        step()


def test_following_ends_when_the_run_is_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "run"
    node = run_dir / "events/node-1"
    node.mkdir(parents=True)
    live = _Live(run_dir, monkeypatch)
    ticks = count(START_NS)
    path = node / chain_name(rollout_id(1), Producer.BROKER)
    with (
        open_writer(node, RUN_SCOPE, Producer.CONTROL, times=ticks) as control,
        open_writer(node, rollout_id(1), Producer.BROKER, times=ticks) as broker,
    ):

        def torn() -> None:
            broker.append("rollout.end", exit="exited")
            whole = path.read_bytes()
            path.write_bytes(whole[:-7])
            live.steps.insert(0, lambda: path.write_bytes(whole))

        def later_chain() -> None:
            with open_writer(node, rollout_id(2), Producer.BROKER, times=ticks) as other:
                other.append("run.end", reason="x")
                other.seal()

        control.append("run.start", manifest_digest="x")
        live.steps = [
            lambda: None,
            lambda: broker.append("rollout.start", backend="b", role="rollout"),
            torn,
            later_chain,
            broker.seal,
            control.seal,
        ]
        seen = summary(iter_events(run_dir, follow=True))
    assert seen == [
        (RUN_SCOPE, 1),
        (rollout_id(1), 1),
        (rollout_id(1), 2),
        (rollout_id(2), 1),
        (rollout_id(2), 2),
        (rollout_id(1), 3),
        (RUN_SCOPE, 2),
    ]
    assert live.steps == []


def test_following_waits_for_every_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = make_run(tmp_path)
    live = _Live(run_dir, monkeypatch)
    (run_dir / "events/node-2").mkdir()

    def second() -> None:
        (run_dir / "events/node-2").rmdir()
        add_node(run_dir, "node-2", range(5, 6))

    live.steps = [lambda: None, second]
    assert len(list(iter_events(run_dir, follow=True))) == 2 * (4 + 5 + 3)


def test_a_file_that_gets_shorter_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = make_run(tmp_path)
    path = run_dir / "events/node-1" / chain_name(RUN_SCOPE, Producer.CONTROL)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1])
    live = _Live(run_dir, monkeypatch)
    live.steps = [lambda: path.write_bytes(lines[0])]
    with pytest.raises(RecordError, match="shorter"):
        list(iter_events(run_dir, follow=True))


def test_following_a_writer_in_another_thread(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    node = run_dir / "events/node-1"
    node.mkdir(parents=True)

    def write(writer: ChainWriter) -> None:
        for number in range(3000):
            writer.append("run.end", reason="x" * (number % 700))
        writer.seal()

    with open_writer(node, RUN_SCOPE, Producer.CONTROL) as writer:
        thread = threading.Thread(target=write, args=[writer])
        thread.start()
        seen = [event["seq"] for event in iter_events(run_dir, follow=True, poll_s=0.001)]
        thread.join()
    assert seen == list(range(1, 3002))


def test_a_run_is_sealed_when_all_its_nodes_are(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    assert is_run_sealed(run_dir)
    path = run_dir / "events/node-1" / chain_name(RUN_SCOPE, Producer.CONTROL)
    whole = path.read_bytes()
    for torn in (whole[:-1], whole[: whole.rindex(b"\n", 0, -1) + 1], b"", b"garbage\n", whole + b"x"):
        path.write_bytes(torn)
        assert not is_run_sealed(run_dir)
    path.unlink()
    assert not is_run_sealed(run_dir)
