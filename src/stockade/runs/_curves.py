"""Training curves for the report, read from metrics files as what they are: text from the learning side.

A metrics file holds one JSON object per line. Used are ``step`` and, as far as they are there, ``reward`` and
``passed``; everything else, and every value that is no finite number, is passed over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
from markupsafe import Markup

from stockade.errors import RunError
from stockade.runs._chart import MEAN_OVER, Point, Series, line_chart
from stockade.runs._files import read_regular

_LIMIT_BYTES = 64 << 20
_BIGGEST = 1e12  # an exploded loss may be called reward; the chart could not show it
_MAIN, _CONTROL = "training", "control"


class Chart(NamedTuple):
    """A chart and what to know about it."""

    title: str
    note: str
    svg: Markup


class Curves(NamedTuple):
    """Points by field, of the training and of its control (empty without one)."""

    main: Mapping[str, list[Point]]
    control: Mapping[str, list[Point]]

    def charts(self) -> list[Chart]:
        """Return a chart for each field that has points."""
        found = []
        for field, title, note in _FIELDS:
            series = [
                Series(name, points[field])
                for name, points in ((_MAIN, self.main), (_CONTROL, self.control))
                if field in points
            ]
            svg = line_chart(series, title=title, x_label="training step")
            if svg is not None:
                found.append(Chart(title, note, svg))
        return found


_FIELDS = (
    ("reward", "Reward over steps", f"Dots are steps, the line is the mean of the last {MEAN_OVER}."),
    ("passed", "Programs that pass their hidden tests", "The share of scored samples whose verdict was ok."),
)


def read_curves(metrics: Path | None, control: Path | None) -> Curves:
    """Return the points in two metrics files; raises :class:`RunError` for a file that cannot be read."""
    return Curves(_points(metrics), _points(control))


def _points(path: Path | None) -> dict[str, list[Point]]:
    points: dict[str, list[Point]] = {}
    if path is None:
        return points
    for line in _read(path).splitlines():
        try:
            row = msgspec.json.decode(line, type=dict[str, object])
        except (ValueError, RecursionError):
            continue
        step = _finite(row.get("step"))
        for field, _, _ in _FIELDS:
            value = _finite(row.get(field))
            if step is not None and value is not None:
                points.setdefault(field, []).append(Point(step, value))
    return points


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and abs(number) < _BIGGEST else None


def _read(path: Path) -> bytes:
    # The training process, which writes this file, must not be able to have another file read in its place.
    try:
        return read_regular(path, _LIMIT_BYTES)
    except OSError as error:
        raise RunError(f"{path}: metrics cannot be read: {error.strerror}") from error
