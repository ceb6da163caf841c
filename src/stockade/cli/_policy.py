"""``stockade policy check``: what a policy allows, and whether it joins what must stay apart."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from stockade.cli._output import emit, out, printable, reporting, table

if TYPE_CHECKING:
    from stockade.policy import Held, Policy, Trifecta

app = typer.Typer(help="Read and check policies.", no_args_is_help=True)


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="The policy to check.")],
    *,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the effective rules and the trifecta; refuse a policy that joins all three legs without a waiver."""
    from stockade.policy import load_policy, trifecta

    with reporting(as_json=json_):
        policy = load_policy(file)
        verdict = trifecta(policy, today=dt.datetime.now(tz=dt.UTC).date())
    if json_:
        emit(_as_json(file, policy, verdict))
    else:
        _show(file, policy, verdict)
    raise typer.Exit(2 if verdict.refused else 0)


def _legs(verdict: Trifecta) -> dict[str, tuple[Held, ...]]:
    return {
        "private data": verdict.private,
        "untrusted content": verdict.untrusted,
        "external communication": verdict.external,
    }


def _as_json(file: Path, policy: Policy, verdict: Trifecta) -> dict[str, object]:
    from stockade.policy import explain, policy_digest

    return {
        "file": str(file),
        "digest": policy_digest(policy),
        "rules": [dataclasses.asdict(row) for row in explain(policy)],
        "limits": {**policy.egress.limits.model_dump(mode="json"), **policy.sandbox.model_dump(mode="json")},
        "trifecta": {
            name: [{"line": one.line, "why": one.why} for one in held] for name, held in _legs(verdict).items()
        },
        "waiver": None if verdict.waiver is None else verdict.waiver.model_dump(mode="json"),
        "refused": verdict.refused,
    }


def _show(file: Path, policy: Policy, verdict: Trifecta) -> None:
    from stockade.policy import explain, policy_digest

    columns = ("rule", "host or target", "ports", "methods", "paths", "opaque TLS", "line")
    rows = [
        (row.kind.value, row.host, _any(row.ports), _any(row.methods), _any(row.paths), row.tunnel, row.line or "-")
        for row in explain(policy)
    ]
    table(f"{file}  {policy_digest(policy)[:19]}…", columns, rows)
    table("trifecta", ("leg", "held by"), [(name, _why(held)) for name, held in _legs(verdict).items()])
    color = "bold red" if verdict.refused else "green" if verdict.waiver is None else "yellow"
    out.print(f"[{color}]{escape(printable(verdict.message))}[/]")
    if verdict.refused:
        out.print("remove one leg, or add a waiver that names a person, a reason and a date")


def _any(values: Sequence[object] | None) -> str:
    return "any" if values is None else ", ".join(map(str, values))


def _why(held: Sequence[Held]) -> str:
    return "; ".join(one.why if one.line is None else f"line {one.line}: {one.why}" for one in held) or "not held"
