"""``stockade egress gateway`` and ``stockade egress metrics``: the way out of nodes without one, and what is counted."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stockade.cli._closing import close_run
from stockade.cli._output import emit, err, reporting
from stockade.cli._run import Json, MetricsAnywhere, MetricsAt, Operator, RunId, Runs

if TYPE_CHECKING:
    from stockade.agent import Gateway, GatewayEnd, GatewaySpec, Listening

_TICK_S = 1.0


def gateway(
    policy: Annotated[Path, typer.Argument(help="The policy that holds here, whatever the nodes' say.")],
    *,
    listen: Annotated[str, typer.Option("--listen", help="unix:/path, or HOST:PORT for TLS 1.3 with certificates.")],
    cert: Annotated[Path | None, typer.Option("--cert", help="The gateway's certificate (PEM).")] = None,
    key: Annotated[Path | None, typer.Option("--key", help="Its key (PEM).")] = None,
    client_ca: Annotated[
        Path | None, typer.Option("--client-ca", help="Authorities of the nodes' certificates (PEM).")
    ] = None,
    authority: Annotated[
        Path | None,
        typer.Option("--authority", help="Write the certificate here that nodes must trust where TLS is looked into."),
    ] = None,
    runs: Runs = Path("runs"),
    run_id: RunId = None,
    operator: Operator = None,
    metrics: MetricsAt = None,
    unsafe_metrics_anywhere: MetricsAnywhere = False,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON: a line at the start and one at the end.")] = False,
) -> None:
    """Serve as the way out of nodes that have none, in the foreground, with a policy and a record of its own."""
    with reporting(as_json=json_):
        from stockade.agent import Gateway, GatewaySpec, Keys

        spec = GatewaySpec(
            policy=str(policy),
            listen=listen,
            runs=str(runs),
            keys=Keys(_text(cert), _text(key), _text(client_ca)),
            run_id=run_id,
            operator=_text(operator),
            authority=_text(authority),
            metrics=metrics,
            unsafe_metrics_anywhere=unsafe_metrics_anywhere,
        )

        def tell(said: Listening) -> None:
            _listening(said, spec, as_json=json_)

        end = asyncio.run(_serve(Gateway(spec, tell), quiet=json_ or not err.is_terminal))
        closed = close_run(end.run_dir)
    _ended(end, closed, as_json=json_)
    raise typer.Exit(0 if end.outcome == "ended" else 1)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


async def _serve(served: Gateway, *, quiet: bool) -> GatewayEnd:
    if quiet:
        return await served.serve()
    with err.status("starting") as line:
        shown = asyncio.ensure_future(_show(served, line.update))
        try:
            return await served.serve()
        finally:
            shown.cancel()
            await asyncio.gather(shown, return_exceptions=True)


async def _show(served: Gateway, update: object) -> None:
    """Keep one line up to date, for a person who looks."""
    while True:
        await asyncio.sleep(_TICK_S)
        stats = await served.stats()
        if stats is None or not callable(update):
            continue
        decided = {name: count for name, count in stats.counts.items() if not name.startswith(("tls ", "store "))}
        allowed = sum(count for name, count in decided.items() if name.endswith(" allowed"))
        update(
            f"{stats.connections} connections; {allowed} allowed, {sum(decided.values()) - allowed} denied; "
            f"{stats.bytes_out:,} bytes out, {stats.bytes_in:,} in"
        )


def _listening(said: Listening, spec: GatewaySpec, *, as_json: bool) -> None:
    if as_json:
        told = {"listen": said.where, "tls": said.tls, "run_id": said.run_id, "run_dir": str(said.run_dir)}
        emit({"state": "listening", **told, "inspects": said.inspects, "authority": spec.authority})
        return
    anybody = "whoever on this machine gets at it; unix:/path would be this user alone"
    who = "this user alone" if said.where.startswith("unix:") else anybody
    who = "nodes with a certificate, by TLS 1.3" if said.tls else who
    err.print(f"gateway  {said.where} ({who})\nrun      {said.run_dir}", markup=False)
    if said.inspects and spec.authority is None:
        err.print(
            "TLS is looked into for some hosts: nodes must trust this run's authority (--authority)", markup=False
        )


def _ended(end: GatewayEnd, closed: dict[str, str], *, as_json: bool) -> None:
    usage = end.usage
    if as_json:
        emit({"state": end.outcome, "reason": end.reason, **usage._asdict(), "run_dir": str(end.run_dir), **closed})
        return
    err.print(
        f"{end.outcome} ({end.reason}): {usage.requests} requests, {usage.denied} denied; "
        f"{usage.bytes_out:,} bytes out, {usage.bytes_in:,} in\n"
        f"record   {end.run_dir} ({closed['record']})\nreport   {closed['report']}",
        markup=False,
    )


def metrics(
    run: Annotated[str, typer.Argument(help="The run's directory, or its ID below --runs.")],
    *,
    runs: Runs = Path("runs"),
    json_: Json = False,
) -> None:
    """Print what the workers of a live run have counted, in Prometheus's text format."""
    from stockade.cli._record import find_run

    with reporting(as_json=json_):
        from stockade.agent import read_metrics

        text = read_metrics(find_run(run, runs).resolve().name)
    if json_:
        emit([*_samples(text)])
    else:
        sys.stdout.write(text)


def _samples(text: str) -> Iterator[dict[str, object]]:
    from prometheus_client.parser import text_string_to_metric_families

    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            value = int(sample.value) if float(sample.value).is_integer() else sample.value
            yield {"name": sample.name, "labels": sample.labels, "value": value}
