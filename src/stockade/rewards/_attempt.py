"""One rollout from its task to its verdict: run, collect, close, and grade elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from stockade.errors import AgentGone, BrokerError, StockadeError
from stockade.gym import SOLUTION, WORKSPACE, artifact_path
from stockade.rewards._door import Ended, attested, attested_by, close_quietly, ended_by, open_episode
from stockade.rewards._verdict import Sample, Verdict, plain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stockade.client import BrokerClient, Episode
    from stockade.gym import Task
    from stockade.rewards._grader import Grader

NO_ROLLOUT: Final = "-"
"""``rollout_id`` of a sample whose sandbox could not be made."""


async def attempt(
    client: BrokerClient,
    grader: Grader,
    task: Task,
    *,
    files: Mapping[str, bytes] | None = None,
    group_id: str | None = None,
    train_step: int | None = None,
    attempt: int | None = None,
    python: str = "python3",
) -> Sample:
    """Run ``task.solution`` once in a rollout sandbox, and grade what it leaves in fresh ones.

    ``files`` (name below the workspace → content) are put beside it first; never put tests, expected values or a
    ``.git`` there. The program runs with the network that the policy allows and at most ``task.timeout_s``.
    Its exit code is on record but proves nothing. The rollout's sandbox, with every process in it, is gone before
    grading begins (P1). Raises what :meth:`Grader.grade` raises, and
    :class:`AgentGone` when there was no agent to begin with: then no later rollout would fare better.
    """
    started = time.monotonic_ns()
    state = _State()
    try:
        episode = await open_episode(
            lambda: client.create(
                role="rollout",
                task_id=task.task_id,
                group_id=group_id,
                train_step=train_step,
                attempt=attempt,
                files=_placed(task, files),
            )
        )
        state.rollout_id = episode.id
        artifact = await _roll_out(episode, task, python)
        grade = await grader.grade(task, artifact)
    except Ended as ended:
        return _sample(task, state, started, ended.verdict, ended.evidence)
    except StockadeError as error:
        end = ended_by(error)
        if end is None or (isinstance(error, AgentGone) and state.rollout_id == NO_ROLLOUT):
            raise
        return _sample(task, state, started, end.verdict, end.evidence)
    return _sample(task, state, started, grade.verdict, grade.evidence, grade.tests_passed, grade.tests_required)


class _State:
    rollout_id: str = NO_ROLLOUT


def _sample(
    task: Task,
    state: _State,
    started_ns: int,
    verdict: Verdict,
    evidence: str,
    passed: int = 0,
    required: int = 0,
) -> Sample:
    return Sample(
        task_id=task.task_id,
        task_digest=task.digest,
        rollout_id=state.rollout_id,
        verdict=verdict,
        evidence=evidence,
        tests_passed=passed,
        tests_required=required,
        wall_ns=time.monotonic_ns() - started_ns,
    )


def _placed(task: Task, files: Mapping[str, bytes] | None) -> dict[str, bytes]:
    placed = {f"{WORKSPACE}/{name}": data for name, data in (files or {}).items()}
    placed[artifact_path(SOLUTION)] = task.solution.encode("utf-8")
    return placed


async def _roll_out(episode: Episode, task: Task, python: str) -> dict[str, bytes]:
    """Run the program, take its declared artifacts, and end the sandbox; raise :class:`Ended` for a fault."""
    try:
        reply = await episode.exec([python, "-I", SOLUTION], cwd=WORKSPACE, timeout_s=task.timeout_s)
        verdict = attested_by(reply)
        if verdict is not None:
            raise Ended(verdict, plain(f"rollout: {reply.exit}: {reply.evidence}"))
        artifact = await _collect(episode, task)
    except BaseException:
        await close_quietly(episode)
        raise
    closed = await episode.close()
    verdict = attested(closed.fault, closed.exit)
    if verdict is not None:
        raise Ended(verdict, plain(f"rollout: {closed.exit}: {closed.evidence}"))
    return artifact


async def _collect(episode: Episode, task: Task) -> dict[str, bytes]:
    """Take the declared files that can be had.

    A missing file, a link, a FIFO, a closed folder, a gigabyte: the tree belongs to whoever wrote the program, so
    whatever fails while it is read is the program's doing, even where the broker was surprised (``backend_error``).
    If the node itself failed, closing the episode attests it.
    """
    found: dict[str, bytes] = {}
    for name in task.artifacts:
        try:
            found[name] = await episode.read_file(artifact_path(name))
        except BrokerError as error:
            end = ended_by(error)
            if isinstance(error, AgentGone) or (end is not None and end.verdict is Verdict.STOPPED):
                raise
    return found
