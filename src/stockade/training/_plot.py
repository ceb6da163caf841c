"""The reward curve as SVG and PNG, by altair and vl-convert: no browser, no network."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from stockade.training._metrics import Row

WIDTH: Final = 640
HEIGHT: Final = 300
WINDOW: Final = 5
COLOURS: Final = {"hidden tests": "#1f6f8b", "coin flip": "#b5532a"}


def can_plot() -> bool:
    """Return whether the optional packages are here."""
    return all(importlib.util.find_spec(name) is not None for name in ("altair", "vl_convert"))


def points(curves: Mapping[str, Sequence[Row]]) -> list[dict[str, object]]:
    """Return the chart's data: for each curve and step the share of programs that passed, and its running mean.

    Drawn is ``passed`` and not the reward: with the control the reward is a coin, and what it did to the policy
    model shows only in the programs.
    """
    data: list[dict[str, object]] = []
    for name, rows in curves.items():
        recent: list[float] = []
        for row in rows:
            passed = row["passed"]
            if not isinstance(passed, int | float):
                continue
            recent = [*recent, float(passed)][-WINDOW:]
            data.append(
                {
                    "step": row["step"],
                    "passed": float(passed),
                    "mean": sum(recent) / len(recent),
                    "reward": name,
                }
            )
    return data


def plot(curves: Mapping[str, Sequence[Row]], folder: Path) -> list[Path]:
    """Write ``reward.svg`` and ``reward.png`` into ``folder`` and return their paths."""
    alt = importlib.import_module("altair")
    names = list(curves)
    base = alt.Chart(alt.Data(values=points(curves))).encode(
        x=alt.X("step:Q", title="GRPO step", axis=alt.Axis(tickMinStep=1)),
        color=alt.Color(
            "reward:N",
            title="reward from",
            scale=alt.Scale(domain=names, range=[COLOURS.get(name, "#555555") for name in names]),
        ),
    )
    scale = alt.Scale(domain=[0, 1])
    dots = base.mark_circle(opacity=0.45, size=28).encode(y=alt.Y("passed:Q", scale=scale))
    lines = base.mark_line(strokeWidth=2.5).encode(
        y=alt.Y("mean:Q", scale=scale, title="programs that pass all hidden tests")
    )
    chart = (dots + lines).properties(
        width=WIDTH, height=HEIGHT, title=f"Share of right programs, and its mean over {WINDOW} steps"
    )
    paths = [folder / "reward.svg", folder / "reward.png"]
    for path in paths:
        chart.save(str(path), **({"scale_factor": 2} if path.suffix == ".png" else {}))
    return paths
