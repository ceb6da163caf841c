"""Many tasks, a few at a time, each result handed on the moment it is known."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from stockade.rewards._attempt import attempt
from stockade.rewards._grader import Grader
from stockade.rewards._verdict import Sample, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from stockade.client import BrokerClient
    from stockade.gym import Task


class BatchResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one call of :func:`run_batch` did; samples of earlier calls are with whoever kept them."""

    samples: tuple[Sample, ...]
    resumed: int
    not_started: int
    wall_ns: int

    @property
    def counts(self) -> dict[Verdict, int]:
        """How many samples got each verdict; every verdict is named, also with 0."""
        found = Counter(sample.verdict for sample in self.samples)
        return {verdict: found[verdict] for verdict in Verdict}

    @property
    def stopped(self) -> bool:
        """A person stopped the run: tasks that had not started were left alone."""
        return any(sample.verdict is Verdict.STOPPED for sample in self.samples)


async def run_batch(
    client: BrokerClient,
    tasks: Iterable[Task],
    *,
    parallel: int,
    on_result: Callable[[Sample], None],
    resume: set[str] | frozenset[str] = frozenset(),
) -> BatchResult:
    """Roll out and grade each task whose ID is not in ``resume``, ``parallel`` at a time.

    ``on_result`` is called once a sample, in this task's thread, before the next one starts in its place: use
    :meth:`ResultLog.append`, and cancelling (Ctrl-C) or a crash loses at most the rollouts in flight. After a
    stop nothing new starts. Raises :class:`AgentGone` when there is no agent to go on with, and what
    :func:`attempt` or ``on_result`` raises; the other rollouts are then cancelled and their sandboxes closed.
    """
    if parallel < 1:
        raise ValueError("parallel must be at least 1")
    started = time.monotonic_ns()
    every = list(tasks)
    todo = [task for task in every if task.task_id not in resume]
    batch = _Batch(client, Grader(client, concurrency=parallel), iter(todo), on_result)
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(parallel, len(todo))):
                group.create_task(batch.work())
    except ExceptionGroup as errors:
        # One cause is enough, and callers catch it by its type.
        raise errors.exceptions[0] from None
    return BatchResult(
        samples=tuple(batch.samples),
        resumed=len(every) - len(todo),
        not_started=len(todo) - batch.started,
        wall_ns=time.monotonic_ns() - started,
    )


class _Batch:
    def __init__(
        self,
        client: BrokerClient,
        grader: Grader,
        todo: Iterator[Task],
        on_result: Callable[[Sample], None],
    ) -> None:
        self._client = client
        self._grader = grader
        self._todo = todo
        self._on_result = on_result
        self._halted = False
        self.samples: list[Sample] = []
        self.started = 0

    async def work(self) -> None:
        for task in self._todo:
            if self._halted:
                return
            self.started += 1
            sample = await attempt(self._client, self._grader, task)
            if sample.verdict is Verdict.STOPPED:
                self._halted = True
            self.samples.append(sample)
            self._on_result(sample)
