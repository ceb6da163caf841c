"""What grading says about one rollout: closed types, so that nothing else can travel with a reward.

There is no free-form field, and unknown fields are refused on reading: a finding, an alert or a review has no
place to ride in (design, invariant 7).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NoReturn

import msgspec

MAX_EVIDENCE: Final = 500


class Verdict(StrEnum):
    """How a rollout ended.

    ``ok``: every required test ran and held. ``wrong``: anything else that the program itself did, a crash, an
    exit and silence included. ``candidate_fault``: its side hit a limit of the policy. ``infrastructure_fault``:
    the broker attests that the machinery failed. ``stopped``: a person stopped the run.
    """

    OK = "ok"
    WRONG = "wrong"
    CANDIDATE_FAULT = "candidate_fault"
    INFRASTRUCTURE_FAULT = "infrastructure_fault"
    STOPPED = "stopped"

    def __bool__(self) -> NoReturn:
        raise TypeError("a verdict is not true or false; compare it with a member of Verdict")

    @property
    def reward(self) -> float | None:
        """1.0 for ``ok``, 0.0 for what the candidate answers for, ``None`` where there is no sample."""
        return _REWARD[self]

    @property
    def masked(self) -> bool:
        """The sample leaves its group's mean and spread: it says nothing about the candidate."""
        return self is Verdict.INFRASTRUCTURE_FAULT

    @property
    def drops_group(self) -> bool:
        """The whole group goes: a person's stop must not choose which samples are learned from."""
        return self is Verdict.STOPPED

    @property
    def final(self) -> bool:
        """The verdict is about the candidate; doing the rollout again would not be a second chance for us."""
        return self.reward is not None


_REWARD: Final[dict[Verdict, float | None]] = {
    Verdict.OK: 1.0,
    Verdict.WRONG: 0.0,
    Verdict.CANDIDATE_FAULT: 0.0,
    Verdict.INFRASTRUCTURE_FAULT: None,
    Verdict.STOPPED: None,
}


class Usage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the candidate's side of the grading used."""

    wall_ns: int = 0
    cpu_ns: int = 0
    max_rss_bytes: int = 0


class Grade(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The verdict on one artifact; ``evidence`` is one ASCII line for people, never for the policy model.

    ``tests_passed`` of ``tests_required`` asserts ran and held; there is no partial reward.
    """

    verdict: Verdict
    evidence: str
    tests_passed: int = 0
    tests_required: int = 0
    usage: Usage = Usage()

    @property
    def mask(self) -> bool:
        """See :attr:`Verdict.masked`."""
        return self.verdict.masked

    @property
    def reward(self) -> float | None:
        """See :attr:`Verdict.reward`."""
        return self.verdict.reward


class Sample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rollout and its verdict: a row of a batch's results (JSONL), and what a trainer learns from.

    ``task_digest`` names task and program, ``wall_ns`` is the time from the rollout's start to its verdict, both
    sandboxes of the grading included.
    """

    task_id: str
    task_digest: str
    rollout_id: str
    verdict: Verdict
    evidence: str
    tests_passed: int
    tests_required: int
    wall_ns: int

    @property
    def reward(self) -> float | None:
        """See :attr:`Verdict.reward`."""
        return self.verdict.reward


def plain(text: str) -> str:
    """One printable ASCII line of at most ``MAX_EVIDENCE`` characters: text from inside is only ever text."""
    shown = "".join(
        character if " " <= character <= "~" else f"\\x{{{ord(character):x}}}" for character in text[:MAX_EVIDENCE]
    )
    return shown if len(shown) <= MAX_EVIDENCE else shown[: MAX_EVIDENCE - 3] + "..."
