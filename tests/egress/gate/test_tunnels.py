"""How deep a tunnel is looked into: cases 22, 62, 63, 76, 77, 84, 85 and 100 of the bypass table, for each way in."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.egress.gate import (
    Address,
    Credential,
    Destination,
    Grant,
    Handling,
    Mode,
    Reason,
    Request,
    Rule,
    Rules,
    ServiceRule,
    Way,
    decide,
    judge_hello,
    parse_host,
)
from stockade.egress.gate._tls import Hello

TUNNELS = [Way.CONNECT, Way.SOCKS5, Way.TRANSPARENT]
MODES = [Mode.LIVE, Mode.RECORD, Mode.REPLAY]
KEYS = (Credential("key", "X-Api-Key", "s3cr3t-value"),)


def rule(host, ports=(443,), **more):
    return Rule(host, more.pop("methods", None), more.pop("paths", None), ports, 1, **more)


def tunnel(host, port=443, way=Way.CONNECT):
    return Request(Destination(way, parse_host(host.encode()), port), "CONNECT", "", None, "")


def rules(*allow, **more):
    return Rules(allow=allow, credentials=KEYS, **more)


def terms(verdict) -> Grant:
    assert verdict.grant is not None
    return verdict.grant


SIGHT = {
    "methods": {"methods": ("GET",)},
    "paths": {"paths": ("/a/**",)},
    "query": {"query": (("service", "git-upload-pack"),)},
    "read_only": {"read_only": True},
    "websocket": {"websocket": True},
    "credential": {"credential": "key"},
    "strip_credentials": {"strip_credentials": True},
    "store": {"store": True},
    "encoded_slash": {"encoded_slash": True},
    "query_bytes": {"query_bytes": 100},
    "tls_inspect": {"tls": "inspect"},
}


@pytest.mark.parametrize("way", TUNNELS)
@pytest.mark.parametrize("more", SIGHT.values(), ids=SIGHT)
def test_egress_case_063_what_must_be_seen_is_inspected_or_refused(way, more):
    made = rules(rule("a.example", **more), inspection=True)
    verdict = decide(tunnel("a.example", way=way), made)
    assert (verdict.allowed, verdict.handling, terms(verdict).index) == (True, Handling.INSPECT, 0)
    blind = decide(tunnel("a.example", way=way), rules(rule("a.example", **more)))
    assert (blind.allowed, blind.reason, blind.grant) == (False, Reason.INSPECTION_REQUIRED, None)
    assert blind.rule == "allow a.example line 1"


@pytest.mark.parametrize("way", TUNNELS)
@pytest.mark.parametrize("tls", ["auto", "opaque"])
@pytest.mark.parametrize("inspection", [False, True])
def test_a_rule_that_names_a_host_only_is_an_opaque_tunnel(way, tls, inspection):
    verdict = decide(tunnel("a.example", way=way), rules(rule("a.example", tls=tls), inspection=inspection))
    assert (verdict.allowed, verdict.handling) == (True, Handling.OPAQUE)


@pytest.mark.parametrize("way", TUNNELS)
def test_egress_case_085_tcp_only_with_a_tcp_rule(way):
    made = rules(rule("git.example", (22,), tcp=True), rule("*.example", (443,)))
    assert decide(tunnel("git.example", 22, way), made).handling is Handling.RAW
    assert decide(tunnel("git.example", 443, way), made).handling is Handling.OPAQUE
    assert decide(tunnel("other.example", 22, way), made).reason is Reason.PORT_NOT_ALLOWED


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_tcp_rule_allows_no_parsed_request(scheme):
    where = Destination(Way.HTTP, parse_host(b"git.example"), 22)
    verdict = decide(Request(where, "GET", "/", None, scheme), rules(rule("git.example", (22,), tcp=True)))
    assert verdict.reason is Reason.PORT_NOT_ALLOWED


@pytest.mark.parametrize("mode", [Mode.RECORD, Mode.REPLAY])
@pytest.mark.parametrize("way", TUNNELS)
def test_nothing_unseen_is_recorded_or_replayed(mode, way):
    allow = (rule("a.example"), rule("b.example", tls="opaque"), rule("c.example", tcp=True))
    made = rules(*allow, mode=mode, inspection=True)
    assert decide(tunnel("a.example", way=way), made).handling is Handling.INSPECT
    assert decide(tunnel("b.example", way=way), made).handling is Handling.INSPECT
    assert decide(tunnel("c.example", way=way), made).reason is Reason.NOT_REPLAYABLE
    blind = rules(*allow, mode=mode)
    assert decide(tunnel("a.example", way=way), blind).reason is Reason.INSPECTION_REQUIRED
    assert decide(tunnel("c.example", way=way), blind).reason is Reason.NOT_REPLAYABLE


def test_with_a_tcp_and_another_rule_what_can_be_seen_is_seen_when_recording():
    both = (rule("a.example", tcp=True), rule("a.example", methods=("GET",)))
    assert decide(tunnel("a.example"), rules(*both, inspection=True)).handling is Handling.RAW
    recorded = decide(tunnel("a.example"), rules(*both, inspection=True, mode=Mode.RECORD))
    assert (recorded.handling, terms(recorded).index) == (Handling.INSPECT, 1)


@pytest.mark.parametrize("request_", [tunnel("a.example"), tunnel("nobody.example"), tunnel("localhost"),
                                      tunnel("model.stockade.internal", 8000)])  # fmt: skip
def test_mode_off_refuses_everything(request_):
    service = ServiceRule("model", Address.parse("127.0.0.1"), 8000, ("POST",), ("/v1/x",), 1)
    made = rules(rule("a.example"), services=(service,), mode=Mode.OFF, inspection=True)
    assert decide(request_, made).reason is Reason.EGRESS_OFF
    plain = Request(Destination(Way.HTTP, request_.destination.host, 8000), "POST", "/v1/x")
    assert decide(plain, made).reason is Reason.EGRESS_OFF


class TestDenied:
    HOLE = Rule("a.example", None, ("/solutions/**",), None, 7)

    @pytest.mark.parametrize(
        "hole",
        [
            HOLE,
            Rule("a.example", ("POST",), None, (443,), 7),
            Rule("a.example", None, None, None, 7, query=(("q", "x"),)),
        ],
    )
    def test_egress_case_100_a_deny_rule_that_must_see_makes_the_tunnel_inspected(self, hole):
        made = rules(rule("a.example"), deny=(hole,), inspection=True)
        assert decide(tunnel("a.example"), made).handling is Handling.INSPECT
        blind = decide(tunnel("a.example"), rules(rule("a.example"), deny=(hole,)))
        assert (blind.reason, blind.rule) == (Reason.INSPECTION_REQUIRED, "deny a.example line 7")

    def test_egress_case_100_a_deny_rule_above_the_host_counts_too(self):
        above = Rule("*.example", None, ("/solutions/**",), None, 7)
        made = rules(rule("a.example"), deny=(above,), inspection=True)
        assert decide(tunnel("a.example"), made).handling is Handling.INSPECT

    def test_a_deny_rule_of_another_port_does_not(self):
        other = Rule("a.example", None, ("/solutions/**",), (8443,), 7)
        assert decide(tunnel("a.example"), rules(rule("a.example"), deny=(other,))).handling is Handling.OPAQUE

    def test_nobody_can_look_into_tcp(self):
        for inspection in (False, True):
            made = rules(rule("a.example", tcp=True), deny=(self.HOLE,), inspection=inspection)
            assert decide(tunnel("a.example"), made).reason is Reason.INSPECTION_REQUIRED

    def test_the_whole_host(self):
        whole = Rule("a.example", None, None, None, 7)
        made = rules(rule("a.example"), rule("*.example"), deny=(self.HOLE, whole), inspection=True)
        verdict = decide(tunnel("a.example"), made)
        assert (verdict.reason, verdict.rule) == (Reason.DENIED_BY_RULE, "deny a.example line 7")


class TestSpecific:
    """The most specific pattern that knows the port says how deep; the union of rules then says what passes."""

    def test_an_inspected_host_below_an_opaque_wildcard(self):
        made = rules(rule("*.example"), rule("api.example", credential="key"), inspection=True)
        verdict = decide(tunnel("api.example"), made)
        assert (verdict.handling, terms(verdict).credential) == (Handling.INSPECT, "key")
        assert decide(tunnel("www.example"), made).handling is Handling.OPAQUE

    def test_an_opaque_host_below_an_inspected_wildcard(self):
        made = rules(rule("*.example", read_only=True), rule("pin.example"), inspection=True)
        assert decide(tunnel("pin.example"), made).handling is Handling.OPAQUE
        assert decide(tunnel("www.example"), made).handling is Handling.INSPECT

    def test_a_longer_wildcard_wins(self):
        made = rules(rule("*.example", read_only=True), rule("*.cdn.example"), inspection=True)
        assert decide(tunnel("a.cdn.example"), made).handling is Handling.OPAQUE

    def test_a_port_that_the_specific_one_does_not_have(self):
        made = rules(rule("*.example", (443, 8443)), rule("api.example", methods=("GET",)), inspection=True)
        assert decide(tunnel("api.example", 8443), made).handling is Handling.OPAQUE
        assert decide(tunnel("api.example", 443), made).handling is Handling.INSPECT

    def test_of_one_pattern_the_rule_that_needs_least(self):
        made = rules(rule("a.example", methods=("GET",)), rule("a.example"), inspection=True)
        verdict = decide(tunnel("a.example"), made)
        assert (verdict.handling, terms(verdict).index) == (Handling.OPAQUE, 1)


class TestServices:
    SERVICE = ServiceRule("model", Address.parse("127.0.0.1"), 8000, ("POST",), ("/v1/x",), 4)

    @pytest.mark.parametrize("way", [Way.SOCKS5, Way.TRANSPARENT])
    @pytest.mark.parametrize("inspection", [False, True])
    def test_unmodified_clients_reach_it(self, way, inspection):
        made = rules(services=(self.SERVICE,), inspection=inspection)
        verdict = decide(tunnel("model.stockade.internal", 8000, way), made)
        assert (verdict.handling, verdict.pinned, terms(verdict).index) == (
            Handling.INSPECT,
            Address.parse("127.0.0.1"),
            -1,
        )
        assert verdict.rule == "service model line 4"

    def test_connect_means_tls_which_it_does_not_speak(self):
        request = tunnel("model.stockade.internal", 8000)
        assert decide(request, rules(services=(self.SERVICE,))).reason is Reason.INSPECTION_REQUIRED
        assert decide(request, rules(services=(self.SERVICE,), inspection=True)).handling is Handling.INSPECT

    def test_nothing_else_of_it(self):
        made = rules(services=(self.SERVICE,), inspection=True)
        assert decide(tunnel("model.stockade.internal", 22, Way.SOCKS5), made).reason is Reason.PORT_NOT_ALLOWED
        assert decide(tunnel("other.stockade.internal", 8000, Way.SOCKS5), made).reason is Reason.HOST_NOT_ALLOWED
        secure = Request(
            Destination(Way.TLS, parse_host(b"model.stockade.internal"), 8000), "POST", "/v1/x", None, "https"
        )
        assert decide(secure, made).reason is Reason.PORT_NOT_ALLOWED


GRANTED_ECH = {
    "exact": (rule("a.example"), "log"),
    "wildcard": (rule("*.example"), "deny"),
    "exact_denied": (rule("a.example", ech="deny"), "deny"),
    "wildcard_logged": (rule("*.example", ech="log"), "log"),
    "wildcard_allowed": (rule("*.example", ech="allow"), "allow"),
}


@pytest.mark.parametrize(("made", "ech"), GRANTED_ECH.values(), ids=GRANTED_ECH)
def test_egress_case_076_ech_by_rule(made, ech):
    verdict = decide(tunnel("a.example"), rules(made))
    assert terms(verdict).ech == ech
    hello = Hello(("a.example",), ech=True)
    judged = judge_hello(hello, parse_host(b"a.example"), wildcard=verdict.wildcard, ech=terms(verdict).ech)
    assert judged.reason is (Reason.ECH_NOT_ALLOWED if ech == "deny" else Reason.ALLOWED)
    plain = Hello(("a.example",), ech=False)
    assert judge_hello(plain, parse_host(b"a.example"), wildcard=verdict.wildcard, ech=terms(verdict).ech).allowed


def test_egress_case_076_an_unknown_word_is_no_consent():
    hello = Hello(("a.example",), ech=True)
    assert not judge_hello(hello, parse_host(b"a.example"), wildcard=False, ech="Allow").allowed


@pytest.mark.parametrize("way", TUNNELS)
def test_egress_case_062_all_ways_in_meet_the_same_rules(way):
    """What one way in refuses, no other lets through."""
    made = rules(
        rule("a.example", (443, 8443)), rule("*.wild.example"), rule("140.82.114.4"), rule("t.example", (22,), tcp=True)
    )
    hosts = ["a.example", "b.wild.example", "wild.example", "140.82.114.4", "140.82.114.5", "t.example", "localhost"]
    for host, port in itertools.product(hosts, (22, 80, 443, 8443)):
        assert decide(tunnel(host, port, way), made) == decide(tunnel(host, port), made)


FLAGS = st.fixed_dictionaries(
    {},
    optional={
        "tls": st.sampled_from(["auto", "opaque", "inspect"]),
        "tcp": st.booleans(),
        "read_only": st.booleans(),
        "websocket": st.booleans(),
        "store": st.booleans(),
        "methods": st.sampled_from([None, ("GET",), ("POST",)]),
        "paths": st.sampled_from([None, ("/a/**",)]),
        "credential": st.sampled_from([None, "key"]),
        "ports": st.sampled_from([(443,), (80,), (22, 443)]),
        "host": st.sampled_from(["a.example", "*.example", "b.example"]),
    },
)


def possible(flags):
    flags = dict(flags)
    try:
        made = rule(flags.pop("host", "a.example"), flags.pop("ports", (443,)), **flags)
        rules(made)
    except ValueError:
        return None
    return made


@given(
    st.lists(FLAGS, max_size=4),
    st.lists(st.sampled_from([TestDenied.HOLE, Rule("*.example", None, None, (80,), 2)]), max_size=2),
    st.sampled_from(MODES),
    st.booleans(),
    st.sampled_from(TUNNELS),
    st.sampled_from([443, 80, 22]),
)
def test_what_a_tunnel_may_be_follows_from_the_rules(flags, deny, mode, inspection, way, port):
    allow = [made for made in map(possible, flags) if made is not None]
    made = rules(*allow, deny=tuple(deny), mode=mode, inspection=inspection)
    verdict = decide(tunnel("a.example", port, way), made)
    there = [one for one in allow if one.host != "b.example" and port in one.ports]
    if not verdict.allowed:
        assert verdict.grant is None
        return
    assert made.allow[terms(verdict).index] in there
    chosen = made.allow[terms(verdict).index]
    seen = any(one.paths and (one.ports is None or port in one.ports) for one in deny)
    if verdict.handling is Handling.RAW:
        assert chosen.tcp
        assert mode is Mode.LIVE
        assert not seen
    elif verdict.handling is Handling.OPAQUE:
        assert (chosen.methods, chosen.paths, chosen.credential) == (None, None, None)
        assert chosen.tls != "inspect"
        assert not any((chosen.read_only, chosen.websocket, chosen.store, chosen.tcp))
        assert mode is Mode.LIVE
        assert not seen
    else:
        assert verdict.handling is Handling.INSPECT
        assert inspection
        assert not chosen.tcp
