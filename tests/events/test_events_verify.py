from __future__ import annotations

import os
import shutil
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.errors import RecordError
from stockade.events import (
    GENESIS,
    LINE_LIMIT_BYTES,
    Event,
    Producer,
    VerifyReport,
    chain_name,
    verify_run,
)
from stockade.events._check import ChainCheck
from stockade.events._files import ChainName
from stockade.events._line import canonical, chain_hash, decode, to_line
from stockade.ids import RUN_SCOPE, RolloutId
from tests.events.records import RUN_ID, START_NS, add_node, chain_files, make_run, open_writer, rollout_id

BROKER = f"events/node-1/{chain_name(rollout_id(0), Producer.BROKER)}"
EGRESS = f"events/node-1/{chain_name(rollout_id(0), Producer.EGRESS)}"
CONTROL = f"events/node-1/{chain_name(RUN_SCOPE, Producer.CONTROL)}"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path)


def found(run_dir: Path) -> list[tuple[str, int | None]]:
    return [(problem.file, problem.line) for problem in verify_run(run_dir).problems]


def what(run_dir: Path) -> str:
    return "\n".join(map(str, verify_run(run_dir).problems))


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def rehash(events: list[Event]) -> bytes:
    """Write events as one consistent chain, as whoever can run stockade could."""
    written, prev = b"", GENESIS
    for event in events:
        body = canonical({**{name: value for name, value in event.items() if name != "hash"}, "prev": prev})
        digest = chain_hash(prev, body)
        written += to_line(body, digest)
        prev = digest
    return written


@pytest.mark.promise("S4.3")
def test_an_untouched_record_verifies_and_says_that_nobody_witnessed_it(tmp_path: Path) -> None:
    report = verify_run(make_run(tmp_path, rollouts=3, commands=5, requests=4))
    assert report.problems == ()
    assert report.ok
    assert (report.files, report.events) == (7, 6 + 3 * (13 + 9))
    assert str(report) == "record verified; 7 chains, 72 events, unwitnessed"


def test_a_report_is_not_a_truth_value(run: Path) -> None:
    with pytest.raises(TypeError, match="ok"):
        bool(verify_run(run))


def test_several_nodes_verify_and_each_must_be_sealed(run: Path) -> None:
    second = add_node(run, "node-2", range(5, 7))
    assert verify_run(run).files == 8
    assert verify_run(run).ok
    path = second / chain_name(RUN_SCOPE, Producer.CONTROL)
    path.write_bytes(b"".join(lines_of(path)[:-1]))
    assert found(run) == [(f"events/node-2/{path.name}", 4)]


# ------------------------------------------------------------------------------------ tamper matrix


def check(file: str, data: bytes) -> list[int]:
    """Return the numbers of the lines of one chain that are wrong, its missing seal among them."""
    rollout, producer, _ = Path(file).name.split(".")
    state = ChainCheck(RUN_ID, ChainName(RolloutId(rollout), Producer(producer)))
    wrong = [state.lines for line in data.splitlines(keepends=True) if state.feed(line)[1] is not None]
    return wrong if state.end() is None else [*wrong, state.lines]


def flipped(whole: bytes, offset: int, mask: int) -> bytes:
    return whole[:offset] + bytes([whole[offset] ^ mask]) + whole[offset + 1 :]


@pytest.mark.promise("S4.2")
@pytest.mark.parametrize("file", [BROKER, EGRESS, CONTROL])
@pytest.mark.parametrize("bit", range(8))
def test_every_flipped_byte_is_found_at_its_line(run: Path, file: str, bit: int) -> None:
    whole = (run / file).read_bytes()
    assert check(file, whole) == []
    line = 1
    for offset, byte in enumerate(whole):
        assert line in check(file, flipped(whole, offset, 1 << bit)), f"byte {offset} of {file}"
        line += byte == ord("\n")


@pytest.mark.parametrize("file", [BROKER, EGRESS, CONTROL])
def test_flipped_bytes_on_the_disk_are_found_at_their_lines(run: Path, file: str) -> None:
    path = run / file
    whole = path.read_bytes()
    for offset in range(0, len(whole), 17):
        path.write_bytes(flipped(whole, offset, 0x01))
        assert (file, whole.count(b"\n", 0, offset) + 1) in found(run), f"byte {offset} of {file}"
    path.write_bytes(whole)
    assert verify_run(run).ok


