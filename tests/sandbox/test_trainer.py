"""The trainer's cage: what the learning side can open of the run that it trains in. Nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from stockade.sandbox import _landlock, trainer_launch
from tests.support import ROOT, requires

PROBE = """
import json, os, sys
table = {}
for path in sys.argv[1:]:
    try:
        os.close(os.open(path, os.O_RDONLY))
        table[path] = "opened"
    except OSError as error:
        table[path] = error.strerror
try:
    open(os.path.join("runs-are-elsewhere"), "w").close()
    table["write"] = "written"
except OSError as error:
    table["write"] = error.strerror
print(json.dumps(table))
"""


class Lab:
    """A run directory with a record, a policy, an index, and a trainer's output directory beside them."""

    def __init__(self, folder: Path) -> None:
        self.run = folder / "runs" / "r1"
        (self.run / "events" / "n1").mkdir(parents=True)
        self.record = self.run / "events" / "n1" / "_run.control.jsonl"
        self.record.write_text("{}\n", encoding="ascii")
        self.policy = folder / "policies" / "policy.yaml"
        self.policy.parent.mkdir()
        self.policy.write_text("version: 1\n", encoding="ascii")
        self.index = folder / "state" / "r1.sqlite"
        self.index.parent.mkdir()
        self.index.write_bytes(b"index")
        self.output = folder / "out"
        self.output.mkdir()

    @property
    def secret(self) -> list[Path]:
        return [self.run, self.record, self.policy, self.policy.parent, self.index]

    def launch(self, *, reads: Sequence[Path] = ()) -> tuple[int, dict[str, str], str, str]:
        """Run the probe in the cage: exit code, what it could open, stderr, and the level that was reported."""
        spec_read, spec_write = os.pipe()
        report_read, report_write = os.pipe()
        spec = trainer_launch(
            argv=(sys.executable, "-c", PROBE, *map(str, self.secret), str(self.output)),
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "src")},
            output=self.output,
            reads=reads,
            hidden=(self.run, self.policy),
            keep_fds=(),
            report_fd=report_write,
        )
        os.write(spec_write, spec)
        os.close(spec_write)
        command = [sys.executable, "-m", "stockade.sandbox._launch", str(spec_read)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run(
            command, pass_fds=(spec_read, report_write), capture_output=True, env=environment, check=False
        )
        os.close(spec_read)
        os.close(report_write)
        with open(report_read, "rb") as file:
            reported = file.read()
        told = json.loads(done.stdout) if done.stdout else {}
        level = json.loads(reported)["level"] if reported else ""
        return done.returncode, told, done.stderr.decode(), level


@pytest.mark.promise("S8.3")
def test_the_trainer_cannot_open_record_index_or_policy(tmp_path: Path) -> None:
    requires(_landlock.abi() >= 1, "this kernel has no Landlock")
    lab = Lab(tmp_path)
    bare = subprocess.run(
        [sys.executable, "-c", PROBE, *map(str, lab.secret)], capture_output=True, cwd=lab.output, check=True
    )
    assert {json.loads(bare.stdout)[str(path)] for path in lab.secret} == {"opened"}, "without the cage all is open"
    code, told, stderr, level = lab.launch()
    assert code == 0, stderr
    assert {told[str(path)] for path in lab.secret} == {"Permission denied"}
    assert (told[str(lab.output)], told["write"]) == ("opened", "written"), "its own output is its own"
    assert level in ("full", "partial")


@pytest.mark.promise("S8.3")
def test_a_rule_that_would_let_the_record_through_stops_the_start(tmp_path: Path) -> None:
    requires(_landlock.abi() >= 1, "this kernel has no Landlock")
    lab = Lab(tmp_path)
    code, told, stderr, _ = lab.launch(reads=(lab.run.parent,))
    assert (code, told) == (125, {})
    assert "still allows" in stderr
