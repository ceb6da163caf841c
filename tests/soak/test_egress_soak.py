"""The short form of the egress soak of ``make soak``: two dozen rollouts for most of a minute, workers killed at random."""

from __future__ import annotations

import asyncio

import pytest

from bench.egress_soak import soak
from tests.egress.netlab import NetLab
from tests.support import requires


@pytest.mark.timeout(600)  # of a machine that is busy; nothing below depends on how much was done in that time
def test_mixed_traffic_while_workers_are_killed() -> None:
    """Nothing is lost, nothing goes out unseen, nothing is left behind."""
    requires(NetLab.possible(), "no network namespace can be made here")
    report = asyncio.run(soak(0.6, live=24, round_s=12, seed=1))
    assert report.problems == []
    assert report.kills, "no worker was killed"
    assert report.sums["exact"], "nothing was compared to the byte"
    assert report.sums["denied"], "nothing was refused"
