"""The command line. Each command imports what it needs when it runs: ``stockade --help`` stays quick."""

from __future__ import annotations

from typing import Annotated

import typer

from stockade.cli import (
    _batch,
    _closing,
    _doctor,
    _egress,
    _egress_gateway,
    _egress_learn,
    _egress_store,
    _policy,
    _record,
    _run,
    _tasks,
    _train,
)

app = typer.Typer(
    name="stockade",
    help="Run rollouts of model-written code in sandboxes, with one guarded way out and a record of everything.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:  # noqa: FBT001 - typer calls it so
    if value:
        from stockade._version import __version__

        typer.echo(f"stockade {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.command()(_run.run)
app.command()(_batch.batch)
app.command()(_train.train)
app.command()(_doctor.doctor)
app.command()(_record.events)
app.command()(_closing.report)
app.command()(_record.stop)
_egress.app.command()(_egress_learn.learn)
_egress.app.command()(_egress_gateway.gateway)
_egress.app.command()(_egress_gateway.metrics)
_egress.app.command()(_egress_store.recordings)
app.add_typer(_egress.app, name="egress")
app.add_typer(_policy.app, name="policy")
app.add_typer(_record.app, name="record")
app.add_typer(_tasks.app, name="tasks")


def main() -> None:
    """Entry point of the ``stockade`` program."""
    app()
