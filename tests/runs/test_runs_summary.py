from __future__ import annotations

from pathlib import Path

import pytest

from stockade.errors import RecordError
from stockade.events import EventVerdict, Producer, Value
from stockade.ids import RolloutId
from stockade.runs import ExitRow, HostRow, RunSummary, summarise
from stockade.runs._summary import MAX_DENIALS, MAX_HOSTS, OTHER_HOSTS, UNENDED
from tests.runs.sample import DIGEST, RUN, START_NS, Sample, busy_run

LONELY = RolloutId("ep_" + "z" * 22)  # a rollout of which only one chain tells


@pytest.fixture
def sample(tmp_path: Path) -> Sample:
    return Sample(tmp_path)


def summary_of(sample: Sample) -> RunSummary:
    return summarise(sample.run.path)


def test_a_quiet_run(sample: Sample) -> None:
    with sample.running():
        pass
    summary = summary_of(sample)
    assert (summary.run_id, summary.policy_digest, summary.backend, summary.version) == (
        RUN,
        DIGEST,
        "bubblewrap",
        "0.1.0",
    )
    assert (summary.started_ns, summary.duration_ns, summary.outcome, summary.reason) == (
        START_NS,
        95_000_000_000,
        "ended",
        "closed",
    )
    assert not (summary.rollouts)
    assert not (summary.hosts)
    assert not (summary.stops)
    assert not (summary.incidents)
    assert (summary.record.ok, summary.record.sealed, summary.record.witness) == (True, True, "unwitnessed")


def test_rollouts_are_counted_by_how_they_ended(sample: Sample) -> None:
    with sample.running() as control:
        for _ in range(3):
            sample.rollout(control)
        sample.rollout(control, role="grading", exit_="node_fault", fault="infrastructure")
        sample.rollout(control, exit_="stopped", fault="stopped")
    summary = summary_of(sample)
    assert summary.exits == (
        ExitRow("rollout", "exited", None, 3),
        ExitRow("grading", "node_fault", "infrastructure", 1),
        ExitRow("rollout", "stopped", "stopped", 1),
    )
    assert summary.faults == {"infrastructure": 1, "stopped": 1}
    assert summary.stopped_rollouts == 1


def test_a_row_says_what_a_rollout_did(sample: Sample) -> None:
    with sample.running() as control:
        sample.rollout(
            control,
            evidence="why",
            commands=3,
            changed=2,
            requests=[("a.example", "allowed"), ("b.example", "host_not_allowed")],
            task_id="t",
            group_id="g",
            train_step=4,
            attempt=1,
        )
    summary = summary_of(sample)
    row = summary.rollouts[0]
    assert (row.task_id, row.group_id, row.train_step, row.attempt, row.evidence) == ("t", "g", 4, 1, "why")
    assert (row.commands, row.files_changed, row.allowed, row.denied) == (3, 2, 1, 1)
    assert (row.bytes_out, row.bytes_in, row.duration_ns) == (300, 20_000, 70_000_000)
    assert (summary.commands, summary.files_changed, summary.command_exits) == (3, 2, {"exited": 3})


def test_requests_are_counted_by_host_and_reason(sample: Sample) -> None:
    with sample.running() as control:
        asked = [
            ("a.example", "allowed"),
            ("a.example", "allowed"),
            ("a.example", "path_not_allowed"),
            ("b.example", "own_address"),
        ]
        for _ in range(2):
            sample.rollout(control, requests=asked)
    summary = summary_of(sample)
    assert (summary.allowed, summary.denied, summary.bytes_in) == (4, 4, 80_000)
    assert summary.denied_by_reason == {"path_not_allowed": 2, "own_address": 2}
    assert summary.hosts == (
        HostRow("a.example", 443, 4, 2, 1200, 80_000),
        HostRow("b.example", 443, 0, 2, 0, 0),
    )
    assert [(row.host, row.port, row.reason, row.path, row.method) for row in summary.denials[:1]] == [
        ("a.example", 443, "path_not_allowed", "/latest/meta-data/", "GET")
    ]


