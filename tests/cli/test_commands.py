"""The command line as a person or a script uses it: real processes, real sandboxes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agents import SMALL, assert_sealed, events_of, wait_until, write_policy
from tests.support import ROOT


def stockade(*words: str | Path, cwd: Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run the program and wait for it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200", "TERM": "dumb"}
    command = [sys.executable, "-m", "stockade.cli", *map(str, words)]
    return subprocess.run(command, cwd=cwd, input=stdin, capture_output=True, timeout=100, env=environment, check=False)


def only_run(folder: Path) -> Path:
    runs = [path for path in (folder / "runs").iterdir() if not path.name.startswith(".")]
    assert len(runs) == 1
    return runs[0]


@pytest.mark.promise("S6.1")
def test_run_exits_with_the_commands_code_and_passes_streams(tmp_path: Path) -> None:
    write_policy(tmp_path)
    script = "import sys; sys.stdout.write(sys.stdin.read().upper()); sys.stderr.write('err'); sys.exit(7)"
    done = stockade("run", "-p", "policy.yaml", "-i", "--", "python3", "-c", script, cwd=tmp_path, stdin=b"abc")
    assert (done.returncode, done.stdout, done.stderr) == (7, b"ABC", b"err")
    assert_sealed(only_run(tmp_path))


@pytest.mark.promise("S6.1")
def test_run_reports_its_own_errors_with_125(tmp_path: Path) -> None:
    done = stockade("run", "-p", "missing.yaml", "--", "true", cwd=tmp_path)
    assert done.returncode == 125
    assert done.stderr.count(b"\n") == 1
    assert b"missing.yaml: cannot be read" in done.stderr
    write_policy(tmp_path)
    bad = stockade("run", "-p", "policy.yaml", "-e", "NOVALUE", "--", "true", cwd=tmp_path)
    assert (bad.returncode, b"NAME=VALUE" in bad.stderr) == (125, True)


def test_run_copies_in_and_collects_out(tmp_path: Path) -> None:
    write_policy(tmp_path)
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "sub" / "x").write_bytes(b"data")
    command = ["sh", "-c", "cat sub/x > y; ln -s /etc/passwd link; echo $WHO > who"]
    done = stockade(
        *("run", "-p", "policy.yaml", "--put", "in", "--get", "out", "-e", "WHO=me", "--json", "--", *command),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["exit"] == "exited"
    assert (tmp_path / "out" / "y").read_bytes() == b"data"
    assert (tmp_path / "out" / "who").read_bytes() == b"me\n"
    assert not os.path.lexists(tmp_path / "out" / "link")
    assert b"link" in done.stderr


def test_a_command_that_times_out_is_reported_as_that(tmp_path: Path) -> None:
    write_policy(tmp_path)
    done = stockade("run", "-p", "policy.yaml", "--timeout", "0.5", "--json", "--", "sleep", "60", cwd=tmp_path)
    told = json.loads(done.stdout)
    assert (told["exit"], told["fault"]) == ("timeout", "candidate")
    assert done.returncode == 137


def test_record_verify_names_an_edited_line(tmp_path: Path) -> None:
    write_policy(tmp_path)
    stockade("run", "-p", "policy.yaml", "--run-id", "r1", "--", "echo", "hello", cwd=tmp_path)
    assert stockade("record", "verify", "r1", cwd=tmp_path).returncode == 0
    chain = next((tmp_path / "runs" / "r1" / "events").rglob("ep_*.sandbox.jsonl"))
    text = chain.read_text("ascii")
    assert '"hello"' in text
    chain.write_text(text.replace('"hello"', '"HELLO"'), encoding="ascii")
    done = stockade("record", "verify", "r1", "--json", cwd=tmp_path)
    told = json.loads(done.stdout)
    assert (done.returncode, told["ok"], told["witness"]) == (1, False, "unwitnessed")
    assert told["problems"][0]["file"].endswith(chain.name)
    line = 1 + next(number for number, row in enumerate(text.splitlines()) if '"hello"' in row)
    assert told["problems"][0]["line"] == line


def test_events_filter_and_follow_end_with_the_run(tmp_path: Path) -> None:
    write_policy(tmp_path)
    stockade("run", "-p", "policy.yaml", "--run-id", "r1", "--", "echo", "hi", cwd=tmp_path)
    done = stockade("events", "r1", "--kind", "process.exec", "--json", "--follow", cwd=tmp_path)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["process.command_args"] for row in rows] == [["echo", "hi"]]
    assert stockade("events", "r1", "--kind", "nope", cwd=tmp_path).returncode == 2


@contextlib.contextmanager
def live_run(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A ``stockade run`` whose command sleeps, and the directory of its run; killed at the end of the block."""
    write_policy(folder)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    words = ("run", "-p", "policy.yaml", "--run-id", "live", "--", "sleep", "90")
    command = [sys.executable, "-m", "stockade.cli", *words]
    with subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE) as live:
        try:
            run_dir = folder / "runs" / "live"
            wait_until(lambda: run_dir.exists() and events_of(run_dir, "process.exec"), 30, "the command starts")
            yield live, run_dir
        finally:
            live.kill()


