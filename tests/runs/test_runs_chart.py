from __future__ import annotations

import itertools
import math
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.runs._chart import HEIGHT, WIDTH, Point, Series, line_chart, running_mean, ticks

FINITE = st.floats(-1e11, 1e11)
POINTS = st.lists(st.builds(Point, st.integers(0, 10_000), st.floats()), max_size=40)


def drawn(*series: Series) -> ET.Element:
    svg = line_chart(series, title="t", x_label="step")
    assert svg is not None
    return ET.fromstring(svg)


def line(root: ET.Element, number: int) -> list[Point]:
    polyline = root.find(f"./g[@class='series s{number}']/polyline")
    assert polyline is not None
    pairs = (pair.split(",") for pair in polyline.attrib["points"].split())
    return [Point(float(x), float(y)) for x, y in pairs]


@given(st.lists(POINTS, max_size=3))
def test_a_chart_is_well_formed_and_stays_inside_its_frame(all_points: list[list[Point]]) -> None:
    series = [Series(f"s{number}", points) for number, points in enumerate(all_points)]
    svg = line_chart(series, title="t", x_label="step")
    if not any(abs(point.y) < 1e12 for points in all_points for point in points):
        assert svg is None
        return
    root = ET.fromstring(str(svg))
    for element in root.iter():
        for name in ("x", "x1", "x2", "cx"):
            assert 0 <= float(element.attrib.get(name, 0)) <= WIDTH
        for name in ("y", "y1", "y2", "cy"):
            assert 0 <= float(element.attrib.get(name, 0)) <= HEIGHT


def test_points_lie_where_their_values_say() -> None:
    points = line(drawn(Series("training", [Point(0, 0.0), Point(10, 1.0)])), 1)
    first, last = points
    assert first.x < last.x
    assert first.y > last.y  # SVG counts downwards; the last point is the mean of both
    root = drawn(Series("a", [Point(0, 0.0), Point(10, 0.0)]), Series("b", [Point(0, 1.0), Point(10, 1.0)]))
    assert {point.y for point in line(root, 1)} == {HEIGHT - 40.0}
    assert {point.y for point in line(root, 2)} == {14.0}


def test_a_share_is_drawn_on_the_whole_scale_and_other_values_on_their_own() -> None:
    for values, low, high in (([0.4, 0.5], "0", "1"), ([-3.0, 12.0], "-5", "15")):
        root = drawn(Series("a", [Point(x, y) for x, y in enumerate(values)]))
        texts = [element.text for element in root.iter("text") if element.attrib.get("text-anchor") == "end"]
        assert (texts[0], texts[-1]) == (low, high)


def test_names_and_titles_are_escaped() -> None:
    svg = line_chart([Series("<script>", [Point(0, 1)])], title="</title><b>", x_label="&")
    assert svg is not None
    assert "<script>" not in svg
    assert "<b>" not in svg
    ET.fromstring(svg)


def test_names_at_the_ends_of_lines_do_not_cover_each_other() -> None:
    root = drawn(*(Series(name, [Point(0, 0.5), Point(1, 0.5)]) for name in "abc"))
    heights = sorted(float(text.attrib["y"]) for text in root.iter("text") if text.attrib["class"] == "name")
    assert all(second - first >= 16 for first, second in itertools.pairwise(heights))


def test_a_single_point_and_a_flat_line_are_drawn() -> None:
    assert len(line(drawn(Series("a", [Point(3, 7.0)])), 1)) == 1
    assert len(line(drawn(Series("a", [Point(x, 7.0) for x in range(5)])), 1)) == 5


def test_a_long_training_is_thinned() -> None:
    root = drawn(Series("a", [Point(x, math.sin(x)) for x in range(100_000)]))
    assert 300 < len(line(root, 1)) <= 600
    assert len(ET.tostring(root)) < 20_000


def test_nothing_to_draw_is_no_chart() -> None:
    assert line_chart([], title="t", x_label="step") is None
    assert line_chart([Series("a", []), Series("b", [Point(1, math.nan)])], title="t", x_label="step") is None


@given(FINITE, FINITE)
def test_ticks_are_few_ascending_and_enclose_the_range(one: float, other: float) -> None:
    low, high = min(one, other), max(one, other)
    found = ticks(low, high)
    assert 2 <= len(found) <= 7
    assert found == sorted(set(found))
    slack = (found[1] - found[0]) * 1e-6
    assert found[0] <= low + slack
    assert found[-1] >= high - slack


@pytest.mark.parametrize(("low", "high"), [(0, 0), (0, 3), (0, 59), (1, 10_000), (7, 7)])
def test_steps_have_whole_ticks(low: int, high: int) -> None:
    assert all(tick == int(tick) for tick in ticks(low, high, whole=True))


def test_the_bold_line_is_the_mean_of_the_last_points() -> None:
    points = [Point(x, float(x)) for x in range(6)]
    assert [point.y for point in running_mean(points, 3)] == [0.0, 0.5, 1.0, 2.0, 3.0, 4.0]
