"""``stockade run``: one command in one sandbox, under one policy."""

from __future__ import annotations

import asyncio
import base64
import sys
from pathlib import Path
from typing import Annotated

import typer

from stockade.cli._output import OWN_ERROR, emit, err, fail, reporting

Policy = Annotated[Path, typer.Option("--policy", "-p", help="The policy to run under.")]
Runs = Annotated[Path, typer.Option("--runs", help="Directory that holds the runs.")]
RunId = Annotated[str | None, typer.Option("--run-id", help="Name of the run; made up if missing.")]
Operator = Annotated[Path | None, typer.Option("--operator", help="The operator's file, if this site has one.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def run(
    command: Annotated[list[str], typer.Argument(help="The command, after --.")],
    policy: Policy,
    runs: Runs = Path("runs"),
    run_id: RunId = None,
    operator: Operator = None,
    put: Annotated[Path | None, typer.Option("--put", help="Copy this directory into /workspace first.")] = None,
    get: Annotated[Path | None, typer.Option("--get", help="Collect /workspace into this new directory.")] = None,
    env: Annotated[list[str] | None, typer.Option("--env", "-e", help="NAME=VALUE for the command.")] = None,
    timeout: Annotated[float | None, typer.Option("--timeout", help="Seconds for the command.")] = None,
    stdin: Annotated[bool, typer.Option("--stdin", "-i", help="Pass standard input on.")] = False,
    json_: Json = False,
) -> None:
    """Run COMMAND in a sandbox of its own and exit with its code; 125 is an error of stockade itself."""
    with reporting(code=OWN_ERROR, as_json=json_):
        variables = {}
        for item in env or []:
            name, equals, value = item.partition("=")
            if not equals or not name:
                fail(f"--env {item!r}: not NAME=VALUE", code=OWN_ERROR)
            variables[name] = value
        given = sys.stdin.buffer.read() if stdin else b""
        code = asyncio.run(_run(command, policy, runs, run_id, operator, put, get, variables, timeout, given, json_))
    raise typer.Exit(code)


async def _run(
    command: list[str],
    policy: Path,
    runs: Path,
    run_id: str | None,
    operator: Path | None,
    put: Path | None,
    get: Path | None,
    env: dict[str, str],
    timeout_s: float | None,
    stdin: bytes,
    as_json: bool,
) -> int:
    from stockade.cli._files import read_tree, write_tree
    from stockade.client import connect

    files = {} if put is None else read_tree(put)
    if get is not None:
        get.mkdir(parents=True, exist_ok=False)
    async with connect(policy, runs=runs, run_id=run_id, operator=operator) as open_run:
        async with open_run.rollout(task_id="run") as rollout:
            if files:
                await rollout.put_dir("/workspace", files)
            reply = await rollout.exec(command, env=env, stdin=stdin, timeout_s=timeout_s)
            if get is not None:
                found = await rollout.get_dir("/workspace")
                write_tree(get, found.files)
                for skipped in found.skipped:
                    err.print(f"not collected: {skipped.path!r}: {skipped.reason}", markup=False)
        directory = open_run.directory
    if as_json:
        emit(
            {
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
                "wall_ns": reply.usage.wall_ns,
                "cpu_ns": reply.usage.cpu_ns,
            }
        )
    else:
        sys.stdout.buffer.write(reply.stdout)
        sys.stdout.flush()
        sys.stderr.buffer.write(reply.stderr)
        sys.stderr.flush()
        if reply.exit not in ("exited", "signaled"):
            err.print(f"stockade: {reply.exit}: {reply.evidence}", markup=False)
    return OWN_ERROR if reply.fault == "infrastructure" else reply.return_code
