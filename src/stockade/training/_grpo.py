"""GRPO by TRL's ``GRPOTrainer``, as it comes: no patch, no subclass."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final, Literal

from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerFast, PrinterCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from stockade.errors import AgentGone
from stockade.training._callback import StepBook, Watch
from stockade.training._job import ResolvedJob
from stockade.training._metrics import MetricsFile, Row, row
from stockade.training._model import MAX_NEW_TOKENS
from stockade.training._progress import Progress
from stockade.training._reward import Held, make_reward
from stockade.training._scoring import Scorer
from stockade.training._toy import ToyTask, pool

Phase = Literal["grpo", "control"]
End = Literal["complete", "gave_up", "held", "agent_gone", "interrupted"]

COIN_SALT: Final = 7


@dataclass(frozen=True, slots=True)
class Trained:
    """How a GRPO run went. The model was changed in place."""

    end: End
    rows: tuple[Row, ...]
    seconds: float
    message: str | None = None


def train(
    job: ResolvedJob,
    tokenizer: PreTrainedTokenizerFast,
    model: PreTrainedModel,
    scorer: Scorer,
    progress: Progress,
    *,
    phase: Phase,
    metrics_path: Path,
) -> Trained:
    """Train ``model`` in place, until the steps are done, nothing can be learned, a person must look, or Ctrl-C.

    However it ends, ``model`` is what was learned until then.
    """
    settings = job.grpo
    progress.phase(phase, settings.steps)
    set_seed(settings.seed)
    dice, coin = Random(settings.seed), Random(settings.seed + COIN_SALT)  # noqa: S311 - repeatable on purpose
    data = pool(held_out=False).draw(settings.steps * settings.prompts, job.tasks.service_share, dice)
    book = StepBook()
    reward = make_reward(
        scorer,
        {task.name: task for task in data},
        group_size=settings.samples,
        dropped_limit=settings.unsafe_dropped_share,
        note=book.settled.__setitem__,
        coin=coin if phase == "control" else None,
    )
    began = time.monotonic()
    with MetricsFile(metrics_path) as metrics:
        watch = Watch(
            book,
            metrics,
            progress,
            phase=phase,
            total=settings.steps,
            patience=settings.patience if phase == "grpo" else None,
        )
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=reward,
            train_dataset=_dataset(data),
            callbacks=[watch],
            args=_config(job, job.folder / "cache" / phase),
        )
        trainer.remove_callback(PrinterCallback)
        end, message = _run(trainer)
        for step, settled in sorted(book.settled.items()):
            # The step that was held: settled and counted, but never learned from and never logged by TRL.
            metrics.add(row(step, settled, {}, duration_s=0.0))
        if end == "complete" and watch.gave_up:
            end = "gave_up"
        if message is not None:
            progress.say("held", message=message)
        return Trained(end, tuple(metrics.rows), time.monotonic() - began, message)


def _run(trainer: GRPOTrainer) -> tuple[End, str | None]:
    try:
        trainer.train()
    except Held as held:
        return "held", str(held)
    except AgentGone as gone:
        return "agent_gone", str(gone)
    except KeyboardInterrupt:
        return "interrupted", None
    return "complete", None


def _dataset(data: list[ToyTask]) -> Dataset:
    """Return the rows TRL sees: a prompt and a name. Tests and expected values are not among them."""
    return Dataset.from_list([{"prompt": task.prompt, "task": task.name} for task in data])


def _config(job: ResolvedJob, folder: Path) -> GRPOConfig:
    settings = job.grpo
    return GRPOConfig(
        output_dir=str(folder),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.prompts * settings.samples,
        num_generations=settings.samples,
        max_completion_length=MAX_NEW_TOKENS,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant",
        beta=0.0,
        temperature=settings.temperature,
        top_k=0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=settings.seed,
        disable_tqdm=True,
        dataloader_num_workers=0,
        mask_truncated_completions=False,
    )
