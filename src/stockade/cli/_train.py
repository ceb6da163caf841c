"""``stockade train``: a GRPO job, its trainer locked away from the record of the very run it trains in."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stockade.cli._closing import close_run
from stockade.cli._output import emit, fail, out, reporting, table
from stockade.cli._run import Json, MetricsAnywhere, MetricsAt, Operator, RunId, Runs
from stockade.cli._trainer import follow_trainer

if TYPE_CHECKING:
    from stockade.client import RunOptions
    from stockade.training import Job


def train(
    job: Annotated[Path, typer.Argument(help="The job file (docs/training.md).")],
    *,
    runs: Runs = Path("runs"),
    run_id: RunId = None,
    operator: Operator = None,
    metrics: MetricsAt = None,
    unsafe_metrics_anywhere: MetricsAnywhere = False,
    control: Annotated[
        bool, typer.Option("--control", help="Train a second model on coin flips, for comparison.")
    ] = False,
    json_: Json = False,
) -> None:
    """Train a policy model with rollouts in sandboxes; ends with metrics, a model, a sealed record and a report."""
    from stockade.client import RunOptions
    from stockade.training import load_job

    with reporting(as_json=json_):
        loaded = load_job(job)
        if control:
            loaded = loaded.model_copy(update={"control": "coin_flip"})
        options = RunOptions(
            policy=Path(loaded.policy),
            runs=runs,
            run_id=run_id,
            operator=operator,
            metrics=metrics,
            unsafe_metrics_anywhere=unsafe_metrics_anywhere,
        )
        code, told, directory, isolation = asyncio.run(_train(loaded, options, quiet=json_))
        if told.get("event") == "failed":
            fail(str(told.get("message")), hint=told.get("hint"), code=code or 1, as_json=json_)
        summary = _close(loaded, directory, isolation, told)
    if json_:
        emit(
            {
                "run_dir": str(directory),
                "output": str(loaded.folder),
                "trainer_isolation": isolation,
                **summary,
                "summary": told,
            }
        )
    else:
        _show(told, loaded, directory, isolation, summary)
    raise typer.Exit(code)


async def _train(job: Job, options: RunOptions, *, quiet: bool) -> tuple[int, Mapping[str, Any], Path, str]:
    from stockade.client import Run
    from stockade.policy import load_policy
    from stockade.training import require_engine, resolve_job, serve_rates, service_of

    require_engine()
    policy = load_policy(Path(job.policy))
    resolved = resolve_job(job, policy)
    service = service_of(job, policy)
    with serve_rates(service.address, service.port, resolved.rate):
        async with Run(options) as run:
            code, told, isolation = await follow_trainer(resolved, run, Path(job.policy), quiet=quiet)
            directory = run.directory
    return code, told, directory, isolation


def _close(job: Job, directory: Path, isolation: str, told: Mapping[str, Any]) -> dict[str, str]:
    """After the agent has sealed the record: verify it and write the report."""
    from stockade.runs import Section

    control = job.folder / "control.jsonl"
    grpo = told.get("grpo") or {}
    rows = [
        ("job", job.name),
        ("end", str(told.get("end"))),
        ("verdicts", _short(grpo.get("verdicts"))),
        ("masked samples (infrastructure faults)", str(grpo.get("masked"))),
        ("dropped groups (stops)", str(grpo.get("dropped_groups"))),
        ("held out before, after", f"{_short(told.get('evaluation_before'))}; {_short(grpo.get('evaluation_after'))}"),
        ("trainer isolation (Landlock)", isolation),
        ("model", str(job.folder / "model")),
        ("metrics", str(job.folder / "metrics.jsonl")),
        ("monitor in reward", "false: the trainer cannot open the record, and no type carries a finding"),
    ]
    return close_run(
        directory,
        metrics=job.folder / "metrics.jsonl",
        control=control if job.control != "none" and control.exists() else None,
        extra=[Section("Training", rows, ("what", "value"))],
        notices=[f"The trainer was not fully isolated from the record: {isolation}"] if isolation != "full" else [],
    )


def _show(told: Mapping[str, Any], job: Job, directory: Path, isolation: str, summary: Mapping[str, str]) -> None:
    grpo = told.get("grpo") or {}
    rows = [
        ("end", told.get("end")),
        ("steps", grpo.get("steps")),
        ("reward, first → last quarter", f"{_short(grpo.get('reward_first'))} → {_short(grpo.get('reward_last'))}"),
        ("held out before", _short(told.get("evaluation_before"))),
        ("held out after", _short(grpo.get("evaluation_after"))),
        ("verdicts", _short(grpo.get("verdicts"))),
        ("masked samples, dropped groups", f"{grpo.get('masked')}, {grpo.get('dropped_groups')}"),
        ("trainer isolation", isolation),
        ("model", job.folder / "model"),
        ("metrics", job.folder / "metrics.jsonl"),
        ("record", f"{directory} ({summary['record']})"),
        ("report", summary["report"]),
    ]
    table(f"job {job.name}", ("what", "value"), rows)
    for message in filter(None, [told.get("message")]):
        out.print(str(message), markup=False)


def _short(value: object) -> str:
    """Return a number with two digits, or a table of numbers in words."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_short(one)}" for name, one in value.items())
    return f"{value:.2f}" if isinstance(value, float) else str(value)
