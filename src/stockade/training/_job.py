"""The job file of ``stockade train``, and the resolved job that the training process gets.

A *job* is what a person wrote. A *resolved job* is a job after the launcher looked at the policy: absolute paths,
the address of the service, the number that the service will answer. The training process reads only the latter,
because it may open neither the policy nor the run's directories.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from stockade.errors import JobError
from stockade.policy import StrictModel, load_document, parse_document

Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Rate = Annotated[float, Field(gt=0, le=1)]

DROPPED_SHARE: Final = 0.01
HIDDEN: Final = 128
LAYERS: Final = 3


def _contradiction(message: str) -> PydanticCustomError:
    return PydanticCustomError("job", "{message}", {"message": message})


class ModelSpec(StrictModel):
    """The policy model: ``kind: tiny`` is made on the spot, ``path`` names what ``save_pretrained`` wrote."""

    kind: Literal["tiny"] | None = None
    hidden: Annotated[int, Field(ge=32, le=1024, multiple_of=32)] | None = None
    layers: Annotated[int, Field(ge=1, le=24)] | None = None
    path: str | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.kind is None) == (self.path is None):
            raise _contradiction("a model has either kind: tiny or a path")
        if self.path is not None and (self.hidden is not None or self.layers is not None):
            raise _contradiction("hidden and layers are for kind: tiny; a model with a path has its own")
        return self

    @property
    def folder(self) -> Path | None:
        """Where the model lies, or ``None`` for a tiny one."""
        return None if self.path is None else Path(self.path)


class Tasks(StrictModel):
    """The task set. ``service_share`` of the tasks need the policy's service ``service``."""

    kind: Literal["toy"]
    service: str = "rates"
    service_share: Share = 0.2


class WarmUp(StrictModel):
    """Supervised warm-up on a noisy teacher, of whose programs ``wrong_share`` are wrong on purpose."""

    steps: Count = 250
    batch: Annotated[int, Field(ge=1, le=4096)] = 64
    learning_rate: Rate = 0.002
    wrong_share: Share = 0.5


class Grpo(StrictModel):
    """GRPO: ``steps`` times ``prompts`` groups of ``samples`` rollouts, ``parallel`` of them at a time."""

    steps: Count = 30
    prompts: Annotated[int, Field(ge=1, le=1024)] = 8
    samples: Annotated[int, Field(ge=2, le=1024)] = 8
    learning_rate: Rate = 0.0003
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 3
    parallel: Annotated[int, Field(ge=1, le=64)] = 8
    timeout_s: Annotated[float, Field(gt=0, le=600)] = 10.0
    """Bound of one program, in its rollout and again in its grading."""
    patience: Count = 10
    """Steps in a row without one group to learn from, after which training stops."""
    unsafe_dropped_share: Share = DROPPED_SHARE
    """Share of a step's groups that may be dropped before training holds for a person."""


class Evaluate(StrictModel):
    """Held-out evaluation before and after: ``samples`` programs for each of ``tasks`` tasks, and the greedy one."""

    samples: Annotated[int, Field(ge=1, le=64)] = 4
    tasks: Annotated[int, Field(ge=1, le=1000)] = 32


class Settings(StrictModel):
    """What a job and a resolved job share."""

    version: Literal[1]
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
    output: Annotated[str, Field(min_length=1)]
    engine: Literal["trl"] = "trl"
    threads: Annotated[int, Field(ge=1, le=64)] = 1
    model: ModelSpec
    tasks: Tasks
    warm_up: WarmUp | None = None
    grpo: Grpo = Grpo()
    control: Literal["none", "coin_flip"] = "none"
    evaluate: Evaluate = Evaluate()

    @model_validator(mode="after")
    def _tiny_models_know_nothing(self) -> Self:
        if self.model.folder is None and self.warm_up is None:
            raise _contradiction("a tiny model starts from nothing: add warm_up")
        return self

    @property
    def folder(self) -> Path:
        """The output directory."""
        return Path(self.output)

    @property
    def unsafe(self) -> tuple[str, ...]:
        """The dangerous options in use, as every report must show them."""
        share = self.grpo.unsafe_dropped_share
        return (f"grpo.unsafe_dropped_share: {share:g}",) if share > DROPPED_SHARE else ()


class Job(Settings):
    """A job file. ``output`` is relative to the working directory, ``policy`` and ``model.path`` to the file."""

    policy: Annotated[str, Field(min_length=1)]


class ResolvedJob(Settings):
    """All that the training process is told. It holds no path of a policy or of a run."""

    service_url: Annotated[str, Field(pattern=r"^http://[a-z0-9.-]+:[0-9]{1,5}$")]
    """Where sandboxes find the service."""
    rate: int
    """The number behind ``/v1/rate``. The expected values are made from it; no sandbox is told."""


def load_job(path: Path) -> Job:
    """Read a job file as strictly as a policy.

    Raises:
        JobError: naming file, line, key and the nearest valid name.
    """
    return _placed(load_document(path, Job, error=JobError), path)


def parse_job(text: str, *, source: Path) -> Job:
    """Return the job written in ``text``; ``source`` is the file for messages and for relative paths."""
    return _placed(parse_document(text, Job, source=str(source), error=JobError), source)


def _placed(job: Job, source: Path) -> Job:
    """Return the job with ``policy`` and ``model.path`` as seen from the working directory."""
    here = source.parent
    changes: dict[str, object] = {"policy": str(here / job.policy)}
    if job.model.path is not None:
        folder = here / job.model.path
        if not (folder / "config.json").is_file():
            raise JobError(
                f"{folder} holds no model",
                path=source,
                key="model.path",
                hint="name a folder that save_pretrained wrote",
            )
        changes["model"] = ModelSpec(path=str(folder.absolute()))
    return job.model_copy(update=changes)
