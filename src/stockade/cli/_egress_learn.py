"""``stockade egress learn``: run a task with everything denied, and print the rules that it asked for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer

from stockade.cli._closing import close_run
from stockade.cli._learn import smallest_rules
from stockade.cli._output import emit, err, reporting
from stockade.cli._run import Json, Operator, RunId, Runs, Wish, carry_out, pass_on, variables
from stockade.client import RunOptions
from stockade.errors import ConfigError, PolicyError

NOTHING_ALLOWED = """\
version: 1
egress:
  limits: {requests_per_minute: 10000, connections: 256, names: 1024}
"""
"""The policy of a run whose task brings none: many questions, and no answers."""
_KINDS = ("net.connect", "net.request", "net.dns", "net.end")


def learn(
    command: Annotated[list[str], typer.Argument(help="The command, after --.")],
    *,
    policy: Annotated[
        Path | None, typer.Option("--policy", "-p", help="What is allowed already; nothing, if missing.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the rules to this new file, not to standard output.")
    ] = None,
    runs: Runs = Path("runs"),
    run_id: RunId = None,
    operator: Operator = None,
    put: Annotated[Path | None, typer.Option("--put", help="Copy this directory into /workspace first.")] = None,
    env: Annotated[list[str] | None, typer.Option("--env", "-e", help="NAME=VALUE for the command.")] = None,
    timeout: Annotated[float | None, typer.Option("--timeout", min=0.001, help="Seconds for the command.")] = None,
    json_: Json = False,
) -> None:
    """Run COMMAND with everything denied that the policy does not allow, and print the smallest rules that it asked for."""
    with reporting(as_json=json_), _policy_file(policy) as file:
        if output is not None and output.exists():
            raise ConfigError("exists already", path=output, hint="name a file that does not exist")
        options = RunOptions(policy=file, runs=runs, run_id=run_id, operator=operator, learn=True)
        _, shown = asyncio.run(carry_out(Wish(command, options, put, None, variables(env or []), timeout, b"")))
        directory = Path(str(shown["run_dir"]))
        events = _events(directory, str(shown["rollout_id"]))
        text = smallest_rules(events)
        closed = close_run(directory)
        if output is not None:
            _write(output, text)
    counts = _counts(events)
    if json_:
        emit({**shown, **closed, "counts": counts, "policy": text, "output": None if output is None else str(output)})
        return
    pass_on(shown, sys.stderr)
    _tell(shown, counts, closed, output)
    if output is None:
        sys.stdout.write(text)


@contextlib.contextmanager
def _policy_file(given: Path | None) -> Iterator[Path]:
    """Give the policy to run under: the one that was named, or one that allows nothing."""
    from stockade.policy import load_policy

    if given is not None:
        if load_policy(given).egress.mode == "off":
            raise PolicyError(
                "the mode is 'off': nothing would be met", path=given, key="egress.mode", hint="remove it"
            )
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="stockade-learn-") as folder:
        path = Path(folder, "policy.yaml")
        path.write_text(NOTHING_ALLOWED, "ascii")
        yield path


def _events(directory: Path, rollout_id: str) -> list[Mapping[str, object]]:
    from stockade.events import iter_events

    return list(iter_events(directory, rollout=rollout_id, kinds=_KINDS))


def _counts(events: Iterable[Mapping[str, object]]) -> dict[str, int]:
    """Count what was asked for; a host counts once, by whatever way it was asked for."""
    counts: Counter[str] = Counter(allowed=0, denied=0, hosts_denied=0)
    hosts = set()
    for event in events:
        if event["kind"] == "net.end" or event.get("rule") == "learn":
            continue
        times = event.get("count")
        counts[str(event["verdict"])] += times if isinstance(times, int) else 1
        if event["verdict"] == "denied":
            hosts.add(event.get("server.address", event.get("dns.question.name")))
    counts["hosts_denied"] = len(hosts - {None})
    return dict(counts)


def _write(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    with open(fd, "w", encoding="ascii") as file:
        file.write(text)


def _tell(
    shown: Mapping[str, object], counts: Mapping[str, int], closed: Mapping[str, str], output: Path | None
) -> None:
    ended = {
        "exited": f"exited with {shown['return_code']}",
        "signaled": f"was ended by a signal ({shown['evidence']})",
    }
    err.print(f"command   {ended.get(str(shown['exit']), shown['exit'])}; its output stands above", markup=False)
    err.print(
        f"requests  {counts['denied']} denied, to {counts['hosts_denied']} hosts; {counts['allowed']} allowed by the policy",
        markup=False,
    )
    err.print(f"record    {shown['run_dir']} ({closed['record']})\nreport    {closed['report']}", markup=False)
    where = "below" if output is None else f"in {output}"
    err.print(f"rules     {where}; read each before you allow it: the task decided what to ask for", markup=False)
