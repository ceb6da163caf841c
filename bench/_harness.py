"""Rounds that take turns, and tables of ratios.

On a shared machine absolute times say little: the same program takes twice as long a minute later. So every variant runs
once per round, the order turns by one each round, and what is reported is each variant against the first: the ratio of
medians, the ratio of the fastest rounds, and the median of the rounds' own ratios. Where these disagree, the machine was
busy and the run should be repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"

Measure = Callable[[], Awaitable[float]]
"""Do the thing once and return its measure: seconds, or a rate."""


@dataclass(frozen=True)
class Variant:
    """One way to do the thing that is measured."""

    name: str
    measure: Measure


@dataclass(frozen=True)
class Series:
    """What one variant measured, one number per round, in rounds' order."""

    name: str
    samples: tuple[float, ...]


def timed(body: Callable[[], Awaitable[object]]) -> Measure:
    """Return a measure of the wall-clock seconds that ``body`` takes."""

    async def measure() -> float:
        start = time.perf_counter()
        await body()
        return time.perf_counter() - start

    return measure


async def interleave(variants: Sequence[Variant], *, rounds: int, warm_up: int = 2) -> list[Series]:
    """Run ``rounds`` rounds of all variants, after ``warm_up`` rounds that are thrown away."""
    samples: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for turn in range(-warm_up, rounds):
        shift = turn % len(variants)
        for variant in [*variants[shift:], *variants[:shift]]:
            value = await variant.measure()
            if turn >= 0:
                samples[variant.name].append(value)
    return [Series(name, tuple(values)) for name, values in samples.items()]


@dataclass(frozen=True)
class Row:
    """One variant against the baseline; ``best`` is the smallest time or the largest rate."""

    name: str
    median: float
    best: float
    ratio_of_medians: float
    ratio_of_best: float
    median_of_ratios: float


def compare(series: Sequence[Series], *, more_is_better: bool = False) -> list[Row]:
    """Return one row per series, each against the first."""
    base = series[0]
    pick: Callable[[Sequence[float]], float] = max if more_is_better else min
    return [
        Row(
            name=each.name,
            median=statistics.median(each.samples),
            best=pick(each.samples),
            ratio_of_medians=statistics.median(each.samples) / statistics.median(base.samples),
            ratio_of_best=pick(each.samples) / pick(base.samples),
            median_of_ratios=statistics.median(
                mine / theirs for mine, theirs in zip(each.samples, base.samples, strict=True)
            ),
        )
        for each in series
    ]


def report(
    title: str,
    series: Sequence[Series],
    *,
    unit: str,
    scale: float = 1.0,
    more_is_better: bool = False,
    json_path: Path | None = None,
) -> list[Row]:
    """Print a table, write the samples as JSON, and return the rows. ``scale`` turns a sample into ``unit``."""
    rows = compare(series, more_is_better=more_is_better)
    best = "most" if more_is_better else "least"
    table = Table(title=f"{title} ({len(series[0].samples)} rounds)", title_justify="left")
    for heading in (
        "variant",
        f"median {unit}",
        f"{best} {unit}",
        "ratio of medians",
        f"ratio of {best}",
        "median ratio",
    ):
        table.add_column(heading, justify="left" if heading == "variant" else "right")
    for row in rows:
        numbers = (row.median * scale, row.best * scale, row.ratio_of_medians, row.ratio_of_best, row.median_of_ratios)
        table.add_row(row.name, *(f"{number:.3g}" for number in numbers))
    Console(width=120).print(table)
    path = json_path or RESULTS / f"{title.partition(':')[0].replace(' ', '_')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "title": title,
        "unit": unit,
        "machine": machine(),
        "series": {each.name: each.samples for each in series},
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    return rows


def machine() -> dict[str, Any]:
    """Return what one must know to read the figures."""
    return {
        "kernel": platform.release(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "uid": os.geteuid(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def arguments(description: str, *, rounds: int) -> argparse.Namespace:
    """Parse ``--rounds`` and ``--json``, which every benchmark takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=rounds, help=f"rounds to measure (default {rounds})")
    parser.add_argument("--json", type=Path, default=None, help="where to write the samples")
    return parser.parse_args()
