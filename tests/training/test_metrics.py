from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest

from stockade.rewards import Verdict
from stockade.training import Judged, settle
from stockade.training._metrics import MetricsFile, quarters, row
from stockade.training._plot import can_plot, points
from stockade.training._progress import Progress
from stockade.training._summary import Summary, curve
from tests.support import ROOT, requires

BATCH = settle(
    [
        Judged("a", Verdict.OK),
        Judged("a", Verdict.WRONG),
        Judged("a", Verdict.INFRASTRUCTURE_FAULT),
        Judged("b", Verdict.OK),
        Judged("b", Verdict.STOPPED),
    ]
)
NAN = float("nan")


def test_a_row_has_what_was_counted_and_what_trl_logged():
    logs = {"reward": 0.5, "reward_std": NAN, "loss": 0, "frac_reward_zero_std": 0.25}
    made = row(3, BATCH, logs, duration_s=1.23456)
    assert made["step"] == 3
    assert made["passed"] == 0.5
    assert made["ran_rate"] == 0.6
    assert (made["samples"], made["masked"], made["groups"], made["dropped"], made["flat_groups"]) == (5, 3, 2, 1, 1)
    assert (made["infra_rate"], made["stopped_rate"]) == (0.2, 0.2)
    assert (made["ok"], made["wrong"], made["stopped"]) == (2, 1, 1)
    assert (made["reward"], made["reward_std"], made["loss"], made["duration_s"]) == (0.5, None, 0, 1.235)


def test_passed_counts_scored_samples_only():
    # The right program of the dropped group is no evidence: its group is not a fair draw any more.
    made = row(1, settle([Judged("a", Verdict.STOPPED), Judged("a", Verdict.OK)]), {}, duration_s=0)
    assert made["passed"] is None
    assert made["ok"] == 1


def test_each_row_is_on_disk_before_the_next_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as metrics:
        for step in (1, 2):
            metrics.add(row(step, BATCH, {"loss": NAN}, duration_s=0.0))
            lines = path.read_text().splitlines()
            assert len(lines) == step
            assert json.loads(lines[-1])["loss"] is None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], (None, None)),
        ([0.5], (0.5, 0.5)),
        ([0.0, 0.5, 0.5, 1.0], (0.0, 1.0)),
        ([0, 0, 1, None, 1, 1, 1, 1, 1], (0, 1)),
    ],
)
def test_quarters(values, expected):
    assert quarters([{"reward": value} for value in values], "reward") == expected


def test_progress_lines_are_strict_json():
    out = io.StringIO()
    progress = Progress(out)
    progress.phase("grpo", 30)
    progress.step("grpo", 1, 30, reward=NAN, nested={"a": float("inf")})
    lines = [json.loads(line, parse_constant=pytest.fail) for line in out.getvalue().splitlines()]
    assert lines == [
        {"event": "phase", "phase": "grpo", "total": 30},
        {"event": "step", "phase": "grpo", "step": 1, "total": 30, "reward": None, "nested": {"a": None}},
    ]


def test_a_summary_adds_up_its_rows(tmp_path):
    rows = [row(step, BATCH, {"reward": step / 10}, duration_s=1) for step in range(1, 9)]
    made = curve([*rows, row(9, BATCH, {}, duration_s=0)], end="held", seconds=8.0, evaluation=None)
    assert (made.steps, made.masked, made.dropped_groups) == (8, 27, 9)
    assert made.verdicts["ok"] == 18
    assert [made.reward_first, made.reward_last] == pytest.approx([0.15, 0.75])
    summary = Summary(
        name="x", seed=1, end="held", parameters=5, warm_up_seconds=1.0, warm_up_cached=False,
        evaluation_before={}, grpo=made, message="why",
    )  # fmt: skip
    summary.write(tmp_path / "summary.json")
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["grpo"]["end"] == "held"
    assert written["message"] == "why"
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_the_plot_draws_programs_that_pass_and_not_coins():
    rows = [row(step, BATCH, {"reward": 0.123}, duration_s=1) for step in (1, 2)]
    held = row(3, settle([Judged("a", Verdict.STOPPED)]), {}, duration_s=0)
    data = points({"coin flip": [*rows, held]})
    assert [(point["step"], point["passed"]) for point in data] == [(1, 0.5), (2, 0.5)]


def test_the_plot_is_an_svg_and_a_png(tmp_path):
    requires(can_plot(), "altair and vl-convert-python are not installed", must_run_in_ci=False)
    rows = [row(step, BATCH, {}, duration_s=1) for step in range(1, 6)]
    names = ("hidden tests", "coin flip")
    # In a process of its own: the renderer keeps descriptors for as long as its process lives.
    code = f"from pathlib import Path; from stockade.training._plot import plot; plot({dict.fromkeys(names, rows)!r}, Path('.'))"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(ROOT / "src")}, check=True)
    svg, png = tmp_path / "reward.svg", tmp_path / "reward.png"
    assert svg.read_text().lstrip().startswith("<svg")
    assert "coin flip" in svg.read_text()
    assert png.read_bytes().startswith(b"\x89PNG")
