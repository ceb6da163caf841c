"""Rules and the decision: cases 1, 17 to 22, 42, 62, 63, 66, 67, 69, 96 and 100 of the bypass table."""

from __future__ import annotations

import pytest

from stockade.egress.gate import (
    Address,
    Destination,
    HeadLimits,
    Limits,
    Reason,
    Request,
    Rules,
    Verdict,
    Way,
    decide,
    judge_addresses,
    parse_head,
    parse_host,
)
from stockade.policy import effective, load_operator, parse_policy

POLICY = """
version: 1
egress:
  allow:
    - {host: tunnel.example}
    - {host: "*.wild.example", ports: [443, 8443]}
    - {host: xn--bcher-kva.example}
    - {host: read.example, methods: [GET, HEAD], paths: ["/simple/**", "/o/r/info/refs"], ports: [80]}
    - {host: open.example, ports: [80]}
    - {host: both.example, ports: [80, 443]}
    - {host: 140.82.114.4, ports: [443]}
    - {host: "2a04:4e42::223", ports: [80]}
    - {host: "*.forge.example", methods: [GET], ports: [80]}
  deny:
    - {host: bad.wild.example}
    - {host: both.example, ports: [80]}
    - {host: "*.forge.example", paths: ["/solutions/**"]}
  limits: {requests_per_minute: 7, bytes_out: 2 MiB, idle: 5}
services:
  - {name: model, address: 127.0.0.1, port: 8000, methods: [POST], paths: ["/v1/completions"]}
"""


def rules_of(text, **own):
    return Rules.from_policy(parse_policy(text, source="test.yaml"), load_operator(None), **own)


@pytest.fixture(scope="module", params=["compiled", "through_json"])
def rules(request):
    made = rules_of(
        POLICY, own_addresses=["198.41.0.4", "fe80::1%eth0"], own_names=["Node7.Cluster.example", "bad_name"]
    )
    return made if request.param == "compiled" else Rules.from_json(made.to_json())


def connect(host, port=443):
    return Request(Destination(Way.CONNECT, parse_host(host.encode()), port), "CONNECT", "")


def http(url, method="GET"):
    authority = url.split("/")[2]
    head = f"{method} {url} HTTP/1.1\r\nHost: {authority}\r\n\r\n"
    return parse_head(head.encode(), HeadLimits()).request


ALLOWED, HOST, PORT = Reason.ALLOWED, Reason.HOST_NOT_ALLOWED, Reason.PORT_NOT_ALLOWED
METHOD, PATH, INSPECT = Reason.METHOD_NOT_ALLOWED, Reason.PATH_NOT_ALLOWED, Reason.INSPECTION_REQUIRED

CONNECTS = [
    ("egress_case_001_listed_literal", "140.82.114.4", 443, ALLOWED),
    ("egress_case_001_unlisted_literal", "140.82.114.5", 443, HOST),
    ("egress_case_001_listed_literal_other_port", "140.82.114.4", 80, PORT),
    ("egress_case_002_loopback", "[::1]", 443, HOST),
    ("egress_case_006_trailing_dot", "tunnel.example.", 443, ALLOWED),
    ("egress_case_006_unlisted_trailing_dot", "evil.example.", 443, HOST),
    ("egress_case_007_case", "Tunnel.EXAMPLE", 443, ALLOWED),
    ("egress_case_017_a_label", "xn--bcher-kva.example", 443, ALLOWED),
    ("egress_case_018_no_label_border", "nottunnel.example", 443, HOST),
    ("egress_case_018_prefix", "tunnel.example.evil.example", 443, HOST),
    ("egress_case_018_subdomain_of_exact", "a.tunnel.example", 443, HOST),
    ("egress_case_018_no_border_wild", "notwild.example", 443, HOST),
    ("egress_case_019_one_level", "a.wild.example", 443, ALLOWED),
    ("egress_case_019_three_levels", "a.b.c.wild.example", 8443, ALLOWED),
    ("egress_case_019_apex", "wild.example", 443, HOST),
    ("egress_case_022_ssh", "tunnel.example", 22, PORT),
    ("egress_case_022_smtp", "a.wild.example", 25, PORT),
    ("egress_case_022_redis", "tunnel.example", 6379, PORT),
    ("egress_case_022_http", "tunnel.example", 80, PORT),
    ("egress_case_063_read_only_host", "read.example", 80, INSPECT),
    ("egress_case_063_read_only_host_443", "read.example", 443, PORT),
    ("egress_case_096_own_name", "node7.cluster.example", 443, Reason.OWN_ADDRESS),
    ("egress_case_096_localhost", "localhost", 443, Reason.OWN_ADDRESS),
    ("egress_case_096_below_localhost", "a.localhost", 443, Reason.OWN_ADDRESS),
    ("denied_below_wildcard", "bad.wild.example", 443, Reason.DENIED_BY_RULE),
    ("denied_port", "both.example", 80, Reason.DENIED_BY_RULE),
    ("open_port", "both.example", 443, ALLOWED),
    ("no_tunnel_where_only_requests_are_allowed", "x.forge.example", 443, PORT),
    ("deny_with_paths_cannot_be_held_in_a_tunnel", "x.forge.example", 80, INSPECT),
    ("service_by_tunnel", "model.stockade.internal", 8000, INSPECT),
    ("service_unknown", "other.stockade.internal", 443, HOST),
    ("service_zone", "stockade.internal", 443, HOST),
    ("no_service_zone", "xstockade.internal", 443, HOST),
    ("no_localhost", "xlocalhost", 443, HOST),
    ("below_no_localhost", "localhost.example", 443, HOST),
]


