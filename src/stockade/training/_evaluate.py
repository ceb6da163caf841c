"""Held-out evaluation: the same broker, the same sandboxes, the same hidden tests, tasks that no seed trains on."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from random import Random
from typing import Final

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from stockade.rewards import Verdict
from stockade.training._job import ResolvedJob
from stockade.training._model import complete
from stockade.training._scoring import Sample, Scorer
from stockade.training._toy import ToyTask, pool

SEED: Final = 1234
"""The same tasks and the same dice before and after, for every job."""


@dataclass(frozen=True, slots=True)
class Passed:
    """pass@1 over held-out tasks, 0 to 1: of sampled programs, and of the greedy one. ``masked`` were not scored."""

    sampled: float | None
    greedy: float | None
    tasks: int
    masked: int

    def as_dict(self) -> dict[str, float | int | None]:
        """Return the fields for a JSON file."""
        return asdict(self)


def evaluate(
    job: ResolvedJob, tokenizer: PreTrainedTokenizerFast, model: PreTrainedModel, scorer: Scorer, *, label: str
) -> Passed:
    """Return pass@1 of ``model``. Equal programs for one task run once and count as often as they were written."""
    tasks = pool(held_out=True).sample(job.evaluate.tasks, job.tasks.service_share, Random(SEED))  # noqa: S311 - repeatable on purpose
    prompts = [task.prompt for task in tasks]
    torch.manual_seed(SEED)
    count = job.evaluate.samples
    sampled = complete(tokenizer, model, prompts, samples=count, temperature=1.0)
    greedy = complete(tokenizer, model, prompts, samples=1, temperature=None)
    written = [(tasks[index // count], text) for index, text in enumerate(sampled)]
    written += list(zip(tasks, greedy, strict=True))
    verdicts = _verdicts(written, scorer, label)
    split = len(sampled)
    masked = sum(verdict in (Verdict.INFRASTRUCTURE_FAULT, Verdict.STOPPED) for verdict in verdicts)
    return Passed(_share(verdicts[:split]), _share(verdicts[split:]), len(tasks), masked)


def _verdicts(written: list[tuple[ToyTask, str]], scorer: Scorer, label: str) -> list[Verdict]:
    once = dict.fromkeys(written)
    samples = [
        Sample(task, completion, f"{label}.{task.name}", attempt) for attempt, (task, completion) in enumerate(once)
    ]
    known = dict(zip(once, asyncio.run(scorer.verdicts(samples)), strict=True))
    return [known[key] for key in written]


def _share(verdicts: list[Verdict]) -> float | None:
    scored = [v for v in verdicts if v not in (Verdict.INFRASTRUCTURE_FAULT, Verdict.STOPPED)]
    return sum(v is Verdict.OK for v in scored) / len(scored) if scored else None
