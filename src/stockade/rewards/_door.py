"""What the broker attests: whose fault it was that a rollout or a grading ended early.

The one rule here decides what a trainer learns from, so it reads only what comes from outside the sandbox: the
broker's ``fault``, its exit kind, its error codes. Exit codes, signals, output and files are the candidate's to
choose. If one of them could look like an infrastructure fault, a policy model would learn to have its failures
masked.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING, Final

from stockade.errors import AgentGone, BrokerError, Stopped
from stockade.rewards._verdict import Verdict, plain

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from stockade.client import Episode, ExecReply
    from stockade.errors import StockadeError

LIMITS: Final = frozenset({"timeout", "wall_limit", "cpu_limit", "memory_limit", "pids_limit", "output_limit"})
"""Exit kinds of the broker that are limits of the policy, the only candidate faults."""

# The broker forgets an episode only when somebody closes it. Nobody here uses one that he closed, so one that is
# not found was ended with its run; a sandbox that hit a limit, or whose guest died, is still found.
_STOPPED_CODES: Final = frozenset({"stopped", "shutting_down", "episode_not_found"})
_CLOSED: Final = "closed"
_INFRASTRUCTURE_CODES: Final = frozenset({"backend_error"})
_BUSY: Final = "quota_exceeded"
_BUSY_STATUS: Final = 429
_BUSY_WAITS_S: Final = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 12.8, 12.8)


class Ended(Exception):
    """A rollout or grading that ended without a result, for a reason attested by the broker."""

    def __init__(self, verdict: Verdict, evidence: str) -> None:
        super().__init__(evidence)
        self.verdict = verdict
        self.evidence = evidence


def attested(fault: str | None, exit_kind: str) -> Verdict | None:
    """Translate a reply's ``fault``: ``None`` when the program ended by itself, whatever its exit code.

    A fault this version does not know is held like one of the infrastructure: masked, counted and shown.
    """
    if fault is None:
        return None
    if fault == "stopped":
        return Verdict.STOPPED
    if fault == "candidate":
        return Verdict.CANDIDATE_FAULT if exit_kind in LIMITS else None
    return Verdict.INFRASTRUCTURE_FAULT


def attested_by(reply: ExecReply) -> Verdict | None:
    """:func:`attested` for one command.

    A command that ended because its episode was closed under it was taken away by whoever ended the run. It
    says nothing about the program, though the broker names no fault for it.
    """
    if reply.exit == _CLOSED:
        return Verdict.STOPPED
    return attested(reply.fault, reply.exit)


def ended_by(error: StockadeError) -> Ended | None:
    """Translate an error of the broker's client, or return ``None``: then the request itself was wrong."""
    if isinstance(error, Stopped):
        return Ended(Verdict.STOPPED, plain(f"stopped: {error.message}"))
    if isinstance(error, AgentGone):
        return Ended(Verdict.INFRASTRUCTURE_FAULT, plain(f"the node agent is gone: {error.message}"))
    if isinstance(error, BrokerError):
        if error.code in _STOPPED_CODES:
            return Ended(Verdict.STOPPED, plain(f"{error.code}: {error.message}"))
        if error.code in _INFRASTRUCTURE_CODES:
            return Ended(Verdict.INFRASTRUCTURE_FAULT, plain(f"{error.code}: {error.message}"))
    return None


async def open_episode(make: Callable[[], Awaitable[Episode]]) -> Episode:
    """Create an episode; wait while the broker is full (429), then call that an infrastructure fault."""
    for wait_s in _BUSY_WAITS_S:
        try:
            return await make()
        except BrokerError as error:
            if error.code != _BUSY or error.status != _BUSY_STATUS:
                raise
        # Spread, so that gradings which wait together do not come back together.
        await asyncio.sleep(wait_s * random.uniform(0.5, 1.5))  # noqa: S311 (no secret)
    raise Ended(Verdict.INFRASTRUCTURE_FAULT, "the broker had no free episode for a minute")


async def close_quietly(episode: Episode) -> None:
    """Close an episode of which nothing more is wanted: what is known cannot be changed by a failing close.

    The broker ends an episode that could not be closed by its time to live, and with the connection.
    """
    with contextlib.suppress(BrokerError, Stopped):
        await episode.close()
