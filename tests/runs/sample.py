"""A run in which much happened, written through the room's own doors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from stockade.events import ChainHead, ChainWriter, Context, EventVerdict, Producer, Value
from stockade.ids import RUN_SCOPE, RolloutId, RunId
from stockade.runs import RunDirectory

RUN = RunId("run-20260101-000000-abcdef")
DIGEST = "sha256:9f3c" + "0" * 60
START_NS = 1_767_225_600_000_000_000
HOSTILE = "</td><script>alert(1)</script>\u202e\"'&\x1b[2J{{ 7*7 }}"

_ENDS: dict[int, tuple[str, str | None, str]] = {
    5: ("memory_limit", "candidate", "2.1 GiB of 2 GiB"),
    12: ("node_fault", "infrastructure", "the guest was lost"),
}
_Heads = dict[Producer, ChainHead]


class Sample:
    """Writes one run, event by event, on a clock of its own."""

    def __init__(self, root: Path) -> None:
        self.run = RunDirectory.create(root, RUN, {"policy_digest": DIGEST, "backend": "bubblewrap"}, node="node-1")
        self.clock = count(START_NS, 40_000_000)
        self._rollouts = 0

    @contextmanager
    def chain(self, rollout: RolloutId, producer: Producer, **context: object) -> Iterator[ChainWriter]:
        fd = self.run.open_record(rollout, producer)
        try:
            known = Context(RUN, rollout, DIGEST, **context)  # type: ignore[arg-type]
            yield ChainWriter(fd, known, producer, clock_ns=lambda: next(self.clock))
        finally:
            os.close(fd)

    @contextmanager
    def running(self, *, seal: bool = True) -> Iterator[ChainWriter]:
        """The run chain, from run.start to its seal."""
        with self.chain(RUN_SCOPE, Producer.CONTROL) as control:
            control.append(
                "run.start",
                manifest_digest=self.run.manifest_digest,
                backend="bubblewrap",
                version="0.1.0",
                node="node-1",
            )
            yield control
            if seal:
                control.append("run.end", reason="closed", outcome="ended", duration_ns=95_000_000_000)
                control.seal()

    def rollout(
        self,
        control: ChainWriter,
        *,
        role: str = "rollout",
        exit_: str = "exited",
        fault: str | None = None,
        evidence: str = "",
        commands: int = 1,
        changed: int = 0,
        requests: list[tuple[str, str]] | None = None,
        **context: object,
    ) -> RolloutId:
        """Write one rollout; ``requests`` are (host, reason), where only ``allowed`` lets through."""
        self._rollouts += 1
        rollout = RolloutId(f"ep_{self._rollouts:022d}")
        with (
            self.chain(rollout, Producer.SANDBOX, **context) as sandbox,
            self.chain(rollout, Producer.EGRESS) as egress,
        ):
            sandbox.append("rollout.start", backend="bubblewrap", role=role)
            for number in range(commands):
                sandbox.append("process.exec", {"process.command_args": ["python3", "solution.py"]}, exec_id=number)
                sandbox.append("process.exit", {"process.exit.code": 0}, exit="exited", exec_id=number)
            for host, reason in requests or []:
                self._request(egress, host, reason)
            for number in range(changed):
                sandbox.append("file.changed", {"file.path": f"f{number}"}, change="added", size_bytes=3)
            sandbox.append(
                "rollout.end", exit=exit_, fault=fault, evidence=evidence, duration_ns=self._rollouts * 70_000_000
            )
            heads: _Heads = {Producer.SANDBOX: sandbox.seal(), Producer.EGRESS: egress.seal()}
        control.append_sealed_rollout(rollout, heads)
        return rollout

    def _request(self, egress: ChainWriter, host: str, reason: str) -> None:
        allowed = reason == "allowed"
        fields: Mapping[str, Value] = {
            "http.request.method": "GET",
            "server.address": host,
            "server.port": 443,
            "url.path": "/simple/" if allowed else "/latest/meta-data/",
        }
        verdict = EventVerdict.ALLOWED if allowed else EventVerdict.DENIED
        event = egress.append("net.request", fields, reason=reason, verdict=verdict)
        if allowed:
            egress.append("net.end", reason="completed", request_id=str(event["id"]), bytes_out=300, bytes_in=20_000)


def busy_run(root: Path, *, rollouts: int = 40) -> RunDirectory:
    """A run with every kind of row that a report has."""
    sample = Sample(root)
    with sample.running() as control:
        control.append(
            "operator.exemption",
            what="unsafe_allow_cidrs",
            values=["10.20.0.0/24"],
            reason="package mirror of the site",
        )
        control.append("stage.waiver", waives="trifecta", person="ada", reason="read the record", expires="2026-02-01")
        for number in range(rollouts):
            exit_, fault, evidence = _ENDS.get(number % 20, ("exited", None, ""))
            requests = [("abc.test", "allowed"), ("files.files.hosts.test", "allowed")]
            if number % 9 == 0:
                requests += [("169.254.169.254", "metadata_address"), ("evil.example", "host_not_allowed")]
            sample.rollout(
                control,
                role="rollout" if number % 3 == 0 else "grading",
                exit_=exit_,
                fault=fault,
                evidence=evidence,
                commands=1 + number % 4,
                changed=number % 3,
                requests=requests if number % 3 == 0 else [],
                task_id=f"HumanEval/{number}",
                group_id=f"g{number // 4}",
                train_step=number // 4,
                attempt=number % 4,
            )
        sample.rollout(
            control,
            exit_="stopped",
            fault="stopped",
            task_id=HOSTILE,
            evidence=HOSTILE,
            requests=[(HOSTILE, "malformed_host")],
        )
        control.append("sandbox.crash", what="isolator died", evidence="signal 31 (SIGSYS)")
        control.append("control.stop", reason="asked for a drill", person="ada")
        control.append("control.kill", reason="asked for a drill", person="ada", rollouts=1, latency_ns=412_000_000)
    return sample.run
