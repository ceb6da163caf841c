"""The benchmarks' arithmetic: a ratio that is computed wrongly proves anything."""

from __future__ import annotations

import asyncio
import json

from bench._harness import Series, Variant, compare, interleave, report


def test_rounds_take_turns_and_warm_up_is_thrown_away():
    order: list[str] = []

    def variant(name):
        async def measure():
            order.append(name)
            return float(len(order))

        return Variant(name, measure)

    series = asyncio.run(interleave([variant("a"), variant("b")], rounds=2, warm_up=2))
    assert "".join(order) == "abbaabba"
    assert [each.samples for each in series] == [(5.0, 8.0), (6.0, 7.0)]


def test_ratios():
    base, other = compare([Series("base", (1.0, 2.0, 4.0)), Series("other", (3.0, 2.0, 16.0))])
    assert (base.ratio_of_medians, base.ratio_of_best, base.median_of_ratios) == (1, 1, 1)
    assert (other.ratio_of_medians, other.ratio_of_best, other.median_of_ratios) == (1.5, 2.0, 3.0)


def test_best_of_a_rate_is_the_largest():
    rows = compare([Series("base", (1.0, 2.0)), Series("other", (3.0, 8.0))], more_is_better=True)
    assert rows[1].ratio_of_best == 4.0


def test_report_writes_samples(tmp_path, capsys):
    path = tmp_path / "out.json"
    report("what: how", [Series("base", (1.0, 2.0))], unit="s", json_path=path)
    assert json.loads(path.read_text())["series"] == {"base": [1.0, 2.0]}
    assert "ratio of medians" in capsys.readouterr().out
