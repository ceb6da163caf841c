"""Whose fault it was: only what the broker attests can mask a sample or drop a group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest

from stockade.errors import AgentGone, BrokerError, NodeError, Stopped, TaskError
from stockade.gym import SOLUTION, make_task, plan_tests
from stockade.rewards import Grade, Grader, Sample, Verdict, attempt
from stockade.rewards import _door as door
from stockade.rewards._report import missing_evidence, read_report
from stockade.rewards._verdict import MAX_EVIDENCE, plain
from tests.rewards.hacks import RIGHT, TESTS
from tests.rewards.local_client import LocalClosed, LocalReply

pytestmark = pytest.mark.anyio

TASK = make_task({"task_id": "t", "entry_point": "f", "solution": RIGHT, "tests": TESTS})
ARTIFACT = {SOLUTION: RIGHT.encode()}
NONCE = "0" * 32
SILENT = LocalReply(b"", b"", 0, "exited")


@dataclass
class FakeEpisode:
    """Answers what it was told to; ``asked`` is what it was asked."""

    client: FakeClient
    role: str
    id: str = "ep_" + "0" * 22

    async def exec(self, argv: Any, **rest: Any) -> LocalReply:
        self.client.asked.append(tuple(argv))
        if self.role == "rollout":
            return _give(self.client.rollout)
        return _give(self.client.grading)

    async def read_file(self, path: str) -> bytes:
        return _give(self.client.artifact)

    async def close(self) -> LocalClosed:
        self.client.closed += 1
        return _give(self.client.close)


class FakeClient:
    def __init__(self, **answers: Any) -> None:
        self.rollout: Any = SILENT
        self.grading: Any = replace(SILENT, peer=SILENT)
        self.artifact: Any = RIGHT.encode()
        self.close: Any = LocalClosed()
        self.creates: list[Any] = []
        self.asked: list[tuple[str, ...]] = []
        self.made = self.closed = 0
        for name, answer in answers.items():
            setattr(self, name, answer)

    async def create(self, *, role: str, **rest: Any) -> FakeEpisode:
        if self.creates:
            _give(self.creates.pop(0))
        self.made += 1
        return FakeEpisode(self, role)


def _give(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer


async def _grade(**answers: Any) -> Grade:
    client: Any = FakeClient(**answers)
    grade = await Grader(client).grade(TASK, ARTIFACT)
    assert client.closed == client.made
    return grade


def _both(tests: LocalReply, candidate: LocalReply) -> LocalReply:
    return replace(tests, peer=candidate)


INFRA = replace(SILENT, exit="node_fault", fault="infrastructure", evidence="agent lost")
STOP = replace(SILENT, exit="stopped", fault="stopped", evidence="stopped by a person")
LIMIT = replace(SILENT, exit="memory_limit", fault="candidate", evidence="2 GiB")


@pytest.mark.promise("S7.6")
@pytest.mark.parametrize(
    ("tests", "candidate", "verdict"),
    [
        (INFRA, SILENT, Verdict.INFRASTRUCTURE_FAULT),
        (SILENT, INFRA, Verdict.INFRASTRUCTURE_FAULT),
        (SILENT, STOP, Verdict.STOPPED),
        (STOP, INFRA, Verdict.STOPPED),
        (INFRA, LIMIT, Verdict.INFRASTRUCTURE_FAULT),
        (SILENT, LIMIT, Verdict.CANDIDATE_FAULT),
        (LIMIT, LIMIT, Verdict.CANDIDATE_FAULT),
        # The tests' own side at a limit proves nothing about the candidate's.
        (LIMIT, SILENT, Verdict.WRONG),
        # A fault of a kind that this version does not know is held.
        (SILENT, replace(SILENT, fault="novel"), Verdict.INFRASTRUCTURE_FAULT),
        # The candidate killed the agent in its sandbox: no limit of the policy, so just no answer.
        (SILENT, replace(SILENT, exit="guest_lost", fault="candidate"), Verdict.WRONG),
        # Answers that are large once the tests have worked on them could do that to the tests' side as well.
        (replace(SILENT, exit="guest_lost", fault="candidate"), SILENT, Verdict.WRONG),
        (SILENT, replace(SILENT, exit="pids_limit", fault="candidate"), Verdict.CANDIDATE_FAULT),
        # The run ended under them.
        (replace(SILENT, exit="closed"), replace(SILENT, exit="closed"), Verdict.STOPPED),
        (SILENT, replace(SILENT, exit="owner_gone", fault="stopped"), Verdict.STOPPED),
        (replace(SILENT, exit="not_started", return_code=126), SILENT, Verdict.INFRASTRUCTURE_FAULT),
        (SILENT, replace(SILENT, exit="not_started", return_code=126), Verdict.WRONG),
    ],
)
async def test_verdict_by_attestation(tests, candidate, verdict):
    assert (await _grade(grading=_both(tests, candidate))).verdict is verdict


@pytest.mark.parametrize("code", [0, 1, 2, 126, 127, 134, 137, 139, 255, -9, -11])
async def test_no_exit_code_of_the_candidate_is_infrastructure(code):
    kind = "signaled" if code < 0 else "exited"
    candidate = replace(SILENT, return_code=code, exit=kind, stdout=b"infrastructure fault", stderr=b"Bus error")
    assert (await _grade(grading=_both(SILENT, candidate))).verdict is Verdict.WRONG


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (AgentGone("no agent"), Verdict.INFRASTRUCTURE_FAULT),
        (BrokerError("backend_error", 502, "the backend failed"), Verdict.INFRASTRUCTURE_FAULT),
        (BrokerError("stopped", 409, "the run was stopped"), Verdict.STOPPED),
        (BrokerError("shutting_down", 503, "shutting down"), Verdict.STOPPED),
        (Stopped("stopped"), Verdict.STOPPED),
    ],
)
async def test_verdict_by_error_of_the_broker(error, verdict):
    assert (await _grade(grading=error)).verdict is verdict
    assert (await _grade(creates=[error])).verdict is verdict


async def test_a_refused_request_is_ours_to_mend():
    with pytest.raises(BrokerError, match="not yours"):
        await _grade(grading=BrokerError("unauthorized", 401, "not yours"))


async def test_a_full_broker_is_waited_for(monkeypatch):
    busy = BrokerError("quota_exceeded", 429, "32 episodes are open")
    monkeypatch.setattr(door, "_BUSY_WAITS_S", (0.001, 0.001, 0.001))
    assert (await _grade(creates=[busy, busy])).verdict is Verdict.WRONG
    client: Any = FakeClient(creates=[busy] * 6)
    assert (await Grader(client).grade(TASK, ARTIFACT)).verdict is Verdict.INFRASTRUCTURE_FAULT
    with pytest.raises(BrokerError):
        await _grade(creates=[BrokerError("quota_exceeded", 400, "2 GPUs are not given")])


async def test_a_failing_close_does_not_change_a_verdict():
    assert (await _grade(close=AgentGone("gone"))).verdict is Verdict.WRONG


async def test_no_interpreter_stops_instead_of_teaching():
    with pytest.raises(NodeError, match="cannot run python3"):
        await _grade(grading=_both(replace(SILENT, return_code=127), SILENT))


@pytest.mark.parametrize("code", ["invalid_request", "payload_too_large", "unsupported_operation", "file_not_found"])
async def test_an_artifact_that_cannot_be_had_is_wrong(code):
    client: Any = FakeClient(artifact=BrokerError(code, 400, "no regular file"))
    sample = await attempt(client, Grader(client), TASK)
    assert sample.verdict is Verdict.WRONG
    assert sample.evidence == "the rollout left no solution.py"


@pytest.mark.parametrize(
    ("answers", "verdict"),
    [
        ({"rollout": LIMIT}, Verdict.CANDIDATE_FAULT),
        ({"rollout": STOP}, Verdict.STOPPED),
        ({"rollout": INFRA}, Verdict.INFRASTRUCTURE_FAULT),
        ({"rollout": replace(SILENT, return_code=1)}, Verdict.WRONG),
        ({"rollout": replace(SILENT, exit="closed")}, Verdict.STOPPED),
        ({"artifact": BrokerError("episode_not_found", 404, "no episode")}, Verdict.STOPPED),
        ({"close": BrokerError("episode_not_found", 404, "no episode")}, Verdict.STOPPED),
        # The broker was surprised by the tree that the program left: the program's doing …
        ({"artifact": BrokerError("backend_error", 502, "surprised")}, Verdict.WRONG),
        # … unless the end of the sandbox says that it was not.
        (
            {
                "artifact": BrokerError("backend_error", 502, "lost"),
                "close": LocalClosed("node_fault", "infrastructure"),
            },
            Verdict.INFRASTRUCTURE_FAULT,
        ),
        ({"artifact": AgentGone("gone")}, Verdict.INFRASTRUCTURE_FAULT),
        ({"close": LocalClosed("stopped", "stopped")}, Verdict.STOPPED),
        ({"close": LocalClosed("memory_limit", "candidate")}, Verdict.CANDIDATE_FAULT),
        ({"close": BrokerError("backend_error", 502, "lost")}, Verdict.INFRASTRUCTURE_FAULT),
        ({"creates": [BrokerError("backend_error", 502, "lost")]}, Verdict.INFRASTRUCTURE_FAULT),
    ],
)
async def test_verdict_of_a_rollout(answers, verdict):
    client: Any = FakeClient(**answers)
    sample = await attempt(client, Grader(client), TASK)
    assert sample.verdict is verdict
    assert client.closed == client.made


async def test_no_agent_to_begin_with_is_an_error():
    client: Any = FakeClient(creates=[AgentGone("nobody answers")])
    with pytest.raises(AgentGone):
        await attempt(client, Grader(client), TASK)


@pytest.mark.promise("S7.1")
async def test_p2_nothing_of_the_tests_goes_to_the_candidate(local_client):
    """Everything that the candidate's episode is given: the runner and the declared artifact."""
    given: list[dict[str, bytes]] = []
    create = local_client.create

    async def spy(*, files: dict[str, bytes], **rest: Any) -> Any:
        given.append(files)
        return await create(files=files, **rest)

    local_client.create = spy
    artifact = {**ARTIFACT, "conftest.py": b"hook", "reward.txt": b"1.0"}
    grade = await Grader(local_client).grade(TASK, artifact)
    assert grade.verdict is Verdict.OK
    tests, candidate = given
    assert list(tests) == ["/workspace/.stockade-tests.py"]
    assert set(candidate) == {"/workspace/.stockade-candidate.py", "/workspace/solution.py"}
    assert not any(b"canary" in data or b"13" in data for data in candidate.values())


