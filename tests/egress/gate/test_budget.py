"""Budgets of one rollout: case 105 of the bypass table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.egress.gate import BUDGET_CELLS, Account, Budget, Limits, Reason, RuleLimits

LIMITS = Limits(requests_per_minute=6, connections=2, bytes_out=1000, bytes_in=5000, bytes_out_per_request=300)


def taken(budget, now, tries=1000):
    count = 0
    while count < tries and budget.take_request(now) is None:
        count += 1
    return count


def test_egress_case_105_many_small_requests():
    budget = Budget(LIMITS, now=100.0)
    assert taken(budget, 100.0) == 6
    assert budget.take_request(100.0) is Reason.RATE_LIMITED
    assert budget.retry_after_s(100.0) == 10
    assert budget.retry_after_s(104.5) == 6
    assert taken(budget, 109.9) == 0
    assert budget.retry_after_s(109.95) == 1
    assert taken(budget, 110.0) == 1
    assert taken(budget, 10_000.0) == 6, "the bucket holds one minute, not an hour"


@given(st.lists(st.floats(0, 30), max_size=60), st.integers(1, 500))
def test_rate_holds_over_any_pattern_of_calls(gaps, rate):
    budget, now, total = Budget(Limits(requests_per_minute=rate), now=0.0), 0.0, 0
    for gap in gaps:
        now += gap
        total += taken(budget, now)
    assert total <= rate + rate * now / 60 + 1e-6
    assert budget.take_request(now) is Reason.RATE_LIMITED or not gaps
    if gaps:
        assert budget.take_request(now + budget.retry_after_s(now)) is None


def test_often_asking_loses_no_credit():
    budget = Budget(Limits(requests_per_minute=1), now=0.0)
    assert taken(budget, 0.0) == 1
    for step in range(59_999):
        assert budget.take_request(step / 1000) is Reason.RATE_LIMITED
    assert budget.take_request(60.0) is None


def test_egress_case_105_many_connections():
    budget = Budget(LIMITS, now=0.0)
    assert budget.open_connection() is None
    assert budget.open_connection() is None
    assert budget.open_connection() is Reason.TOO_MANY_CONNECTIONS
    budget.close_connection()
    assert budget.open_connection() is None
    budget.close_connection()
    budget.close_connection()
    with pytest.raises(ValueError, match="open"):
        budget.close_connection()


def test_egress_case_105_one_big_request():
    budget = Budget(LIMITS, now=0.0)
    meter = budget.meter()
    assert meter.left_out == 300
    assert meter.out(300) is None
    assert meter.left_out == 0
    assert meter.out(1) is Reason.REQUEST_TOO_LARGE
    assert (meter.bytes_out, budget.bytes_out) == (301, 301)


def test_egress_case_105_pieces_of_many_requests_and_a_tunnel():
    budget = Budget(LIMITS, now=0.0)
    for _ in range(3):
        assert budget.meter().out(300) is None
    last = budget.meter()
    assert last.left_out == 100
    tunnel = budget.meter(tunnel=True)
    assert tunnel.out(60) is None
    assert last.left_out == 40
    assert last.out(41) is Reason.BYTES_OUT_EXCEEDED
    assert tunnel.left_out == 0
    assert tunnel.out(1) is Reason.BYTES_OUT_EXCEEDED
    assert budget.meter().out(1) is Reason.BYTES_OUT_EXCEEDED


def test_egress_case_105_tunnel_upload_has_no_cap_of_its_own():
    tunnel = Budget(LIMITS, now=0.0).meter(tunnel=True)
    assert tunnel.left_out == 1000
    assert tunnel.out(1000) is None
    assert tunnel.out(1) is Reason.BYTES_OUT_EXCEEDED


def test_bytes_in():
    budget = Budget(LIMITS, now=0.0)
    meter, other = budget.meter(), budget.meter(tunnel=True)
    assert meter.into(4999) is None
    assert other.left_in == 1
    assert other.into(1) is None
    assert other.into(1) is Reason.BYTES_IN_EXCEEDED
    assert (meter.left_in, meter.bytes_in, other.bytes_in, budget.bytes_in) == (0, 4999, 2, 5001)


def test_a_worker_goes_on_where_another_ended():
    cells = [0] * BUDGET_CELLS
    first = Budget(LIMITS, now=50.0, cells=cells)
    assert taken(first, 50.0) == 6
    first.open_connection()
    first.meter(tunnel=True).out(999)
    first.meter().into(10)
    first.decided(denied=False)
    first.decided(denied=True)
    second = Budget(LIMITS, now=51.0, cells=cells)
    assert (second.bytes_out, second.bytes_in, second.connections) == (999, 10, 0)
    assert (second.requests, second.denied) == (2, 1)
    assert taken(second, 51.0) == 0, "a restart refills nothing"
    assert second.meter().out(2) is Reason.BYTES_OUT_EXCEEDED
    assert taken(second, 60.0) == 1


def test_clock_that_went_back_mints_nothing():
    budget = Budget(LIMITS, now=1000.0)
    assert taken(budget, 1000.0) == 6
    assert taken(budget, 5.0) == 0
    assert taken(budget, 15.0) == 1, "but the bucket fills again"


@pytest.mark.parametrize(
    "cells",
    [
        [],
        [1] * (BUDGET_CELLS - 1),
        [0, 1, 0, 0, 0, 0, 0, 0],
        [2, 1, 0, 0, 0, 0, 0, 0],
        [1, -1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, -1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, -1],
    ],
)
def test_damaged_cells_are_refused(cells):
    with pytest.raises(ValueError, match="cells"):
        Budget(LIMITS, now=0.0, cells=cells)


def test_cells_cannot_hold_more_than_a_full_bucket():
    assert taken(Budget(LIMITS, now=0.0, cells=[1, 10**15, 0, 0, 0, 0, 0, 0]), 0.0) == 6


def account(limits, **more):
    return Account(limits, [0] * BUDGET_CELLS, now=0.0, **more)


def test_a_rule_has_an_account_of_its_own():
    rule = account(RuleLimits(requests_per_minute=2, connections=1, bytes_out=50, bytes_in=70))
    budget = Budget(LIMITS, now=0.0, rules=(rule,))
    assert budget.take_of_rule(-1, 0.0) is None
    assert [budget.take_of_rule(0, 0.0) for _ in range(3)] == [None, None, Reason.RATE_LIMITED]
    assert budget.retry_after_s(0.0, 0) == 30
    assert budget.take_of_rule(0, 30.0) is None
    rule.open_connection()
    assert budget.take_of_rule(0, 90.0) is Reason.TOO_MANY_CONNECTIONS
    rule.close_connection()
    meter = budget.meter(limited=0)
    assert (meter.left_out, meter.left_in) == (50, 70)
    assert meter.exceeded is Reason.BYTES_OUT_EXCEEDED
    assert meter.out(50) is None
    assert meter.out(1) is Reason.BYTES_OUT_EXCEEDED
    assert meter.into(71) is Reason.BYTES_IN_EXCEEDED
    assert budget.meter().left_out == 300, "other rules are not bound by it"


def test_all_rollouts_of_a_run_share_an_account():
    cells, live = [0] * BUDGET_CELLS, [0, 0]
    limits = RuleLimits(requests_per_minute=3, connections=2, bytes_out=100, bytes_in=None)
    one, two = (
        Budget(LIMITS, now=0.0, run=Account(limits, cells, now=0.0, live=live, place=place)) for place in range(2)
    )
    assert [one.take_request(0.0), two.take_request(0.0), one.take_request(0.0)] == [None, None, None]
    assert two.take_request(0.0) is Reason.RATE_LIMITED
    assert two.retry_after_s(0.0) == 20
    assert taken(two, 60.0) == 3, "what the run refused is not taken from the rollout"
    assert [one.open_connection(), two.open_connection()] == [None, None]
    assert one.open_connection() is Reason.TOO_MANY_CONNECTIONS
    two.close_connection()
    assert one.open_connection() is None
    assert one.meter().out(90) is None
    assert two.meter().left_out == 10
    assert two.meter().out(11) is Reason.BYTES_OUT_EXCEEDED
    assert two.meter().left_in == 5000


def test_an_account_without_limits_only_counts():
    free = account(RuleLimits())
    assert (free.left_out, free.left_in, free.full) == (None, None, False)
    assert all(free.take_request(0.0) for _ in range(1000))
    assert free.retry_after_s(0.0) == 1
