"""``stockade train``: a GRPO job, its trainer locked away from the record of the very run it trains in."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stockade.cli._output import emit, err, fail, out, reporting, table
from stockade.cli._run import Json, Operator, RunId, Runs

if TYPE_CHECKING:
    from rich.progress import Progress

    from stockade.client import Run
    from stockade.training import Job, ResolvedJob


def train(
    job: Annotated[Path, typer.Argument(help="The job file (docs/training.md).")],
    runs: Runs = Path("runs"),
    run_id: RunId = None,
    operator: Operator = None,
    control: Annotated[bool, typer.Option("--control", help="Train a second model on coin flips, for comparison.")] = False,
    json_: Json = False,
) -> None:
    """Train a policy model with rollouts in sandboxes; ends with metrics, a model, a sealed record and a report."""
    from stockade.training import load_job

    with reporting(as_json=json_):
        loaded = load_job(job)
        if control:
            loaded = loaded.model_copy(update={"control": "coin_flip"})
        code, told, directory, isolation = asyncio.run(_train(loaded, runs, run_id, operator, quiet=json_))
        if told.get("event") == "failed":
            fail(str(told.get("message")), hint=told.get("hint"), code=code or 1, as_json=json_)
        summary = _close(loaded, directory, isolation, told)
    if json_:
        emit({"run_dir": str(directory), "output": str(loaded.folder), "trainer_isolation": isolation, **summary, "summary": told})
    else:
        _show(told, loaded, directory, isolation, summary)
    raise typer.Exit(code)


async def _train(
    job: Job, runs: Path, run_id: str | None, operator: Path | None, *, quiet: bool
) -> tuple[int, Mapping[str, Any], Path, str]:
    from stockade.client import connect
    from stockade.policy import load_policy
    from stockade.training import require_engine, resolve_job, serve_rates, service_of

    require_engine()
    policy = load_policy(Path(job.policy))
    resolved = resolve_job(job, policy)
    service = service_of(job, policy)
    resolved.folder.mkdir(parents=True, exist_ok=True)
    with serve_rates(service.address, service.port, resolved.rate):
        async with connect(job.policy, runs=runs, run_id=run_id, operator=operator) as run:
            code, told, isolation = await _trainer(resolved, run, Path(job.policy), quiet=quiet)
            directory = run.directory
    return code, told, directory, isolation


async def _trainer(job: ResolvedJob, run: Run, policy: Path, *, quiet: bool) -> tuple[int, Mapping[str, Any], str]:
    """Start the training process under Landlock and follow it to its end."""
    from stockade.sandbox import trainer_launch

    file = job.folder / "job.resolved.json"
    file.write_text(job.model_dump_json(indent=1), encoding="utf-8")
    progress_read, progress_write = os.pipe()
    report_read, report_write = os.pipe()
    spec_read, spec_write = os.pipe()
    spec = trainer_launch(
        argv=[sys.executable, "-m", "stockade.training", "--job", str(file.absolute()), "--progress-fd", str(progress_write)],
        env={**_environment(), **run.environment},
        output=job.folder.absolute(),
        reads=() if job.model.folder is None else (job.model.folder.absolute(),),
        hidden=(run.directory.absolute(), policy.absolute().parent),
        keep_fds=(progress_write,),
        report_fd=report_write,
    )
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "stockade.sandbox._launch", str(spec_read)),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=(spec_read, progress_write, report_write),
        )
    finally:
        for fd in (spec_read, progress_write, report_write):
            os.close(fd)
    with open(spec_write, "wb") as stream:
        stream.write(spec)
    try:
        isolation = await asyncio.to_thread(_isolation, report_read)
        told = await _follow(progress_read, quiet=quiet)
        return await process.wait(), told, isolation
    except asyncio.CancelledError:
        # Ctrl-C reached the trainer too: it saves what there is, and its last words still count.
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        await asyncio.wait_for(process.wait(), 60)
        raise


def _environment() -> dict[str, str]:
    """What the trainer inherits: nothing of the user's environment but where its programs and messages are."""
    kept = ("PATH", "LANG", "LC_ALL", "PYTHONPATH", "VIRTUAL_ENV", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")
    return {name: os.environ[name] for name in kept if name in os.environ} | {"PYTHONUNBUFFERED": "1"}


def _isolation(fd: int) -> str:
    with open(fd, "rb") as stream:
        line = stream.readline()
    return str(json.loads(line)["level"]) if line.strip() else "unknown"


async def _follow(fd: int, *, quiet: bool) -> Mapping[str, Any]:
    """Show progress until the trainer closes its descriptor; returns its last word."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    reader = asyncio.StreamReader(limit=1 << 20)
    loop = asyncio.get_running_loop()
    stream = open(fd, "rb", buffering=0)  # noqa: SIM115 - the transport closes it
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), stream)
    columns = (TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
    last: Mapping[str, Any] = {"event": "failed", "message": "the training process ended without a word", "hint": "see its messages above"}
    try:
        with Progress(*columns, console=err, disable=quiet or not sys.stderr.isatty()) as bar:
            tasks: dict[str, Any] = {}
            while line := await reader.readline():
                said = json.loads(line)
                if said["event"] in ("done", "failed"):
                    last = said
                else:
                    _progress(bar, tasks, said, quiet=quiet)
    finally:
        transport.close()
    return last


def _progress(bar: Progress, tasks: dict[str, Any], said: Mapping[str, Any], *, quiet: bool) -> None:
    phase = said.get("phase")
    if said["event"] == "phase":
        tasks[str(phase)] = bar.add_task(str(phase), total=said["total"], note="")
        if not quiet and not sys.stderr.isatty():
            err.print(f"{phase} …", markup=False)
    elif said["event"] == "step" and phase in tasks:
        reward = said.get("reward")
        bar.update(tasks[str(phase)], completed=said["step"], total=said["total"], note="" if reward is None else f"reward {reward:.2f}")
    elif said["event"] in ("warning", "held"):
        err.print(f"{said['event']}: {said['message']}", markup=False)


def _close(job: Job, directory: Path, isolation: str, told: Mapping[str, Any]) -> dict[str, str]:
    from stockade.events import verify_run
    from stockade.runs import write_report

    verified = verify_run(directory)
    control = job.folder / "control.jsonl"
    report = write_report(
        directory,
        metrics=job.folder / "metrics.jsonl",
        control=control if job.control != "none" and control.exists() else None,
        extra={"trainer isolation (Landlock)": isolation, "job": job.name, "model": str(job.folder / "model"), "end": str(told.get("end"))},
    )
    state = "verified, " if verified.ok else f"{len(verified.problems)} problems, "
    return {"record": state + ("witnessed" if verified.witnessed else "unwitnessed"), "report": str(report.html)}


def _show(told: Mapping[str, Any], job: Job, directory: Path, isolation: str, summary: Mapping[str, str]) -> None:
    grpo = told.get("grpo") or {}
    rows = [
        ("end", told.get("end")),
        ("steps", grpo.get("steps")),
        ("reward, first → last quarter", f"{grpo.get('reward_first')} → {grpo.get('reward_last')}"),
        ("held out before", told.get("evaluation_before")),
        ("held out after", grpo.get("evaluation_after")),
        ("verdicts", grpo.get("verdicts")),
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
