"""What a run did, counted from its record in one pass.

Everything here is a count or a row of the record; nothing is judged. Lists that model-written code could make long
(denied hosts, denials) are capped and say what was left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stockade.events import Event, VerifyReport, is_run_sealed, iter_events, verify_run
from stockade.ids import RUN_SCOPE
from stockade.runs._rows import (
    DenialRow,
    ExitRow,
    HostRow,
    IncidentRow,
    RecordState,
    RolloutRow,
    RunSummary,
    StopRow,
)

MAX_DENIALS = 500
MAX_INCIDENTS = 500
MAX_HOSTS = 500
MAX_PROBLEMS = 50
OTHER_HOSTS = "(other hosts)"
UNENDED = "not ended"


def summarise(run_dir: Path) -> RunSummary:
    """Read and verify the record in ``run_dir`` and count what happened; the run may still go on.

    Raises :class:`stockade.errors.RecordError` if there is no record or a line of it is no event at all.
    """
    tally = _Tally()
    for event in iter_events(run_dir):
        tally.take(event)
    record = _record_state(verify_run(run_dir), sealed=is_run_sealed(run_dir))
    return tally.summary(run_dir.resolve().name, record)


def _record_state(report: VerifyReport, *, sealed: bool) -> RecordState:
    return RecordState(
        ok=report.ok,
        sealed=sealed,
        witness=report.witness,
        files=report.files,
        events=report.events,
        problems=tuple(map(str, report.problems[:MAX_PROBLEMS])),
        problem_count=len(report.problems),
    )


@dataclass(slots=True)
class _Rollout:
    start: Event
    started_ns: int
    end: Event = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)


class _Tally:
    def __init__(self) -> None:
        self._rollouts: dict[str, _Rollout] = {}
        self._run: dict[str, Event] = {}
        self._counts: Counter[str] = Counter()
        self._command_exits: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._hosts: dict[tuple[str, int | None], Counter[str]] = {}
        self._asked: dict[str, tuple[str, int | None]] = {}
        self._denials: list[DenialRow] = []
        self._stops: list[StopRow] = []
        self._incidents: list[IncidentRow] = []
        self._unsafe: dict[str, None] = {}
        self._waivers: dict[str, None] = {}
        self._first_ns: int | None = None
        self._last_ns = 0

    def take(self, event: Event) -> None:
        """Count one event."""
        now = int(text(event, "time"))
        self._first_ns = now if self._first_ns is None else self._first_ns
        self._last_ns = max(self._last_ns, now)
        kind = text(event, "kind")
        match kind.partition(".")[0]:
            case "run":
                self._take_run(kind, event)
            case "rollout":
                self._take_rollout(kind, event, now)
            case "process" | "file":
                self._take_work(kind, event, now)
            case "net":
                self._take_net(kind, event, now)
            case _:
                self._take_other(kind, event, now)

    def _take_run(self, kind: str, event: Event) -> None:
        self._run.setdefault(kind, event)
        for line in texts(event, "unsafe"):
            self._unsafe[line] = None

    def _rollout(self, event: Event, now: int) -> _Rollout:
        name = text(event, "rollout_id")
        found = self._rollouts.get(name)
        if found is None:
            found = self._rollouts[name] = _Rollout(event, now)
        return found

    def _take_rollout(self, kind: str, event: Event, now: int) -> None:
        if text(event, "rollout_id") == RUN_SCOPE:
            return
        rollout = self._rollout(event, now)
        if kind == "rollout.start":
            rollout.start, rollout.started_ns = event, now
        elif kind == "rollout.end":
            rollout.end = event

    def _take_work(self, kind: str, event: Event, now: int) -> None:
        if kind == "process.exec":
            self._count(event, now, "commands")
        elif kind == "process.exit":
            self._command_exits[text(event, "exit")] += 1
        elif kind == "file.changed":
            self._count(event, now, "files_changed")

    def _take_net(self, kind: str, event: Event, now: int) -> None:
        if kind == "net.end":
            self._take_net_end(event, now)
            return
        host = (text(event, "server.address"), number(event, "server.port"))
        row = self._host(host)
        if event.get("verdict") == "allowed":
            self._asked[text(event, "id")] = host
            row["allowed"] += 1
            self._count(event, now, "allowed")
            return
        # Whatever is not an explicit permission was not let through.
        times = number(event, "count") or 1
        row["denied"] += times
        self._count(event, now, "denied", times)
        self._reasons[text(event, "reason")] += times
        if len(self._denials) < MAX_DENIALS:
            method = text(event, "http.request.method") or ("CONNECT" if kind == "net.connect" else "")
            path = text(event, "url.path")
            self._denials.append(
                DenialRow(now, text(event, "rollout_id"), method, *host, path, text(event, "reason"), times)
            )

    def _take_net_end(self, event: Event, now: int) -> None:
        asked = self._asked.pop(text(event, "request_id"), None)
        row = self._host(asked or (text(event, "server.address"), number(event, "server.port")))
        for name in ("bytes_out", "bytes_in"):
            size = number(event, name) or 0
            row[name] += size
            self._count(event, now, name, size)
        if event.get("verdict") == "denied":
            self._counts["cut_off"] += 1
            self._reasons[text(event, "reason")] += 1

    def _take_other(self, kind: str, event: Event, now: int) -> None:
        rollout_id = text(event, "rollout_id")
        if kind.startswith("control."):
            self._stops.append(
                StopRow(
                    time_ns=now,
                    rollout_id=rollout_id,
                    kind=kind,
                    reason=text(event, "reason"),
                    person=text(event, "person"),
                    rollouts=number(event, "rollouts"),
                    latency_ns=number(event, "latency_ns"),
                )
            )
        elif kind == "stage.waiver":
            who = f"{text(event, 'person')}, until {text(event, 'expires')}"
            self._waivers[f"{text(event, 'waives')} waived by {who}: {text(event, 'reason')}"] = None
        elif kind == "operator.exemption":
            what = f"{text(event, 'what')} {' '.join(texts(event, 'values'))}".strip()
            self._unsafe[f"{what}: {text(event, 'reason')}" if event.get("reason") else what] = None
        else:
            self._counts["incidents"] += 1
            if len(self._incidents) < MAX_INCIDENTS:
                what = text(event, "what") or text(event, "reason")
                detail = " ".join(filter(None, (text(event, name) for name in ("limit", "evidence", "detail"))))
                self._incidents.append(IncidentRow(now, rollout_id, kind, what, detail))

    def _count(self, event: Event, now: int, name: str, times: int = 1) -> None:
        self._counts[name] += times
        if text(event, "rollout_id") != RUN_SCOPE:
            self._rollout(event, now).counts[name] += times

    def _host(self, host: tuple[str, int | None]) -> Counter[str]:
        if host not in self._hosts and len(self._hosts) >= MAX_HOSTS:
            host = (OTHER_HOSTS, None)
        return self._hosts.setdefault(host, Counter())

    def summary(self, run_id: str, record: RecordState) -> RunSummary:
        """Return what was counted."""
        start, end = self._run.get("run.start", {}), self._run.get("run.end", {})
        rows = tuple(_rollout_row(name, found, self._last_ns) for name, found in self._rollouts.items())
        elapsed_ns = self._last_ns - (self._first_ns or self._last_ns)
        counts = self._counts
        return RunSummary(
            run_id=run_id,
            policy_digest=text(start, "policy_digest"),
            backend=text(start, "backend"),
            version=text(start, "version"),
            started_ns=self._first_ns,
            duration_ns=number(end, "duration_ns") or elapsed_ns,
            outcome=text(end, "outcome") or ("ended" if end else "running" if not record.sealed else ""),
            reason=text(end, "reason"),
            rollouts=rows,
            exits=_exit_rows(rows),
            faults=dict(Counter(row.fault for row in rows if row.fault is not None)),
            commands=counts["commands"],
            command_exits=dict(self._command_exits),
            files_changed=counts["files_changed"],
            allowed=counts["allowed"],
            denied=counts["denied"],
            cut_off=counts["cut_off"],
            denied_by_reason=dict(self._reasons.most_common()),
            hosts=_host_rows(self._hosts),
            denials=tuple(self._denials),
            bytes_out=counts["bytes_out"],
            bytes_in=counts["bytes_in"],
            stops=tuple(self._stops),
            stopped_rollouts=sum(row.fault == "stopped" for row in rows),
            incidents=tuple(self._incidents),
            incident_count=counts["incidents"],
            unsafe=tuple(self._unsafe),
            waivers=tuple(self._waivers),
            record=record,
        )


def _rollout_row(rollout_id: str, found: _Rollout, last_ns: int) -> RolloutRow:
    start, end, counts = found.start, found.end, found.counts
    return RolloutRow(
        rollout_id=rollout_id,
        role=text(start, "role") or "rollout",
        task_id=text(start, "task_id"),
        group_id=text(start, "group_id"),
        train_step=number(start, "train_step"),
        attempt=number(start, "attempt"),
        started_ns=found.started_ns,
        exit=text(end, "exit") or UNENDED,
        fault=text(end, "fault") or None,
        evidence=text(end, "evidence"),
        commands=counts["commands"],
        allowed=counts["allowed"],
        denied=counts["denied"],
        files_changed=counts["files_changed"],
        bytes_out=counts["bytes_out"],
        bytes_in=counts["bytes_in"],
        duration_ns=number(end, "duration_ns") or (0 if end else last_ns - found.started_ns),
    )


def _exit_rows(rows: Iterable[RolloutRow]) -> tuple[ExitRow, ...]:
    counts = Counter((row.role, row.exit, row.fault) for row in rows)
    return tuple(ExitRow(*key, count) for key, count in counts.most_common())


def _host_rows(hosts: Mapping[tuple[str, int | None], Counter[str]]) -> tuple[HostRow, ...]:
    rows = [
        HostRow(host, port, row["allowed"], row["denied"], row["bytes_out"], row["bytes_in"])
        for (host, port), row in hosts.items()
        if row.total()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.allowed - row.denied, row.host, row.port or 0)))


def text(event: Event, name: str) -> str:
    """Return a field that is text, or ``""``: a report must come out whatever a record holds."""
    value = event.get(name)
    return value if isinstance(value, str) else ""


def number(event: Event, name: str) -> int | None:
    """Return a field that is an integer, or ``None``."""
    value = event.get(name)
    return value if type(value) is int else None


def texts(event: Event, name: str) -> list[str]:
    """Return a field that is a list of texts, or an empty list."""
    value = event.get(name)
    return value if isinstance(value, list) else []
