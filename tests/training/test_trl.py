"""The real engine, in processes of its own: torch is never imported into the test process."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stockade.policy import load_policy
from stockade.training import load_job, resolve_job
from stockade.training._process import NEEDED
from tests.support import ROOT, requires

HERE = Path(__file__).parent
INSTALLED = all(importlib.util.find_spec(name) is not None for name in NEEDED)
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def _engine():
    requires(INSTALLED, "the extra 'train' is not installed", must_run_in_ci=False)


def environment(scratch: Path) -> dict[str, str]:
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    offline = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(scratch)}
    return {**os.environ, **offline, "PYTHONPATH": path, "TMPDIR": str(scratch)}


# ------------------------------------------------------------------------------------------ masks and drops

CASES = ["owio/oowo:0.01", "owwo/oowo:0.01", "owso/oowo:0.5", "owso/oowo:0.01", "oiii/owow:0.01", "iiii/iiii:1.0"]


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    requires(INSTALLED, "the extra 'train' is not installed", must_run_in_ci=False)
    command = [sys.executable, str(HERE / "masking.py"), *CASES]
    scratch = tmp_path_factory.mktemp("scratch")
    done = subprocess.run(command, env=environment(scratch), capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, map(json.loads, done.stdout.splitlines()), strict=True))


def advantages(*rewards: float | None) -> list[float]:
    """GRPO's arithmetic by hand: over the scored samples of one group, sample standard deviation."""
    scored = [reward for reward in rewards if reward is not None]
    if len(scored) < 2:
        return [0.0] * len(rewards)
    mean, spread = statistics.mean(scored), statistics.stdev(scored)
    return [0.0 if reward is None else (reward - mean) / (spread + 1e-4) for reward in rewards]


@pytest.mark.promise("S7.5")
def test_a_masked_sample_leaves_the_mean_of_its_group(masked):
    result = masked["owio/oowo:0.01"]
    expected = advantages(1, 0, None, 1) + advantages(1, 1, 0, 1)
    assert result["advantages"] == pytest.approx(expected, abs=1e-4)
    assert result["reward"] == pytest.approx(5 / 7)
    assert result["moved"]


def test_the_same_fault_scored_as_zero_would_have_taught_something_else(masked):
    # The attack of the field: a dead sandbox counted as a wrong program lifts its siblings.
    wrong = masked["owwo/oowo:0.01"]["advantages"]
    assert wrong == pytest.approx(advantages(1, 0, 0, 1) + advantages(1, 1, 0, 1), abs=1e-4)
    assert wrong[0] != pytest.approx(masked["owio/oowo:0.01"]["advantages"][0], abs=0.1)


def test_a_dropped_group_teaches_nothing_and_the_other_all_it_has(masked):
    result = masked["owso/oowo:0.5"]
    assert result["advantages"] == pytest.approx([0.0] * 4 + advantages(1, 1, 0, 1), abs=1e-4)
    assert result["reward"] == pytest.approx(0.75)


def test_a_group_with_one_sample_left_teaches_nothing(masked):
    assert masked["oiii/owow:0.01"]["advantages"][:4] == [0.0] * 4


@pytest.mark.parametrize("case", ["owso/oowo:0.01", "iiii/iiii:1.0"])
def test_a_batch_that_is_held_moves_no_weight(masked, case):
    assert masked[case]["held"].startswith("training holds at step 1")
    assert not masked[case]["moved"]


# ---------------------------------------------------------------------------------------------- whole jobs


def write_job(folder: Path, **changes: object) -> Path:
    job = load_job(ROOT / "examples" / "grpo" / "short.yaml")
    resolved = resolve_job(job, load_policy(Path(job.policy)))
    fields = json.loads(resolved.model_dump_json())
    fields["output"] = str(folder / "out")
    fields["grpo"].update(changes)
    path = folder / "resolved.json"
    path.write_text(json.dumps(fields))
    return path


def start(job: Path, faults: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, str(HERE / "run_local.py"), str(job), *([faults] if faults else [])]
    return subprocess.Popen(
        command, env=environment(job.parent), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    return [json.loads(line) for line in out.splitlines()]


def rows(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out" / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One output directory for all jobs, so that the warm-up runs once."""
    return tmp_path_factory.mktemp("job")


@pytest.mark.promise("S9.1")
def test_a_short_job_trains_masks_saves_and_starts_no_process(folder):
    """One run, many claims: runs of the engine are what costs time here."""
    # run_local.py forbids processes as the training process does, so a fork would have ended it.
    job = write_job(folder)
    said = finish(start(job, "2:1:0:infrastructure,2:1:3:infrastructure,3:0:1:candidate"))
    done = next(line for line in said if line["event"] == "done")
    counts = next(line for line in said if line["event"] == "counts")

    assert done["end"] == "complete"
    assert counts["faults"] == ["2:1:0", "2:1:3", "3:0:1"]
    metrics = rows(folder)
    assert [row["step"] for row in metrics] == [1, 2, 3]
    assert [row["masked"] for row in metrics] == [0, 2, 0]
    assert metrics[1]["infra_rate"] == 2 / 16
    assert all(row["dropped"] == 0 and row["samples"] == 16 for row in metrics)
    assert all(row["reward"] == pytest.approx(row["passed"]) for row in metrics)
    # The tiny model has learned a little in its warm-up, so both verdicts came out of the real grader.
    assert sum(row["ok"] for row in metrics) > 0
    assert sum(row["wrong"] for row in metrics) > 0
    # A sandbox for each sample; a grading, of two sandboxes, only for each different artifact.
    assert counts["rollout"] >= 48
    assert counts["grading"] < 2 * counts["rollout"]

    output = folder / "out"
    assert json.loads((output / "summary.json").read_text())["grpo"]["masked"] == 2
    assert (output / "model" / "model.safetensors").is_file()
    assert not list((output / "model").glob("*.bin"))

    # The warm-up is kept: the same job again finds it.
    said = finish(start(job))
    done = next(line for line in said if line["event"] == "done")
    assert done["warm_up_cached"]

    # A stop in the second step: held, the model saved, no second evaluation.
    said = finish(start(job, "2:0:0:stopped"))
    held = next(line for line in said if line["event"] == "held")
    done = next(line for line in said if line["event"] == "done")
    assert "step 2: 1 of 4 groups were dropped" in held["message"]
    assert (done["end"], done["grpo"]["steps"]) == ("held", 1)
    assert done["grpo"]["evaluation_after"] is None
    assert [row["dropped"] for row in rows(folder)] == [0, 1]
    assert (output / "model" / "model.safetensors").is_file()


def test_ctrl_c_saves_what_there_is(folder):
    process = start(write_job(folder, steps=200))
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line).get("phase") == "grpo" and "step" in json.loads(line):
            process.send_signal(signal.SIGINT)
            break
    said = finish(process)
    done = next(line for line in said if line["event"] == "done")
    assert done["end"] == "interrupted"
    assert 1 <= done["grpo"]["steps"] < 200
    assert len(rows(folder)) == done["grpo"]["steps"]
    assert (folder / "out" / "model" / "model.safetensors").is_file()
