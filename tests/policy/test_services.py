"""Services: exact addresses only, and never one of a cloud's metadata services in any spelling."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.errors import PolicyError
from stockade.policy import Service, parse_policy
from stockade.policy._addresses import METADATA, is_metadata, parse_address

REST = "port: 8000, methods: [GET], paths: ['/**']"


def service(address: str, name: str = "model") -> Service:
    text = f"version: 1\nservices:\n  - {{name: {name}, address: '{address}', {REST}}}\n"
    return parse_policy(text, source="p").services[0]


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.0.9", "::1", "fd00:1::5", "11.0.0.1", "100.64.0.1"]
)
def test_addresses_of_services(address):
    assert service(address).address == address


@pytest.mark.promise("S1.4")
@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254",
        "169.254.170.2",
        "169.254.0.1",
        "169.254.255.255",
        "100.100.100.200",
        "168.63.129.16",
        "192.0.0.192",
        "fd00:ec2::254",
        "fd00:ec2::23",
        "fd20:ce::254",
        "fe80::1",
        "febf::1",
        "fe80::a9fe:a9fe",
    ],
)
def test_egress_cases_027_037_metadata_addresses(address):
    with pytest.raises(PolicyError, match="metadata") as caught:
        service(address)
    assert (caught.value.line, caught.value.key) == (3, "services[0].address")


@pytest.mark.parametrize(
    "address",
    [
        "::ffff:169.254.169.254",
        "::ffff:a9fe:a9fe",
        "::169.254.169.254",
        "::ffff:0:a9fe:a9fe",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::a9fe:a9fe",
        "2002:a9fe:a9fe::1",
        "2001:0:1::5601:5601",
        "2001:db8::5efe:a9fe:a9fe",
        "fd00::200:5efe:a9fe:a9fe",
    ],
)
def test_egress_cases_030_033_metadata_inside_ipv6(address):
    naive = any(ipaddress.ip_address(address) in network for network in METADATA)
    assert not naive, "a table of addresses alone lets this through"
    with pytest.raises(PolicyError, match=r"carries an IPv4 address|odd spelling"):
        service(address)


@pytest.mark.parametrize(
    "address",
    ["0.0.0.0", "0.1.2.3", "::", "224.0.0.1", "239.255.255.255", "255.255.255.255", "240.0.0.1", "ff02::1", "ff0e::1"],
)
def test_egress_case_005_addresses_that_are_no_host(address):
    with pytest.raises(PolicyError, match="unspecified, multicast"):
        service(address)


@pytest.mark.parametrize(
    "address",
    [
        "localhost",
        "model",
        "",
        "127.1",
        "0x7f000001",
        "2130706433",
        "127.0.0.01",
        "127.0.0.1:80",
        "[::1]",
        "::1%lo",
        "fe80::1%eth0",
        "fd00::1%1",
        "0:0:0:0:0:0:0:1",
        "fd00:0::1",
        "127.0.0.1 ",
        "１２７.0.0.1",
        "127.0.0.1/32",
    ],
)
def test_egress_cases_003_011_spellings(address):
    with pytest.raises(PolicyError):
        service(address)


@given(st.integers(0, 2**32 - 1).map(lambda number: str(ipaddress.IPv4Address(number))) | st.text(max_size=30))
def test_any_text_is_an_address_or_refused(text):
    try:
        address = parse_address(text)
    except PolicyError:
        return
    assert address == text
    assert not is_metadata(ipaddress.ip_address(address))


@pytest.mark.parametrize("name", ["a", "model", "m0", "a-b", "a" * 31])
def test_names(name):
    assert service("127.0.0.1", name).host == f"{name}.stockade.internal"


@pytest.mark.parametrize("name", ["''", "A", "0a", "-a", "a-", "a_b", "a.b", "xn--a", "a" * 32, "'a b'", "é", "'*'"])
def test_bad_names(name):
    with pytest.raises(PolicyError):
        service("127.0.0.1", name)


@pytest.mark.promise("S1.4")
@pytest.mark.parametrize("missing", ["name", "address", "port", "methods", "paths"])
def test_every_key_is_required(missing):
    keys = {"name": "m", "address": "127.0.0.1", "port": "80", "methods": "[GET]", "paths": "[/]"}
    body = ", ".join(f"{key}: {value}" for key, value in keys.items() if key != missing)
    with pytest.raises(PolicyError, match="the key is missing") as caught:
        parse_policy(f"version: 1\nservices:\n  - {{{body}}}\n", source="p")
    assert (caught.value.line, caught.value.key) == (3, f"services[0].{missing}")


@pytest.mark.parametrize("key", ["methods", "paths"])
def test_empty_lists_are_refused(key):
    text = f"version: 1\nservices:\n  - {{name: m, address: 127.0.0.1, {REST}}}\n"
    old = {"methods": "[GET]", "paths": "['/**']"}[key]
    with pytest.raises(PolicyError, match="an empty list"):
        parse_policy(text.replace(old, "[]"), source="p")


@pytest.mark.promise("S1.4")
def test_services_are_out_of_reach_of_host_rules():
    for host in ("stockade.internal", "model.stockade.internal", "'*.stockade.internal'", "'*.a.stockade.internal'"):
        for kind in ("allow", "deny"):
            with pytest.raises(PolicyError, match="zone of services"):
                parse_policy(f"version: 1\negress: {{{kind}: [{{host: {host}}}]}}\n", source="p")
    with pytest.raises(PolicyError, match="anybody can own"):
        parse_policy("version: 1\negress: {allow: [{host: '*.internal'}]}\n", source="p")
