"""May this rollout start, and under which effective policy?

One pure function. It answers with an :class:`Admitted` or a :class:`Held`; neither can be mistaken for the
other, and there is no third answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stockade.policy import Policy, effective


@dataclass(frozen=True, slots=True)
class Ask:
    """What a client wants: sizes in bytes may only lower what the policy gives."""

    role: Literal["rollout", "grading"]
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    cpus: float | None = None


@dataclass(frozen=True, slots=True)
class Admitted:
    """Yes, under this policy."""

    policy: Policy
    network: bool


@dataclass(frozen=True, slots=True)
class Held:
    """No; ``reason`` is a fixed word: ``stopped``, ``ending``, ``full``, ``record_broken`` or ``unknown_role``."""

    reason: str


@dataclass(frozen=True, slots=True)
class RunState:
    """What admission must know of the run at this moment.

    ``learn``: what a rollout asks for is to be found out, so it has a network even where nothing is allowed.
    """

    stopped: bool
    ending: bool
    record_broken: bool
    live: int
    max_live: int
    learn: bool = False


def admit(policy: Policy, ask: Ask, state: RunState) -> Admitted | Held:
    """Decide. A grading sandbox gets no network whatever the policy says: what it grades must not phone home."""
    if state.stopped:
        return Held("stopped")
    if state.ending:
        return Held("ending")
    if state.record_broken:
        return Held("record_broken")
    if state.live >= state.max_live:
        return Held("full")
    if ask.role not in ("rollout", "grading"):
        return Held("unknown_role")
    limits = policy.sandbox
    lowered = limits.model_copy(
        update={
            "memory": min(ask.memory_bytes or limits.memory, limits.memory),
            "disk": min(ask.disk_bytes or limits.disk, limits.disk),
            "cpus": min(ask.cpus or limits.cpus, limits.cpus),
        }
    )
    allowed = effective(policy, network=ask.role == "rollout")
    asks = state.learn and ask.role == "rollout"
    network = asks or bool(allowed.egress.allow or allowed.services)
    return Admitted(allowed.model_copy(update={"sandbox": lowered}), network)
