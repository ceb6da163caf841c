"""Tables of medians, and of ratios with their spread."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from bench.egress._work import Bound, Cell, Work

Samples = Mapping[str, Sequence[Cell]]
"""For each line of a table, what it measured, one cell per round."""

_BASES = ("direct", "envoy", "squid", "squid-bump", "worker: 1", "worker: http, first", "worker: https, first")
_HEADINGS = {
    "rate": "ops/s",
    "mb_s": "MB/s",
    "p50_us": "p50 ms",
    "p99_us": "p99 ms",
    "cpu_us": "CPU µs",
    "base_mib": "base MiB",
    "later_kib_each": "KiB each, later",
    "origin_mib": "origin MiB",
}
_SCALES = {"p50_us": 1e-3, "p99_us": 1e-3}


def ratios(mine: Sequence[Cell], theirs: Sequence[Cell], measure: str) -> list[float]:
    """Return the ratios of one measure, round by round; a round in which a side has none is left out."""
    pairs = zip(mine, theirs, strict=False)
    return [a[measure] / b[measure] for a, b in pairs if measure in a and b.get(measure)]


def spread(values: Sequence[float]) -> str:
    """Return the median, with the least and the most if they differ from it."""
    if not values:
        return "-"
    middle = statistics.median(values)
    return f"{middle:.2f}" if len(values) == 1 else f"{middle:.2f} [{min(values):.2f}-{max(values):.2f}]"


def show(work: Work, samples: Samples, *, judge: bool) -> None:
    """Print the table of one workload; with ``judge`` also which bounds are kept."""
    rounds = max((len(cells) for cells in samples.values()), default=0)
    bases = [base for base in _BASES if base in samples and any(cell.get(work.measure) for cell in samples[base])]
    table = Table(title=f"{work.name}: {work.title} ({rounds} rounds)", title_justify="left")
    table.add_column("")
    for heading in (f"median {work.unit}", "least", *(f"x {base}" for base in bases)):
        table.add_column(heading, justify="right")
    for measure in work.beside:
        table.add_column(_HEADINGS.get(measure, measure), justify="right")
    for name, cells in samples.items():
        values = [cell[work.measure] * work.scale for cell in cells if work.measure in cell]
        if not values:
            continue
        row = [name, f"{statistics.median(values):.4g}", f"{min(values):.4g}"]
        row += [spread(ratios(cells, samples[base], work.measure)) for base in bases]
        for measure in work.beside:
            beside = [cell[measure] * _SCALES.get(measure, 1.0) for cell in cells if measure in cell]
            row.append(f"{statistics.median(beside):.4g}" if beside else "-")
        table.add_row(*row)
    Console(width=140).print(table)
    for bound in work.bounds if judge else ():
        for line in judged(bound, samples):
            print(f"  {line}")


def judged(bound: Bound, samples: Samples) -> list[str]:
    """Say of each of the worker's lines whether it keeps ``bound``, by the median of the ratios."""
    said = []
    for name, cells in samples.items():
        theirs = samples.get(bound.against, ()) if bound.against else [{bound.measure: 1.0}] * len(cells)
        found = ratios(cells, theirs, bound.measure)
        if not name.startswith(bound.line) or name == bound.against or not found:
            continue
        middle = statistics.median(found)
        kept = middle >= bound.ratio if bound.at_least else middle <= bound.ratio
        sign = "≥" if bound.at_least else "≤"
        said.append(
            f"{name} {bound.measure}: {spread(found)}{' x ' * bool(bound.against)}{bound.against}, "
            f"bound {sign} {bound.ratio}: " + ("kept" if kept else "MISSED")
        )
    return said
