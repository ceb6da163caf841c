"""The report of the tests' sandbox: positive evidence, or none.

Only the tests' process can write it (P4 of docs/grading.md), yet it is read as if anything could come: one line,
exactly these fields, the nonce of this grading. Exit codes prove nothing.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Literal

import msgspec

from stockade.rewards._verdict import plain

if TYPE_CHECKING:
    from stockade.gym import Plan


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One grading as the tests' process saw it."""

    nonce: str
    outcome: Literal["completed", "failed", "broken"]
    calls: int
    held: tuple[int, ...]
    line: int
    detail: str


def read_report(stdout: bytes, *, nonce: str, truncated: bool) -> Report | None:
    """Return the report, or ``None`` when ``stdout`` is not exactly one of this grading."""
    if truncated or stdout.count(b"\n") != 1 or not stdout.endswith(b"\n"):
        return None
    try:
        report = msgspec.json.decode(stdout, type=Report)
    except msgspec.MsgspecError:
        return None
    if not hmac.compare_digest(report.nonce.encode(), nonce.encode()):
        return None
    return report


def missing_evidence(report: Report, plan: Plan) -> str | None:
    """Say what is missing for a pass, or return ``None``: then every required test ran and held."""
    if report.outcome == "failed":
        where = f" at line {report.line} of the tests" if report.line else ""
        return plain(f"failed{where}: {report.detail}")
    if report.outcome == "broken":
        return plain(f"no usable answer: {report.detail}")
    if report.calls < 1:
        return "the tests never called the candidate"
    missing = set(range(len(plan.lines))) - set(report.held)
    if missing:
        lines = sorted({plan.lines[number] for number in missing})
        return plain(f"asserts that never ran, at lines of the tests: {', '.join(map(str, lines))}")
    if len(report.held) != len(plan.lines):
        return "the report names asserts that the tests do not have"
    return None
