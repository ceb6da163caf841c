from __future__ import annotations

import errno
import os
import stat
import subprocess
import threading
from enum import StrEnum
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.errors import RunError
from stockade.events import ChainWriter, Context, Producer, iter_events, verify_run
from stockade.ids import RUN_SCOPE, RolloutId, RunId, new_rollout_id, new_run_id
from stockade.runs import LAYOUT_VERSION, RunDirectory, StopRequest, runs_in
from stockade.runs._manifest import dump_manifest, load_manifest

RUN = RunId("run-20260101-000000-abcdef")
ROLLOUT = RolloutId("ep_" + "a" * 22)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "runs", RUN, {"policy_digest": "sha256:0"}, node="node-1")


def left_in(root: Path) -> list[str]:
    return sorted(os.listdir(root)) if root.exists() else []


# ---------------------------------------------------------------------------------- making and opening


def test_a_new_run_is_private_and_complete(run: RunDirectory) -> None:
    modes = {
        str(path.relative_to(run.path)): stat.S_IMODE(path.lstat().st_mode) for path in (run.path, *run.path.rglob("*"))
    }
    assert modes == {".": 0o700, "manifest.yaml": 0o600, "events": 0o700, "events/node-1": 0o700, "blobs": 0o700}
    assert left_in(run.path.parent) == [RUN]


def test_a_run_opens_as_it_was_made(run: RunDirectory) -> None:
    again = RunDirectory.open(run.path)
    assert (again.run_id, again.manifest_digest, again.manifest) == (RUN, run.manifest_digest, run.manifest)
    assert again.manifest["layout"] == LAYOUT_VERSION
    assert again.node is None


def test_its_record_verifies(run: RunDirectory) -> None:
    fd = run.open_record(RUN_SCOPE, Producer.CONTROL)
    try:
        writer = ChainWriter(fd, Context(RUN, RUN_SCOPE, "sha256:0"), Producer.CONTROL)
        writer.append("run.start", manifest_digest=run.manifest_digest)
        assert not run.sealed()
        writer.seal()
    finally:
        os.close(fd)
    assert run.sealed()
    assert verify_run(run.path).ok


def test_two_runs_cannot_have_one_id(run: RunDirectory) -> None:
    before = (run.path / "manifest.yaml").read_bytes()
    with pytest.raises(RunError, match="exists already") as caught:
        RunDirectory.create(run.path.parent, RUN, {})
    assert caught.value.hint is not None
    assert (run.path / "manifest.yaml").read_bytes() == before
    assert left_in(run.path.parent) == [RUN]


def test_of_many_that_start_at_once_one_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Blind the early look, so that only the rename decides.
    monkeypatch.setattr(Path, "exists", lambda _self: False)
    barrier = threading.Barrier(8)
    results: list[str] = []

    def start(number: int) -> None:
        barrier.wait()
        try:
            RunDirectory.create(tmp_path, RUN, {"number": number})
        except RunError as error:
            results.append(error.message)
        else:
            results.append("made")

    threads = [threading.Thread(target=start, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.undo()
    assert sorted("made" if result == "made" else "refused" for result in results) == ["made"] + ["refused"] * 7
    assert left_in(tmp_path) == [RUN]


@pytest.mark.parametrize("taken", ["file", "link"])
def test_a_name_that_is_taken_by_something_else_is_left_alone(tmp_path: Path, taken: str) -> None:
    target = tmp_path / RUN
    if taken == "file":
        target.write_text("precious")
    else:
        (tmp_path / "elsewhere").mkdir()
        target.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="exists already"):
        RunDirectory.create(tmp_path, RUN, {})
    assert target.is_symlink() == (taken == "link")
    assert not any(name.startswith(".run") for name in left_in(tmp_path))


@pytest.mark.promise("S6.2")
@pytest.mark.parametrize("failing", ["fsync", "rename", "mkdir"])
def test_a_disk_that_fills_up_leaves_nothing_half_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if failing == "mkdir":
        monkeypatch.setattr("stockade.runs._layout._fill", full)
    else:
        monkeypatch.setattr(os, failing, full)
    with pytest.raises(RunError, match="No space left") as caught:
        RunDirectory.create(tmp_path, RUN, {})
    monkeypatch.undo()
    assert caught.value.hint == "free space there, or name another directory for runs"
    assert left_in(tmp_path) == []


def test_too_little_room_is_found_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="MiB are free, a run needs"):
        RunDirectory.create(tmp_path, RUN, {}, needed_bytes=1 << 62)
    assert left_in(tmp_path) == []


def test_a_root_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot make"):
        RunDirectory.create(tmp_path / "file" / "runs", RUN, {})


def test_a_manifest_cannot_claim_another_identity(tmp_path: Path) -> None:
    for manifest in ({"layout": 9}, {"run_id": "run-x"}):
        with pytest.raises(RunError, match="cannot set"):
            RunDirectory.create(tmp_path, RUN, manifest)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("layout", [0, 2, "1", None])