def _report(**changes: Any) -> bytes:
    fields = {"nonce": NONCE, "outcome": "completed", "calls": 3, "held": [0, 1, 2], "line": 0, "detail": ""}
    return msgspec.json.encode({**fields, **changes}) + b"\n"


@pytest.mark.promise("S7.2")
@pytest.mark.parametrize(
    "stdout",
    [
        b"", b"\n", b"3 passed\n", _report().rstrip(), _report() * 2, b"x\n" + _report(), _report(nonce="1" * 32),
        _report(nonce=""), _report(extra=1), _report(outcome="ok"), _report(held="all"), b"[]\n", _report(calls="3"),
        _report(held=[True, True, True]),
    ],
)  # fmt: skip
def test_p3_no_report_but_the_one(stdout):
    assert read_report(stdout, nonce=NONCE, truncated=False) is None
    assert read_report(_report(), nonce=NONCE, truncated=True) is None
    assert read_report(_report(), nonce=NONCE, truncated=False) is not None


@pytest.mark.promise("S7.2")
@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"held": [0, 2]}, "asserts that never ran, at lines of the tests: 4"),
        ({"held": []}, "3, 4, 5"),
        ({"held": [0, 1, 2, 3]}, "do not have"),
        ({"calls": 0}, "never called"),
        ({"outcome": "failed", "line": 4, "detail": "AssertionError: "}, "failed at line 4"),
        ({"outcome": "broken", "detail": "gone"}, "no usable answer: gone"),
    ],
)
def test_p3_every_assert_must_have_held(changes, missing):
    plan = plan_tests(TESTS)
    good = read_report(_report(), nonce=NONCE, truncated=False)
    report = read_report(_report(**changes), nonce=NONCE, truncated=False)
    assert good is not None
    assert report is not None
    assert missing_evidence(good, plan) is None
    assert missing in str(missing_evidence(report, plan))