@pytest.mark.parametrize(("host", "port", "reason"), [pytest.param(*c[1:], id=c[0]) for c in CONNECTS])
def test_connect(rules, host, port, reason):
    verdict = decide(connect(host, port), rules)
    assert verdict.reason is reason
    assert verdict.allowed == (reason is ALLOWED)


HTTPS = [
    ("listed", "http://open.example/any/thing?x=1", "DELETE", ALLOWED),
    ("egress_case_062_tunnel_rule_in_clear", "http://tunnel.example/", "GET", PORT),
    ("egress_case_062_clear_text_to_443", "http://tunnel.example:443/", "GET", PORT),
    ("egress_case_062_post_to_read_only", "http://read.example/simple/x", "POST", METHOD),
    ("read", "http://read.example/simple/", "GET", ALLOWED),
    ("read_below", "http://read.example/simple/a/b?c=/d", "HEAD", ALLOWED),
    ("egress_case_066_other_path", "http://read.example/other", "GET", PATH),
    ("egress_case_066_path_without_slash", "http://read.example/simple", "GET", PATH),
    ("egress_case_066_empty_segment", "http://read.example/simple//x", "GET", PATH),
    ("egress_case_066_parameters", "http://read.example/simple/x;y", "GET", PATH),
    ("egress_case_066_empty_segment_where_any_path_is_allowed", "http://open.example/a//b;c", "GET", ALLOWED),
    ("egress_case_067_fetch", "http://read.example/o/r/info/refs?service=git-upload-pack", "GET", ALLOWED),
    ("egress_case_067_push", "http://read.example/o/r/git-receive-pack", "POST", METHOD),
    ("egress_case_069_method", "http://read.example/simple/x?_method=DELETE", "GET", METHOD),
    ("egress_case_069_encoded", "http://read.example/simple/x?a=1&%5Fmethod=DELETE", "GET", METHOD),
    ("egress_case_069_header_name", "http://read.example/simple/x?X-HTTP-Method-Override=PUT", "GET", METHOD),
    ("egress_case_069_other_key", "http://read.example/simple/x?my_method=a&q=_method", "GET", ALLOWED),
    ("egress_case_069_where_any_method_is_allowed", "http://open.example/x?_method=DELETE", "POST", ALLOWED),
    ("egress_case_100_denied_path", "http://a.forge.example/solutions/1", "GET", Reason.DENIED_BY_RULE),
    ("egress_case_100_denied_path_in_capitals", "http://a.forge.example/SOLUTIONS/1", "GET", Reason.DENIED_BY_RULE),
    ("egress_case_100_denied_path_doubtful", "http://a.forge.example//solutions/1", "GET", Reason.DENIED_BY_RULE),
    ("egress_case_100_denied_path_parameters", "http://a.forge.example/solutions;x/1", "GET", Reason.DENIED_BY_RULE),
    ("egress_case_100_other_path", "http://a.forge.example/repo", "GET", ALLOWED),
    ("literal", "http://[2a04:4e42::223]/", "GET", ALLOWED),
    ("literal_other_spelling", "http://[2A04:4E42:0:0::0223]/", "GET", ALLOWED),
    ("literal_unlisted", "http://[2a04:4e42::224]/", "GET", HOST),
    ("literal_mapped", "http://[::ffff:140.82.114.4]:443/", "GET", HOST),
    ("service", "http://model.stockade.internal:8000/v1/completions", "POST", ALLOWED),
    ("service_method", "http://model.stockade.internal:8000/v1/completions", "GET", METHOD),
    ("service_path", "http://model.stockade.internal:8000/v1/models", "POST", PATH),
    ("service_path_doubtful", "http://model.stockade.internal:8000//v1/completions", "POST", PATH),
    ("service_port", "http://model.stockade.internal/v1/completions", "POST", PORT),
    ("service_by_address", "http://127.0.0.1:8000/v1/completions", "POST", HOST),
]


