"""From verdicts to rewards: the whole arithmetic, and nothing else.

============================  =========================================================
verdict of a sample           what TRL gets
============================  =========================================================
``ok``                        1.0
``wrong``, ``candidate_fault``  0.0
``infrastructure_fault``      ``None``: the sample is masked, it leaves its group's mean
``stopped``                   ``None`` for **every** sample of its group: it is dropped
============================  =========================================================

An infrastructure fault must not teach: scored as zero it tells the model that a good program was bad, and scored
as zero *only in the baseline* it still lifts its siblings. A stop must not teach either, and a group of which a
person stopped one member is no longer a fair draw, so the group goes as a whole (a stop says something about a
sample, and that something must not reach the advantage of its siblings).

The functions take verdicts and group names. There is no parameter, field or global through which a finding, an
alert or a review could come in; ``tests/training/test_arithmetic.py`` holds that for arbitrary findings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from stockade.rewards import Verdict


@dataclass(frozen=True, slots=True)
class Judged:
    """One sample: the ``group`` (rollouts of one prompt in one step) it belongs to, and its verdict."""

    group: str
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Settled:
    """The rewards of one batch, in the order of its samples, and what has to be counted about it."""

    rewards: tuple[float | None, ...]
    verdicts: tuple[tuple[Verdict, int], ...]
    """How often each verdict occurred, every verdict named, in the order of :class:`Verdict`."""
    groups: int
    dropped_groups: int
    flat_groups: int
    """Groups from which nothing can be learned: fewer than two rewards, or all of them equal."""

    @property
    def samples(self) -> int:
        """Number of samples in the batch."""
        return len(self.rewards)

    @property
    def masked(self) -> int:
        """Samples without a reward, for whatever reason."""
        return sum(reward is None for reward in self.rewards)

    @property
    def passed(self) -> float | None:
        """Share of the samples with a reward whose program was right, or ``None`` if there is none.

        A right program in a dropped group does not count: what a stop left over is not a fair draw.
        """
        scored = [reward for reward in self.rewards if reward is not None]
        return sum(scored) / len(scored) if scored else None

    def count(self, verdict: Verdict) -> int:
        """Return how many samples got ``verdict``."""
        return dict(self.verdicts)[verdict]

    @property
    def dropped_share(self) -> float:
        """Share of the groups that were dropped, 0 to 1."""
        return self.dropped_groups / self.groups if self.groups else 0.0


def settle(samples: Sequence[Judged]) -> Settled:
    """Return the rewards of one batch: a pure function of the verdicts and their groups."""
    stopped = {sample.group for sample in samples if sample.verdict.drops_group}
    rewards = tuple(None if s.group in stopped else s.verdict.reward for s in samples)
    by_group: dict[str, list[float]] = {sample.group: [] for sample in samples}
    for sample, reward in zip(samples, rewards, strict=True):
        if reward is not None:
            by_group[sample.group].append(reward)
    counted = Counter(sample.verdict for sample in samples)
    return Settled(
        rewards=rewards,
        verdicts=tuple((verdict, counted[verdict]) for verdict in Verdict),
        groups=len(by_group),
        dropped_groups=len(stopped),
        flat_groups=sum(len(set(scored)) < 2 for scored in by_group.values()),
    )


def coin_flips(rewards: Sequence[float | None], rng: Random) -> list[float | None]:
    """Replace each reward by a fair coin: the control. Masked samples stay masked.

    One flip per sample, masked or not, so that the control's draws do not depend on what was masked.
    """
    flips = [float(rng.random() < 0.5) for _ in rewards]
    return [None if old is None else flip for old, flip in zip(rewards, flips, strict=True)]


def reason_to_hold(settled: Settled, *, dropped_limit: float) -> str | None:
    """Return why training must not learn from this batch, or ``None`` if it may.

    ``dropped_limit`` is the share of groups (0 to 1) that may be dropped. Too many drops mean that people are
    stopping rollouts; a batch without any reward means that the machinery is broken. Both need a person.
    """
    if settled.dropped_share > dropped_limit:
        return (
            f"{settled.dropped_groups} of {settled.groups} groups were dropped because rollouts in them "
            f"were stopped (limit {dropped_limit:.0%})"
        )
    if settled.masked == settled.samples:
        faults = settled.count(Verdict.INFRASTRUCTURE_FAULT)
        return f"not one of {settled.samples} samples has a reward ({faults} infrastructure faults)"
    return None
