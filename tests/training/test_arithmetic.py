from __future__ import annotations

import dataclasses
import inspect
import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.rewards import Verdict
from stockade.training import Judged, Settled, coin_flips, reason_to_hold, settle

OK, WRONG, FAULT = Verdict.OK, Verdict.WRONG, Verdict.CANDIDATE_FAULT
INFRA, STOPPED = Verdict.INFRASTRUCTURE_FAULT, Verdict.STOPPED

batches = st.lists(st.builds(Judged, st.sampled_from("abcd"), st.sampled_from(list(Verdict))), max_size=40)


def settled(groups: dict[str, list[Verdict]]) -> Settled:
    return settle([Judged(name, verdict) for name, verdicts in groups.items() for verdict in verdicts])


@pytest.mark.parametrize(("verdict", "reward"), [(OK, 1.0), (WRONG, 0.0), (FAULT, 0.0), (INFRA, None), (STOPPED, None)])
def test_each_verdict_has_its_reward(verdict, reward):
    assert settled({"a": [verdict]}).rewards == (reward,)


def test_every_verdict_is_covered():
    assert {verdict.value for verdict in Verdict} == {
        "ok", "wrong", "candidate_fault", "infrastructure_fault", "stopped",
    }  # fmt: skip


@pytest.mark.promise("S7.5")
def test_an_infrastructure_fault_masks_one_sample_and_leaves_its_siblings():
    result = settled({"a": [OK, INFRA, WRONG], "b": [OK, OK, WRONG]})
    assert result.rewards == (1.0, None, 0.0, 1.0, 1.0, 0.0)
    assert (result.masked, result.dropped_groups, result.flat_groups) == (1, 0, 0)


@pytest.mark.promise("S7.5")
def test_a_stop_drops_its_whole_group_and_no_other():
    result = settled({"a": [OK, STOPPED, WRONG], "b": [OK, FAULT]})
    assert result.rewards == (None, None, None, 1.0, 0.0)
    assert (result.masked, result.dropped_groups, result.groups) == (3, 1, 2)
    assert result.dropped_share == 0.5


def test_groups_are_told_apart_by_name_and_not_by_place():
    samples = [Judged("a", OK), Judged("b", STOPPED), Judged("a", WRONG), Judged("b", OK)]
    assert settle(samples).rewards == (1.0, None, 0.0, None)


@pytest.mark.parametrize(
    ("verdicts", "flat"),
    [([OK, OK], 1), ([OK, WRONG], 0), ([OK, INFRA], 1), ([INFRA, INFRA], 1), ([WRONG, FAULT], 1), ([OK], 1)],
)
def test_a_group_without_two_different_rewards_is_flat(verdicts, flat):
    assert settled({"a": verdicts}).flat_groups == flat


def test_counts_name_every_verdict_and_add_up():
    result = settled({"a": [OK, INFRA, WRONG, OK]})
    assert dict(result.verdicts) == {OK: 2, WRONG: 1, FAULT: 0, INFRA: 1, STOPPED: 0}
    assert result.count(INFRA) == 1
    assert sum(count for _, count in result.verdicts) == result.samples == 4


def test_an_empty_batch_is_empty():
    result = settle([])
    assert (result.rewards, result.groups, result.dropped_share) == ((), 0, 0.0)


@given(batches)
def test_rewards_follow_from_verdict_and_group_alone(samples):
    result = settle(samples)
    stopped = {sample.group for sample in samples if sample.verdict is STOPPED}
    for sample, reward in zip(samples, result.rewards, strict=True):
        if sample.group in stopped or sample.verdict in (INFRA, STOPPED):
            assert reward is None
        else:
            assert reward == (1.0 if sample.verdict is OK else 0.0)
    assert result.dropped_groups == len(stopped)
    assert result.groups == len({sample.group for sample in samples})


@given(batches, st.randoms(use_true_random=False))
def test_a_group_does_not_depend_on_other_groups(samples, rng):
    for group in {sample.group for sample in samples}:
        alone = settle([sample for sample in samples if sample.group == group]).rewards
        others = [sample for sample in samples if sample.group != group]
        mixed = [sample for sample in samples if sample.group == group] + others
        rng.shuffle(mixed)
        together = settle(mixed).rewards
        mine = sorted(repr(r) for s, r in zip(mixed, together, strict=True) if s.group == group)
        assert mine == sorted(map(repr, alone))


@given(batches)
def test_the_batch_is_the_same_bytes_every_time(samples):
    first, second = (json.dumps(settle(list(samples)).rewards).encode() for _ in range(2))
    assert first == second


def test_there_is_no_way_in_for_a_finding():
    # What the trainer gets is a function of these inputs. Adding one must break this test first.
    assert [field.name for field in dataclasses.fields(Judged)] == ["group", "verdict"]
    assert list(inspect.signature(settle).parameters) == ["samples"]
    assert list(inspect.signature(coin_flips).parameters) == ["rewards", "rng"]
    assert list(inspect.signature(reason_to_hold).parameters) == ["settled", "dropped_limit"]
    closure = inspect.getclosurevars(settle)
    assert not closure.nonlocals
    assert set(closure.globals) == {"Settled", "Counter", "Verdict"}


def test_coin_flips_keep_masks_and_do_not_depend_on_them():
    flips = coin_flips([1.0] * 200, Random(1))
    assert set(flips) == {0.0, 1.0}
    assert 60 < sum(flip == 1.0 for flip in flips) < 140
    masked = coin_flips([None, *[0.0] * 199], Random(1))
    assert masked[0] is None
    assert masked[1:] == flips[1:]


def test_a_dropped_group_holds_training():
    reason = reason_to_hold(settled({"a": [OK, STOPPED], "b": [OK, WRONG]}), dropped_limit=0.01)
    assert reason == "1 of 2 groups were dropped because rollouts in them were stopped (limit 1%)"


def test_the_limit_is_a_share_of_groups():
    groups = {str(number): [OK, WRONG] for number in range(100)}
    groups["0"] = [OK, STOPPED]
    assert reason_to_hold(settled(groups), dropped_limit=0.01) is None
    groups["1"] = [STOPPED, STOPPED]
    assert reason_to_hold(settled(groups), dropped_limit=0.01) is not None
    assert reason_to_hold(settled(groups), dropped_limit=0.02) is None


def test_a_batch_without_any_reward_holds_whatever_the_limit():
    reason = reason_to_hold(settled({"a": [INFRA, INFRA]}), dropped_limit=1.0)
    assert reason == "not one of 2 samples has a reward (2 infrastructure faults)"
    assert reason_to_hold(settled({"a": [INFRA, WRONG]}), dropped_limit=0.01) is None
