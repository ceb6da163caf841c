"""Rows on disk: durable, resumable, refused when they are something else."""

from __future__ import annotations

import os

import msgspec
import pytest

from stockade.errors import ConfigError, RunError
from stockade.gym import make_task
from stockade.rewards import ResultLog, Sample, Verdict
from tests.rewards.hacks import RIGHT, TESTS


def _task(number: int, solution: str = RIGHT):
    return make_task({"task_id": f"t/{number}", "entry_point": "f", "solution": solution, "tests": TESTS})


def _sample(task, verdict: Verdict = Verdict.OK) -> Sample:
    return Sample(
        task_id=task.task_id,
        task_digest=task.digest,
        rollout_id="ep_" + "0" * 22,
        verdict=verdict,
        evidence="3 asserts held in 3 calls",
        tests_passed=3,
        tests_required=3,
        wall_ns=5,
    )


def test_rows_come_back(tmp_path):
    path = tmp_path / "results.jsonl"
    with ResultLog(path) as log:
        for number in range(3):
            log.append(_sample(_task(number)))
    with ResultLog(path) as log:
        assert log.samples == {f"t/{number}": _sample(_task(number)) for number in range(3)}
    assert path.read_bytes().count(b"\n") == 3
    assert path.stat().st_mode & 0o777 == 0o600


def test_only_verdicts_on_this_program_are_final(tmp_path):
    with ResultLog(tmp_path / "r") as log:
        for number, verdict in enumerate(Verdict):
            log.append(_sample(_task(number), verdict))
        done = log.finished([*(_task(number) for number in range(9))])
        assert done == {"t/0", "t/1", "t/2"}
        assert log.finished([_task(0, "def f(x): return 1\n")]) == set()


def test_a_later_row_replaces_an_earlier_one(tmp_path):
    with ResultLog(tmp_path / "r") as log:
        log.append(_sample(_task(0), Verdict.INFRASTRUCTURE_FAULT))
        log.append(_sample(_task(0)))
    with ResultLog(tmp_path / "r") as log:
        assert log.samples["t/0"].verdict is Verdict.OK


def test_a_torn_last_line_is_cut_and_written_again(tmp_path):
    path = tmp_path / "r"
    with ResultLog(path) as log:
        log.append(_sample(_task(0)))
        log.append(_sample(_task(1)))
    whole = path.read_bytes()
    for lost in range(1, 40, 7):
        path.write_bytes(whole[:-lost])
        with ResultLog(path) as log:
            assert set(log.samples) == {"t/0"}
            log.append(_sample(_task(1)))
        assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "row",
    [b"{}", b"x", b"", b'{"verdict": "ok"}', msgspec.json.encode(_sample(_task(0))).replace(b'"ok"', b'"fine"')],
)
def test_another_file_is_not_touched(tmp_path, row):
    path = tmp_path / "r"
    content = msgspec.json.encode(_sample(_task(0))) + b"\n" + row + b"\n"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"r:2: not a result row"):
        ResultLog(path)
    assert path.read_bytes() == content


def test_two_batches_do_not_share_a_file(tmp_path):
    with ResultLog(tmp_path / "r"), pytest.raises(RunError, match="another batch"):
        ResultLog(tmp_path / "r")


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(RunError, match="cannot be opened"):
        ResultLog(tmp_path / "none" / "r")


def test_a_full_disk_leaves_no_half_row(tmp_path, monkeypatch):
    write = os.write
    with ResultLog(tmp_path / "r") as log:
        log.append(_sample(_task(0)))
        monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:20]))
        with pytest.raises(RunError, match="cannot be written: No space left"):
            log.append(_sample(_task(1)))
        monkeypatch.undo()
        assert set(log.samples) == {"t/0"}
    assert (tmp_path / "r").read_bytes().count(b"\n") == 1
    with ResultLog(tmp_path / "r") as log:
        assert set(log.samples) == {"t/0"}
