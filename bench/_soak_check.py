"""Holding one rollout's record and ledger of the egress soak against what its origins received.

What must hold: each line of the record is in its place. Each byte that an origin received was on record as permitted
before, and is in the ledger. No ledger says more than its cap. Every permission has an end, unless a worker was killed
after it; where each has one the sums are equal, not only bounded.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench._soak_lab import Message, Origins
from stockade.egress._usage import Usage
from stockade.events import ChainName, Producer
from stockade.events._check import ChainCheck
from stockade.ids import RolloutId

_CLEAN = ("completed", "client_closed", "upstream_closed")
_SLACK_NS = 50_000_000
"""A kill is noted just before it happens."""


@dataclass(slots=True)
class Caps:
    """What a rollout may use up: bytes of its own, of the rule for its capped host, and requests a minute."""

    bytes_out: int
    bytes_in: int
    of_rule: int
    requests_per_minute: int


@dataclass(slots=True)
class Finding:
    """What came of one rollout."""

    problems: list[str] = field(default_factory=list)
    events: int = 0
    permitted: int = 0
    denied: int = 0
    unended: int = 0
    exact: int = 0
    bytes_out: int = 0
    bytes_in: int = 0


@dataclass(slots=True)
class Case:
    """One rollout, when it is over."""

    number: int
    rollout_id: str
    run_id: str
    path: Path
    usage: Usage
    caps: Caps
    alive_s: float
    until_ns: int
    done: set[str]
    got: int
    frozen: int | None = None
    """What the origins had received when its revocation was over."""


def check_rollout(case: Case, origins: Origins, kills: Sequence[int]) -> Finding:
    """Return what is wrong with a rollout; ``kills`` are Unix times in ns. The origins must be quiet."""
    kills = [kill for kill in kills if kill < case.until_ns]
    finding = Finding(bytes_out=case.usage.bytes_out, bytes_in=case.usage.bytes_in)
    events = _read(case, finding)
    permissions: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    ends: dict[str, dict[str, Any]] = {}
    allowed = []
    decisions = denials = 0
    for event in events:
        if event["kind"] in ("net.request", "net.connect"):
            count = event.get("count", 1)
            decisions += count
            if event["verdict"] == "allowed":
                allowed.append(event)
                permissions[event["server.address"], event.get("url.path", "")].append(event)
            else:
                denials += count
        elif event["kind"] == "net.end":
            ends[event["request_id"]] = event
            denials += event["verdict"] == "denied"
    finding.permitted, finding.denied = len(allowed), denials
    for event in allowed:
        if event["id"] not in ends:
            finding.unended += 1
            if not any(kill > int(event["time"]) - _SLACK_NS for kill in kills):
                finding.problems.append(f"no end of {event['id']}, and no worker was killed after it")
    _check_messages(case, finding, origins.messages[case.number], permissions, ends)
    _check_sums(case, finding, origins, list(ends.values()))
    whole = finding.unended == 0 and not any(kill > int(events[0]["time"]) - _SLACK_NS for kill in kills)
    counted = (case.usage.requests, case.usage.denied)
    if (counted != (decisions, denials)) if whole else (counted[0] < decisions or counted[1] < denials):
        finding.problems.append(f"the ledger counts {counted}, the record {(decisions, denials)}")
    if len(allowed) > case.caps.requests_per_minute * (1 + case.alive_s / 60) + 1:
        finding.problems.append(f"{len(allowed)} requests in {case.alive_s:.0f} s")
    return finding


def _read(case: Case, finding: Finding) -> list[dict[str, Any]]:
    """Read the chain, and check each line of it."""
    chain = ChainCheck(case.run_id, ChainName(RolloutId(case.rollout_id), Producer.EGRESS))
    events: list[dict[str, Any]] = []
    with case.path.open("rb") as file:
        for number, line in enumerate(file, 1):
            event, problem = chain.feed(line)
            if problem is not None:
                finding.problems.append(f"line {number}: {problem}")
            if event is not None:
                events.append(dict(event))
    problem = chain.end()
    if problem is not None:
        finding.problems.append(problem)
    seal = events[-1] if events else {}
    usage = case.usage
    if (seal.get("bytes_out"), seal.get("bytes_in")) != (usage.bytes_out, usage.bytes_in):
        finding.problems.append("the seal says other sums than the ledger")
    finding.events = len(events)
    return events


def _check_messages(
    case: Case,
    finding: Finding,
    messages: Sequence[Message],
    permissions: dict[tuple[str, str], list[dict[str, Any]]],
    ends: dict[str, dict[str, Any]],
) -> None:
    """What each origin received was permitted by name, and is in the sums of its end."""
    received: Counter[tuple[str, str]] = Counter()
    for message in messages:
        if not message.key:  # cut off before it said what it is: it is in the sums of the rollout
            continue
        exact = message.key.startswith("/")
        host = f"{message.kind}-{case.number}.soak.test" if exact else message.key
        received[host, message.key if exact else ""] += message.bytes_in
    for (host, path), size in received.items():
        found = permissions.get((host, path), [])
        if len(found) != 1:
            finding.problems.append(f"{size} bytes at {host}{path} by {len(found)} permissions")
            continue
        end = ends.get(found[0]["id"])
        if end is None:
            continue
        if size > end["bytes_out"]:
            finding.problems.append(f"{size} bytes at {host}{path}, {end['bytes_out']} on record")
        elif (path or host) in case.done and end["reason"] in _CLEAN:
            finding.exact += 1
            if size != end["bytes_out"]:
                finding.problems.append(f"{size} bytes at {host}{path}, but {end['bytes_out']} on record")


def _check_sums(case: Case, finding: Finding, origins: Origins, ends: Sequence[dict[str, Any]]) -> None:
    usage, caps, number = case.usage, case.caps, case.number
    received, sent = origins.received[number], origins.sent[number]
    of_rule = sum(message.bytes_in for message in origins.messages[number] if message.kind == "capped")
    on_record = sum(end["bytes_out"] for end in ends), sum(end["bytes_in"] for end in ends)
    if finding.unended:
        recorded = on_record[0] <= usage.bytes_out and on_record[1] <= usage.bytes_in
    else:
        recorded = on_record == (usage.bytes_out, usage.bytes_in)
    for holds, what in (
        (received <= usage.bytes_out, f"{received} bytes received, {usage.bytes_out} in the ledger"),
        (case.frozen in (None, received), f"{case.frozen} bytes received at the revocation, {received} at the end"),
        (usage.bytes_out <= caps.bytes_out, f"{usage.bytes_out} bytes out of {caps.bytes_out}"),
        (usage.bytes_in <= caps.bytes_in, f"{usage.bytes_in} bytes in of {caps.bytes_in}"),
        (usage.bytes_in <= sent, f"{usage.bytes_in} bytes in the ledger, {sent} sent by origins"),
        (case.got <= usage.bytes_in, f"{case.got} bytes at the clients, {usage.bytes_in} in the ledger"),
        (of_rule <= caps.of_rule, f"{of_rule} bytes by a rule that allows {caps.of_rule}"),
        (recorded, f"ends sum up to {on_record}, the ledger to {(usage.bytes_out, usage.bytes_in)}"),
    ):
        if not holds:
            finding.problems.append(what)
