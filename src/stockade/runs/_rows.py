"""What a summary of a run consists of. Times are ns since 1970, durations ns, sizes bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RecordState:
    """Whether the record can be believed; ``witness`` is ``witnessed`` or ``unwitnessed``."""

    ok: bool
    sealed: bool
    witness: str
    files: int
    events: int
    problems: tuple[str, ...]
    problem_count: int


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One rollout. ``exit`` is how it ended, ``fault`` whose fault that was (``None``: nobody's)."""

    rollout_id: str
    role: str
    task_id: str
    group_id: str
    train_step: int | None
    attempt: int | None
    started_ns: int
    exit: str
    fault: str | None
    evidence: str
    commands: int
    allowed: int
    denied: int
    files_changed: int
    bytes_out: int
    bytes_in: int
    duration_ns: int


@dataclass(frozen=True, slots=True)
class ExitRow:
    """How many rollouts of one role ended in one way."""

    role: str
    exit: str
    fault: str | None
    count: int


@dataclass(frozen=True, slots=True)
class HostRow:
    """Traffic with one host and port, in requests and bytes."""

    host: str
    port: int | None
    allowed: int
    denied: int
    bytes_out: int
    bytes_in: int


@dataclass(frozen=True, slots=True)
class DenialRow:
    """One refused request, or ``count`` equal ones that the worker folded into one event."""

    time_ns: int
    rollout_id: str
    method: str
    host: str
    port: int | None
    path: str
    reason: str
    count: int


@dataclass(frozen=True, slots=True)
class StopRow:
    """One act of control: ``kind`` is ``control.stop``, ``control.freeze`` or ``control.kill``."""

    time_ns: int
    rollout_id: str
    kind: str
    reason: str
    person: str
    rollouts: int | None
    latency_ns: int | None


@dataclass(frozen=True, slots=True)
class IncidentRow:
    """A violation, a crash or a gap in the record."""

    time_ns: int
    rollout_id: str
    kind: str
    what: str
    detail: str


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run in numbers. Times are ns since 1970, durations ns."""

    run_id: str
    policy_digest: str
    backend: str
    version: str
    started_ns: int | None
    duration_ns: int
    outcome: str
    reason: str
    rollouts: tuple[RolloutRow, ...]
    exits: tuple[ExitRow, ...]
    faults: Mapping[str, int]
    commands: int
    command_exits: Mapping[str, int]
    files_changed: int
    allowed: int
    denied: int
    cut_off: int
    denied_by_reason: Mapping[str, int]
    hosts: tuple[HostRow, ...]
    denials: tuple[DenialRow, ...]
    bytes_out: int
    bytes_in: int
    stops: tuple[StopRow, ...]
    stopped_rollouts: int
    incidents: tuple[IncidentRow, ...]
    incident_count: int
    unsafe: tuple[str, ...]
    waivers: tuple[str, ...]
    record: RecordState
