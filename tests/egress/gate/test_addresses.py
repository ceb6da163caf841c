"""What an address is and whether an answer may be dialled: cases 25 to 39 (and 5) of the bypass table.

testdata/addresses.json holds the vectors as plain data, so that every Python and any other implementation can be held
to the same list (case 35).
"""

from __future__ import annotations

import ipaddress
import json
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.egress.gate import Address, AddressClass, Cidr, Reason, Rules, classify, judge_addresses

VECTORS = json.loads((Path(__file__).parent / "testdata" / "addresses.json").read_text("ascii"))
PUBLIC = Address.parse("93.184.216.34")
OPEN = Rules()


def addresses(*texts):
    return [Address.parse(text) for text in texts]


@pytest.mark.promise("S3.4")
@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: f"egress_case_{v['case']:03d}_{v['address']}")
def test_vector(vector):
    address = Address.parse(vector["address"])
    kind = classify(address)
    assert kind == vector["class"]
    verdict = judge_addresses([address], OPEN)
    assert verdict.allowed == (kind is AddressClass.PUBLIC)
    if kind is AddressClass.METADATA:
        assert verdict.reason is Reason.METADATA_ADDRESS
    elif not verdict.allowed:
        assert verdict.reason is Reason.INTERNAL_ADDRESS


def test_every_class_has_a_vector():
    assert {vector["class"] for vector in VECTORS} == set(AddressClass)


def test_egress_case_035_the_standard_library_would_let_these_through():
    """The attack works where ``is_global`` decides; should a Python ever fix all of them, this test may go."""
    fooled = ["64:ff9b::7f00:1", "::127.0.0.1", "::ffff:0:7f00:1", "fec0::1", "224.0.0.1", "168.63.129.16"]
    assert [text for text in fooled if ipaddress.ip_address(text).is_global]
    for text in fooled:
        assert not judge_addresses(addresses(text), OPEN).allowed


@pytest.mark.promise("S3.4")
@given(st.integers(0, (1 << 32) - 1))
def test_whatever_hides_an_ipv4_address_is_judged_by_it(value):
    inner = classify(Address(4, value))
    for wrapped in (0xFFFF << 32 | value, 0x64FF9B << 96 | value):
        assert classify(Address(6, wrapped)) is inner
    for wrapped in (
        value,
        0xFFFF0000 << 32 | value,
        0x2002 << 112 | value << 80,
        0x20010000 << 96 | value ^ 0xFFFFFFFF,
    ):
        outer = classify(Address(6, wrapped))
        assert outer is not AddressClass.PUBLIC
        assert (outer is AddressClass.METADATA) == (inner is AddressClass.METADATA)


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        pytest.param(["93.184.216.34", "2a04:4e42::223"], Reason.ALLOWED, id="all_public"),
        pytest.param(["10.0.0.5"], Reason.INTERNAL_ADDRESS, id="egress_case_025_private"),
        pytest.param(["127.0.0.1"], Reason.INTERNAL_ADDRESS, id="egress_case_025_loopback"),
        pytest.param(["93.184.216.34", "10.0.0.1"], Reason.MIXED_ANSWER, id="egress_case_027_public_first"),
        pytest.param(["10.0.0.1", "93.184.216.34"], Reason.MIXED_ANSWER, id="egress_case_027_internal_first"),
        pytest.param(["93.184.216.34", "fc00::1"], Reason.MIXED_ANSWER, id="egress_case_028_other_family"),
        pytest.param(["93.184.216.34", "169.254.169.254"], Reason.METADATA_ADDRESS, id="egress_case_027_metadata"),
        pytest.param(["10.0.0.1", "::1"], Reason.INTERNAL_ADDRESS, id="all_internal"),
        pytest.param([], Reason.RESOLVE_FAILED, id="egress_case_041_no_answer"),
    ],
)
def test_answer_set(answers, reason):
    verdict = judge_addresses(iter(addresses(*answers)), OPEN)
    assert verdict.reason is reason
    assert verdict.allowed == (reason is Reason.ALLOWED)


def test_egress_case_038_own_addresses():
    own = frozenset(addresses("198.41.0.4", "2a04:4e42::1"))
    rules = Rules(own_addresses=own)
    for text in ("198.41.0.4", "2a04:4e42::1", "::ffff:198.41.0.4", "64:ff9b::198.41.0.4"):
        assert judge_addresses(addresses(text), OPEN).allowed, "public to anybody else"
        assert judge_addresses(addresses(text), rules).reason is Reason.OWN_ADDRESS
        assert judge_addresses(addresses(text), OPEN, own=own).reason is Reason.OWN_ADDRESS
    assert judge_addresses(addresses("198.41.0.5"), rules, own=own).allowed


