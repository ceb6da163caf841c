"""One line of metrics for each step, and the summary of a run. No clock and no torch in here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from stockade.rewards import Verdict
from stockade.training._arithmetic import Settled
from stockade.training._progress import to_line

Row = dict[str, float | int | str | None]

_FROM_TRL = {
    "reward": "reward",
    "reward_std": "reward_std",
    "frac_reward_zero_std": "frac_reward_zero_std",
    "loss": "loss",
    "grad_norm": "grad_norm",
    "entropy": "entropy",
    "completions/mean_length": "completion_tokens",
}


def row(step: int, settled: Settled, logs: Mapping[str, object], *, duration_s: float) -> Row:
    """Return one row: what our arithmetic counted, next to what TRL logged.

    ``passed`` is the share of scored samples whose verdict was ok. With the coin-flip control it is the only honest
    curve: the reward is a coin then.
    """
    ran = settled.count(Verdict.OK) + settled.count(Verdict.WRONG)
    result: Row = {
        "step": step,
        "passed": settled.passed,
        "ran_rate": ran / settled.samples,
        "samples": settled.samples,
        "masked": settled.masked,
        "groups": settled.groups,
        "dropped": settled.dropped_groups,
        "flat_groups": settled.flat_groups,
        "infra_rate": settled.count(Verdict.INFRASTRUCTURE_FAULT) / settled.samples,
        "stopped_rate": settled.count(Verdict.STOPPED) / settled.samples,
        **{verdict.value: count for verdict, count in settled.verdicts},
        "duration_s": round(duration_s, 3),
    }
    for theirs, ours in _FROM_TRL.items():
        value = logs.get(theirs)
        finite = isinstance(value, int | float) and math.isfinite(value)
        result[ours] = value if finite else None  # type: ignore[assignment]
    return result


class MetricsFile:
    """``metrics.jsonl``: each row is on disk before the next step begins."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")
        self.rows: list[Row] = []

    def add(self, new: Row) -> None:
        """Append one row."""
        self.rows.append(new)
        self._file.write(to_line(new))
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def quarters(rows: Sequence[Row], key: str) -> tuple[float | None, float | None]:
    """Return the mean of ``key`` over the first and the last quarter of the steps that have it."""
    values = [value for value in (r.get(key) for r in rows) if isinstance(value, int | float)]
    size = max(1, len(values) // 4)
    if not values:
        return None, None
    return sum(values[:size]) / size, sum(values[-size:]) / size
