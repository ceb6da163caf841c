"""Lines that are held: chained at once, written with the next line that somebody waits for."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from stockade.errors import RecordError
from stockade.events import GENESIS, ChainHead, ChainWriter, EventVerdict, Producer, chain_name, recover_head
from stockade.events._chain import _HELD_LIMIT_BYTES
from stockade.events._line import decode
from tests.events.records import REQUEST, START_NS, open_writer, rollout_id
from tests.events.test_events_chain import file_size_limit, problems

ROLLOUT = rollout_id(1)
EGRESS = chain_name(ROLLOUT, Producer.EGRESS)


def end(writer: ChainWriter, reason: str = "completed") -> None:
    writer.append_lazy("net.end", reason=reason, bytes_out=1)


def kinds(path: Path) -> list[object]:
    return [decode(line)["kind"] for line in path.read_bytes().splitlines(keepends=True)]


@pytest.mark.promise("S4.1")
def test_held_lines_come_before_the_next_and_the_chain_is_whole(tmp_path: Path) -> None:
    path = tmp_path / EGRESS
    with open_writer(tmp_path, ROLLOUT, Producer.EGRESS) as writer:
        first = writer.append("net.request", REQUEST, verdict=EventVerdict.ALLOWED)
        held = writer.append_lazy("net.end", {"request_id": str(first["id"])}, reason="completed")
        assert (held["seq"], held["prev"]) == (2, first["hash"])
        end(writer)
        assert (kinds(path), writer.held) == (["net.request"], 2)
        last = writer.append("net.request", REQUEST)
        assert (kinds(path), writer.held) == (["net.request", "net.end", "net.end", "net.request"], 0)
        assert (last["seq"], writer.head) == (4, ChainHead(4, str(last["hash"])))
        end(writer)
        writer.flush()
        writer.flush()
        assert len(kinds(path)) == 5
        end(writer)
        head = writer.seal()
    assert kinds(path)[5:] == ["net.end", "rollout.sealed"]
    assert head == recover_head(path)
    assert problems(path) == []


def test_one_write_takes_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    write = os.write

    def spy(fd: int, data: bytes) -> int:
        sizes.append(data.count(b"\n"))
        return write(fd, data)

    with open_writer(tmp_path, ROLLOUT, Producer.EGRESS) as writer:
        monkeypatch.setattr(os, "write", spy)
        for _ in range(3):
            end(writer)
        writer.append("net.request", REQUEST)
        end(writer)
        writer.flush()
        writer.flush()
    assert sizes == [4, 1]


def test_the_head_is_what_the_file_says(tmp_path: Path) -> None:
    with open_writer(tmp_path, ROLLOUT, Producer.EGRESS) as writer:
        end(writer)
        assert writer.head == ChainHead(0, GENESIS) == recover_head(tmp_path / EGRESS)
        writer.append("net.request", REQUEST)
        known = writer.head
        end(writer)
        assert writer.head == known == recover_head(tmp_path / EGRESS)
        writer.flush()
        assert writer.head == recover_head(tmp_path / EGRESS) != known


def test_a_writer_that_is_given_up_takes_along_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / EGRESS
    with open_writer(tmp_path, ROLLOUT, Producer.EGRESS) as writer:
        writer.append("net.request", REQUEST)
        end(writer)
    with open_writer(tmp_path, ROLLOUT, Producer.EGRESS, start=recover_head(path)) as again:
        again.append("monitor.gap", reason="worker_restarted")
        again.seal()
    assert kinds(path) == ["net.request", "monitor.gap", "rollout.sealed"]
    assert problems(path) == []


def test_an_event_that_does_not_fit_leaves_what_is_held_alone(tmp_path: Path) -> None:
    path = tmp_path / EGRESS
    with open_writer(tmp_path, ROLLOUT, Producer.EGRESS) as writer:
        end(writer)
        for append in (writer.append, writer.append_lazy):
            for kind in ("net.party", "rollout.sealed", "net.end"):
                with pytest.raises(RecordError, match="not recorded"):
                    append(kind)
        assert (writer.held, writer.broken) == (1, False)
        writer.seal()
    assert problems(path) == []


def test_not_more_is_held_than_a_bound(tmp_path: Path) -> None:
    path = tmp_path / EGRESS
    most = 0
    with open_writer(tmp_path, ROLLOUT, Producer.EGRESS, times=count(START_NS)) as writer:
        for _ in range(2000):
            writer.append_lazy("net.end", reason="completed", detail="x" * 200)
            most = max(most, sum(map(len, writer._held)))
        assert _HELD_LIMIT_BYTES - 2000 < most <= _HELD_LIMIT_BYTES
        assert 2000 - writer.held == len(kinds(path)) == writer.head.seq
        writer.seal()
    assert problems(path) == []


@pytest.mark.promise("S4.4")
@pytest.mark.parametrize("how", ["append", "flush", "seal", "sync", "full"])
def test_held_lines_that_do_not_fit_break_the_chain(how: str, tmp_path: Path) -> None:
    path = tmp_path / EGRESS
    with open_writer(tmp_path, ROLLOUT, Producer.EGRESS, times=count(START_NS)) as writer, file_size_limit():
        writer.append("net.request", REQUEST)
        kept, head = path.read_bytes(), writer.head
        for _ in range(3):
            end(writer, "x" * 300)
        ways: dict[str, Callable[[], object]] = {
            "append": lambda: writer.append("net.request", REQUEST),
            "flush": writer.flush,
            "seal": writer.seal,
            "sync": writer.sync,
            "full": lambda: end(writer, "y" * _HELD_LIMIT_BYTES),
        }
        with pytest.raises(RecordError, match="cannot be written"):
            ways[how]()
        assert writer.broken
        assert (path.read_bytes(), writer.head, writer.held) == (kept, head, 0)
        for attempt in (lambda: end(writer), writer.flush, writer.seal, writer.sync):
            with pytest.raises(RecordError, match="broke"):
                attempt()
    assert recover_head(path) == head


def test_nothing_is_held_after_a_seal(tmp_path: Path) -> None:
    with open_writer(tmp_path, ROLLOUT, Producer.EGRESS) as writer:
        writer.seal()
        with pytest.raises(RecordError, match="sealed"):
            end(writer)
        writer.flush()


_KILLED_WRITER = """
import sys
from pathlib import Path
from itertools import count
from tests.events.records import *
with open_writer(Path(sys.argv[1]), rollout_id(1), Producer.EGRESS, times=count(1)) as writer:
    print("writing", flush=True)
    for number in count():
        writer.append_lazy("net.end", reason="x" * 3000)
        if number % 7 == 0:
            writer.append("net.request", REQUEST)
"""


def test_a_killed_writer_leaves_a_chain_that_can_go_on(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    environment = {"PYTHONPATH": f"{root}:{root / 'src'}", "PATH": os.environ["PATH"]}
    path = tmp_path / EGRESS
    with subprocess.Popen(
        [sys.executable, "-c", _KILLED_WRITER, tmp_path], env=environment, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"writing\n"
        while not path.exists() or path.stat().st_size < 100_000:
            time.sleep(0.01)
        child.kill()
    start = recover_head(path)
    assert start.seq > 10
    with open_writer(tmp_path, ROLLOUT, Producer.EGRESS, start=start, times=count(START_NS)) as writer:
        writer.append("monitor.gap", reason="worker_restarted")
        writer.seal()
    assert problems(path) == []