def test_a_directory_of_another_version_says_what_to_do(run: RunDirectory, layout: object) -> None:
    (run.path / "manifest.yaml").write_bytes(dump_manifest({**run.manifest, "layout": layout}))
    with pytest.raises(RunError, match="is not the layout 1 of this version") as caught:
        RunDirectory.open(run.path)
    assert caught.value.hint is not None
    assert "version" in caught.value.hint


@pytest.mark.parametrize(
    "manifest", [b"", b"[]", b"a: [", b"\xff\xfe", b"x" * (5 << 20), b"!!python/object:os.system {}"]
)
def test_what_is_no_manifest_is_refused(run: RunDirectory, manifest: bytes) -> None:
    (run.path / "manifest.yaml").write_bytes(manifest)
    with pytest.raises(RunError, match="manifest"):
        RunDirectory.open(run.path)


def test_a_manifest_is_never_read_through_a_link(run: RunDirectory, tmp_path: Path) -> None:
    (run.path / "manifest.yaml").rename(tmp_path / "elsewhere")
    (run.path / "manifest.yaml").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="no run directory"):
        RunDirectory.open(run.path)
    (run.path / "manifest.yaml").unlink()
    os.mkfifo(run.path / "manifest.yaml")
    with pytest.raises(RunError, match="not a regular file"):
        RunDirectory.open(run.path)


def test_a_renamed_or_missing_run_is_refused(run: RunDirectory) -> None:
    moved = run.path.rename(run.path.with_name("run-other"))
    with pytest.raises(RunError, match="holds run"):
        RunDirectory.open(moved)
    with pytest.raises(RunError, match="no run directory"):
        RunDirectory.open(run.path)


def test_runs_are_listed_and_drafts_are_not(run: RunDirectory) -> None:
    root = run.path.parent
    other = RunDirectory.create(root, new_run_id(), {})
    (root / ".run-draft").mkdir()
    (root / ".run-draft/manifest.yaml").write_text("")
    (root / "notes").mkdir()
    assert list(runs_in(root)) == sorted([run.path, other.path])
    assert list(runs_in(root / "missing")) == []


# ------------------------------------------------------------------------------------------ manifest


class _Word(StrEnum):
    NO = "no"


@pytest.mark.parametrize(
    "word", ["no", "yes", "1e3", "0o7", "2020-01-01", "~", "null", "", " x ", "a: b", "#", "1_000"]
)
def test_every_yaml_reader_reads_a_text_as_text(word: str) -> None:
    data = dump_manifest({"word": word})
    assert data.split(b": ", 1)[1].startswith(b'"')
    assert load_manifest(data, Path("m"))["word"] == word


def test_enums_paths_and_tuples_are_written_plainly() -> None:
    data = dump_manifest({"enum": _Word.NO, "path": Path("/a"), "items": (1, [2.5, None], {}, [], {"off": True})})
    assert load_manifest(data, Path("m")) == {
        "enum": "no",
        "path": "/a",
        "items": [1, [2.5, None], {}, [], {"off": True}],
    }


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab_: #~é\n\u202e", max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text("abyesno_:", min_size=1, max_size=5), PLAIN, min_size=1, max_size=4))
def test_a_manifest_reads_back_as_it_was(manifest: dict[str, object]) -> None:
    data = dump_manifest(manifest)
    assert data.isascii()
    assert load_manifest(data, Path("m")) == manifest


@pytest.mark.parametrize("value", [object(), float("nan"), float("inf"), b"bytes", {1: 2}])
def test_what_plain_data_cannot_hold_is_refused(value: object) -> None:
    with pytest.raises(RunError, match="a manifest cannot"):
        dump_manifest({"value": value})


def test_endless_nesting_is_refused() -> None:
    nested: list[object] = []
    nested.append(nested)
    with pytest.raises(RunError, match="deeply"):
        dump_manifest({"value": nested})


# ------------------------------------------------------------------------------------------ the record


def test_a_record_file_is_made_once_private_and_for_appending(run: RunDirectory) -> None:
    fd = run.open_record(ROLLOUT, Producer.EGRESS)
    try:
        os.write(fd, b"a")
        os.lseek(fd, 0, os.SEEK_SET)
        os.write(fd, b"b")
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)
    path = run.record_path(ROLLOUT, Producer.EGRESS)
    assert path == run.path / "events/node-1" / f"{ROLLOUT}.egress.jsonl"
    assert path.read_bytes() == b"ab"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(RunError, match="already"):
        run.open_record(ROLLOUT, Producer.EGRESS)


def test_a_planted_link_is_not_written_through(run: RunDirectory, tmp_path: Path) -> None:
    run.record_path(ROLLOUT, Producer.EGRESS).symlink_to(tmp_path / "target")
    with pytest.raises(RunError, match="already"):
        run.open_record(ROLLOUT, Producer.EGRESS)
    node = run.path / "events/node-1"
    node.rename(tmp_path / "node")
    node.symlink_to(tmp_path / "node")
    with pytest.raises(RunError, match="cannot make a record file"):
        run.open_record(RolloutId(new_rollout_id()), Producer.EGRESS)
    assert not (tmp_path / "target").exists()


