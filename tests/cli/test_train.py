"""``stockade train`` from the command to the report: the real engine, broker, sandboxes and proxy."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stockade.training import require_engine
from tests.agents import assert_sealed, events_of, wait_until
from tests.support import ROOT, requires

LOADS = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokens = AutoTokenizer.from_pretrained(sys.argv[1])("# x plus 3", return_tensors="pt", add_special_tokens=False)
print(model(input_ids=tokens["input_ids"]).logits.shape[-1] == len(AutoTokenizer.from_pretrained(sys.argv[1])))
"""


def engine() -> bool:
    try:
        require_engine()
    except OSError:
        return False
    return True


def write_job(folder: Path, **changes: Any) -> Path:
    """The short example with a port of its own, so that two checkouts can test at once."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    examples = ROOT / "examples" / "grpo"
    policy = (examples / "policy.yaml").read_text("utf-8").replace("18473", str(port))
    assert str(port) in policy
    (folder / "policy").mkdir()
    (folder / "policy" / "policy.yaml").write_text(policy, encoding="utf-8")
    text = (examples / "short.yaml").read_text("utf-8")
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "policy" / "job.yaml").write_text(text, encoding="utf-8")
    return folder / "policy" / "job.yaml"


def command(job: Path, *words: str) -> tuple[list[str], dict[str, str]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return [sys.executable, "-m", "stockade.cli", "train", str(job), *words], environment


@pytest.mark.promise("S9.1")
@pytest.mark.timeout(600)
def test_a_short_job_ends_with_metrics_model_record_and_report(tmp_path: Path) -> None:
    requires(engine(), "torch, transformers and trl are not installed")
    words, environment = command(write_job(tmp_path), "--json", "--run-id", "short")
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr.decode()
    told = json.loads(done.stdout)
    run, output = tmp_path / "runs" / "short", tmp_path / "out" / "grpo-short"
    assert told["record"].startswith("verified")
    assert told["trainer_isolation"] in ("full", "partial", "unenforced")
    assert_sealed(run)

    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert len([row for row in rows if row.get("reward") is not None]) == 3
    assert (output / "reward.svg").stat().st_size > 0
    loading = {**environment, "TMPDIR": str(tmp_path)}  # torch leaves a cache folder there
    model = str(output / "model")
    loaded = subprocess.run([sys.executable, "-c", LOADS, model], capture_output=True, env=loading, check=True)
    assert loaded.stdout.strip() == b"True"

    starts = events_of(run, "rollout.start")
    rollouts = [event for event in starts if event["role"] == "rollout"]
    trained = [event for event in rollouts if "train_step" in event]
    assert len(trained) >= 3 * 4 * 4, "every sample has a sandbox of its own"
    assert {event["network"] for event in starts if event["role"] == "grading"} == {False}
    requests = events_of(run, "net.request")
    assert {event["verdict"] for event in requests if event["url.path"] == "/v1/rate"} == {"allowed"}
    page = (run / "report.html").read_text("utf-8")
    assert "<svg" in page
    assert "<script" not in page
    assert "dropped groups (stops)" in page


@pytest.mark.promise("S9.1")
@pytest.mark.timeout(600)
def test_ctrl_c_saves_the_model_and_seals_the_record(tmp_path: Path) -> None:
    requires(engine(), "torch, transformers and trl are not installed")
    job = write_job(tmp_path, **{"steps: 3,": "steps: 500,"})
    words, environment = command(job, "--run-id", "cut")
    output, run = tmp_path / "out" / "grpo-short", tmp_path / "runs" / "cut"
    with subprocess.Popen(
        words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as live:
        try:
            metrics = output / "metrics.jsonl"
            wait_until(
                lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 2, 400, "two steps of training"
            )
            live.send_signal(signal.SIGINT)
            assert live.wait(150) == 130
        finally:
            live.kill()
    assert_sealed(run)
    assert (run / "report.html").is_file()
    assert json.loads((output / "summary.json").read_text("utf-8"))["end"] == "interrupted"
    assert (output / "model" / "config.json").is_file()
