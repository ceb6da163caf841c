"""``stockade doctor``: what this node allows, and what to ask its operators for."""

from __future__ import annotations

from typing import Annotated

import typer

from stockade.cli._output import emit, out, table


def doctor(*, json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Measure this node: user namespaces, seccomp, Landlock, cgroups, KVM, runsc, apptainer, Slurm and more."""
    from stockade.sandbox import diagnose

    report = diagnose()
    if json_:
        emit({"ready": report.ready, "findings": [item.to_json() for item in report.findings]})
    else:
        table(
            "this node",
            ("part", "state", "found"),
            [(item.name, item.status.value, item.detail) for item in report.findings],
        )
        asks = [(item.name, item.ask) for item in report.findings if item.ask and item.status.value != "ok"]
        if asks:
            table("what to ask the operators for", ("part", "ask"), asks)
        out.print("[green]sandboxes can run here[/]" if report.ready else "[bold red]no sandbox can run here[/]")
    raise typer.Exit(0 if report.ready else 2)