@pytest.mark.promise("S1.2")
@pytest.mark.parametrize(("url", "method", "reason"), [pytest.param(*c[1:], id=c[0]) for c in HTTPS])
def test_http(rules, url, method, reason):
    verdict = decide(http(url, method), rules)
    assert verdict.reason is reason
    assert verdict.allowed == (reason is ALLOWED)


def test_verdict_names_its_rule_and_what_follows_from_it(rules):
    wild = decide(connect("a.wild.example"), rules)
    assert (wild.wildcard, wild.pinned) == (True, None)
    assert str(wild.rule).startswith("allow *.wild.example line ")
    assert not decide(connect("tunnel.example"), rules).wildcard
    assert str(decide(connect("bad.wild.example"), rules).rule).startswith("deny bad.wild.example line ")
    service = decide(http("http://model.stockade.internal:8000/v1/completions", "POST"), rules)
    assert service.pinned == Address.parse("127.0.0.1")
    assert judge_addresses([service.pinned], rules, pinned=True).allowed
    assert not judge_addresses([service.pinned], rules).allowed


def test_verdict_has_no_truth_value():
    for verdict in (Verdict(True, ALLOWED), Verdict(False, HOST)):
        with pytest.raises(TypeError, match="allowed"):
            bool(verdict)
        with pytest.raises(AttributeError):
            verdict.allowed = True  # type: ignore[misc]


def test_own_addresses_are_read(rules):
    assert rules.own_addresses == {Address.parse("198.41.0.4"), Address.parse("fe80::1")}
    assert judge_addresses([Address.parse("198.41.0.4")], rules).reason is Reason.OWN_ADDRESS


def test_limits_are_those_of_the_policy(rules):
    assert rules.limits == Limits(requests_per_minute=7, bytes_out=2 << 20, idle_s=5.0)
    assert rules.limits.head == HeadLimits(64 << 10, 100)


def test_operator_settings_are_read(tmp_path):
    path = tmp_path / "operator.yaml"
    path.write_text(
        "version: 1\n"
        "unsafe_allow_cidrs: [{cidr: 10.20.0.0/24, reason: mirror of the site}]\n"
        "deny_cidrs: [11.1.0.0/16]\n"
    )
    made = Rules.from_policy(parse_policy("version: 1\n", source="p"), load_operator(path))
    assert judge_addresses([Address.parse("10.20.0.9")], made).allowed
    assert judge_addresses([Address.parse("11.1.0.1")], made).reason is Reason.DENIED_ADDRESS
    assert Rules.from_json(made.to_json()) == made


def test_json_gives_the_same_rules(rules):
    text = rules.to_json()
    assert text.isascii()
    assert "\n" not in text
    assert Rules.from_json(text) == rules
    assert Rules.from_json(text.encode()).to_json() == text


@pytest.mark.promise("S1.2")
def test_egress_case_091_no_rules_allow_nothing():
    policy = parse_policy(POLICY, source="test.yaml")
    for empty in (
        Rules(),
        rules_of("version: 1\n"),
        Rules.from_policy(effective(policy, network=False), load_operator(None)),
    ):
        for _, host, port, _ in CONNECTS:
            assert not decide(connect(host, port), empty).allowed
        for _, url, method, _ in HTTPS:
            assert not decide(http(url, method), empty).allowed


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"version":2', '"version":1'),
        ('"version":2', '"version":2,"more":true'),
        ('"idle_s":', '"idle":'),
        ('"ports":[443]', '"ports":null'),
        ('"ports":[443]', '"ports":[]'),
        ('"ports":[443]', '"ports":["443"]'),
        ('"ports":[443],', ""),
        ('"host":"tunnel.example"', '"host":"*"'),
        ('"host":"tunnel.example"', '"host":"a..b"'),
        ('"host":"tunnel.example"', '"host":"*.1.2.3.4"'),
        ('"host":"tunnel.example"', '"host":"t\\u00fcnnel.example"'),
        ('"/simple/**"', '"simple/**"'),
        ('"127.0.0.1"', '"127.1"'),
        ("{", "["),
    ],
)
def test_egress_case_091_damaged_json_is_no_rules(old, new):
    text = rules_of(POLICY).to_json()
    assert old in text
    with pytest.raises(ValueError):
        Rules.from_json(text.replace(old, new, 1))


def test_egress_case_042_a_denied_name_needs_no_address(rules):
    """The decision takes no address, so a resolver cannot have been asked for one."""
    secret = "mfzwizltoq2gc3lqnrsq.evil.example"
    assert decide(connect(secret), rules).reason is HOST
