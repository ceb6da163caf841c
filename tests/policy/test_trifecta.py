"""The three together are refused, and a waiver counts only while it is one."""

from __future__ import annotations

import datetime as dt

import pytest

from stockade.policy import Leg, Trifecta, parse_policy, trifecta

TODAY = dt.date(2026, 11, 30)
PRIVATE = "data: {private: true}\n"
MOUNT = "mounts:\n  - {source: /srv/data, target: /data}\n"
EGRESS = "egress:\n  allow:\n    - {host: abc.test, methods: [GET]}\n"
LOCAL = "services:\n  - {name: m, address: %s, port: 80, methods: [GET], paths: [/]}\n"


def waiver(expires: str = "2027-01-31", person: str = "A. Person") -> str:
    reason = "the data is public already"
    return f"  - {{waives: trifecta, person: {person}, reason: {reason}, expires: {expires}}}\n"


def judge(*parts: str) -> Trifecta:
    return trifecta(parse_policy("version: 1\n" + "".join(parts), source="p"), today=TODAY)


@pytest.mark.promise("S1.5")
@pytest.mark.parametrize(("private", "external"), [(False, False), (False, True), (True, False), (True, True)])
def test_all_three_and_only_all_three_are_refused(private, external):
    result = judge(*[PRIVATE] * private, *[EGRESS] * external)
    assert result.refused is (private and external)
    assert result.complete is (private and external)
    assert bool(result.private) is private
    assert bool(result.external) is external
    assert result.untrusted, "the model wrote the code"
    assert result.message.startswith("refused" if result.refused else "allowed")


def test_lines_are_told():
    result = judge(EGRESS, PRIVATE, MOUNT)
    assert [(held.leg, held.line) for held in result.private] == [(Leg.PRIVATE, 5), (Leg.PRIVATE, 7)]
    assert [(held.leg, held.line) for held in result.untrusted] == [(Leg.UNTRUSTED, None), (Leg.UNTRUSTED, 4)]
    assert [(held.leg, held.line) for held in result.external] == [(Leg.EXTERNAL, 4)]
    assert "private data: lines 5, 7" in result.message
    assert "external communication: line 4" in result.message


def test_a_mount_is_private_data():
    assert judge(MOUNT, EGRESS).refused
    assert "/srv/data" in judge(MOUNT).private[0].why


def test_egress_case_099_reading_is_sending():
    assert judge(PRIVATE, "egress: {allow: [{host: a.example, methods: [GET], paths: [/one]}]}\n").refused


@pytest.mark.parametrize(
    ("address", "external"),
    [
        ("127.0.0.1", False),
        ("10.0.0.1", False),
        ("172.31.0.1", False),
        ("192.168.1.1", False),
        ("::1", False),
        ("fd00::1", False),
        ("11.0.0.1", True),
        ("172.32.0.1", True),
        ("100.64.0.1", True),
        ("2a00::1", True),
    ],
)
def test_a_service_is_external_unless_its_address_is_private(address, external):
    result = judge(PRIVATE, LOCAL % f"'{address}'")
    assert result.refused is external
    assert bool(result.external) is external


def test_denials_are_no_way_out():
    assert not judge(PRIVATE, "egress: {deny: [{host: a.example}]}\n").refused


def test_waiver_in_force():
    result = judge(PRIVATE, EGRESS, "waivers:\n" + waiver())
    assert not result.refused
    assert result.complete
    assert result.waiver is not None
    assert result.message == "allowed by a waiver of A. Person until 2027-01-31: the data is public already"


@pytest.mark.promise("S1.5")
@pytest.mark.parametrize(
    ("days", "refused"), [(-1, True), (0, False), (1, False), (90, False), (91, True), (10_000, True)]
)
def test_waiver_holds_to_its_last_day_and_ninety_days_at_most(days, refused):
    expires = (TODAY + dt.timedelta(days=days)).isoformat()
    result = judge(PRIVATE, EGRESS, "waivers:\n" + waiver(expires))
    assert result.refused is refused
    assert (result.waiver is None) is refused


def test_refusal_names_each_waiver_that_does_not_hold():
    result = judge(PRIVATE, EGRESS, "waivers:\n" + waiver("2026-11-29", "Old") + waiver("2030-01-01", "Eager"))
    assert result.refused
    assert "the waiver of Old on line 7 expired on 2026-11-29" in result.message
    assert "the waiver of Eager on line 8 runs until 2030-01-01, more than 90 days" in result.message


def test_one_good_waiver_among_bad_ones():
    result = judge(PRIVATE, EGRESS, "waivers:\n" + waiver("2026-11-29", "Old") + waiver())
    assert result.waiver is not None
    assert result.waiver.person == "A. Person"


def test_unneeded_waiver_changes_nothing():
    result = judge(EGRESS, "waivers:\n" + waiver("2026-11-29"))
    assert not result.refused
    assert result.waiver is None


def test_finding_is_no_truth_value():
    with pytest.raises(TypeError, match="refused"):
        bool(judge())
