"""Rules that are each right alone and wrong together, in whatever order they stand."""

from __future__ import annotations

import pytest

from stockade.errors import PolicyError
from stockade.policy import parse_policy


def egress(allow: list[str], deny: list[str] = []) -> str:  # noqa: B006
    lines = ["version: 1", "egress:"]
    for kind, rules in (("allow", allow), ("deny", deny)):
        lines += [f"  {kind}:", *(f"    - {{{rule}}}" for rule in rules)] if rules else []
    return "\n".join(lines) + "\n"


def refused(text: str, message: str) -> PolicyError:
    with pytest.raises(PolicyError, match=message) as caught:
        parse_policy(text, source="p")
    return caught.value


@pytest.mark.promise("S1.1")
@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("host: a.example", "host: A.example"),
        ("host: bücher.example", "host: xn--bcher-kva.example"),
        ("host: a.example, ports: [80, 443]", "host: a.example, ports: [443, 80]"),
        ("host: a.example, methods: [GET, HEAD]", "host: a.example, methods: [HEAD, GET]"),
        ("host: '*.a.example', paths: [/x]", "host: '*.a.example', paths: [/x]"),
    ],
)
def test_one_rule_twice(one, two):
    error = refused(egress([one, "host: b.example", two]), "given twice")
    assert (error.line, error.key, error.hint) == (6, "egress.allow[2].host", "see line 4; keep one of the two")
    refused(egress(["host: z.example"], [one, two]), "given twice")


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("host: a.example", "host: b.example"),
        ("host: a.example", "host: a.example, ports: [8443]"),
        ("host: a.example, methods: [GET]", "host: a.example, methods: [POST], paths: [/x]"),
        ("host: '*.a.example', methods: [GET]", "host: b.a.example, methods: [POST]"),
        ("host: '*.a.example'", "host: a.example"),
        ("host: '*.a.example'", "host: a.example, methods: [GET]"),
    ],
)
def test_rules_that_add_to_each_other(one, two):
    for rules in ([one, two], [two, one]):
        assert len(parse_policy(egress(rules), source="p").egress.allow) == 2


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [
        ("host: a.example", "host: a.example, methods: [GET]"),
        ("host: a.example, ports: [80, 443]", "host: a.example, paths: [/x]"),
        ("host: '*.a.example'", "host: x.y.a.example, methods: [GET]"),
        ("host: '*.a.example'", "host: '*.b.a.example', methods: [GET]"),
    ],
)
def test_rule_that_a_tunnel_makes_meaningless(wide, narrow):
    assert refused(egress([wide, narrow]), "tunnels to it are open").line == 5
    assert refused(egress([narrow, wide]), "tunnels to it are open").line == 4


@pytest.mark.parametrize(
    ("allow", "deny"),
    [
        ("host: a.example", "host: a.example"),
        ("host: b.a.example", "host: '*.a.example'"),
        ("host: '*.b.a.example'", "host: '*.a.example'"),
        ("host: a.example, ports: [80]", "host: a.example, ports: [443, 80]"),
        ("host: a.example, methods: [GET]", "host: a.example, methods: [HEAD, GET]"),
        ("host: a.example, paths: [/x/y]", "host: a.example, paths: [/x/**]"),
        ("host: a.example, paths: [/x/y]", "host: a.example, paths: ['/**']"),
        ("host: a.example", "host: '*.example'"),
    ],
)
def test_allowance_that_never_takes_effect(allow, deny):
    error = refused(egress([allow], [deny]), "never takes effect")
    assert (error.line, error.key) == (4, "egress.allow[0].host")


@pytest.mark.parametrize(
    ("allow", "deny"),
    [
        ("host: '*.a.example'", "host: b.a.example"),
        ("host: a.example", "host: '*.a.example'"),
        ("host: a.example, ports: [80, 443]", "host: a.example, ports: [80]"),
        ("host: a.example, methods: [GET, POST]", "host: a.example, methods: [POST]"),
        ("host: a.example, paths: ['/x/**']", "host: a.example, paths: [/x/y]"),
        ("host: a.example, methods: [GET]", "host: a.example, methods: [GET], paths: [/x]"),
        ("host: a.example", "host: '*.com'"),
    ],
)
def test_allowance_with_exceptions(allow, deny):
    assert parse_policy(egress([allow], [deny]), source="p").egress.deny