def test_every_flipped_byte_of_the_manifest_is_found(run: Path) -> None:
    path = run / "manifest.yaml"
    whole = path.read_bytes()
    for offset in range(len(whole)):
        path.write_bytes(flipped(whole, offset, 1))
        assert found(run) == [(CONTROL, 1)]
    path.write_bytes(whole + b"\n")
    assert "manifest.yaml was changed" in what(run)
    path.unlink()
    assert found(run) == [("manifest.yaml", None)]


@pytest.mark.promise("S4.2")
@pytest.mark.parametrize("file", [BROKER, EGRESS, CONTROL])
def test_every_removed_line_is_found(run: Path, file: str) -> None:
    path = run / file
    whole = lines_of(path)
    for index in range(len(whole)):
        path.write_bytes(b"".join(whole[:index] + whole[index + 1 :]))
        last = index == len(whole) - 1
        assert (file, index if last else index + 1) in found(run)


@pytest.mark.promise("S4.2")
@pytest.mark.parametrize("file", [BROKER, EGRESS, CONTROL])
def test_every_duplicated_or_moved_line_is_found(run: Path, file: str) -> None:
    path = run / file
    whole = lines_of(path)
    for index in range(len(whole)):
        path.write_bytes(b"".join([*whole[: index + 1], *whole[index:]]))
        assert (file, index + 2) in found(run)
        if index:
            path.write_bytes(b"".join([*whole[: index - 1], whole[index], whole[index - 1], *whole[index + 1 :]]))
            assert (file, index) in found(run)


@pytest.mark.promise("S4.2")
@pytest.mark.parametrize("file", [BROKER, EGRESS, CONTROL])
def test_every_truncation_is_found(run: Path, file: str) -> None:
    path = run / file
    whole = path.read_bytes()
    assert all(check(file, whole[:size]) for size in range(len(whole)))
    for cut in (1, 2, len(lines_of(path)[-1]), len(whole) - 1, len(whole)):
        path.write_bytes(whole[: len(whole) - cut])
        assert file in {name for name, _ in found(run)}, f"{cut} bytes cut off"


@given(st.data())
def test_no_edit_goes_unnoticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    run_dir = make_run(tmp_path_factory.mktemp("runs"))
    path = data.draw(st.sampled_from(chain_files(run_dir)))
    whole = path.read_bytes()
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, min(len(whole), start + 600)))
    put = data.draw(st.binary(max_size=20) | st.sampled_from([*lines_of(path), b"\n", b"\r\n", b" "]))
    spoiled = whole[:start] + put + whole[end:]
    path.write_bytes(spoiled)
    assert verify_run(run_dir).ok == (spoiled == whole)


# ------------------------------------------------- edits by somebody who knows how the chain is made


def test_a_recomputed_chain_contradicts_the_run_chain(run: Path) -> None:
    path = run / EGRESS
    events = [decode(line) for line in lines_of(path)]
    events[0]["server.address"] = "harmless.example"
    path.write_bytes(rehash(events))
    assert found(run) == [(EGRESS, 3)]
    assert "ends otherwise" in what(run)


def test_a_consistent_rewrite_of_all_files_is_what_takes_a_witness(run: Path) -> None:
    egress, control = run / EGRESS, run / CONTROL
    events = [decode(line) for line in lines_of(egress)]
    events[0]["server.address"] = "harmless.example"
    egress.write_bytes(rehash(events))
    new = decode(lines_of(egress)[-1])["hash"]
    whole = [decode(line) for line in lines_of(control)]
    heads = whole[1]["heads"]
    assert isinstance(heads, list)
    whole[1]["heads"] = [head if head.startswith("broker") else f"egress:3:{new}" for head in heads]
    control.write_bytes(rehash(whole))
    report = verify_run(run)
    assert report.ok
    assert report.witness == "unwitnessed"


@pytest.mark.parametrize(
    ("field", "value", "what_is_said"),
    [
        ("run_id", "run-other", "run_id"),
        ("rollout_id", rollout_id(9), "rollout_id"),
        ("producer", "broker", "producer"),
        ("seq", 9, "follows event"),
        ("kind", "net.party", "unknown kind"),
        ("invented", 1, "no field"),
        ("reason", 1, "cannot be"),
        ("severity", 9, "severity"),
        ("v", 2, "version"),
        ("time", "never", "time"),
    ],
)
def test_a_false_event_in_a_true_chain_is_found(run: Path, field: str, value: str | int, what_is_said: str) -> None:
    path = run / EGRESS
    events = [decode(line) for line in lines_of(path)]
    events[1][field] = value
    path.write_bytes(rehash(events))
    assert (EGRESS, 2) in found(run)
    assert what_is_said in what(run)


