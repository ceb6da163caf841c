from __future__ import annotations

import asyncio
import json
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stockade.client import ClosedEpisode
from stockade.errors import AgentGone, BrokerError
from stockade.rewards import Grade, Grader, Verdict
from stockade.training._reward import Held, check_groups, group_name, make_reward
from stockade.training._scoring import Sample, Scorer
from stockade.training._toy import RATE, Step, ToyTask
from tests.training.doubles import Script, ScriptedClient, reply

PLAIN = ToyTask((Step("plus", 3),))
SERVICE = ToyTask((Step("plus", RATE),))
RIGHT = "def f(x):\n    return x + 3\n"


@pytest.fixture(autouse=True)
def graded(monkeypatch):
    """Grading by a word in the program, so that these tests are about what is around it."""
    calls: list[tuple[str, dict[str, bytes]]] = []

    async def grade(self, task, artifact):
        calls.append((task.task_id, dict(artifact)))
        await asyncio.sleep(0)
        text = artifact.get("solution.py", b"").decode()
        named = [verdict for verdict in Verdict if verdict.value in text]
        return Grade(verdict=named[0] if named else Verdict.OK, evidence="")

    monkeypatch.setattr(Grader, "grade", grade)
    return calls


def scorer(client: ScriptedClient, *, parallel: int = 8) -> Scorer:
    return Scorer(lambda: client, "http://rates.stockade.internal:18473", rate=42, parallel=parallel, timeout_s=5.0)


def score(client: ScriptedClient, *samples: Sample, parallel: int = 8) -> list[Verdict]:
    return asyncio.run(scorer(client, parallel=parallel).verdicts(samples))


def sample(completion: str = RIGHT, *, task: ToyTask = PLAIN, group: str = "g", attempt: int = 0) -> Sample:
    return Sample(task, completion, group, attempt, 4)


def test_a_rollout_carries_its_place_in_the_run():
    client = ScriptedClient()
    assert score(client, sample(attempt=5)) == [Verdict.OK]
    (fields,) = client.created
    assert fields["role"] == "rollout"
    assert (fields["task_id"], fields["group_id"], fields["train_step"], fields["attempt"]) == ("toy/plus-3", "g", 4, 5)


def test_nothing_of_the_tests_is_in_the_rollout():
    client = ScriptedClient()
    score(client, sample(), sample(task=SERVICE))
    put = b"\n".join(data for fields in client.created for data in fields["files"].values())
    assert b"assert" not in put
    assert b"42" not in put
    assert not any("env" in fields for fields in client.created)


def test_only_service_tasks_get_the_helper():
    client = ScriptedClient()
    score(client, sample(), sample(task=SERVICE))
    names = [set(fields["files"]) for fields in client.created]
    assert {"/workspace/solution.py"} in names
    assert {"/workspace/solution.py", "/workspace/toolbox.py"} in names


def test_each_sample_has_a_rollout_and_equal_artifacts_one_grading(graded):
    client = ScriptedClient()
    samples = [sample(attempt=number) for number in range(6)] + [sample("wrong", attempt=6)]
    assert score(client, *samples) == [Verdict.OK] * 6 + [Verdict.WRONG]
    assert client.count("rollout") == 7
    assert len(graded) == 2


def test_equal_programs_of_two_tasks_are_graded_apart(graded):
    score(ScriptedClient(), sample(), sample(task=ToyTask((Step("plus", 4),))))
    assert sorted(name for name, _ in graded) == ["toy/plus-3", "toy/plus-4"]


def test_what_was_fetched_is_part_of_what_is_graded(graded):
    numbers = iter(("1", "2"))

    def choose(fields):
        return Script(files={**fields["files"], "/workspace/fetched.json": next(numbers).encode()})

    score(ScriptedClient(choose), sample(task=SERVICE), sample(task=SERVICE, attempt=1))
    assert sorted(artifact["fetched.json"] for _, artifact in graded) == [b"1", b"2"]


def test_a_grading_is_not_shared_between_batches(graded):
    client = ScriptedClient()
    score(client, sample())
    score(client, sample())
    assert len(graded) == 2


def test_no_more_sandboxes_than_asked_live_at_once():
    client = ScriptedClient()
    score(client, *(sample(attempt=number) for number in range(20)), parallel=3)
    assert client.most_open == 3
    assert client.open == 0


@pytest.mark.parametrize(
    ("script", "verdict"),
    [
        (Script(exec=reply(fault="infrastructure")), Verdict.INFRASTRUCTURE_FAULT),
        (Script(exec=reply(fault="stopped", exit_kind="stopped")), Verdict.STOPPED),
        (Script(exec=reply(fault="candidate", exit_kind="memory_limit")), Verdict.CANDIDATE_FAULT),
        (Script(exec=reply(fault="a word of tomorrow")), Verdict.INFRASTRUCTURE_FAULT),
        (Script(exec=reply(code=1)), Verdict.OK),
        (Script(close=ClosedEpisode("stopped", "", "stopped")), Verdict.STOPPED),
        (Script(create=BrokerError("shutting_down", 503, "stopped")), Verdict.STOPPED),
        (Script(create=BrokerError("backend_error", 502, "no sandbox")), Verdict.INFRASTRUCTURE_FAULT),
        (Script(exec=BrokerError("backend_error", 502, "gone")), Verdict.INFRASTRUCTURE_FAULT),
    ],
)
def test_whose_fault_it_was_decides(script, verdict):
    assert score(ScriptedClient(lambda _fields: script), sample()) == [verdict]


