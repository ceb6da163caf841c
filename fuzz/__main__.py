"""Run the targets: ``python -m fuzz [NAME…] [--minutes N]``.

The time is shared out evenly. What crashes or hangs is written to ``out/fuzz`` and named at the end (exit status 1): once
it is repaired it becomes a seed (``fuzz/_seeds.py``), and is looked at for ever after. ``--keep`` adds what was found to
the corpus, minimised.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from fuzz._corpus import inputs, keep, unpack
from fuzz._targets import TARGETS

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out" / "fuzz"
HANG_S = 25
MEMORY_MIB = 2048
_GRACE_S = 120
_STATS = re.compile(r"stat::number_of_executed_units:\s*(\d+)")
_COVER = re.compile(r"cov: (\d+)")


class Outcome(NamedTuple):
    """What one target came to; ``problem`` is empty where nothing was found."""

    runs: int
    coverage: int
    kept: int
    problem: str


def fuzz(name: str, seconds: float, *, keeping: bool = False, out: Path = OUT) -> Outcome:
    """Fuzz one target; crashes, hangs (25 s for one input) and more than 2 GiB are problems."""
    target = TARGETS[name]
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as text:
        folder = Path(text)
        samples = inputs(name)
        unpack(samples, folder / "corpus")
        words = "".join('"' + "".join(f"\\x{byte:02x}" for byte in word) + '"\n' for word in target.words)
        (folder / "words").write_text(words)
        options = [f"-max_total_time={max(1, round(seconds))}", "-print_final_stats=1", f"-dict={folder / 'words'}"]
        options += [f"-artifact_prefix={out / name}-", f"-max_len={target.max_len}", "-len_control=20"]
        status, log = _child(name, [*options, str(folder / "corpus")], seconds + _GRACE_S)
        units = _STATS.search(log)
        covered = _COVER.findall(log)
        problem = "" if status == 0 and units else _told(name, status, log, out)
        now = len(samples)
        if keeping and not problem:
            now = _minimise(name, folder)
    return Outcome(int(units[1]) if units else 0, int(covered[-1]) if covered else 0, now, problem)


def _child(name: str, options: list[str], limit_s: float) -> tuple[int, str]:
    """Run libFuzzer; return its status (-1: it had to be ended) and what it said."""
    words = [sys.executable, "-m", "fuzz._child", name, f"-timeout={HANG_S}", f"-rss_limit_mb={MEMORY_MIB}", *options]
    try:
        done = subprocess.run(words, cwd=ROOT, check=False, capture_output=True, timeout=limit_s)
    except subprocess.TimeoutExpired as late:
        return -1, (late.stderr or b"").decode("utf-8", "replace")
    return done.returncode, (done.stdout + done.stderr).decode("utf-8", "replace")


def _minimise(name: str, folder: Path) -> int:
    """Keep a smallest set of inputs with the same coverage; return how many there are then."""
    merged = folder / "merged"
    merged.mkdir()
    status, log = _child(name, ["-merge=1", str(merged), str(folder / "corpus")], 600)
    if status:
        raise RuntimeError(f"{name}: the corpus could not be minimised:\n{log[-2000:]}")
    keep(name, [path.read_bytes() for path in merged.iterdir()])
    return len(inputs(name))


def _told(name: str, status: int, log: str, out: Path) -> str:
    """Write the log beside the input that was found; return its end."""
    path = out / f"{name}.log"
    path.write_text(log)
    lines = [line for line in log.splitlines() if not line.startswith(("INFO: Instrumenting", "#"))]
    return f"exit status {status}, see {path}\n" + "\n".join(lines[-40:])


def main() -> int:
    """Fuzz what the command line names; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="targets (default: all): " + ", ".join(TARGETS))
    parser.add_argument("--minutes", type=float, default=30.0, help="of all targets together (default: 30)")
    parser.add_argument("--keep", action="store_true", help="minimise the corpus with what was found, and keep it")
    given = parser.parse_args()
    unknown = set(given.names) - set(TARGETS)
    if unknown:
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    names = given.names or list(TARGETS)
    failed = []
    for name in names:
        begin = time.monotonic()
        outcome = fuzz(name, given.minutes * 60 / len(names), keeping=given.keep)
        took = time.monotonic() - begin
        print(
            f"{name:10} {outcome.runs:>9} runs in {took:4.0f} s, coverage {outcome.coverage}, corpus {outcome.kept}"
            f"{': FOUND' if outcome.problem else ''}",
            flush=True,
        )
        if outcome.problem:
            failed.append(name)
            print(outcome.problem, flush=True)
    print(f"found something in: {', '.join(failed)}" if failed else "nothing found")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
