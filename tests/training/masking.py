"""Runs TRL's real ``GRPOTrainer`` for one step on prescribed verdicts and prints what it made of them, a line of JSON a case.

``masking.py VERDICTS:LIMIT...``: verdicts by initial letter, groups separated by ``/``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from random import Random

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from stockade.rewards import Verdict
from stockade.training._model import make_model, make_tokenizer
from stockade.training._quiet import silence
from stockade.training._reward import Held, make_reward
from stockade.training._toy import pool, teacher

LETTERS = {verdict.value[0]: verdict for verdict in Verdict}


class Prescribed:
    def __init__(self, verdicts: list[Verdict]) -> None:
        self._verdicts = verdicts

    async def verdicts(self, samples: list[object]) -> list[Verdict]:
        assert len(samples) == len(self._verdicts)
        return self._verdicts


def run(case: str) -> dict[str, object]:
    verdicts, limit = case.split(":")
    groups = [[LETTERS[letter] for letter in group] for group in verdicts.split("/")]
    size = len(groups[0])
    rows = teacher(50, wrong_share=0.0, service_share=0.0, rng=Random(1))
    tokenizer = make_tokenizer(row.prompt + row.completion for row in rows)
    model = make_model(tokenizer, hidden=32, layers=1)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    tasks = pool(held_out=False).draw(len(groups), 0.0, Random(2))
    reward = make_reward(
        Prescribed([verdict for group in groups for verdict in group]),  # type: ignore[arg-type]
        {task.name: task for task in tasks},
        group_size=size,
        dropped_limit=float(limit),
        note=lambda _step, _settled: None,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=reward,
            train_dataset=Dataset.from_list([{"prompt": task.prompt, "task": task.name} for task in tasks]),
            args=GRPOConfig(
                output_dir=folder, max_steps=1, per_device_train_batch_size=size * len(groups), num_generations=size,
                max_completion_length=4, beta=0.0, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True,
                bf16=False, gradient_checkpointing=False, disable_tqdm=True, learning_rate=0.01,
                lr_scheduler_type="constant",
            ),
        )  # fmt: skip
        held = None
        try:
            trainer.train()
        except Held as error:
            held = str(error)
    moved = any(not torch.equal(before[name], weight) for name, weight in model.named_parameters())
    logged = {
        key: value
        for entry in trainer.state.log_history
        for key, value in entry.items()
        if isinstance(value, int | float)
    }
    advantages = list(trainer._logs["advantages"])
    return {"advantages": advantages, "held": held, "moved": moved, "reward": logged.get("reward")}


if __name__ == "__main__":
    silence()
    torch.set_num_threads(1)
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # TRL prints
        for word in sys.argv[1:]:
            out.write(json.dumps(run(word)) + "\n")
