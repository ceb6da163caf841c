"""The one reward function of a GRPO run: completions in, rewards out, everything in between through the broker."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from random import Random
from typing import Protocol

from stockade.errors import StockadeError
from stockade.training._arithmetic import Judged, Settled, coin_flips, reason_to_hold, settle
from stockade.training._scoring import Sample, Scorer
from stockade.training._toy import ToyTask

RewardFunction = Callable[..., Coroutine[None, None, list[float | None]]]
"""TRL calls it with the batch's columns by keyword; ``None`` masks a sample."""


class TrainerState(Protocol):
    """What is read of the engine's state."""

    @property
    def global_step(self) -> int:
        """Steps that are done."""
        ...


class Held(StockadeError):
    """Training must not learn from the batch at hand; a person has to look first."""


def make_reward(
    scorer: Scorer,
    tasks: Mapping[str, ToyTask],
    *,
    group_size: int,
    dropped_limit: float,
    note: Callable[[int, Settled], None],
    coin: Random | None = None,
) -> RewardFunction:
    """Return the reward function. ``note(step, settled)`` gets what was counted; ``coin`` makes it the control.

    There is only this one function: TRL masks a sample when *every* reward function returns ``None`` for it, and
    one stray function that returns a number would undo that.

    The function raises :class:`Held` instead of returning, so that a batch to hold never moves a weight.
    """

    async def hidden_tests(
        completions: Sequence[str], task: Sequence[str], trainer_state: TrainerState, **_columns: object
    ) -> list[float | None]:
        step = trainer_state.global_step + 1
        samples = [
            Sample(tasks[name], completion, group_name(step, index, group_size), index % group_size, step)
            for index, (name, completion) in enumerate(zip(task, completions, strict=True))
        ]
        check_groups(samples)
        verdicts = await scorer.verdicts(samples)
        settled = settle([Judged(s.group, v) for s, v in zip(samples, verdicts, strict=True)])
        note(step, settled)
        reason = reason_to_hold(settled, dropped_limit=dropped_limit)
        if reason is not None:
            raise Held(
                f"training holds at step {step}: {reason}",
                hint="look at the run's report, then start again; nothing was learned from this step",
            )
        return list(settled.rewards) if coin is None else coin_flips(settled.rewards, coin)

    return hidden_tests


def group_name(step: int, index: int, group_size: int) -> str:
    """Return the group of the ``index``-th sample of a batch: TRL puts the samples of one prompt side by side."""
    return f"step-{step}.{index // group_size}"


def check_groups(samples: Sequence[Sample]) -> None:
    """Refuse a batch whose groups mix tasks: the engine's order changed, and every baseline would be wrong."""
    seen: dict[str, ToyTask] = {}
    for sample in samples:
        if seen.setdefault(sample.group, sample.task) != sample.task:
            raise AssertionError(f"group {sample.group} holds samples of two tasks: the engine's order changed")
