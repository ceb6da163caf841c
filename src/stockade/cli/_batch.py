"""``stockade batch``: every task of a file rolled out in its own sandbox and graded in fresh ones."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stockade.cli._closing import close_run
from stockade.cli._output import emit, err, out, reporting, table
from stockade.cli._run import Json, MetricsAnywhere, MetricsAt, Operator, Policy, RunId, Runs

if TYPE_CHECKING:
    from stockade.client import RunOptions
    from stockade.gym import Task
    from stockade.rewards import BatchResult, ResultLog, Sample


def batch(
    tasks: Annotated[Path, typer.Argument(help="The task file (docs/tasks.md).")],
    *,
    policy: Policy,
    parallel: Annotated[
        int | None, typer.Option("--parallel", "-n", min=1, max=256, help="Tasks at a time; default: one a CPU.")
    ] = None,
    results: Annotated[
        Path | None, typer.Option("--results", help="Where results go; default: TASKS.results.jsonl.")
    ] = None,
    runs: Runs = Path("runs"),
    run_id: RunId = None,
    operator: Operator = None,
    metrics: MetricsAt = None,
    unsafe_metrics_anywhere: MetricsAnywhere = False,
    expect: Annotated[
        str | None, typer.Option("--expect", help="Exit with 1 unless every verdict is this one.")
    ] = None,
    json_: Json = False,
) -> None:
    """Run and grade every task; a rerun with the same results file goes on with what is missing."""
    from stockade.client import RunOptions
    from stockade.gym import load_tasks
    from stockade.rewards import ResultLog

    with reporting(as_json=json_):
        wanted = None if expect is None else _verdict(expect)
        loaded = load_tasks(tasks)
        with ResultLog(results or tasks.with_suffix(".results.jsonl")) as log:
            width = parallel or len(os.sched_getaffinity(0))
            options = RunOptions(
                policy=policy,
                runs=runs,
                run_id=run_id,
                operator=operator,
                metrics=metrics,
                unsafe_metrics_anywhere=unsafe_metrics_anywhere,
            )
            done, directory = asyncio.run(_batch(loaded, log, options, width, quiet=json_))
            samples = [log.samples[task.task_id] for task in loaded if task.task_id in log.samples]
        counts = Counter(sample.verdict.value for sample in samples)
        summary = close_run(directory)
    _show(loaded, log, done, directory, counts, summary, as_json=json_)
    unexpected = [sample for sample in samples if wanted is not None and sample.verdict is not wanted]
    for sample in unexpected[:20]:
        err.print(f"{sample.task_id}: {sample.verdict.value}: {sample.evidence}", markup=False)
    incomplete = len(samples) < len(loaded) or any(not sample.verdict.final for sample in samples)
    raise typer.Exit(1 if unexpected or incomplete else 0)


def _show(
    loaded: Sequence[Task],
    log: ResultLog,
    done: BatchResult,
    directory: Path,
    counts: Counter[str],
    summary: Mapping[str, object],
    *,
    as_json: bool,
) -> None:
    """Print what came of it, for people or for programs."""
    from stockade.rewards import Verdict

    if as_json:
        emit(
            {
                "run_dir": str(directory),
                "tasks": len(loaded),
                "resumed": done.resumed,
                "not_started": done.not_started,
                "verdicts": {verdict.value: counts[verdict.value] for verdict in Verdict},
                "wall_s": round(done.wall_ns / 1e9, 3),
                **summary,
            }
        )
        return
    table(
        f"{counts.total()} of {len(loaded)} tasks, {done.resumed} of them from an earlier run",
        ("verdict", "tasks"),
        [(verdict.value, counts[verdict.value]) for verdict in Verdict],
    )
    out.print(
        f"results {log.path}\nrecord  {directory} ({summary['record']})\nreport  {summary['report']}", markup=False
    )


def _verdict(name: str) -> object:
    from stockade.errors import StockadeError
    from stockade.rewards import Verdict

    try:
        return Verdict(name)
    except ValueError as error:
        raise StockadeError(
            f"no such verdict: {name!r}", hint=f"there are: {', '.join(item.value for item in Verdict)}"
        ) from error


async def _batch(
    tasks: list[Task],
    log: ResultLog,
    options: RunOptions,
    parallel: int,
    *,
    quiet: bool,
) -> tuple[BatchResult, Path]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from stockade.client import Run
    from stockade.rewards import run_batch

    done = log.finished(tasks)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[seen]}"),
    )
    async with Run(options) as run:
        with Progress(*columns, console=err, disable=quiet or not sys.stderr.isatty()) as bar:
            shown = bar.add_task("rollouts", total=len(tasks), completed=len(done), seen="")
            seen: Counter[str] = Counter()

            def take(sample: Sample) -> None:
                log.append(sample)
                seen[sample.verdict.value] += 1
                bar.update(shown, advance=1, seen=" ".join(f"{name} {count}" for name, count in seen.items()))

            result = await run_batch(run.client, tasks, parallel=parallel, on_result=take, resume=done)
        directory = run.directory
    return result, directory
