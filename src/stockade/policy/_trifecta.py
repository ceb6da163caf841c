"""The lint that refuses the three together: private data, untrusted content, a way out.

Whoever holds all three can be talked into carrying the first out through the third by the second (Willison, "The
lethal trifecta for AI agents", 2025). Code in a rollout was written by a model, so the second leg is always held; a
policy may hold one of the others.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NoReturn

from stockade.policy._addresses import is_local

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Iterator

    from stockade.policy._models import Policy, Waiver
    from stockade.policy._rules import HostRule

MAX_WAIVER_DAYS = 90


class Leg(StrEnum):
    """One of the three."""

    PRIVATE = "private data"
    UNTRUSTED = "untrusted content"
    EXTERNAL = "external communication"


@dataclass(frozen=True, slots=True)
class Held:
    """Why a leg is held; ``line`` is that of the policy file, None where no line is to blame.

    ``source`` is the preset that holds it, if it is one that does: its lines are not those of the policy.
    """

    leg: Leg
    line: int | None
    why: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class Trifecta:
    """The finding: which legs are held by which lines, and whether the policy is refused.

    ``waiver`` is the waiver in force where all three are held; ``problems`` says of each other waiver why it is not.
    """

    private: tuple[Held, ...]
    untrusted: tuple[Held, ...]
    external: tuple[Held, ...]
    waiver: Waiver | None
    refused: bool
    problems: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether all three legs are held."""
        return bool(self.private and self.untrusted and self.external)

    @property
    def message(self) -> str:
        """One line for people: what is held, and what to do where the policy is refused."""
        if not self.complete:
            missing = [leg.value for leg, held in self._legs() if not held]
            return "allowed: no " + " and no ".join(missing)
        if self.waiver is not None:
            return f"allowed by a waiver of {self.waiver.person} until {self.waiver.expires}: {self.waiver.reason}"
        parts = "; ".join(f"{leg.value}: {_lines(held)}" for leg, held in self._legs())
        text = f"refused: private data, untrusted content and external communication together ({parts})"
        return text + "".join(f"; {problem}" for problem in self.problems)

    def _legs(self) -> tuple[tuple[Leg, tuple[Held, ...]], ...]:
        return (Leg.PRIVATE, self.private), (Leg.UNTRUSTED, self.untrusted), (Leg.EXTERNAL, self.external)

    def __bool__(self) -> NoReturn:
        raise TypeError("a Trifecta is not a truth value; read .refused")


def trifecta(policy: Policy, *, today: dt.date) -> Trifecta:
    """Tell which legs the policy holds, and refuse all three unless a waiver is in force on the day ``today``."""
    private, untrusted, external = tuple(_private(policy)), tuple(_untrusted(policy)), tuple(_external(policy))
    if not (private and external):
        return Trifecta(private, untrusted, external, waiver=None, refused=False)
    problems: list[str] = []
    for waiver in policy.waivers:
        problem = _waiver_problem(waiver, today)
        if problem is None:
            return Trifecta(private, untrusted, external, waiver=waiver, refused=False)
        problems.append(problem)
    return Trifecta(private, untrusted, external, waiver=None, refused=True, problems=tuple(problems))


def _private(policy: Policy) -> Iterator[Held]:
    if policy.data.private:
        yield Held(Leg.PRIVATE, _line(policy.data.source_line), "data.private is true")
    for mount in policy.mounts:
        yield Held(Leg.PRIVATE, _line(mount.source_line), f"{mount.source} of the host is mounted")


def _untrusted(policy: Policy) -> Iterator[Held]:
    yield Held(Leg.UNTRUSTED, None, "the policy model writes the code that runs")
    for rule in policy.egress.allow:
        yield _held(Leg.UNTRUSTED, rule, f"answers come from {rule.host}")


def _external(policy: Policy) -> Iterator[Held]:
    for rule in policy.egress.allow:
        # GET counts too: path, query, headers and timing carry data out (egress.md case 99).
        yield _held(Leg.EXTERNAL, rule, f"requests go to {rule.host}")
    for service in policy.services:
        if not is_local(ipaddress.ip_address(service.address)):
            why = f"the service {service.name} is at {service.address}, outside private ranges"
            yield Held(Leg.EXTERNAL, _line(service.source_line), why)


def _held(leg: Leg, rule: HostRule, why: str) -> Held:
    if rule.source_name:
        return Held(leg, None, f"{rule.source_name}: {why}", rule.source_name)
    return Held(leg, _line(rule.source_line), why)


def _waiver_problem(waiver: Waiver, today: dt.date) -> str | None:
    at = f" on line {waiver.source_line}" if waiver.source_line else ""
    left = (waiver.expires - today).days
    if left < 0:
        return f"the waiver of {waiver.person}{at} expired on {waiver.expires}"
    if left > MAX_WAIVER_DAYS:
        return f"the waiver of {waiver.person}{at} runs until {waiver.expires}, more than {MAX_WAIVER_DAYS} days"
    return None


def _line(source_line: int) -> int | None:
    return source_line or None


def _lines(held: tuple[Held, ...]) -> str:
    lines = [str(one.line) for one in held if one.line is not None]
    named = list(dict.fromkeys(one.source for one in held if one.source))
    said = [("line " if len(lines) == 1 else "lines ") + ", ".join(lines)] if lines else []
    return ", ".join([*said, *named]) or "always"
