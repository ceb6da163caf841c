"""The bypass cases that tests are named after, and the page that lists them.

A test whose name, or whose parameter's name, has ``case_NNN``, ``cases_NNN_MMM`` or ``case[NNN`` in it is a test of these
cases. ``python -m tests.style._cases`` writes the page's last column anew.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict

from tests.support import ROOT

CASES = range(1, 106)
PAGE = ROOT / "docs" / "egress-cases.md"
FOLDERS = (
    "tests/agent",
    "tests/attacks",
    "tests/cli",
    "tests/clients",
    "tests/egress",
    "tests/policy",
    "tests/sandbox",
)
ROW = re.compile(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \| ([^|]*) \|$", re.MULTILINE)
_NUMBERS = re.compile(r"case(?:[_\[]\d{3}(?:_and_\d{3})*|s_\d{3}(?:_(?:and_)?\d{3})*)(?=[_\[\]-]|$)")
_HIDDEN = "tests/"


def numbers(name: str) -> set[int]:
    """Return the cases that a test's name holds."""
    return {int(digits) for found in _NUMBERS.findall(name) for digits in re.findall(r"\d{3}", found)}


def collected() -> dict[int, set[str]]:
    """Return the test files, below tests/, of each case: collected by pytest, since names of parameters count too."""
    words = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "case or cases",
        *FOLDERS,
    ]
    done = subprocess.run(words, cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(f"pytest cannot collect the tests of the cases:\n{done.stdout[-2000:]}")
    found: dict[int, set[str]] = defaultdict(set)
    for line in done.stdout.splitlines():
        path, colons, name = line.partition("::")
        if colons:
            for number in numbers(name):
                found[number].add(path.removeprefix(_HIDDEN))
    return dict(found)


def listed() -> dict[int, set[str]]:
    """Return the test files of each case as the page names them."""
    return {int(number): set(re.findall(r"`([^`]+)`", files)) for number, _, _, files in ROW.findall(PAGE.read_text())}


def rewrite() -> None:
    """Write the files of each case into the page."""
    tests = collected()

    def row(match: re.Match[str]) -> str:
        files = ", ".join(f"`{path}`" for path in sorted(tests.get(int(match[1]), ())))
        return f"| {match[1]} | {match[2]} | {match[3]} | {files} |"

    PAGE.write_text(ROW.sub(row, PAGE.read_text()))


if __name__ == "__main__":
    rewrite()
