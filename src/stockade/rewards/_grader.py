"""Grading: the tests in one fresh sandbox, the candidate in another, bytes between them.

The principles and what each prevents are in docs/grading.md. In short: nothing of the rollout but its declared
artifacts comes here (P1); expected values never share a process or a file system with the candidate (P2); a pass
needs evidence for every assert (P3), from a process that the candidate cannot write to (P4).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import TYPE_CHECKING, Final

from stockade.client import Peer
from stockade.errors import NodeError, StockadeError, TaskError
from stockade.gym import MARKER, SOLUTION, artifact_path, artifacts_problem, plan_tests
from stockade.rewards._door import Ended, attested_by, close_quietly, ended_by, open_episode
from stockade.rewards._guest._codec import MAX_JOB_BYTES, encode
from stockade.rewards._guest_text import CANDIDATE_PATH, TESTS_PATH, candidate_program, tests_program
from stockade.rewards._report import missing_evidence, read_report
from stockade.rewards._verdict import Grade, Usage, Verdict, plain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stockade.client import BrokerClient, Episode, ExecReply
    from stockade.gym import Plan, Task

_FLAGS: Final = ("-I", "-S", "-B")
_NO_INTERPRETER: Final = frozenset({126, 127})
_NOT_STARTED: Final = "not_started"


class Grader:
    """Grades artifacts through one broker, ``concurrency`` gradings (two sandboxes each) at a time."""

    def __init__(self, client: BrokerClient, *, concurrency: int = 2, python: str = "python3") -> None:
        if concurrency < 1:
            raise ValueError("concurrency must be at least 1")
        self._client = client
        self._slots = asyncio.Semaphore(concurrency)
        self._python = python

    async def grade(self, task: Task, artifact: Mapping[str, bytes]) -> Grade:
        """Judge ``artifact`` (file name below the workspace → content) by the hidden tests of ``task``.

        Every outcome that the candidate can bring about is a :class:`Grade`; so are faults of the broker. Raises
        :class:`TaskError` for tests that cannot judge, :class:`NodeError` when the sandbox has no interpreter,
        and :class:`BrokerError` when the broker refuses the request itself.
        """
        plan = plan_tests(task.tests)
        if plan.problem is not None:
            raise TaskError(plan.problem, key=f"{task.task_id}: tests")
        required = len(plan.lines)
        files = {name: artifact[name] for name in task.artifacts if name in artifact}
        problem = artifacts_problem(files)
        if SOLUTION not in files:
            problem = f"the rollout left no {SOLUTION}"
        if problem is not None:
            return Grade(verdict=Verdict.WRONG, evidence=problem, tests_required=required)
        async with self._slots:
            try:
                return await self._run(task, plan, files)
            except Ended as ended:
                return Grade(verdict=ended.verdict, evidence=ended.evidence, tests_required=required)

    async def _run(self, task: Task, plan: Plan, files: Mapping[str, bytes]) -> Grade:
        nonce = secrets.token_hex(16)
        job = {"nonce": nonce, "marker": MARKER, "helpers": task.helpers, "tests": plan.text}
        placed = {artifact_path(name): data for name, data in files.items()}
        placed[CANDIDATE_PATH] = candidate_program()
        try:
            async with contextlib.AsyncExitStack() as stack:
                tests, candidate = await self._open_both(stack, task, placed)
                reply = await tests.exec(
                    [self._python, *_FLAGS, TESTS_PATH],
                    stdin=encode(job, limit=MAX_JOB_BYTES),
                    timeout_s=task.timeout_s,
                    peer=Peer(
                        candidate,
                        [self._python, *_FLAGS, CANDIDATE_PATH, artifact_path(SOLUTION), task.entry_point],
                    ),
                )
        except StockadeError as error:
            ended = ended_by(error)
            if ended is None:
                raise
            raise ended from error
        return _judge(reply, plan, nonce)

    async def _open_both(
        self, stack: contextlib.AsyncExitStack, task: Task, placed: dict[str, bytes]
    ) -> tuple[Episode, Episode]:
        tests, candidate = await asyncio.gather(
            self._open(stack, task, {TESTS_PATH: tests_program()}),
            self._open(stack, task, placed),
            return_exceptions=True,
        )
        if isinstance(tests, BaseException):
            raise tests
        if isinstance(candidate, BaseException):
            raise candidate
        return tests, candidate

    async def _open(self, stack: contextlib.AsyncExitStack, task: Task, files: dict[str, bytes]) -> Episode:
        episode = await open_episode(lambda: self._client.create(role="grading", task_id=task.task_id, files=files))
        # At once: the other of the pair may fail, or the grading be cancelled, before both are there.
        stack.push_async_callback(close_quietly, episode)
        return episode


def _judge(reply: ExecReply, plan: Plan, nonce: str) -> Grade:
    """Turn the two ends of one joined exec into a grade.

    A stop outweighs everything, then a fault of the machinery on either side, then a limit that the
    candidate's side hit. The tests' side hitting a limit is no fault of the policy's kind: it only means that
    there is no evidence.
    """
    peer = reply.peer
    required = len(plan.lines)
    if peer is None:
        return Grade(
            verdict=Verdict.INFRASTRUCTURE_FAULT,
            evidence="the broker answered without the candidate's side",
            tests_required=required,
        )
    usage = Usage(wall_ns=peer.usage.wall_ns, cpu_ns=peer.usage.cpu_ns, max_rss_bytes=peer.usage.max_rss_bytes)
    sides = (attested_by(reply), attested_by(peer))
    for verdict in (Verdict.STOPPED, Verdict.INFRASTRUCTURE_FAULT):
        if verdict in sides:
            evidence = reply.evidence if sides[0] is verdict else peer.evidence
            return Grade(verdict=verdict, evidence=plain(evidence), tests_required=required, usage=usage)
    if sides[1] is Verdict.CANDIDATE_FAULT:
        evidence = plain(f"{peer.exit}: {peer.evidence}")
        return Grade(verdict=Verdict.CANDIDATE_FAULT, evidence=evidence, tests_required=required, usage=usage)
    report = read_report(reply.stdout, nonce=nonce, truncated=reply.truncated_stdout)
    if report is None or reply.fault is not None:
        return _no_report(reply, required, usage)
    missing = missing_evidence(report, plan)
    passed = len(set(report.held) & set(range(required)))
    if missing is not None:
        if report.outcome == "broken":
            missing = plain(f"{missing} ({_end(peer)})")
        return Grade(verdict=Verdict.WRONG, evidence=missing, tests_passed=passed, tests_required=required, usage=usage)
    return Grade(
        verdict=Verdict.OK,
        evidence=f"{required} asserts held in {report.calls} calls",
        tests_passed=passed,
        tests_required=required,
        usage=usage,
    )


def _no_report(reply: ExecReply, required: int, usage: Usage) -> Grade:
    # No byte of the candidate is read before the tests' interpreter runs, so neither end can be its doing.
    if reply.exit == _NOT_STARTED:
        return Grade(
            verdict=Verdict.INFRASTRUCTURE_FAULT,
            evidence=plain(f"the tests could not start: {reply.evidence}"),
            tests_required=required,
            usage=usage,
        )
    # Scoring everything 0 because there is no interpreter would be noise; stop instead.
    if reply.fault is None and reply.return_code in _NO_INTERPRETER and not reply.stdout:
        raise NodeError(
            f"the grading sandbox cannot run python3 (exit code {reply.return_code})",
            hint="run 'stockade doctor'; the sandbox needs a Python interpreter",
        )
    return Grade(
        verdict=Verdict.WRONG,
        evidence=plain(f"the tests gave no report: {_end(reply)}"),
        tests_required=required,
        usage=usage,
    )


def _end(reply: ExecReply) -> str:
    return f"{reply.exit}, exit code {reply.return_code}" + (f", {reply.evidence}" if reply.evidence else "")
