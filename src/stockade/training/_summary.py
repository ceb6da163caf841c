"""``summary.json``: what a training run did, for the report and for scripts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from stockade.rewards import Verdict
from stockade.training._metrics import Row, quarters


@dataclass(frozen=True, slots=True)
class Curve:
    """One GRPO run: how it ended, and its first and last quarter (``None`` where no step has a value)."""

    end: str
    steps: int
    seconds: float
    reward_first: float | None
    reward_last: float | None
    passed_first: float | None
    passed_last: float | None
    verdicts: Mapping[str, int]
    masked: int
    dropped_groups: int
    evaluation_after: Mapping[str, float | int | None] | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """A whole job. Paths are relative to the output directory."""

    name: str
    seed: int
    end: str
    parameters: int
    warm_up_seconds: float
    warm_up_cached: bool
    evaluation_before: Mapping[str, float | int | None]
    grpo: Curve
    control: Curve | None = None
    files: Sequence[str] = ()
    unsafe: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    message: str | None = None

    def as_dict(self) -> dict[str, object]:
        """Return plain values for a JSON file."""
        return asdict(self)

    def write(self, path: Path) -> None:
        """Write the file whole or not at all."""
        draft = path.with_suffix(".unfinished")
        draft.write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")
        draft.replace(path)


def curve(
    rows: Sequence[Row], *, end: str, seconds: float, evaluation: Mapping[str, float | int | None] | None
) -> Curve:
    """Return the summary of one GRPO run from its metrics."""
    reward, passed = quarters(rows, "reward"), quarters(rows, "passed")
    return Curve(
        end=end,
        steps=sum(row["reward"] is not None for row in rows),
        seconds=round(seconds, 2),
        reward_first=reward[0],
        reward_last=reward[1],
        passed_first=passed[0],
        passed_last=passed[1],
        verdicts={verdict.value: _total(rows, verdict.value) for verdict in Verdict},
        masked=_total(rows, "masked"),
        dropped_groups=_total(rows, "dropped"),
        evaluation_after=evaluation,
    )


def _total(rows: Sequence[Row], key: str) -> int:
    return sum(int(row[key] or 0) for row in rows)
