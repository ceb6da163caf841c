"""``stockade run``: one command in one sandbox, under one policy."""

from __future__ import annotations

import asyncio
import base64
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TextIO

import typer

from stockade.cli._files import make_fresh, read_tree, write_tree
from stockade.cli._output import OWN_ERROR, emit, err, reporting
from stockade.client import Run, RunOptions
from stockade.errors import ConfigError

Policy = Annotated[Path, typer.Option("--policy", "-p", help="The policy to run under.")]
Runs = Annotated[Path, typer.Option("--runs", help="Directory that holds the runs.")]
RunId = Annotated[str | None, typer.Option("--run-id", help="Name of the run; made up if missing.")]
Operator = Annotated[Path | None, typer.Option("--operator", help="The operator's file, if this site has one.")]
MetricsAt = Annotated[
    str | None, typer.Option("--metrics", metavar="127.0.0.1:PORT", help="Where a Prometheus server may read.")
]
MetricsAnywhere = Annotated[
    bool, typer.Option("--unsafe-metrics-anywhere", help="--metrics may be an address that other hosts reach.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@dataclass(frozen=True, slots=True)
class Wish:
    """One command and how to run it."""

    command: list[str]
    options: RunOptions
    put: Path | None
    get: Path | None
    env: dict[str, str]
    timeout_s: float | None
    stdin: bytes


def run(
    command: Annotated[list[str], typer.Argument(help="The command, after --.")],
    *,
    policy: Policy,
    runs: Runs = Path("runs"),
    run_id: RunId = None,
    operator: Operator = None,
    put: Annotated[Path | None, typer.Option("--put", help="Copy this directory into /workspace first.")] = None,
    get: Annotated[Path | None, typer.Option("--get", help="Collect /workspace into this new directory.")] = None,
    env: Annotated[list[str] | None, typer.Option("--env", "-e", help="NAME=VALUE for the command.")] = None,
    timeout: Annotated[float | None, typer.Option("--timeout", min=0.001, help="Seconds for the command.")] = None,
    stdin: Annotated[bool, typer.Option("--stdin", "-i", help="Pass standard input on.")] = False,
    metrics: MetricsAt = None,
    unsafe_metrics_anywhere: MetricsAnywhere = False,
    json_: Json = False,
) -> None:
    """Run COMMAND in a sandbox of its own and exit with its code; 125 is an error of stockade itself."""
    with reporting(code=OWN_ERROR, as_json=json_):
        wish = Wish(
            command,
            RunOptions(
                policy=policy,
                runs=runs,
                run_id=run_id,
                operator=operator,
                metrics=metrics,
                unsafe_metrics_anywhere=unsafe_metrics_anywhere,
            ),
            put,
            get,
            variables(env or []),
            timeout,
            sys.stdin.buffer.read() if stdin else b"",
        )
        code, shown = asyncio.run(carry_out(wish))
    if json_:
        emit(shown)
    else:
        pass_on(shown, sys.stdout)
    raise typer.Exit(code)


def pass_on(shown: Mapping[str, object], stdout: TextIO | None) -> None:
    """Write what the command wrote: its output to ``stdout``, the rest to standard error."""
    for stream, name in ((stdout, "stdout_b64"), (sys.stderr, "stderr_b64")):
        if stream is not None:  # None: whoever started this had closed it
            stream.buffer.write(base64.b64decode(str(shown[name])))
            stream.flush()


def variables(items: list[str]) -> dict[str, str]:
    """Return NAME=VALUE items as a table."""
    table = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise ConfigError(f"{item!r} is not NAME=VALUE", key="--env")
        table[name] = value
    return table


async def carry_out(wish: Wish) -> tuple[int, dict[str, object]]:
    """Run it; return the exit code, and what there is to tell."""
    files = {} if wish.put is None else read_tree(wish.put)
    if wish.get is not None:
        make_fresh(wish.get)
    async with Run(wish.options) as open_run:
        async with open_run.rollout(task_id="run") as rollout:
            if files:
                await rollout.put_dir("/workspace", files)
            reply = await rollout.exec(wish.command, env=wish.env, stdin=wish.stdin, timeout_s=wish.timeout_s)
            if wish.get is not None:
                found = await rollout.get_dir("/workspace")
                write_tree(wish.get, found.files)
                for skipped in found.skipped:
                    err.print(f"not collected: {skipped.path!r}: {skipped.reason}", markup=False)
        directory, store = open_run.directory, open_run.store
    if store is not None:
        done = "were recorded in" if store["mode"] == "record" else "came from"
        err.print(f"stockade: answers {done} {store['path']} (recording {store['recording']})", markup=False)
    if reply.exit not in ("exited", "signaled", "not_started"):
        err.print(f"stockade: {reply.exit}: {reply.evidence}", markup=False)
    shown: dict[str, object] = {
        "run_id": open_run.run_id,
        "run_dir": str(directory),
        "rollout_id": rollout.id,
        "return_code": reply.return_code,
        "exit": reply.exit,
        "fault": reply.fault,
        "evidence": reply.evidence,
        "stdout_b64": base64.b64encode(reply.stdout).decode(),
        "stderr_b64": base64.b64encode(reply.stderr).decode(),
        "truncated": {"stdout": reply.truncated_stdout, "stderr": reply.truncated_stderr},
        "store": store,
        "wall_ns": reply.usage.wall_ns,
        "cpu_ns": reply.usage.cpu_ns,
    }
    return OWN_ERROR if reply.fault == "infrastructure" else reply.return_code, shown
