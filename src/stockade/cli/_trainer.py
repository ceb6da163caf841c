"""The training process as its launcher sees it: started under Landlock, followed, interrupted once."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stockade.cli._output import err

if TYPE_CHECKING:
    from rich.progress import Progress

    from stockade.client import Run
    from stockade.training import ResolvedJob

_SAVE_S = 300.0
_SILENT = {"event": "failed", "message": "the training process ended without a word", "hint": "see its messages above"}


async def follow_trainer(
    job: ResolvedJob, run: Run, policy: Path, *, quiet: bool
) -> tuple[int, Mapping[str, Any], str]:
    """Start the training process and follow it; returns its exit code, its last word, and its isolation.

    Ctrl-C is passed on once: the trainer saves what there is and says its last word, and this returns as usual.
    """
    progress_read, progress_write = os.pipe()
    report_read, report_write = os.pipe()
    spec_read, spec_write = os.pipe()
    try:
        _write(spec_write, _launch_spec(job, run, policy, progress_write, report_write))
        process = await asyncio.create_subprocess_exec(
            # -P: with -m, Python would import from the working directory first, where collected files may lie.
            *(sys.executable, "-P", "-m", "stockade.sandbox._launch", str(spec_read)),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=(spec_read, progress_write, report_write),
            start_new_session=True,  # or a terminal would interrupt it too, a second time, while it saves
        )
    finally:
        for fd in (spec_read, progress_write, report_write):
            os.close(fd)
    isolation = await asyncio.to_thread(_isolation, report_read)
    following = asyncio.create_task(_follow(progress_read, quiet=quiet))
    try:
        told = await asyncio.shield(following)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
        err.print("interrupted: the trainer saves what there is")
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        told = await asyncio.wait_for(following, _SAVE_S)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        raise
    return await process.wait(), told, isolation


def _launch_spec(job: ResolvedJob, run: Run, policy: Path, progress_fd: int, report_fd: int) -> bytes:
    from stockade.runs import state_dir
    from stockade.sandbox import trainer_launch

    job.folder.mkdir(parents=True, exist_ok=True)
    file = (job.folder / "job.resolved.json").absolute()
    file.write_text(job.model_dump_json(indent=1), encoding="utf-8")
    command = ("-P", "-m", "stockade.training", "--job", str(file), "--progress-fd", str(progress_fd))
    return trainer_launch(
        argv=(sys.executable, *command),
        env={**_environment(), **run.environment},
        output=job.folder.absolute(),
        reads=() if job.model.folder is None else (job.model.folder.absolute(),),
        hidden=(run.directory.absolute(), state_dir(), policy.absolute(), policy.absolute().parent),
        keep_fds=(progress_fd,),
        report_fd=report_fd,
    )


def _environment() -> dict[str, str]:
    """What the trainer inherits: nothing of the user's environment but where its programs and messages are."""
    kept = ("PATH", "LANG", "LC_ALL", "PYTHONPATH", "VIRTUAL_ENV", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")
    return {name: os.environ[name] for name in kept if name in os.environ} | {"PYTHONUNBUFFERED": "1"}


def _write(fd: int, data: bytes) -> None:
    with open(fd, "wb") as file:
        file.write(data)


def _isolation(fd: int) -> str:
    with open(fd, "rb") as file:
        line = file.readline()
    return str(json.loads(line)["level"]) if line.strip() else "unknown"


async def _follow(fd: int, *, quiet: bool) -> Mapping[str, Any]:
    """Show progress until the trainer closes its descriptor; returns its last word."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    reader = asyncio.StreamReader(limit=1 << 20)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), io.FileIO(fd))
    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    last: Mapping[str, Any] = _SILENT
    try:
        with Progress(*columns, console=err, disable=quiet or not sys.stderr.isatty()) as bar:
            tasks: dict[str, Any] = {}
            while line := await reader.readline():
                said = json.loads(line)
                if said["event"] in ("done", "failed"):
                    last = said
                else:
                    _show(bar, tasks, said, quiet=quiet)
    finally:
        transport.close()
    return last


def _show(bar: Progress, tasks: dict[str, Any], said: Mapping[str, Any], *, quiet: bool) -> None:
    phase = str(said.get("phase"))
    if said["event"] == "phase":
        tasks[phase] = bar.add_task(phase, total=said["total"], note="")
        if not quiet and not sys.stderr.isatty():
            err.print(f"{phase} …", markup=False)
    elif said["event"] == "step" and phase in tasks:
        reward = said.get("reward")
        note = "" if reward is None else f"reward {reward:.2f}"
        bar.update(tasks[phase], completed=said["step"], total=said["total"], note=note)
    elif said["event"] in ("warning", "held"):
        err.print(f"{said['event']}: {said['message']}", markup=False)