def test_stop_ends_a_live_run_and_says_so(tmp_path: Path) -> None:
    with live_run(tmp_path) as (live, run_dir):
        done = stockade("stop", "live", "--reason", "drill", "--json", cwd=tmp_path)
        assert (done.returncode, json.loads(done.stdout)[0]["state"]) == (0, "stopped")
        assert live.wait(30) != 0
    assert_sealed(run_dir)
    assert stockade("stop", "--all", "--json", cwd=tmp_path).returncode == 0


@pytest.mark.promise("S5.3")
def test_ctrl_c_in_run_seals_the_record(tmp_path: Path) -> None:
    with live_run(tmp_path) as (live, run_dir):
        live.send_signal(signal.SIGINT)
        assert live.wait(30) == 130
        assert live.stderr is not None
        assert b"Traceback" not in live.stderr.read()
    assert_sealed(run_dir)


def test_policy_check_prints_rules_and_refuses_the_trifecta(tmp_path: Path) -> None:
    write_policy(tmp_path, "version: 1\negress: {allow: [{host: example.com}]}\ndata: {private: true}\n")
    done = stockade("policy", "check", "policy.yaml", "--json", cwd=tmp_path)
    told = json.loads(done.stdout)
    assert (done.returncode, told["refused"]) == (2, True)
    assert told["trifecta"]["private data"][0]["line"] == 3
    write_policy(tmp_path, SMALL)
    shown = stockade("policy", "check", "policy.yaml", cwd=tmp_path)
    assert shown.returncode == 0
    assert b"trifecta" in shown.stdout


def test_doctor_has_a_table_and_json(tmp_path: Path) -> None:
    told = json.loads(stockade("doctor", "--json", cwd=tmp_path).stdout)
    names = {item["name"] for item in told["findings"]}
    assert {
        "user namespaces",
        "seccomp",
        "landlock",
        "cgroup",
        "kvm",
        "gvisor",
        "apptainer",
        "slurm",
        "internet",
    } <= names
    assert told["ready"] is True
    assert b"user namespaces" in stockade("doctor", cwd=tmp_path).stdout


BATCH = [
    {"task_id": "good", "entry_point": "f", "solution": "def f(x):\n    return x + 1\n"},
    {"task_id": "bad", "entry_point": "f", "solution": "def f(x):\n    return x\n"},
]


@pytest.mark.promise("S6.3")
def test_batch_grades_resumes_and_reports(tmp_path: Path) -> None:
    write_policy(tmp_path)
    tests = "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(5) == 6\n"
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({**row, "tests": tests}) + "\n" for row in BATCH), encoding="utf-8")
    done = stockade("batch", "tasks.jsonl", "-p", "policy.yaml", "--run-id", "b1", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["verdicts"]["ok"], told["verdicts"]["wrong"], told["resumed"]) == (1, 1, 0)
    assert told["record"].startswith("verified")
    assert Path(told["report"]).is_file()
    again = stockade("batch", "tasks.jsonl", "-p", "policy.yaml", "--json", "--expect", "ok", cwd=tmp_path)
    assert (json.loads(again.stdout)["resumed"], again.returncode) == (2, 1)
    assert b"bad: wrong" in again.stderr


@pytest.mark.promise("S6.2")
def test_batch_refuses_a_bad_task_file_by_line_and_key(tmp_path: Path) -> None:
    write_policy(tmp_path)
    (tmp_path / "tasks.jsonl").write_text(json.dumps(BATCH[0]) + "\n", encoding="utf-8")
    done = stockade("batch", "tasks.jsonl", "-p", "policy.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert b"tasks.jsonl:1: tests" in done.stderr
    assert not (tmp_path / "runs").exists()