@pytest.mark.parametrize("error", [AgentGone("nobody there"), BrokerError("unauthorized", 401, "no")])
def test_what_stands_for_all_samples_ends_the_batch(error):
    def choose(fields):
        return Script(create=error) if fields["attempt"] == 3 else Script()

    client = ScriptedClient(choose)
    with pytest.raises(type(error)):
        score(client, *(sample(attempt=number) for number in range(8)), parallel=2)
    assert client.open == 0


@pytest.mark.parametrize("text", ["\x00", "def f(x): return '\ud800'", "", "é" * 10])
def test_text_that_no_file_can_hold_is_still_a_sample(text):
    assert score(ScriptedClient(), sample(text)) == [Verdict.OK]


# --------------------------------------------------------------------------------------- reward function


class State:
    global_step = 6


def reward_of(client: ScriptedClient, completions: list[str], *, size: int = 4, coin: Random | None = None, **columns):
    notes = []
    function = make_reward(
        scorer(client),
        {PLAIN.name: PLAIN, SERVICE.name: SERVICE},
        group_size=size,
        dropped_limit=0.01,
        note=lambda step, settled: notes.append((step, settled)),
        coin=coin,
    )
    names = columns.pop("task", [PLAIN.name] * len(completions))
    return asyncio.run(function(completions=completions, task=names, trainer_state=State(), **columns)), notes


def test_rewards_come_in_the_order_of_the_completions():
    rewards, notes = reward_of(ScriptedClient(), [RIGHT, "wrong", "infrastructure_fault", "candidate_fault"])
    assert rewards == [1.0, 0.0, None, 0.0]
    ((step, settled),) = notes
    assert step == 7
    assert (settled.masked, settled.groups) == (1, 1)


def test_steps_and_groups_are_named_for_the_record():
    client = ScriptedClient()
    reward_of(client, [RIGHT] * 8)
    seen = sorted((fields["group_id"], fields["attempt"], fields["train_step"]) for fields in client.created)
    assert seen == [(f"step-7.{group}", attempt, 7) for group in range(2) for attempt in range(4)]


def test_a_stop_holds_training_and_is_counted_first():
    notes = []
    function = make_reward(
        scorer(ScriptedClient()),
        {PLAIN.name: PLAIN},
        group_size=4,
        dropped_limit=0.01,
        note=lambda step, settled: notes.append((step, settled.dropped_groups)),
    )
    batch = [RIGHT, "stopped", RIGHT, "wrong", *["wrong"] * 4]
    with pytest.raises(Held, match=r"holds at step 7: 1 of 2 groups were dropped"):
        asyncio.run(function(completions=batch, task=[PLAIN.name] * 8, trainer_state=State()))
    assert notes == [(7, 1)]


def test_the_control_flips_coins_and_keeps_the_masks():
    completions = ["infrastructure_fault", *["wrong"] * 39]
    rewards, notes = reward_of(ScriptedClient(), completions, coin=Random(1))
    assert rewards[0] is None
    assert set(rewards[1:]) == {0.0, 1.0}
    assert notes[0][1].count(Verdict.WRONG) == 39


def test_groups_that_mix_tasks_are_refused():
    with pytest.raises(AssertionError, match="two tasks"):
        reward_of(ScriptedClient(), [RIGHT] * 4, task=[PLAIN.name, PLAIN.name, SERVICE.name, PLAIN.name])
    check_groups([sample(group=group_name(1, index, 2), task=(PLAIN, SERVICE)[index // 2]) for index in range(4)])


findings = st.dictionaries(
    st.sampled_from(["finding", "findings", "alert", "alerts", "monitor", "severity", "review", "risk"]),
    st.one_of(st.text(), st.integers(), st.lists(st.floats(allow_nan=False))),
)


@pytest.mark.promise("S9.2")
@settings(max_examples=30)
@given(findings, st.lists(st.sampled_from([RIGHT, "wrong", "candidate_fault"]), min_size=4, max_size=4))
def test_arbitrary_findings_leave_the_batch_byte_identical(found, completions):
    """Whatever the other side writes where it can write text, and whatever columns a row might gain."""

    def choose(_fields):
        noisy = ClosedEpisode("exited", json.dumps(found), None)
        return Script(close=noisy)

    plain = reward_of(ScriptedClient(), completions)[0]
    noisy = reward_of(ScriptedClient(choose), completions, **found)[0]
    assert json.dumps(plain).encode() == json.dumps(noisy).encode()
    assert plain == [1.0 if completion == RIGHT else 0.0 for completion in completions]