def test_egress_case_039_deny_cidrs_hold_in_every_notation():
    rules = Rules(deny_cidrs=(Cidr.parse("11.1.0.0/16"), Cidr.parse("2a04:4e42::/32")))
    for text in ("11.1.2.3", "::ffff:11.1.2.3", "64:ff9b::11.1.2.3", "2a04:4e42::223"):
        assert judge_addresses(addresses(text), OPEN).allowed
        assert judge_addresses(addresses(text), rules).reason is Reason.DENIED_ADDRESS
        assert judge_addresses([PUBLIC, *addresses(text)], rules).reason is Reason.DENIED_ADDRESS
    assert judge_addresses(addresses("11.2.0.0"), rules).allowed


def test_unsafe_allow_opens_its_range_and_never_more():
    rules = Rules(unsafe_allow_cidrs=(Cidr.parse("10.20.0.0/24"),))
    assert judge_addresses(addresses("10.20.0.5"), rules).allowed
    assert judge_addresses(addresses("::ffff:10.20.0.5"), rules).allowed
    assert judge_addresses(addresses("10.20.1.5"), rules).reason is Reason.INTERNAL_ADDRESS
    assert judge_addresses(addresses("2002:a14:5::"), rules).reason is Reason.INTERNAL_ADDRESS, "6to4 is not opened"
    both = Rules(deny_cidrs=rules.unsafe_allow_cidrs, unsafe_allow_cidrs=rules.unsafe_allow_cidrs)
    assert judge_addresses(addresses("10.20.0.5"), both).reason is Reason.DENIED_ADDRESS
    own = Rules(own_addresses=frozenset(addresses("10.20.0.5")), unsafe_allow_cidrs=rules.unsafe_allow_cidrs)
    assert judge_addresses(addresses("10.20.0.5"), own).reason is Reason.OWN_ADDRESS


@pytest.mark.promise("S3.4")
@pytest.mark.parametrize("vector", [v for v in VECTORS if v["class"] == "metadata"], ids=lambda v: v["address"])
def test_egress_case_037_nothing_opens_metadata(vector):
    everything = (Cidr.parse("0.0.0.0/0"), Cidr.parse("::/0"))
    rules = Rules(unsafe_allow_cidrs=everything)
    for pinned in (False, True):
        verdict = judge_addresses(addresses(vector["address"]), rules, pinned=pinned)
        assert verdict.reason is Reason.METADATA_ADDRESS


@pytest.mark.parametrize("text", ["0.0.0.0", "::", "169.254.1.1", "fe80::1", "224.0.0.1", "ff02::1"])
def test_what_is_no_hosts_address_stays_closed(text):
    rules = Rules(unsafe_allow_cidrs=(Cidr.parse("0.0.0.0/0"), Cidr.parse("::/0")))
    for pinned in (False, True):
        assert judge_addresses(addresses(text), rules, pinned=pinned).reason is Reason.INTERNAL_ADDRESS


def test_service_address_is_dialled_wherever_it_is():
    rules = Rules(own_addresses=frozenset(addresses("10.0.0.7")), deny_cidrs=(Cidr.parse("10.0.0.0/8"),))
    for text in ("127.0.0.1", "10.0.0.7", "::1", "192.168.1.1"):
        assert judge_addresses(addresses(text), rules, pinned=True).allowed
        assert not judge_addresses(addresses(text), rules).allowed


@given(st.integers(0, (1 << 128) - 1), st.integers(0, 8), st.integers(0, 8))
def test_text_and_bytes_of_ipv6_agree_with_the_c_library(value, first, length):
    groups = [value >> shift & 0xFFFF for shift in range(112, -1, -16)]
    groups[first : first + length] = [0] * len(groups[first : first + length])
    packed = b"".join(group.to_bytes(2, "big") for group in groups)
    address = Address.from_packed(packed)
    assert address.packed == packed
    assert socket.inet_pton(socket.AF_INET6, str(address)) == packed
    assert Address.parse(str(address)) == address
    assert Address.parse(socket.inet_ntop(socket.AF_INET6, packed)) == address
    assert Address.parse(ipaddress.IPv6Address(packed).exploded) == address


@given(st.text("0123456789abcdefg:.", max_size=24) | st.from_regex(r"[0-9a-f:.]{0,40}", fullmatch=True))
def test_text_is_an_address_exactly_if_the_c_library_says_so(text):
    family = socket.AF_INET6 if ":" in text else socket.AF_INET
    try:
        expected = socket.inet_pton(family, text)
    except OSError:
        expected = None
    try:
        found = Address.parse(text).packed
    except ValueError:
        found = None
    assert found == expected


def test_cidr_text():
    assert str(Cidr.parse("10.0.0.0/8")) == "10.0.0.0/8"
    assert Cidr.parse("10.1.1.1") == Cidr.parse("10.1.1.1/32")
    assert Cidr.parse("::/0").holds(Address(6, 1))
    assert not Cidr.parse("::/0").holds(Address(4, 1)), "families are told apart"
    for bad in ("10.1.1.1/8", "10.0.0.0/33", "10.0.0.0/", "10.0.0.0/08", "10.0.0.0/-1", "::/129", "x/8"):
        with pytest.raises(ValueError):
            Cidr.parse(bad)
