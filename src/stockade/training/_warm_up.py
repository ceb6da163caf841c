"""Supervised warm-up by TRL's ``SFTTrainer``, kept under the output directory by a hash of all that goes in."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from random import Random
from typing import Final

import tokenizers
import torch
import transformers
import trl
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerFast, PrinterCallback, set_seed
from trl import SFTConfig, SFTTrainer

from stockade.training import _toy
from stockade.training._callback import StepCounter
from stockade.training._job import HIDDEN, LAYERS, ResolvedJob, WarmUp
from stockade.training._model import CONTEXT, PIECES, VOCABULARY, load, make_model, make_tokenizer, save
from stockade.training._progress import Progress

CACHE_FORMAT: Final = 1
TOKENIZER_ROWS: Final = 2000
MAX_LENGTH: Final = 64


def warmed_up(job: ResolvedJob, progress: Progress) -> tuple[Path, bool]:
    """Return the folder of the warmed-up model, and whether it was there already.

    A folder is moved to its name when it is complete, so that an interrupted warm-up is never mistaken for one.
    """
    if job.warm_up is None:
        if job.model.folder is None:
            raise AssertionError("a tiny model without warm-up does not validate")
        return job.model.folder, True
    folder = job.folder / "cache" / f"warm-up-{fingerprint(job)}"
    if folder.is_dir():
        return folder, True
    progress.phase("warm_up", job.warm_up.steps)
    tokenizer, model = _train(job, job.warm_up, progress)
    unfinished = folder.with_suffix(".unfinished")
    if unfinished.exists():
        shutil.rmtree(unfinished)
    save(unfinished, tokenizer, model)
    unfinished.rename(folder)
    return folder, False


def fingerprint(job: ResolvedJob) -> str:
    """Return a hash of everything the warm-up depends on: settings, rows of the teacher, tokenizer, versions."""
    if job.warm_up is None:
        raise AssertionError("there is nothing to fingerprint without a warm-up")
    digest = hashlib.sha256()
    inputs = {
        "format": CACHE_FORMAT,
        "model": job.model.model_dump(mode="json"),
        "warm_up": job.warm_up.model_dump(mode="json"),
        "seed": job.grpo.seed,
        "threads": job.threads,
        "tokenizer": [PIECES, VOCABULARY, CONTEXT, MAX_LENGTH],
        "versions": [torch.__version__, transformers.__version__, trl.__version__, tokenizers.__version__],
    }
    digest.update(json.dumps(inputs, sort_keys=True).encode())
    if job.model.folder is not None:
        for file in sorted(job.model.folder.iterdir()):
            if file.is_file():
                digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    for prompt, completion in _rows(job, job.warm_up):
        digest.update(f"{prompt}\0{completion}\0".encode())
    return digest.hexdigest()[:16]


def _rows(job: ResolvedJob, warm_up: WarmUp) -> list[_toy.Row]:
    return _toy.teacher(
        warm_up.steps * warm_up.batch,
        wrong_share=warm_up.wrong_share,
        service_share=job.tasks.service_share,
        rng=Random(job.grpo.seed),  # noqa: S311 - repeatable on purpose
    )


def _train(job: ResolvedJob, warm_up: WarmUp, progress: Progress) -> tuple[PreTrainedTokenizerFast, PreTrainedModel]:
    rows = _rows(job, warm_up)
    set_seed(job.grpo.seed)
    if job.model.folder is not None:
        tokenizer, model = load(job.model.folder)
    else:
        tokenizer = make_tokenizer(row.prompt + row.completion for row in rows[:TOKENIZER_ROWS])
        model = make_model(tokenizer, hidden=job.model.hidden or HIDDEN, layers=job.model.layers or LAYERS)
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([row._asdict() for row in rows]),
        callbacks=[StepCounter(progress, phase="warm_up", total=warm_up.steps)],
        args=SFTConfig(
            output_dir=str(job.folder / "cache" / "sft"),
            max_steps=warm_up.steps,
            per_device_train_batch_size=warm_up.batch,
            learning_rate=warm_up.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=min(20, warm_up.steps // 2),
            logging_steps=50,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            max_length=MAX_LENGTH,
            dataloader_num_workers=0,
            seed=job.grpo.seed,
            disable_tqdm=True,
            completion_only_loss=True,
            packing=False,
        ),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return tokenizer, model
