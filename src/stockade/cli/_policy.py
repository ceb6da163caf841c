"""``stockade policy check``: what a policy allows, and whether it joins what must stay apart."""

from __future__ import annotations

import dataclasses
import datetime as dt
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from stockade.cli._output import emit, err, out, printable, reporting, table

app = typer.Typer(help="Read and check policies.", no_args_is_help=True)


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="The policy to check.")],
    *,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the effective rules and the trifecta; refuse a policy that joins all three legs without a waiver."""
    from stockade.policy import explain, load_policy, policy_digest, trifecta

    with reporting(as_json=json_):
        policy = load_policy(file)
        verdict = trifecta(policy, today=dt.datetime.now(tz=dt.UTC).date())
        rows = explain(policy)
    legs = {
        "private data": verdict.private,
        "untrusted content": verdict.untrusted,
        "external communication": verdict.external,
    }
    if json_:
        emit(
            {
                "file": str(file),
                "digest": policy_digest(policy),
                "rules": [dataclasses.asdict(row) for row in rows],
                "limits": {**policy.egress.limits.model_dump(mode="json"), **policy.sandbox.model_dump(mode="json")},
                "trifecta": {name: [{"line": held.line, "why": held.why} for held in legs[name]] for name in legs},
                "waiver": None if verdict.waiver is None else verdict.waiver.model_dump(mode="json"),
                "refused": verdict.refused,
            }
        )
    else:
        any_ = "any"
        table(
            f"{file}  {policy_digest(policy)[:19]}…",
            ("rule", "host or target", "ports", "methods", "paths", "opaque TLS", "line"),
            [
                (
                    row.kind.value,
                    row.host,
                    any_ if row.ports is None else ", ".join(map(str, row.ports)),
                    any_ if row.methods is None else ", ".join(row.methods),
                    any_ if row.paths is None else ", ".join(map(str, row.paths)),
                    "yes" if row.tunnel else "no",
                    row.line or "-",
                )
                for row in rows
            ],
        )
        table(
            "trifecta",
            ("leg", "held by"),
            [
                (
                    name,
                    "; ".join(f"line {held.line}: {held.why}" if held.line else held.why for held in legs[name])
                    or "not held",
                )
                for name in legs
            ],
        )
    if verdict.refused:
        if not json_:
            err.print(f"[bold red]{escape(printable(verdict.message))}[/]")
            err.print("remove one leg, or add a waiver that names a person, a reason and a date")
        raise typer.Exit(2)
    if not json_:
        out.print(f"[{'green' if verdict.waiver is None else 'yellow'}]{escape(printable(verdict.message))}[/]")