def test_the_same_content_in_other_bytes_is_found(run: Path) -> None:
    path = run / EGRESS
    first, *rest = lines_of(path)
    others = [
        first.replace(b'":', b'": ', 1),
        first.replace(b"{", b'{"v":1,', 1),
        first.replace(b"abc.test", b"abc\\u002etest"),
        first.replace(b'"seq":1', b'"seq":1.0'),
        first.replace(b"\n", b"\r\n"),
        first.replace(b"\n", b" \n"),
        b"\xef\xbb\xbf" + first,
        b"\n" + first,
        first.replace(b"/simple", b"\\/simple"),
    ]
    for other in others:
        assert other != first
        path.write_bytes(b"".join([other, *rest]))
        assert (EGRESS, 1) in found(run), other


def test_raw_bytes_beyond_ascii_are_found(run: Path) -> None:
    path = run / EGRESS
    for text in ("é".encode(), b"\xff\xfe", b"\x7f", b"\xed\xa0\x80"):
        lines = lines_of(make_run(run.parent / os.urandom(4).hex()) / EGRESS)
        path.write_bytes(lines[0].replace(b"abc.", text) + b"".join(lines[1:]))
        assert (EGRESS, 1) in found(run)


def test_a_previous_hash_that_is_no_ascii_is_found(run: Path) -> None:
    """Found by fuzzing: it ended the verifier instead of being named by it."""
    path = run / EGRESS
    lines = lines_of(path)
    path.write_bytes(lines[0].replace(b'"prev":"0', '"prev":"\x80'.encode()) + b"".join(lines[1:]))
    assert (EGRESS, 1) in found(run)
    assert "was edited" in what(run)


def test_a_line_that_is_too_long_is_skipped_not_swallowed(run: Path) -> None:
    path = run / EGRESS
    first, *rest = lines_of(path)
    for size in (LINE_LIMIT_BYTES, 5 * LINE_LIMIT_BYTES):
        path.write_bytes(first + b"x" * size + b"\n" + b"".join(rest))
        assert (EGRESS, 2) in found(run)
        assert "longer than a line may be" in what(run)


def test_a_file_of_garbage_is_reported_briefly(run: Path) -> None:
    (run / EGRESS).write_bytes(b"garbage\n" * 10_000)
    report = verify_run(run)
    assert len(report.problems) == 22
    assert "9980 more lines are wrong" in what(run)


# ----------------------------------------------------------------------- files and the directory


def test_a_missing_chain_is_named(run: Path) -> None:
    (run / EGRESS).unlink()
    assert what(run) == f"{EGRESS}: missing, though _run.control.jsonl:2 names it"


def test_a_chain_that_nobody_named_is_found(run: Path) -> None:
    with open_writer(run / "events/node-1", rollout_id(7), Producer.BROKER) as writer:
        writer.seal()
    assert found(run) == [(f"events/node-1/{rollout_id(7)}.broker.jsonl", None)]


def test_a_whole_rollout_that_is_removed_is_found(run: Path) -> None:
    for path in (run / "events/node-1").glob("ep_*"):
        path.unlink()
    assert found(run) == [(BROKER, None), (EGRESS, None)]


def test_swapped_files_are_found(run: Path) -> None:
    data = (run / EGRESS).read_bytes()
    (run / EGRESS).write_bytes((run / BROKER).read_bytes())
    (run / BROKER).write_bytes(data)
    assert {(BROKER, 1), (EGRESS, 1)} <= set(found(run))


def test_a_missing_run_chain_leaves_nothing_verified(run: Path) -> None:
    (run / CONTROL).unlink()
    assert {(CONTROL, None), (BROKER, None), (EGRESS, None)} == set(found(run))


def test_another_run_in_this_ones_place_is_found(run: Path) -> None:
    moved = run.rename(run.with_name("run-20260101-000000-ffffff"))
    assert f"run_id is '{RUN_ID}'" in what(moved)


def test_strangers_in_the_directory_are_found(run: Path) -> None:
    node = run / "events/node-1"
    (node / "notes.txt").write_text("x")
    (node / f"{rollout_id(1)}.broker.jsonl.bak").write_text("x")
    (node / "a\n\x1b[2J.jsonl").write_text("x")
    (run / "events/stray.jsonl").write_text("x")
    (run / "events/.hidden").mkdir()
    said = what(run)
    assert len(verify_run(run).problems) == 5
    assert "\x1b" not in said
    assert r"a\n\x1b[2J.jsonl: not the name of a chain" in said


@pytest.mark.parametrize("file", [BROKER, CONTROL])
def test_a_link_is_never_followed_even_to_the_true_file(run: Path, tmp_path: Path, file: str) -> None:
    shutil.move(run / file, tmp_path / "elsewhere")
    (run / file).symlink_to(tmp_path / "elsewhere")
    assert (file, None) in found(run)


