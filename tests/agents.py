"""Runs for tests: a policy, an agent, and ways to look at what became of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stockade.client import Run, connect
from stockade.events import VerifyReport, verify_run
from tests.support import ROOT

PLAIN = "version: 1\n"
SMALL = (
    "version: 1\nsandbox: {memory: 256 MiB, cpus: 1, pids: 64, disk: 32 MiB, wall: 2 min, cpu: 1 min, output: 1 MiB}\n"
)


def write_policy(folder: Path, text: str = SMALL) -> Path:
    """Write a policy file and return its path."""
    path = folder / "policy.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def open_run(folder: Path, policy: str = SMALL, **options: Any) -> Run:
    """Return a run to be opened, with its record below ``folder``."""
    return connect(write_policy(folder, policy), runs=folder / "runs", **options)


def assert_sealed(run_dir: Path) -> VerifyReport:
    """The record of a run that is over verifies."""
    report = verify_run(run_dir)
    assert report.ok, report.problems
    return report


def events_of(run_dir: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Every event of a run, read straight from its files."""
    found = []
    for path in sorted((run_dir / "events").rglob("*.jsonl")):
        for line in path.read_text("utf-8").splitlines():
            event = json.loads(line)
            if kind is None or event["kind"] == kind:
                found.append(event)
    return found


def python_program(source: str, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a Python program that imports this checkout's stockade; its standard output is piped."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), **(env or {})}
    return subprocess.Popen(
        [sys.executable, "-c", source, *arguments], stdout=subprocess.PIPE, env=environment, start_new_session=True
    )


def read_line(process: subprocess.Popen[bytes]) -> Any:
    """Return the JSON value that the program prints next."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the program ended without the line that the test waits for"
    return json.loads(line)


def alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Any, timeout_s: float, what: str) -> float:
    """Poll until ``condition()`` holds; returns the seconds it took."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < timeout_s, f"{what}: not within {timeout_s} s"
        time.sleep(0.02)
    return time.monotonic() - begun


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """End a program of :func:`python_program` for good."""
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    process.wait(10)
    if process.stdout is not None:
        process.stdout.close()
