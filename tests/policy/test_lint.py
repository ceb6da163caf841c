"""Hosts of many owners: what a rule for one may do, and what it must say to do more."""

from __future__ import annotations

import pytest

from stockade.errors import PolicyError
from stockade.policy import HostRule, parse_policy


def read(rule: str) -> HostRule:
    return parse_policy(f"version: 1\negress:\n  allow:\n    - {{{rule}}}\n", source="p").egress.allow[0]


OPEN = [
    *("github.com", "api.github.com", "gist.github.com", "gist.githubusercontent.com", "gitlab.com", "huggingface.co"),
    *("pastebin.com", "0x0.st", "transfer.sh", "webhook.site", "abc.webhook.site", "hooks.slack.com", "discord.com"),
    *("api.telegram.org", "docs.google.com", "api.dropboxapi.com", "x.oastify.com", "upload.pypi.org"),
]


@pytest.mark.parametrize("host", OPEN)
@pytest.mark.parametrize(
    "keys",
    [
        "",
        ", tls: opaque",
        ", tls: inspect",
        ", methods: [GET]",
        ", paths: [/a/**]",
        ", methods: [GET, POST], paths: [/a]",
    ],
)
def test_egress_cases_068_098_nothing_is_written_where_anybody_can_receive(host, keys):
    with pytest.raises(PolicyError, match="anybody can publish or receive on") as caught:
        read(f"host: {host}{keys}")
    assert caught.value.key == "egress.allow[0].host"


@pytest.mark.parametrize("host", OPEN)
@pytest.mark.parametrize(
    "keys", ["read_only: true", "methods: [GET, HEAD], paths: [/a/**]", "unsafe_many_owners: true"]
)
def test_reading_and_what_says_that_it_is_unsafe_are_taken(host, keys):
    assert read(f"host: {host}, {keys}").host.text == host


@pytest.mark.parametrize("host", ["*.github.com", "*.slack.com", "*.b.webhook.site", "*.webhook.site"])
def test_a_wildcard_over_such_a_host_is_one(host):
    with pytest.raises(PolicyError, match="anybody can publish or receive on"):
        read(f"host: '{host}'")
    read(f"host: '{host}', read_only: true")


@pytest.mark.parametrize("host", ["notgithub.com", "github.com.example", "webhook.site.example", "www.github.example"])
def test_egress_case_018_names_that_only_look_alike_are_not_meant(host):
    assert read(f"host: {host}").tunnel


def test_egress_case_067_fetching_over_git_is_reading():
    paths = 'paths: ["/*/*/git-upload-pack"]'
    assert read(f"host: gitlab.com, methods: [POST], {paths}").methods == ("POST",)
    for rule in (
        'methods: [POST], paths: ["/*/*/git-upload-pack", "/*/*/git-receive-pack"]',
        'methods: [POST], paths: ["/*/*/git-upload-pack/**"]',
        f"methods: [PUT], {paths}",
        paths,
    ):
        with pytest.raises(PolicyError, match="anybody can publish"):
            read(f"host: gitlab.com, {rule}")


RESOLVERS = [
    *("dns.google", "cloudflare-dns.com", "mozilla.cloudflare-dns.com", "one.one.one.one", "dns.quad9.net"),
    *("doh.opendns.com", "abc.dns.nextdns.io", "dns.adguard-dns.com", "doh.pub", "dns.mullvad.net"),
]


@pytest.mark.parametrize("host", RESOLVERS)
@pytest.mark.parametrize(
    "keys", ["", ", read_only: true", ", methods: [GET], paths: [/x]", ", tcp: true, ports: [853]"]
)
def test_egress_case_044_resolvers_are_refused_whatever_the_rule_says(host, keys):
    with pytest.raises(PolicyError, match="answers DNS queries over HTTPS"):
        read(f"host: {host}{keys}")


def test_egress_case_044_resolvers_by_address_and_under_wildcards():
    for rule in (
        "host: 8.8.8.8, ports: [443]",
        "host: 1.1.1.1, ports: [443]",
        "host: '2606:4700:4700::1111', ports: [443]",
    ):
        with pytest.raises(PolicyError, match="answers DNS queries"):
            read(rule)
    for host in ("*.cloudflare-dns.com", "*.quad9.net", "*.eu.dns.nextdns.io"):
        with pytest.raises(PolicyError, match="answers DNS queries"):
            read(f"host: '{host}', read_only: true")
    assert read("host: dns.google, unsafe_many_owners: true").unsafe_many_owners


@pytest.mark.parametrize(
    "host", ["'*.com'", "'*.co.uk'", "'*.github.io'", "'*.amazonaws.com'", "s3.amazonaws.com", "storage.googleapis.com"]
)
def test_egress_cases_020_098_shared_names_need_the_word_unsafe(host):
    for keys in ("", ", read_only: true", ", methods: [GET]"):
        with pytest.raises(PolicyError, match=r"anybody can own|shared by many owners"):
            read(f"host: {host}{keys}")
    assert read(f"host: {host}, unsafe_many_owners: true").unsafe_many_owners


@pytest.mark.parametrize(
    "rule",
    [
        "host: '*', unsafe_many_owners: true",
        "host: localhost, unsafe_many_owners: true",
        "host: 10.0.0.1, ports: [443], unsafe_many_owners: true",
        "host: 169.254.169.254, ports: [80], unsafe_many_owners: true",
        "host: a.stockade.internal, unsafe_many_owners: true",
    ],
)
def test_no_word_opens_everything_or_what_is_internal(rule):
    with pytest.raises(PolicyError):
        read(rule)