def test_folded_denials_and_what_was_cut_off(sample: Sample) -> None:
    with sample.running(), sample.chain(LONELY, Producer.EGRESS) as egress:
        fields: dict[str, Value] = {"server.address": "x.example", "server.port": 443}
        egress.append("net.connect", fields, reason="host_not_allowed", verdict=EventVerdict.DENIED, count=250)
        event = egress.append("net.connect", fields, reason="allowed", verdict=EventVerdict.ALLOWED)
        egress.append(
            "net.end",
            reason="bytes_out_exceeded",
            request_id=str(event["id"]),
            bytes_out=7,
            verdict=EventVerdict.DENIED,
        )
        egress.append("net.connect", fields, reason="odd")  # neither allowed nor denied: not let through
    summary = summary_of(sample)
    assert (summary.allowed, summary.denied, summary.cut_off, summary.bytes_out) == (1, 251, 1, 7)
    assert summary.denied_by_reason == {"host_not_allowed": 250, "bytes_out_exceeded": 1, "odd": 1}
    assert summary.hosts == (HostRow("x.example", 443, 1, 251, 7, 0),)
    assert [row.method for row in summary.denials] == ["CONNECT", "CONNECT"]


def test_a_flood_of_hosts_and_denials_is_capped_but_counted(sample: Sample) -> None:
    with sample.running() as control:
        sample.rollout(control, requests=[(f"h{number}.example", "host_not_allowed") for number in range(700)])
    summary = summary_of(sample)
    assert summary.denied == sum(row.denied for row in summary.hosts) == 700
    assert len(summary.hosts) == MAX_HOSTS + 1
    assert next(row for row in summary.hosts if row.host == OTHER_HOSTS).denied == 200
    assert len(summary.denials) == MAX_DENIALS


def test_stops_incidents_exemptions_and_waivers_are_shown(tmp_path: Path) -> None:
    summary = summarise(busy_run(tmp_path).path)
    assert [(row.kind, row.person, row.latency_ns) for row in summary.stops] == [
        ("control.stop", "ada", None),
        ("control.kill", "ada", 412_000_000),
    ]
    assert [(row.kind, row.what, row.detail) for row in summary.incidents] == [
        ("sandbox.crash", "isolator died", "signal 31 (SIGSYS)")
    ]
    assert summary.unsafe == ("unsafe_allow_cidrs 10.20.0.0/24: package mirror of the site",)
    assert summary.waivers == ("trifecta waived by ada, until 2026-02-01: read the record",)
    assert summary.record.ok


def test_a_run_that_goes_on_can_be_looked_at(sample: Sample) -> None:
    with sample.running(seal=False) as control:
        sample.rollout(control)
        with sample.chain(LONELY, Producer.SANDBOX) as sandbox:
            sandbox.append("rollout.start", backend="bubblewrap", role="rollout")
            summary = summary_of(sample)
    assert summary.outcome == "running"
    assert [row.exit for row in summary.rollouts] == ["exited", UNENDED]
    assert (summary.record.ok, summary.record.sealed) == (False, False)
    assert summary.record.problem_count == len(summary.record.problems) > 0


def test_an_edited_record_is_summed_up_but_not_believed(tmp_path: Path) -> None:
    run = busy_run(tmp_path, rollouts=3)
    path = next((run.path / "events/node-1").glob("*.egress.jsonl"))
    path.write_bytes(path.read_bytes().replace(b"abc.test", b"pypj.org", 1))
    summary = summarise(run.path)
    assert not summary.record.ok
    assert summary.record.sealed
    assert summary.record.problems[0].startswith(f"events/node-1/{path.name}:1: was edited")


def test_no_record_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecordError):
        summarise(tmp_path / "missing")
