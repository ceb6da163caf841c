"""``stockade policy check``: what a policy allows, and whether it joins what must stay apart."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from stockade.cli._output import emit, out, printable, reporting, table

if TYPE_CHECKING:
    from stockade.policy import Held, Policy, Row, Trifecta

app = typer.Typer(help="Read and check policies.", no_args_is_help=True)


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="The policy to check.")],
    *,
    all_: Annotated[bool, typer.Option("--all", help="Show every rule of the presets, too.")] = False,
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
        _show(file, policy, verdict, unfold=all_)
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


def _show(file: Path, policy: Policy, verdict: Trifecta, *, unfold: bool) -> None:
    from stockade.policy import explain, policy_digest

    columns = ("rule", "host or target", "ports", "methods", "paths", "terms", "line")
    rows = [_cells(row) for row in explain(policy) if unfold or not row.source]
    if not unfold:
        rows = [*_folded(explain(policy)), *rows]
    table(f"{file}  {policy_digest(policy)[:19]}…", columns, rows)
    table("trifecta", ("leg", "held by"), [(name, _why(held, unfold=unfold)) for name, held in _legs(verdict).items()])
    color = "bold red" if verdict.refused else "green" if verdict.waiver is None else "yellow"
    out.print(f"[{color}]{escape(printable(verdict.message))}[/]")
    if verdict.refused:
        out.print("remove one leg, or add a waiver that names a person, a reason and a date")


def _cells(row: Row) -> tuple[object, ...]:
    line = " ".join(filter(None, (row.source, str(row.line) if row.line else ""))) or "-"
    return row.kind.value, row.host, _any(row.ports), _any(row.methods), _any(row.paths), row.note, line


def _folded(rows: Sequence[Row]) -> list[tuple[object, ...]]:
    """Return one line for each preset: its rules ship with the program and are the same for everybody."""
    shown: list[tuple[object, ...]] = []
    for source in dict.fromkeys(row.source for row in rows if row.source):
        own = [row for row in rows if row.source == source]
        hosts = list(dict.fromkeys(row.host for row in own if row.kind.value == "allow"))
        kinds = Counter(row.kind.value for row in own)
        counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        name = source.removeprefix("preset ")
        shown.append(("preset", name, "", "", "", f"{counted}: {', '.join(hosts)}", "--all"))
    return shown


def _any(values: Sequence[object] | None) -> str:
    return "any" if values is None else ", ".join(map(str, values))


def _why(held: Sequence[Held], *, unfold: bool) -> str:
    said = [one.why if one.line is None else f"line {one.line}: {one.why}" for one in held]
    if not unfold:
        said = [why.partition(":")[0] if why.startswith("preset ") else why for why in said]
    return "; ".join(dict.fromkeys(said)) or "not held"