def test_a_reader_cannot_write(run: RunDirectory) -> None:
    with pytest.raises(RunError, match="opened for reading"):
        RunDirectory.open(run.path).open_record(ROLLOUT, Producer.EGRESS)


def test_every_agent_of_a_run_gets_a_place_of_its_own(run: RunDirectory) -> None:
    second = RunDirectory.open(run.path)
    assert [second.claim_node("node-1"), second.claim_node("node-1"), second.claim_node("other")] == [
        "node-1.2",
        "node-1.3",
        "other",
    ]
    assert second.record_path(ROLLOUT, Producer.BROKER).parent == run.path / "events/other"


@pytest.mark.parametrize(
    ("given_name", "used"),
    [("a b/../c", "a-b-..-c"), ("", "node"), ("-.-", "node"), ("x" * 300, "x" * 64), ("Node.example.org", None)],
)
def test_any_host_name_gives_a_name_for_its_node(tmp_path: Path, given_name: str, used: str | None) -> None:
    run = RunDirectory.create(tmp_path, RUN, {}, node=given_name)
    assert run.node == (used or given_name)
    assert (run.path / "events" / str(run.node)).is_dir()


# -------------------------------------------------------------------------------------------- stopping


@pytest.mark.promise("S6.4")
def test_a_stop_is_seen_by_everybody_and_the_first_one_holds(run: RunDirectory) -> None:
    reader = RunDirectory.open(run.path)
    assert run.stop_requested() is None
    assert reader.request_stop("smells odd", "ada") == StopRequest("smells odd", "ada")
    assert run.request_stop("again", "bob") == StopRequest("smells odd", "ada")
    assert run.stop_requested() == reader.stop_requested() == StopRequest("smells odd", "ada")


def test_what_a_person_says_is_kept_as_text(run: RunDirectory) -> None:
    run.request_stop("\x1b[2J\u202eevil", "é" * 1000)
    stop = run.stop_requested()
    assert stop is not None
    assert stop.reason == r"\x1b[2J\xe2\x80\xaeevil"
    assert len(stop.person or "") <= 2048


@pytest.fixture(params=["empty", "text", "garbage", "link", "dangling", "directory", "fifo", "huge", "list"])
def stop_file(request: pytest.FixtureRequest, run: RunDirectory, tmp_path: Path) -> str:
    path = run.path / "STOP"
    match request.param:
        case "empty":
            subprocess.run(["touch", path], check=True)
        case "text":
            path.write_text("please \x1b[2J\n")
        case "garbage":
            path.write_bytes(b"\xff\x00" * 50)
        case "link":
            (tmp_path / "secret").write_text("secret")
            path.symlink_to(tmp_path / "secret")
        case "dangling":
            path.symlink_to(tmp_path / "nowhere")
        case "directory":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "huge":
            path.write_bytes(b"x" * 1_000_000)
        case "list":
            path.write_bytes(b'{"reason": ["x"]}')
    return str(request.param)


def test_anything_called_stop_stops(run: RunDirectory, stop_file: str) -> None:
    stop = run.stop_requested()
    assert stop is not None
    assert stop.reason
    assert stop.reason.isascii()
    assert "secret" not in stop.reason
    assert "\x1b" not in stop.reason
    assert len(stop.reason) <= 4096


def test_a_full_disk_costs_the_reason_but_not_the_stop(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        run.request_stop("x", "ada")
    assert run.stop_requested() == StopRequest("a STOP file without a reason", None)


def test_a_stop_that_cannot_be_written_is_an_error(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_kwargs: object) -> int:
        raise PermissionError(errno.EACCES, "denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(RunError, match="cannot write"):
        run.request_stop("x", "ada")


def test_who_cannot_ask_is_not_told_to_go_on(run: RunDirectory) -> None:
    run.path.rename(run.path.with_name("gone"))
    with pytest.raises(FileNotFoundError):
        run.stop_requested()
    run.path.write_text("a file")
    with pytest.raises(NotADirectoryError):
        run.stop_requested()


def test_a_stop_is_confirmed_by_every_node(run: RunDirectory) -> None:
    second = RunDirectory.open(run.path)
    second.claim_node("node-2")
    for directory in (run, second):
        assert not run.stop_confirmed()
        fd = directory.open_record(RUN_SCOPE, Producer.CONTROL)
        try:
            writer = ChainWriter(fd, Context(RUN, RUN_SCOPE, "sha256:0"), Producer.CONTROL)
            writer.append("control.stop", reason="x")
            assert not run.stop_confirmed()
            writer.append("control.kill", reason="x")
        finally:
            os.close(fd)
    assert run.stop_confirmed()
    assert len(list(iter_events(run.path))) == 4
