"""``stockade record verify``, ``stockade events`` and ``stockade stop``: what a run did, and its end."""

from __future__ import annotations

import getpass
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from stockade.cli._output import emit, err, fail, out, printable, reporting

app = typer.Typer(help="The record of a run.", no_args_is_help=True)

RunDir = Annotated[str, typer.Argument(help="The run's directory, or its ID below --runs.")]
Runs = Annotated[Path, typer.Option("--runs", help="Directory that holds the runs.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_CONFIRM_S = 10.0


def find_run(run: str, runs: Path) -> Path:
    """Return the directory of ``run``, given as a path or as an ID."""
    found = next((path for path in (Path(run), runs / run) if (path / "manifest.yaml").is_file()), None)
    return found or fail(f"no run {run!r} here or in {runs}", hint="name the run's directory, or give --runs")


@app.command()
def verify(run: RunDir, *, runs: Runs = Path("runs"), json_: Json = False) -> None:
    """Check every chain of a run: any edit, gap or truncation is named by file and line."""
    from stockade.events import verify_run

    with reporting(as_json=json_):
        report = verify_run(find_run(run, runs))
    problems = [{"file": str(problem.file), "line": problem.line, "what": problem.what} for problem in report.problems]
    witness = "witnessed" if report.witnessed else "unwitnessed"
    if json_:
        emit(
            {"ok": report.ok, "files": report.files, "events": report.events, "witness": witness, "problems": problems}
        )
    else:
        for problem in problems:
            out.print(f"{problem['file']}:{problem['line']}: {printable(str(problem['what']))}", markup=False)
        verdict = "[green]verified[/]" if report.ok else f"[bold red]{len(problems)} problems[/]"
        out.print(f"{verdict}: {report.events} events in {report.files} files, {witness}")
    raise typer.Exit(0 if report.ok else 1)


def events(
    run: RunDir,
    *,
    runs: Runs = Path("runs"),
    rollout: Annotated[str | None, typer.Option("--rollout", help="Only this rollout.")] = None,
    kind: Annotated[list[str] | None, typer.Option("--kind", help="Only this kind; may be repeated.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run is sealed.")] = False,
    json_: Json = False,
) -> None:
    """Print the events of a run in the order of time."""
    from stockade.events import KINDS, iter_events

    unknown = sorted(set(kind or ()) - set(KINDS))
    if unknown:
        fail(f"no such kind: {', '.join(unknown)}", hint=f"kinds: {', '.join(sorted(KINDS))}")
    with reporting(as_json=json_):
        for event in iter_events(
            find_run(run, runs), rollout=rollout, kinds=set(kind) if kind else None, follow=follow
        ):
            if json_:
                sys.stdout.write(json.dumps(event) + "\n")
                sys.stdout.flush()
            else:
                out.print(_line(event), markup=False)


_ENVELOPE = frozenset(
    (
        *("v", "id", "time", "observed", "run_id", "rollout_id", "seq", "producer"),
        *("trust", "policy_digest", "kind", "severity", "verdict", "prev", "hash"),
    )
)


def _line(event: Mapping[str, object]) -> str:
    at = int(str(event["time"])) / 1e9
    clock = time.strftime("%H:%M:%S", time.localtime(at)) + f".{int(at * 1000) % 1000:03d}"
    rest = " ".join(
        f"{name}={value}" for name, value in event.items() if name not in _ENVELOPE and value not in (None, "", [])
    )
    verdict = "" if event["verdict"] == "observed" else f" {str(event['verdict']).upper()}"
    return printable(f"{clock} {event['rollout_id']} {event['kind']}{verdict} {rest}")


def stop(
    run: Annotated[str | None, typer.Argument(help="The run's directory or ID.")] = None,
    *,
    all_: Annotated[bool, typer.Option("--all", help="Stop every run below --runs.")] = False,
    runs: Runs = Path("runs"),
    reason: Annotated[str, typer.Option("--reason", help="Why; kept in the record.")] = "stopped by hand",
    json_: Json = False,
) -> None:
    """Stop a run for good: its way out is cut, then every process is killed. Needs no agent to answer."""
    if (run is None) == (not all_):
        fail("name one run, or give --all")
    with reporting(as_json=json_):
        targets = (
            [found for found in sorted(runs.glob("*")) if (found / "manifest.yaml").is_file()]
            if all_
            else [find_run(run or "", runs)]
        )
        results = [_stop_one(target, reason) for target in targets]
    if json_:
        emit(results)
    for result in results:
        if not json_:
            out.print(f"{result['run']}: {result['state']}", markup=False)
    if any(result["state"] == "not confirmed" for result in results):
        err.print("the STOP file is written; an agent that cannot be reached stops when it sees it")
        raise typer.Exit(1)


def _stop_one(target: Path, reason: str) -> dict[str, object]:
    from stockade.runs import RunDirectory

    directory = RunDirectory.open(target)
    if directory.sealed():
        return {"run": target.name, "state": "had ended already"}
    begun = time.monotonic()
    directory.request_stop(reason=reason, person=getpass.getuser())
    while time.monotonic() < begun + _CONFIRM_S:
        if directory.sealed() or directory.stop_confirmed():
            return {"run": target.name, "state": "stopped", "seconds": round(time.monotonic() - begun, 3)}
        time.sleep(0.1)
    return {"run": target.name, "state": "not confirmed"}
