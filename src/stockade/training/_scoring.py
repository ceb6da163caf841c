"""A batch of samples to a batch of verdicts: one rollout for each sample, one grading for each different artifact."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from stockade.client import BrokerClient
from stockade.gym import Task
from stockade.rewards import Grade, Grader, Verdict, attempt
from stockade.training._toolbox import TOOLBOX, toolbox
from stockade.training._toy import ToyTask

OpenClient = Callable[[], AbstractAsyncContextManager[BrokerClient]]
"""Opens a client for one batch: its connections belong to one event loop, and TRL has a loop of its own."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion of the policy model and its place in the run."""

    task: ToyTask
    completion: str
    group: str
    attempt: int
    train_step: int | None = None


@dataclass(frozen=True, slots=True)
class Scorer:
    """Scores batches through the broker, at most ``parallel`` samples at a time."""

    open_client: OpenClient
    service_url: str
    rate: int
    parallel: int
    timeout_s: float

    async def verdicts(self, samples: Sequence[Sample]) -> list[Verdict]:
        """Return the verdict of each sample, in order.

        Every sample has a rollout of its own, so that the record shows what each program did.

        Raises:
            BrokerError, NodeError: the first error that stands for all: the agent is gone, a request was wrong,
                a sandbox has no interpreter. Masking those would hide a broken set-up in a quiet training run.
        """
        async with self.open_client() as client:
            grader = SharedGrader(client, concurrency=max(1, self.parallel // 2))
            slots = asyncio.Semaphore(self.parallel)
            tasks = [asyncio.ensure_future(self._verdict(one, client, grader, slots)) for one in samples]
            try:
                return list(await asyncio.gather(*tasks))
            finally:
                # After an error nothing of this batch may run on: its sandboxes are closed on the way out.
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await grader.aclose()

    async def _verdict(self, sample: Sample, client: BrokerClient, grader: Grader, slots: asyncio.Semaphore) -> Verdict:
        task = sample.task.as_task(_storable(sample.completion), rate=self.rate, timeout_s=self.timeout_s)
        async with slots:
            scored = await attempt(
                client,
                grader,
                task,
                files={TOOLBOX: toolbox(self.service_url)} if sample.task.needs_service else None,
                group_id=sample.group,
                train_step=sample.train_step,
                attempt=sample.attempt,
            )
        return scored.verdict


def _storable(completion: str) -> str:
    """Return the completion without what no source file can hold: it would not have run either way."""
    return completion.replace("\0", "\\0").encode("utf-8", "replace").decode("utf-8")


class SharedGrader(Grader):
    """A grader that grades equal artifacts of one task once.

    Grading has no network, no clock and no chance in it, so equal in means equal out; while a policy model
    sharpens, two thirds of its programs are the same. Only what a verdict depends on is in the key.
    """

    def __init__(self, client: BrokerClient, *, concurrency: int = 2, python: str = "python3") -> None:
        super().__init__(client, concurrency=concurrency, python=python)
        self._known: dict[tuple[str, tuple[tuple[str, bytes], ...]], asyncio.Task[Grade]] = {}

    async def grade(self, task: Task, artifact: Mapping[str, bytes]) -> Grade:
        """Judge ``artifact`` as :meth:`stockade.rewards.Grader.grade` does, or wait for its twin's grade."""
        declared = tuple(sorted((name, artifact[name]) for name in task.artifacts if name in artifact))
        key = (task.task_id, declared)
        if key not in self._known:
            self._known[key] = asyncio.ensure_future(super().grade(task, artifact))
        # Shielded: one sample that is cancelled must not take the grading of its twins along.
        return await asyncio.shield(self._known[key])

    async def aclose(self) -> None:
        """End gradings that nobody waits for any more."""
        for grading in self._known.values():
            grading.cancel()
        await asyncio.gather(*self._known.values(), return_exceptions=True)