async def test_tests_that_cannot_judge_are_refused(local_client):
    task = msgspec.structs.replace(TASK, tests="def check(candidate):\n    candidate(1)\n")
    with pytest.raises(TaskError, match="no assert"):
        await Grader(local_client).grade(task, ARTIFACT)


def test_types_are_closed():
    """Invariant 7: a grade or a sample has no place for a finding, neither when made nor when read."""
    with pytest.raises(TypeError):
        Grade(verdict=Verdict.OK, evidence="", finding="x")  # type: ignore[call-arg]
    row = {"task_id": "t", "task_digest": "d", "rollout_id": "-", "verdict": "ok", "evidence": "", "wall_ns": 1}
    row |= {"tests_passed": 1, "tests_required": 1}
    assert msgspec.convert(row, Sample).reward == 1
    for bad in ({**row, "findings": []}, {**row, "verdict": "fine"}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(bad, Sample)
    fields = {*Sample.__struct_fields__, *Grade.__struct_fields__}
    assert not {name for name in fields if "finding" in name or "alert" in name or "review" in name}


def test_a_verdict_is_not_a_truth_value():
    with pytest.raises(TypeError):
        bool(Verdict.WRONG)
    assert {verdict: verdict.reward for verdict in Verdict} == {
        Verdict.OK: 1.0,
        Verdict.WRONG: 0.0,
        Verdict.CANDIDATE_FAULT: 0.0,
        Verdict.INFRASTRUCTURE_FAULT: None,
        Verdict.STOPPED: None,
    }
    assert [verdict for verdict in Verdict if verdict.masked] == [Verdict.INFRASTRUCTURE_FAULT]
    assert [verdict for verdict in Verdict if verdict.drops_group] == [Verdict.STOPPED]


def test_evidence_is_one_short_line_of_ascii():
    assert plain("a\x1b[31m\n\u202e") == "a\\x{1b}[31m\\x{a}\\x{202e}"
    assert len(plain("\0" * 10_000)) == MAX_EVIDENCE
