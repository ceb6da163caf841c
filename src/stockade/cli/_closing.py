"""The last act of every command that made a run: verify the record, write the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stockade.cli._output import emit, out, reporting

if TYPE_CHECKING:
    from stockade.runs import Section


def close_run(
    directory: Path,
    *,
    metrics: Path | None = None,
    control: Path | None = None,
    extra: Sequence[Section] = (),
    notices: Sequence[str] = (),
) -> dict[str, str]:
    """Verify the record of a run that is over and write its report; returns what to print of both."""
    from stockade.events import verify_run
    from stockade.runs import write_report

    verified = verify_run(directory)
    found = metrics if metrics is not None and metrics.exists() else None
    report = write_report(directory, metrics=found, control=control, extra=extra, notices=notices)
    state = "verified, " if verified.ok else f"{len(verified.problems)} problems, "
    return {"record": state + ("witnessed" if verified.witnessed else "unwitnessed"), "report": str(report.html)}


def report(
    run: Annotated[str, typer.Argument(help="The run's directory, or its ID below --runs.")],
    *,
    runs: Annotated[Path, typer.Option("--runs", help="Directory that holds the runs.")] = Path("runs"),
    metrics: Annotated[Path | None, typer.Option("--metrics", help="Metrics of a training (JSONL).")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write report.html and report.json of a run anew from its record."""
    from stockade.cli._record import find_run

    with reporting(as_json=json_):
        done = close_run(find_run(run, runs), metrics=metrics)
    if json_:
        emit(done)
    else:
        out.print(f"record {done['record']}\nreport {done['report']}", markup=False)
