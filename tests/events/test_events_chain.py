from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from enum import StrEnum
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.errors import RecordError
from stockade.events import (
    GENESIS,
    LINE_LIMIT_BYTES,
    ChainHead,
    ChainWriter,
    Context,
    Producer,
    Trust,
    chain_name,
    format_head,
    parse_head,
    recover_head,
)
from stockade.events._check import ChainCheck
from stockade.events._files import ChainName
from stockade.events._line import decode
from stockade.ids import RUN_SCOPE
from tests.events.records import DIGEST, REQUEST, RUN_ID, START_NS, open_writer, rollout_id

ROLLOUT = rollout_id(1)
BROKER = chain_name(ROLLOUT, Producer.BROKER)


def problems(path: Path) -> list[str]:
    rollout, producer = path.name.split(".")[:2]
    check = ChainCheck(RUN_ID, ChainName(rollout, Producer(producer)))  # type: ignore[arg-type]
    found = [check.feed(line)[1] for line in path.read_bytes().splitlines(keepends=True)]
    return [what for what in (*found, check.end()) if what is not None]


@pytest.mark.promise("S4.1")
def test_a_chain_is_gapless_linked_and_sealed(tmp_path: Path) -> None:
    with open_writer(tmp_path, ROLLOUT, Producer.BROKER) as writer:
        assert writer.head == ChainHead(0, GENESIS, sealed=False)
        first = writer.append("rollout.start", backend="bubblewrap", role="rollout")
        second = writer.append("process.exec", {"process.command_args": ["ls", "-l"]}, trust=Trust.REPORTED)
        head = writer.seal()
    lines = (tmp_path / BROKER).read_bytes().splitlines(keepends=True)
    assert [decode(line) for line in lines[:2]] == [first, second]
    assert [first["seq"], first["prev"], second["seq"], second["prev"]] == [1, GENESIS, 2, first["hash"]]
    last = decode(lines[2])
    assert (last["kind"], last["count"], last["hash"]) == ("rollout.sealed", 3, head.hash)
    assert head == ChainHead(3, head.hash, sealed=True)
    assert problems(tmp_path / BROKER) == []