@pytest.mark.parametrize(
    ("allow", "deny"),
    [
        ("host: a.example", "host: a.example, methods: [POST]"),
        ("host: '*.a.example'", "host: b.a.example, paths: ['/x/**']"),
        ("host: b.a.example", "host: '*.a.example', paths: ['/x/**']"),
    ],
)
def test_denial_that_a_tunnel_goes_around(allow, deny):
    error = refused(egress([allow], [deny]), "cannot be denied inside a tunnel")
    assert (error.line, error.key) == (6, "egress.deny[0].host")


def test_denial_elsewhere_than_the_tunnel():
    parse_policy(egress(["host: a.example"], ["host: a.example, ports: [80], methods: [POST]"]), source="p")


def test_denial_means_every_port():
    """A default of 443 here would leave port 80 of a denied host open."""
    policy = parse_policy(egress(["host: '*.a.example', ports: [80, 443]"], ["host: b.a.example"]), source="p")
    assert policy.egress.deny[0].ports is None


def test_many_rules_are_checked_in_time():
    rules = [f"host: h{index}.example.org, methods: [GET]" for index in range(500)]
    assert len(parse_policy(egress(rules), source="p").egress.allow) == 500
    refused(egress([*rules, "host: h0.example.org, methods: [GET]"]), "too long")
    refused(egress([*rules[:-1], rules[0]]), "given twice")


# -------------------------------------------------------------------------------------- mounts


def mounts(*targets: str) -> str:
    lines = [f"  - {{source: /srv/d{index}, target: {target}}}" for index, target in enumerate(targets)]
    return "\n".join(["version: 1", "mounts:", *lines, ""])


@pytest.mark.parametrize("targets", [("/data", "/data"), ("/data", "/data/a"), ("/data/a/b", "/data")])
def test_mounts_that_hide_each_other(targets):
    error = refused(mounts("/other", *targets), "overlaps")
    assert (error.line, error.key) == (5, "mounts[2].target")


def test_mounts_side_by_side():
    assert len(parse_policy(mounts("/data", "/data2", "/opt/a", "/opt/b"), source="p").mounts) == 4


@pytest.mark.parametrize(
    "target",
    [
        "/",
        "/usr",
        "/usr/bin",
        "/usr/local/share/x",
        "/proc",
        "/proc/self",
        "/dev",
        "/dev/shm",
        "/sys",
        "/tmp",
        "/tmp/x",
        "/workspace",
        "/workspace/data",
        "/sandbox",
        "/sandbox/home",
        "/etc",
        "/etc/ssl",
        "/run",
        "/var",
        "/var/lib/x",
        "/home",
        "/home/x",
        "/root",
        "/bin",
        "/sbin",
        "/lib",
        "/lib64",
        "/boot",
    ],
)
def test_targets_that_are_the_sandboxs_own(target):
    assert refused(mounts(target), "the sandbox's own").key == "mounts[0].target"


@pytest.mark.parametrize(
    "target",
    [
        "data",
        "./data",
        "/data/",
        "/data//x",
        "/data/../etc",
        "/data/./x",
        "'/da\\ta'",
        "'/dat*'",
        "'/data '",
        "/d\u00e4ta",
    ],
)
def test_targets_in_another_spelling(target):
    refused(mounts(target), "not absolute|not a plain path|'..'")


@pytest.mark.parametrize(
    "source",
    [
        "/",
        "/proc",
        "/proc/1/root",
        "/sys",
        "/dev",
        "/dev/kvm",
        "/run",
        "/run/docker.sock",
        "/var/run/dbus",
        "/var",
        "/etc",
        "/root",
        "/home",
        "/boot",
    ],
)
def test_sources_that_hold_the_hosts_secrets(source):
    refused(f"version: 1\nmounts: [{{source: {source}, target: /data}}]\n", "must not be mounted")


@pytest.mark.parametrize(
    "source", ["/srv/data", "/home/ann/data", "/mnt/a b/c", "/var/lib/data", "/runs", "/scratch/x-1_2@3"]
)
def test_sources(source):
    policy = parse_policy(f"version: 1\nmounts: [{{source: {source}, target: /data}}]\n", source="p")
    assert policy.mounts[0].read_only
