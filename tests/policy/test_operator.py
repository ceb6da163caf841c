"""The operator's file: what it may open, and what not even it may."""

from __future__ import annotations

import ipaddress

import pytest

from stockade.errors import ConfigError, PolicyError
from stockade.policy import OperatorConfig, load_operator

TEXT = """\
version: 1
unsafe_allow_cidrs:
  - {cidr: 10.20.0.0/24, reason: package mirror of the site}
  - {cidr: "fd00:20::/64", reason: package mirror of the site}
deny_cidrs: [198.51.100.0/24, 10.30.0.0/16]
resolvers: ["10.20.0.2", "10.20.0.3:5353", "fd00:20::2", "[fd00:20::3]:53"]
uid_range: {first: 2000000000, count: 1000}
"""


@pytest.fixture
def read(tmp_path):
    def load(text: str) -> OperatorConfig:
        path = tmp_path / "operator.yaml"
        path.write_text(text)
        return load_operator(path)

    return load


def test_every_key_is_read(read):
    config = read(TEXT)
    assert config.unsafe_allow_cidrs == (ipaddress.ip_network("10.20.0.0/24"), ipaddress.ip_network("fd00:20::/64"))
    assert [(one.reason, one.source_line) for one in config.unsafe_allow] == [
        ("package mirror of the site", 3),
        ("package mirror of the site", 4),
    ]
    assert config.deny_cidrs == (ipaddress.ip_network("198.51.100.0/24"), ipaddress.ip_network("10.30.0.0/16"))
    assert config.resolvers == ("10.20.0.2", "10.20.0.3:5353", "fd00:20::2", "[fd00:20::3]:53")
    assert (config.uid_range.first, config.uid_range.count) == (2_000_000_000, 1000)
    assert OperatorConfig.model_validate_json(config.model_dump_json()) == config


def test_without_a_file_nothing_is_opened():
    config = load_operator(None)
    assert (config.unsafe_allow_cidrs, config.deny_cidrs, config.resolvers) == ((), (), ())
    assert config.uid_range.first == 0x7000_0000
    assert config.uid_range.count == 65_536


def test_named_file_must_exist(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        load_operator(tmp_path / "none.yaml")
    assert not isinstance(caught.value, PolicyError)


@pytest.mark.promise("S1.6")
@pytest.mark.parametrize(
    "cidr",
    [
        "169.254.0.0/16",
        "169.254.169.254/32",
        "168.63.129.16/32",
        "168.63.0.0/16",
        "100.100.100.200/32",
        "100.64.0.0/10",
        "192.0.0.0/24",
        "fd00:ec2::/32",
        "fd00:ec2::254/128",
        "fd00::/8",
        "fc00::/7",
        "fd20:ce::/64",
        "fe80::/10",
        "fe80::/64",
        "0.0.0.0/0",
        "::/0",
        "0.0.0.0/8",
        "224.0.0.0/4",
        "240.0.0.0/4",
        "255.255.255.255/32",
        "ff00::/8",
        "128.0.0.0/1",
    ],
)
def test_egress_case_037_metadata_stays_closed_to_operators(read, cidr):
    with pytest.raises(ConfigError, match=r"can never be opened|carries IPv4") as caught:
        read(f"version: 1\nunsafe_allow_cidrs:\n  - {{cidr: '{cidr}', reason: package mirror of the site}}\n")
    assert (caught.value.line, caught.value.key) == (3, "unsafe_allow_cidrs[0].cidr")


@pytest.mark.parametrize("cidr", ["::ffff:a9fe:a9fe/128", "64:ff9b::/96", "2002:a9fe:a9fe::/48", "64:ff9b::a9fe:0/112"])
def test_egress_case_031_blocks_that_embed_ipv4(read, cidr):
    with pytest.raises(ConfigError, match="carries IPv4"):
        read(f"version: 1\nunsafe_allow_cidrs:\n  - {{cidr: '{cidr}', reason: package mirror of the site}}\n")


@pytest.mark.parametrize(
    "cidr", ["10.0.0.1/8", "10.0.0.0", "10.0.0.0/33", "10.0.0.0/255.0.0.0", "mirror", "''", "010.0.0.0/8", "10/8"]
)
def test_not_blocks(read, cidr):
    with pytest.raises(ConfigError):
        read(f"version: 1\ndeny_cidrs: [{cidr}]\n")


@pytest.mark.promise("S1.6")
@pytest.mark.parametrize("reason", ["", ", reason: ''", ", reason: short", ", reason: '          '"])
def test_opening_a_block_needs_a_reason(read, reason):
    with pytest.raises(ConfigError):
        read(f"version: 1\nunsafe_allow_cidrs:\n  - {{cidr: 10.0.0.0/24{reason}}}\n")


def test_contradictions(read):
    entry = "{cidr: 10.0.0.0/24, reason: package mirror of the site}"
    with pytest.raises(ConfigError, match="given twice"):
        read(f"version: 1\nunsafe_allow_cidrs: [{entry}, {entry}]\n")
    with pytest.raises(ConfigError, match="never takes effect") as caught:
        read(f"version: 1\nunsafe_allow_cidrs: [{entry}]\ndeny_cidrs: [10.0.0.0/8]\n")
    assert (caught.value.line, caught.value.key) == (2, "unsafe_allow_cidrs[0].cidr")


@pytest.mark.parametrize(
    "resolver",
    [
        "dns.example",
        "10.0.0.2:0",
        "10.0.0.2:65536",
        "10.0.0.2:053",
        "[10.0.0.2]:53",
        "fd00::2:",
        "0.0.0.0",
        "[::]:53",
        "224.0.0.1",
        "10.0.0",
        "''",
    ],
)
def test_not_resolvers(read, resolver):
    with pytest.raises(ConfigError) as caught:
        read(f"version: 1\nresolvers: ['{resolver.strip(chr(39))}']\n")
    assert caught.value.key == "resolvers[0]"


@pytest.mark.parametrize(
    "body",
    [
        "first: 0",
        "first: 1000",
        "first: 65535",
        "count: 0",
        "first: 4294967295",
        "first: 4294967294, count: 2",
        "frist: 70000",
    ],
)
def test_uid_ranges_that_hold_accounts_or_end_beyond(read, body):
    with pytest.raises(ConfigError):
        read(f"version: 1\nuid_range: {{{body}}}\n")


def test_misspelt_key_is_never_ignored(read):
    with pytest.raises(ConfigError, match="did you mean 'deny_cidrs'"):
        read("version: 1\ndeny_cidr: [10.0.0.0/8]\n")
