"""The eyes on a TRL run: metrics, progress, and the reasons to stop."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from stockade.training._arithmetic import Settled
from stockade.training._metrics import MetricsFile, row
from stockade.training._progress import Progress


@dataclass(slots=True)
class StepBook:
    """What the reward function settled, by the step it was for: written there, read by the callback."""

    settled: dict[int, Settled] = field(default_factory=dict)


class Watch(TrainerCallback):
    """Writes one row a step, and stops a run that can learn nothing any more.

    When every group is flat the loss is exactly zero, but the optimiser's momentum goes on moving the weights: a
    policy that collapsed once was never seen to come back. ``patience`` is the number of such steps in a row;
    ``None`` for the control, whose coins are never flat.
    """

    def __init__(
        self, book: StepBook, metrics: MetricsFile, progress: Progress, *, phase: str, total: int, patience: int | None
    ) -> None:
        self._book = book
        self._metrics = metrics
        self._progress = progress
        self._phase = phase
        self._total = total
        self._patience = patience
        self._flat_steps = 0
        self._began = time.monotonic()
        self.gave_up = False

    def on_step_begin(
        self, _args: TrainingArguments, _state: TrainerState, _control: TrainerControl, **_kwargs: object
    ) -> None:
        """Start the step's clock."""
        self._began = time.monotonic()

    def on_log(
        self,
        _args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, object] | None = None,
        **_kwargs: object,
    ) -> None:
        """Write the row of the step that just ended."""
        settled = self._book.settled.pop(state.global_step, None)
        if settled is None:
            return
        new = row(state.global_step, settled, logs or {}, duration_s=time.monotonic() - self._began)
        self._metrics.add(new)
        self._progress.step(self._phase, state.global_step, self._total, reward=new["reward"], passed=new["passed"])
        self._flat_steps = self._flat_steps + 1 if settled.flat_groups == settled.groups else 0
        if self._patience is not None and self._patience <= self._flat_steps and state.global_step < self._total:
            self.gave_up = True
            control.should_training_stop = True
            self._progress.say(
                "warning",
                message=f"no group had two different rewards for {self._flat_steps} steps: "
                f"stopped at step {state.global_step}, there is nothing left to learn from",
            )


class StepCounter(TrainerCallback):
    """Progress of the warm-up."""

    def __init__(self, progress: Progress, *, phase: str, total: int) -> None:
        self._progress = progress
        self._phase = phase
        self._total = total

    def on_step_end(
        self, _args: TrainingArguments, state: TrainerState, _control: TrainerControl, **_kwargs: object
    ) -> None:
        """Report every tenth step."""
        if state.global_step % 10 == 0 or state.global_step == self._total:
            self._progress.step(self._phase, state.global_step, self._total)
