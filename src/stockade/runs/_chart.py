"""A line chart as inline SVG: numbers in, markup out; no script, no style attribute, nothing from outside.

Colours and strokes come from the page's style sheet by class, so that the chart follows its light and dark dress
and the page's content security policy can forbid everything else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

WIDTH = 1060
HEIGHT = 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 130, 14, 40
MEAN_OVER = 5
"""How many points the bold line averages."""
_MOST_POINTS = 600
_MOST_DOTS = 200
_TICKS = 5
_BIGGEST = 1e12  # beyond it, floats are too coarse for axes; false for NaN as well


class Point(NamedTuple):
    """A value at a step."""

    x: float
    y: float


class Series(NamedTuple):
    """A named line; the first one is drawn as the main one."""

    name: str
    points: Sequence[Point]


class _Scale(NamedTuple):
    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def line_chart(series: Sequence[Series], *, title: str, x_label: str) -> Markup | None:
    """Return the chart of ``series``, or ``None`` if none of them has a point.

    Each is drawn as faint dots with a bold running mean over the last :data:`MEAN_OVER` points. Values that are
    not finite, or absurdly big, are left out.
    """
    lines = [Series(line.name, _thinned(_finite(line.points))) for line in series]
    lines = [line for line in lines if line.points]
    if not lines:
        return None
    xs = [point.x for line in lines for point in line.points]
    ys = [point.y for line in lines for point in line.points]
    x_ticks, y_ticks = ticks(min(xs), max(xs), whole=True), ticks(*_value_range(ys))
    x = _Scale(x_ticks[0], x_ticks[-1], _LEFT, WIDTH - _RIGHT)
    y = _Scale(y_ticks[0], y_ticks[-1], HEIGHT - _BOTTOM, _TOP)
    parts = [_axes(x, y, x_ticks, y_ticks, x_label)]
    ends: list[float] = []
    for number, line in enumerate(lines):
        parts.append(_drawn(line, number, x, y, ends))
    return Markup('<svg class="chart" viewBox="0 0 {} {}" role="img"><title>{}</title>{}</svg>').format(
        WIDTH, HEIGHT, title, Markup("").join(parts)
    )


def ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Return about five round numbers that enclose ``low`` and ``high``; at least two, ascending."""
    size = max(1.0, abs(low), abs(high))
    if high - low < size * 1e-6:  # flat, as far as anybody can see
        half = max(0.5, size * 1e-3)
        low, high = low - half, high + half
    raw = (high - low) / (_TICKS - 1)
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(magnitude * factor for factor in (1, 2, 2.5, 5, 10) if magnitude * factor >= raw * 0.999)
    if whole:
        step = max(1.0, math.ceil(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def running_mean(points: Sequence[Point], over: int = MEAN_OVER) -> list[Point]:
    """Return, at each point, the mean of it and up to ``over - 1`` points before it."""
    return [
        Point(point.x, sum(other.y for other in points[max(0, index - over + 1) : index + 1]) / min(over, index + 1))
        for index, point in enumerate(points)
    ]


def _finite(points: Sequence[Point]) -> list[Point]:
    return sorted(point for point in points if abs(point.x) < _BIGGEST and abs(point.y) < _BIGGEST)


def _thinned(points: list[Point]) -> list[Point]:
    """Return at most :data:`_MOST_POINTS` points, each the mean of its neighbours."""
    size = math.ceil(len(points) / _MOST_POINTS)
    if size <= 1:
        return points
    chunks = [points[start : start + size] for start in range(0, len(points), size)]
    return [Point(sum(p.x for p in c) / len(c), sum(p.y for p in c) / len(c)) for c in chunks]


def _value_range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    # Rewards and shares mostly lie between 0 and 1; the whole range shows how far there is to go.
    return (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)


def _axes(x: _Scale, y: _Scale, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str) -> Markup:
    left, right, bottom = f"{x.start:.1f}", f"{x.end:.1f}", f"{y.start:.1f}"
    parts = []
    for tick in y_ticks:
        at = f"{y(tick):.1f}"
        parts.append(Markup('<line class="grid" x1="{}" y1="{}" x2="{}" y2="{}"/>').format(left, at, right, at))
        parts.append(
            Markup('<text class="tick" x="{}" y="{}" text-anchor="end">{}</text>').format(
                f"{x.start - 8:.1f}", f"{y(tick) + 4:.1f}", f"{tick:g}"
            )
        )
    parts.extend(
        Markup('<text class="tick" x="{}" y="{}" text-anchor="middle">{}</text>').format(
            f"{x(tick):.1f}", f"{y.start + 18:.1f}", f"{tick:g}"
        )
        for tick in x_ticks
    )
    parts.append(Markup('<line class="axis" x1="{}" y1="{}" x2="{}" y2="{}"/>').format(left, bottom, right, bottom))
    parts.append(
        Markup('<text class="label" x="{}" y="{}" text-anchor="middle">{}</text>').format(
            f"{(x.start + x.end) / 2:.1f}", HEIGHT - 4, x_label
        )
    )
    return Markup("").join(parts)


def _drawn(line: Series, number: int, x: _Scale, y: _Scale, ends: list[float]) -> Markup:
    mean = running_mean(line.points)
    dots = Markup("").join(
        Markup('<circle cx="{}" cy="{}" r="2.2"/>').format(f"{x(point.x):.1f}", f"{y(point.y):.1f}")
        for point in (line.points if len(line.points) <= _MOST_DOTS else ())
    )
    path = " ".join(f"{x(point.x):.1f},{y(point.y):.1f}" for point in mean)
    last = mean[-1]
    label_y = _free_place(y(last.y), ends)
    return Markup(
        '<g class="series s{}"><g class="dots">{}</g><polyline points="{}"/>'
        '<circle class="end" cx="{}" cy="{}" r="3.5"/>'
        '<text class="name" x="{}" y="{}">{} <tspan class="value">{}</tspan></text></g>'
    ).format(
        number + 1,
        dots,
        path,
        f"{x(last.x):.1f}",
        f"{y(last.y):.1f}",
        f"{x(last.x) + 10:.1f}",
        f"{label_y + 4:.1f}",
        line.name,
        f"{last.y:.2f}",
    )


def _free_place(wanted: float, taken: list[float]) -> float:
    """Return a height near ``wanted`` that keeps the labels of line ends apart, as long as there is room."""
    offsets = (sign * 17.0 * step for step in range(8) for sign in (1, -1))
    free = (wanted + offset for offset in offsets if all(abs(wanted + offset - other) >= 16 for other in taken))
    place = next((height for height in free if _TOP <= height <= HEIGHT - _BOTTOM), wanted)
    taken.append(place)
    return place