@pytest.mark.promise("S4.1")
def test_every_line_says_where_it_belongs(tmp_path: Path) -> None:
    context = Context(RUN_ID, ROLLOUT, DIGEST, task_id="t", group_id="g", train_step=3, attempt=0, stage=1)
    fd = os.open(tmp_path / BROKER, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        event = ChainWriter(fd, context, Producer.BROKER, clock_ns=lambda: START_NS).append("run.end", reason="x")
    finally:
        os.close(fd)
    assert {name: event[name] for name in ("run_id", "rollout_id", "policy_digest")} == {
        "run_id": RUN_ID,
        "rollout_id": ROLLOUT,
        "policy_digest": DIGEST,
    }
    assert [event[name] for name in ("task_id", "group_id", "train_step", "attempt", "stage")] == ["t", "g", 3, 0, 1]
    assert event["time"] == event["observed"] == str(START_NS)


def test_when_it_happened_and_when_it_was_seen_are_two_things(tmp_path: Path) -> None:
    with open_writer(tmp_path, ROLLOUT, Producer.BROKER) as writer:
        event = writer.append("run.end", reason="x", time_ns=5)
    assert (event["time"], event["observed"]) == ("5", str(START_NS))


@pytest.mark.parametrize(
    "context",
    [
        Context(RUN_ID, ROLLOUT, DIGEST, train_step="3"),  # type: ignore[arg-type]
        Context(RUN_ID, ROLLOUT, None),  # type: ignore[arg-type]
        Context(RUN_ID, ROLLOUT, DIGEST, stage=True),
    ],
)
def test_a_context_of_other_types_is_refused(tmp_path: Path, context: Context) -> None:
    fd = os.open(tmp_path / BROKER, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        with pytest.raises(RecordError, match="context"):
            ChainWriter(fd, context, Producer.BROKER)
    finally:
        os.close(fd)


@given(st.lists(st.text(st.characters(), max_size=30), max_size=5), st.text(st.characters(), max_size=50))
def test_any_text_is_recorded_and_verifies(
    tmp_path_factory: pytest.TempPathFactory, args: list[str], detail: str
) -> None:
    directory = tmp_path_factory.mktemp("chain")
    with open_writer(directory, ROLLOUT, Producer.BROKER) as writer:
        event = writer.append("process.exec", {"process.command_args": args}, detail=detail)
        writer.seal()
    raw = (directory / BROKER).read_bytes()
    assert raw.isascii()
    assert decode(raw.splitlines()[0]) == event
    assert problems(directory / BROKER) == []


def test_enums_and_tuples_are_written_as_what_they_stand_for(tmp_path: Path) -> None:
    class Reason(StrEnum):
        GONE = "gone"

    with open_writer(tmp_path, ROLLOUT, Producer.BROKER) as writer:
        event = writer.append("process.exec", {"process.command_args": (Reason.GONE, "x")})  # type: ignore[dict-item]
        other = writer.append("rollout.end", exit=Reason.GONE)
    assert event["process.command_args"] == ["gone", "x"]
    assert type(other["exit"]) is str


@pytest.mark.parametrize(
    ("kind", "fields", "what"),
    [
        ("run.party", {}, "unknown kind"),
        ("process.exec", {}, "process.command_args"),
        ("process.exec", {"process.command_args": "ls"}, "process.command_args"),
        ("run.end", {"reason": "x", "seq": 9}, "seq"),
        ("run.end", {"reason": "x", "hash": "0"}, "hash"),
        ("run.end", {"reason": "x", "rollout_id": "ep_"}, "rollout_id"),
        ("run.end", {"reason": "x", "duration_ns": 1.5}, "duration_ns"),
        ("run.end", {"reason": "x", "duration_ns": 2**53}, "duration_ns"),
        ("rollout.sealed", {"count": 1}, "seal"),
        ("run.sealed", {"count": 1}, "seal"),
        ("run.end", {"reason": "x" * LINE_LIMIT_BYTES}, "longer than a line"),
        ("run.end", {"reason": "x", "severity": 7}, "severity"),
        ("run.end", {"reason": "x", "severity": True}, "severity"),
    ],
)
def test_what_the_schema_does_not_know_is_not_recorded(
    tmp_path: Path, kind: str, fields: dict[str, object], what: str
) -> None:
    with open_writer(tmp_path, ROLLOUT, Producer.BROKER) as writer:
        with pytest.raises(RecordError, match=what):
            writer.append(kind, **fields)  # type: ignore[arg-type]
        assert not writer.broken
        writer.append("run.end", reason="x")
        writer.seal()
    assert problems(tmp_path / BROKER) == []


def test_nothing_follows_a_seal(tmp_path: Path) -> None:
    with open_writer(tmp_path, ROLLOUT, Producer.BROKER) as writer:
        head = writer.seal()
        for attempt in (lambda: writer.append("run.end", reason="x"), writer.seal):
            with pytest.raises(RecordError, match="sealed"):
                attempt()
        assert writer.head == head == recover_head(tmp_path / BROKER)
    with (
        open_writer(tmp_path, ROLLOUT, Producer.BROKER, start=head) as again,
        pytest.raises(RecordError, match="sealed"),
    ):
        again.append("run.end", reason="x")


def test_a_run_chain_names_only_sealed_chains(tmp_path: Path) -> None:
    with open_writer(tmp_path, RUN_SCOPE, Producer.CONTROL) as run:
        with pytest.raises(RecordError, match="not sealed: egress"):
            run.append_sealed_rollout(ROLLOUT, {Producer.EGRESS: ChainHead(1, "a" * 64)})
        event = run.append_sealed_rollout(
            ROLLOUT,
            {p: ChainHead(2, "a" * 64, sealed=True) for p in (Producer.EGRESS, Producer.BROKER)},
        )
    assert event["heads"] == [f"broker:2:{'a' * 64}", f"egress:2:{'a' * 64}"]
    assert (event["count"], event["sealed_rollout_id"]) == (4, ROLLOUT)
    with (
        open_writer(tmp_path, ROLLOUT, Producer.BROKER) as writer,
        pytest.raises(RecordError, match="not a run chain"),
    ):
        writer.append_sealed_rollout(ROLLOUT, {})


def test_heads_read_back() -> None:
    text = format_head(Producer.EGRESS, ChainHead(12, "b" * 64, sealed=True))
    assert parse_head(text) == ("egress", 12, "b" * 64)


@pytest.mark.parametrize(
    "text", ["", "egress", "egress:1", f"agent:1:{'b' * 64}", f"egress:01:{'b' * 64}", "egress:1:bb", "egress:x:y"]
)
def test_what_is_no_head_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_head(text)


# ------------------------------------------------------------------------------------- failing writes


@contextlib.contextmanager
def file_size_limit() -> Iterator[None]:
    """Let a file of this process grow to 2,000 bytes, as a full disk or a quota would.

    No fixture: pytest writes its progress before fixtures are torn down, and that may go to a file as well.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.promise("S4.4")
def test_a_line_that_fits_only_in_part_is_cut_off_and_breaks_the_chain(tmp_path: Path) -> None:
    path = tmp_path / BROKER
    with open_writer(tmp_path, ROLLOUT, Producer.BROKER) as writer, file_size_limit():
        writer.append("run.end", reason="x")
        kept = path.read_bytes()
        head = writer.head
        with pytest.raises(RecordError, match="bytes were written"):
            writer.append("run.end", reason="y" * 2000)
        assert writer.broken
        assert (path.read_bytes(), writer.head) == (kept, head)
        for attempt in (lambda: writer.append("run.end", reason="z"), writer.seal):
            with pytest.raises(RecordError, match="broke"):
                attempt()
    assert path.read_bytes() == kept
    assert recover_head(path) == head


@pytest.mark.promise("S4.4")
def test_a_refused_write_breaks_the_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_writer(tmp_path, ROLLOUT, Producer.BROKER) as writer:

        def refuse(_fd: int, _line: bytes) -> int:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", refuse)
            with pytest.raises(RecordError, match="No space left"):
                writer.append("run.end", reason="x")
        with pytest.raises(RecordError, match="broke"):
            writer.append("run.end", reason="x")


def test_a_failed_flush_breaks_the_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_writer(tmp_path, RUN_SCOPE, Producer.CONTROL) as writer:

        def refuse(_fd: int) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "fdatasync", refuse)
        with pytest.raises(RecordError, match="flushed"):
            writer.seal()
        assert writer.broken


def test_only_a_regular_file_opened_for_appending_will_do(tmp_path: Path) -> None:
    path = tmp_path / BROKER
    reader, pipe = os.pipe()
    fds = [
        os.open(path, os.O_WRONLY | os.O_CREAT),
        os.open(path, os.O_RDONLY),
        os.open(path, os.O_RDONLY | os.O_APPEND),
        pipe,
        reader,
        os.open("/dev/null", os.O_WRONLY | os.O_APPEND),
    ]
    closed = fcntl.fcntl(fds[0], fcntl.F_DUPFD_CLOEXEC, 100)
    os.close(closed)
    try:
        for fd in (*fds, closed):
            with pytest.raises(RecordError, match="descriptor"):
                ChainWriter(fd, Context(RUN_ID, ROLLOUT, DIGEST), Producer.BROKER)
    finally:
        for fd in fds:
            os.close(fd)


# ------------------------------------------------------------------------------------------ recovery


def test_a_second_writer_goes_on_where_the_first_died(tmp_path: Path) -> None:
    path = tmp_path / BROKER
    with open_writer(tmp_path, ROLLOUT, Producer.BROKER) as writer:
        writer.append("run.end", reason="x")
    with path.open("ab") as file:
        file.write(b'{"torn":')
    start = recover_head(path)
    assert start == writer.head
    with open_writer(tmp_path, ROLLOUT, Producer.BROKER, start=start) as writer:
        writer.append("monitor.gap", reason="worker_restarted")
        writer.seal()
    assert problems(path) == []


def test_a_chain_cannot_be_begun_twice_or_continued_from_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(RecordError, match="cannot go on"),
        open_writer(tmp_path, ROLLOUT, Producer.BROKER, start=ChainHead(4, "a" * 64)),
    ):
        pass
    with open_writer(tmp_path, ROLLOUT, Producer.BROKER) as writer:
        writer.append("run.end", reason="x")
    with pytest.raises(RecordError, match="cannot go on"), open_writer(tmp_path, ROLLOUT, Producer.BROKER):
        pass


@pytest.mark.parametrize("torn", [b"", b"{", b"x" * (LINE_LIMIT_BYTES - 1)])
def test_recovery_cuts_any_torn_line(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / BROKER
    path.write_bytes(torn)
    assert recover_head(path) == ChainHead()
    assert path.read_bytes() == b""
    with open_writer(tmp_path, ROLLOUT, Producer.BROKER) as writer:
        for _ in range(3):
            writer.append("run.end", reason="x" * (LINE_LIMIT_BYTES - 1000))
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert recover_head(path) == writer.head
    assert path.read_bytes() == whole


@pytest.mark.parametrize("last", [b"garbage\n", b"{}\n", b"\n", b"x" * (3 * LINE_LIMIT_BYTES)])
def test_recovery_refuses_what_is_no_event(tmp_path: Path, last: bytes) -> None:
    path = tmp_path / BROKER
    with open_writer(tmp_path, ROLLOUT, Producer.BROKER) as writer:
        writer.append("run.end", reason="x")
    with path.open("ab") as file:
        file.write(last)
    with pytest.raises(RecordError, match="last line"):
        recover_head(path)


def test_recovery_refuses_an_edited_last_line(tmp_path: Path) -> None:
    path = tmp_path / BROKER
    with open_writer(tmp_path, ROLLOUT, Producer.BROKER) as writer:
        writer.append("run.end", reason="good")
    path.write_bytes(path.read_bytes().replace(b"good", b"evil"))
    with pytest.raises(RecordError, match="hash"):
        recover_head(path)


def test_recovery_follows_no_link_and_waits_for_no_fifo(tmp_path: Path) -> None:
    with open_writer(tmp_path, ROLLOUT, Producer.BROKER) as writer:
        writer.append("run.end", reason="x")
    (tmp_path / "link").symlink_to(tmp_path / BROKER)
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "fifo", "missing"):
        with pytest.raises(RecordError, match=name):
            recover_head(tmp_path / name)


_KILLED_WRITER = """
import sys
from pathlib import Path
from itertools import count
from tests.events.records import *
with open_writer(Path(sys.argv[1]), rollout_id(1), Producer.BROKER, times=count(1)) as writer:
    print("writing", flush=True)
    while True:
        writer.append("run.end", reason="x" * 5000)
"""


def test_a_killed_writer_leaves_whole_lines(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    environment = {"PYTHONPATH": f"{root}:{root / 'src'}", "PATH": os.environ["PATH"]}
    with subprocess.Popen(
        [sys.executable, "-c", _KILLED_WRITER, tmp_path], env=environment, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"writing\n"
        time.sleep(0.1)
        child.kill()
    path = tmp_path / BROKER
    before = path.read_bytes()
    start = recover_head(path)
    assert start.seq > 0
    assert path.read_bytes() == before
    with open_writer(tmp_path, ROLLOUT, Producer.BROKER, start=start, times=count(START_NS)) as writer:
        writer.append("net.request", REQUEST)
        writer.seal()
    assert problems(path) == []
