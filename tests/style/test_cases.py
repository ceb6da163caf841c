"""Every bypass case has a test that is named after it, and the page that lists them says where."""

from __future__ import annotations

import pytest

from tests.style import _cases


@pytest.fixture(scope="module")
def tests() -> dict[int, set[str]]:
    return _cases.collected()


def test_every_case_has_a_test(tests):
    assert [number for number in _cases.CASES if not tests.get(number)] == []


def test_no_test_is_named_after_a_case_that_is_none(tests):
    assert set(tests) - set(_cases.CASES) == set()


def test_the_page_lists_every_case_once_and_in_order():
    numbers = [int(number) for number, *_ in _cases.ROW.findall(_cases.PAGE.read_text())]
    assert numbers == list(_cases.CASES)


def test_the_page_names_the_files_that_hold_the_tests(tests):
    listed = _cases.listed()
    wrong = {number: sorted(tests.get(number, set()) ^ listed.get(number, set())) for number in _cases.CASES}
    assert {number: files for number, files in wrong.items() if files} == {}, "python -m tests.style._cases repairs it"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("test_egress_case_023_port_syntax", {23}),
        ("test_egress_cases_003_011_spellings", {3, 11}),
        ("test_egress_case_049_and_070_each", {49, 70}),
        ("test_egress_case[054_space]", {54}),
        ("test_bad[case_091_empty_list.yaml]", {91}),
        ("test_name[egress_case_024_254_bytes]", {24}),
        ("test_a_case_of_1000_rollouts", set()),
        ("test_showcases[0023]", set()),
        ("test_egress_case[100.64.0.1]", set()),
    ],
)
def test_numbers_of_a_name(name, expected):
    assert _cases.numbers(name) == expected