@pytest.mark.parametrize("directory", ["events", "events/node-1"])
def test_a_linked_directory_is_never_followed(run: Path, tmp_path: Path, directory: str) -> None:
    shutil.move(run / directory, tmp_path / "elsewhere")
    (run / directory).symlink_to(tmp_path / "elsewhere")
    assert (directory, None) in found(run)


def test_a_fifo_or_a_directory_in_place_of_a_chain_hangs_nothing(run: Path) -> None:
    (run / EGRESS).unlink()
    os.mkfifo(run / EGRESS)
    (run / BROKER).unlink()
    (run / BROKER).mkdir()
    assert set(found(run)) == {(EGRESS, None), (BROKER, None)}


def test_an_empty_or_missing_record_is_a_problem(run: Path) -> None:
    shutil.rmtree(run / "events")
    assert "no directory of events" in what(run)
    (run / "events").mkdir()
    assert "no node" in what(run)
    (run / "events/node-1").mkdir()
    assert found(run) == [(CONTROL, None)]


def test_no_run_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no run directory"):
        verify_run(tmp_path / RUN_ID)


@pytest.mark.promise("S4.3")
def test_an_unsealed_chain_is_an_error_with_its_last_line(run: Path) -> None:
    with open_writer(run / "events/node-1", rollout_id(7), Producer.BROKER) as writer:
        writer.append("run.end", reason="x")
        writer.append("run.end", reason="x")
    name = f"events/node-1/{rollout_id(7)}.broker.jsonl"
    assert (name, 2) in found(run)
    assert f"{name}:2: not sealed" in what(run)


# ------------------------------------------------------------------------------------- the run chain


def _run_chain(tmp_path: Path, kinds: list[str]) -> VerifyReport:
    run_dir = make_run(tmp_path, rollouts=0)
    path = run_dir / CONTROL
    digest = decode(lines_of(path)[0])["manifest_digest"]
    path.unlink()
    with open_writer(path.parent, RUN_SCOPE, Producer.CONTROL, times=count(START_NS)) as writer:
        for kind in kinds:
            writer.append(kind, **({"manifest_digest": digest} if kind == "run.start" else {"reason": "x"}))
        writer.seal()
    return verify_run(run_dir)


def test_a_run_chain_opens_with_run_start(tmp_path: Path) -> None:
    assert _run_chain(tmp_path / "a", ["run.start", "run.end"]).ok
    report = _run_chain(tmp_path / "b", ["run.end", "run.start"])
    assert [(p.file, p.line) for p in report.problems] == [(CONTROL, 1)]


def test_a_rollout_is_sealed_once(run: Path) -> None:
    path = run / CONTROL
    events = [decode(line) for line in lines_of(path)]
    events.insert(2, dict(events[1]))
    for seq, event in enumerate(events, 1):
        event["seq"] = seq
    events[-1]["count"] = len(events)
    path.write_bytes(rehash(events))
    assert found(run) == [(CONTROL, 3)]
    assert "a second time" in what(run)


def test_a_seal_that_counts_wrong_is_found(run: Path) -> None:
    path = run / CONTROL
    events = [decode(line) for line in lines_of(path)]
    events[-1]["count"] = 99
    path.write_bytes(rehash(events))
    assert found(run) == [(CONTROL, len(events))]


@pytest.mark.parametrize("heads", [["nonsense"], [f"agent:1:{GENESIS}"]])
def test_heads_that_cannot_be_read_are_found(run: Path, heads: list[str]) -> None:
    path = run / CONTROL
    events = [decode(line) for line in lines_of(path)]
    events[1]["heads"] = heads
    path.write_bytes(rehash(events))
    assert (CONTROL, 2) in found(run)


def test_further_chains_of_run_scope_are_named_by_the_runs_seal(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, rollouts=0)
    node = run_dir / "events/node-1"
    (run_dir / CONTROL).rename(tmp_path / "old")
    with open_writer(node, RUN_SCOPE, Producer.BROKER) as broker:
        head = broker.seal()
    with open_writer(node, RUN_SCOPE, Producer.CONTROL) as writer:
        writer.append("run.start", manifest_digest=str(decode(lines_of(tmp_path / "old")[0])["manifest_digest"]))
        writer.seal({Producer.BROKER: head})
    assert verify_run(run_dir).ok
    (node / chain_name(RUN_SCOPE, Producer.BROKER)).unlink()
    assert not verify_run(run_dir).ok
