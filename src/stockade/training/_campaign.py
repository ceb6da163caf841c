"""A whole job inside the training process: warm-up, evaluation, GRPO, control, model, plot, summary."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Final

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from stockade.training._evaluate import Passed, evaluate
from stockade.training._grpo import Phase, Trained, train
from stockade.training._job import ResolvedJob
from stockade.training._metrics import Row
from stockade.training._model import complete, load, save
from stockade.training._plot import can_plot, plot
from stockade.training._progress import Progress
from stockade.training._scoring import OpenClient, Scorer
from stockade.training._summary import Curve, Summary, curve
from stockade.training._toy import pool
from stockade.training._warm_up import warmed_up

METRICS: Final[dict[Phase, str]] = {"grpo": "metrics.jsonl", "control": "control.jsonl"}
MODEL: Final = "model"
FINISHED: Final = ("complete", "gave_up")
VERSIONS: Final = ("torch", "transformers", "trl", "accelerate", "datasets", "tokenizers")


def run_job(job: ResolvedJob, open_client: OpenClient, progress: Progress) -> Summary:
    """Run a resolved job and return its summary, which is also in ``output/summary.json``.

    Ctrl-C during GRPO ends the training, not the process: the model as it is, the metrics and the summary are
    written, and the summary's ``end`` says what happened.
    """
    torch.set_num_threads(job.threads)
    job.folder.mkdir(parents=True, exist_ok=True)
    scorer = Scorer(
        open_client,
        service_url=job.service_url,
        rate=job.rate,
        parallel=job.grpo.parallel,
        timeout_s=job.grpo.timeout_s,
    )
    campaign = _Campaign(job, scorer, progress)
    summary = campaign.run()
    summary.write(job.folder / "summary.json")
    progress.say("done", **summary.as_dict())
    return summary


@dataclass(slots=True)
class _Campaign:
    job: ResolvedJob
    scorer: Scorer
    progress: Progress
    curves: dict[str, tuple[Row, ...]] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)

    def run(self) -> Summary:
        began = time.monotonic()
        warm, cached = warmed_up(self.job, self.progress)
        warm_seconds = time.monotonic() - began
        tokenizer, model = load(warm)
        before = self._evaluate(tokenizer, model, "before")
        trained = self._train(tokenizer, model, "grpo")
        self._save(tokenizer, model)
        grpo = self._curve(trained, tokenizer, model, "after")
        control = None
        if self.job.control == "coin_flip" and grpo.end in FINISHED:
            control = self._control(warm)
        self._plot()
        return Summary(
            name=self.job.name,
            seed=self.job.grpo.seed,
            end=control.end if control is not None and control.end not in FINISHED else grpo.end,
            parameters=model.num_parameters(),
            warm_up_seconds=round(warm_seconds, 2),
            warm_up_cached=cached,
            evaluation_before=before.as_dict(),
            grpo=grpo,
            control=control,
            files=tuple(self.files),
            unsafe=self.job.unsafe,
            versions={name: version(name) for name in VERSIONS},
            message=trained.message,
        )

    def _control(self, warm: Path) -> Curve:
        """Train a second time from the same warm-up on a reward that knows nothing."""
        tokenizer, model = load(warm)
        trained = self._train(tokenizer, model, "control")
        return self._curve(trained, tokenizer, model, "control-after")

    def _train(self, tokenizer: PreTrainedTokenizerFast, model: PreTrainedModel, phase: Phase) -> Trained:
        path = self.job.folder / METRICS[phase]
        trained = train(self.job, tokenizer, model, self.scorer, self.progress, phase=phase, metrics_path=path)
        self.curves["hidden tests" if phase == "grpo" else "coin flip"] = trained.rows
        self.files.append(path.name)
        return trained

    def _curve(self, trained: Trained, tokenizer: PreTrainedTokenizerFast, model: PreTrainedModel, label: str) -> Curve:
        evaluation, end = None, trained.end
        if end in FINISHED:
            try:
                evaluation = self._evaluate(tokenizer, model, label).as_dict()
            except KeyboardInterrupt:
                end = "interrupted"
        return curve(trained.rows, end=end, seconds=trained.seconds, evaluation=evaluation)

    def _evaluate(self, tokenizer: PreTrainedTokenizerFast, model: PreTrainedModel, label: str) -> Passed:
        self.progress.phase("evaluate")
        return evaluate(self.job, tokenizer, model, self.scorer, label=label)

    def _save(self, tokenizer: PreTrainedTokenizerFast, model: PreTrainedModel) -> None:
        """Save the model, then load it again as a user would: a model that does not load is not an output."""
        self.progress.phase("save")
        folder = self.job.folder / MODEL
        save(folder, tokenizer, model)
        prompts = [pool(held_out=True).plain[0].prompt]
        again = complete(*load(folder), prompts, samples=1, temperature=None)
        if again != complete(tokenizer, model, prompts, samples=1, temperature=None):
            raise AssertionError(f"the model saved in {folder} does not write what it wrote in memory")
        self.files.append(MODEL)

    def _plot(self) -> None:
        if not can_plot():
            self.progress.say(
                "warning",
                message="no plot: altair and vl-convert-python are not installed (pip install 'stockade[train]')",
            )
            return
        self.files += [path.name for path in plot(self.curves, self.job.folder)]
