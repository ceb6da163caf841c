"""From denials to rules: the smallest that would have let them through, always a policy that loads."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.cli._learn import smallest_rules
from stockade.policy import HostRule, parse_policy


def request(
    host: str | None, port: int | None, method: str | None, path: str | None, **more: object
) -> dict[str, object]:
    return {
        "kind": "net.request",
        "verdict": "denied",
        "reason": "host_not_allowed",
        "server.address": host,
        "server.port": port,
        "http.request.method": method,
        "url.path": path,
        **more,
    }


def connect(host: str | None, port: int | None, **more: object) -> dict[str, object]:
    fields: dict[str, object] = {"kind": "net.connect", "verdict": "denied", "reason": "host_not_allowed"}
    return {**fields, "server.address": host, "server.port": port, **more}


def lookup(name: str, reason: str = "host_not_allowed", **more: object) -> dict[str, object]:
    return {"kind": "net.dns", "verdict": "denied", "reason": reason, "dns.question.name": name, **more}


def learnt(*events: Mapping[str, object]) -> tuple[HostRule, ...]:
    return parse_policy(smallest_rules(events), source="learnt").egress.allow


def shown(rule: HostRule) -> tuple[object, ...]:
    return rule.host.text, rule.ports, rule.methods, None if rule.paths is None else tuple(map(str, rule.paths))


def test_nothing_was_denied():
    assert smallest_rules([]) == "version: 1\negress:\n  allow: []\n"
    allowed = {**request("a.example", 443, "GET", "/"), "verdict": "allowed"}
    ended = {**request("a.example", 443, "GET", "/"), "kind": "net.end"}
    assert learnt(allowed, ended, {"kind": "process.exec", "verdict": "observed"}) == ()


def test_hosts_methods_ports_and_paths_are_those_that_were_asked_for():
    rules = learnt(
        request("a.example", 443, "GET", "/x"),
        request("a.example", 443, "GET", "/x", count=4),
        request("a.example", 443, "HEAD", "/x"),
        request("a.example", 443, "POST", "/up"),
        request("a.example", 443, "GET", "/y"),
        request("b.example", 80, "GET", "/"),
        request("93.184.216.34", 443, "GET", "/z"),
    )
    assert [shown(rule) for rule in rules] == [
        ("93.184.216.34", (443,), ("GET",), ("/z",)),
        ("a.example", (443,), ("GET",), ("/y",)),
        ("a.example", (443,), ("GET", "HEAD"), ("/x",)),
        ("a.example", (443,), ("POST",), ("/up",)),
        ("b.example", (80,), ("GET",), ("/",)),
    ]


def test_what_two_ports_have_in_common_is_one_rule():
    events = [request("a.example", port, "GET", "/x") for port in (443, 80, 80)]
    assert [shown(rule) for rule in learnt(*events)] == [("a.example", (80, 443), ("GET",), ("/x",))]
    assert "# a.example: asked for 3 times" in smallest_rules(events)


@pytest.mark.parametrize("reason", ["port_not_allowed", "method_not_allowed", "path_not_allowed", "query_not_allowed"])
def test_a_rule_that_was_too_narrow_is_one_that_was_missing(reason):
    assert len(learnt(request("a.example", 443, "PUT", "/x", reason=reason))) == 1


@pytest.mark.parametrize("reason", ["denied_by_rule", "internal_address", "rate_limited", "sni_mismatch", "egress_off"])
def test_what_no_rule_would_change_is_told_and_opens_nothing(reason):
    events = [
        request("a.example", 443, "GET", "/x", reason=reason, rule="deny a.example line 3"),
        connect("a.example", 443, reason=reason),
    ]
    text = smallest_rules(events)
    assert learnt(*events) == ()
    assert f"# not for want of a rule, once: {reason} (a.example:443 by deny a.example line 3)" in text
    assert f"# not for want of a rule, once: {reason} (a.example:443)" in text


def test_many_files_of_one_folder_are_a_folder():
    few = [request("a.example", 443, "GET", f"/simple/p{index}") for index in range(8)]
    assert [shown(rule)[3] for rule in learnt(*few)] == [tuple(f"/simple/p{index}" for index in range(8))]
    many = [*few, request("a.example", 443, "GET", "/simple/p8/x"), request("a.example", 443, "GET", "/other")]
    assert [shown(rule)[3] for rule in learnt(*many)] == [("/other", "/simple/**")]
    assert "'/**' stands for many names" in smallest_rules(many)
    assert [shown(rule)[3] for rule in parse_policy(smallest_rules(few, siblings=3), source="x").egress.allow] == [
        ("/simple/**",)
    ]


def test_a_host_asked_for_everywhere_is_still_not_asked_for_with_other_methods():
    rules = learnt(*[request("a.example", 443, "GET", f"/p{index}") for index in range(20)])
    assert [shown(rule) for rule in rules] == [("a.example", (443,), ("GET",), ("/**",))]


def test_a_tunnel_alone_gives_a_rule_that_only_reads():
    text = smallest_rules([connect("a.example", 443, count=3)])
    rule = parse_policy(text, source="x").egress.allow[0]
    assert (rule.read_only, rule.methods, rule.paths) == (True, None, None)
    assert "asked for 3 times; only a tunnel was asked for" in text
    assert learnt(connect("a.example", 443), request("a.example", 443, "GET", "/x"))[0].methods == ("GET",)


def test_egress_case_085_raw_bytes_are_proposed_but_never_opened():
    text = smallest_rules([connect("git.example.org", 22)])
    assert parse_policy(text, source="x").egress.allow == ()
    assert "# - {host: 'git.example.org', ports: [22], tcp: true}" in text


@pytest.mark.parametrize(
    ("host", "method", "why"),
    [
        ("gist.github.com", "POST", "anybody can publish"),
        ("127.0.0.1", "GET", "internal address"),
        ("169.254.169.254", "GET", "metadata"),
        ("a.example", "TRACE", "TRACE cannot be allowed"),
        ("a.example", "BREW", "not an HTTP method"),
        ("model.stockade.internal", "GET", "zone of services"),
    ],
)
def test_what_no_policy_may_hold_is_a_comment_with_the_reason(host, method, why):
    events = [request(host, 443, method, "/x"), request("good.example", 443, "GET", "/x")]
    text = smallest_rules(events)
    assert [rule.host.text for rule in learnt(*events)] == ["good.example"]
    assert "    # refused: " in text
    assert why in text


def test_names_that_were_only_looked_up_are_listed():
    text = smallest_rules(
        [lookup("a.example", count=2), lookup("b.example"), connect("b.example", 443), lookup("c", "rate_limited")]
    )
    assert "  # asked for by name only, 2 times: a.example" in text
    assert "by name only, once: b.example" not in text
    assert "rate_limited (the name c)" in text


def test_an_encoded_slash_becomes_a_pattern():
    rule = learnt(request("a.example", 443, "GET", "/@scope%2Fname"))[0]
    assert rule.encoded_slash
    assert [str(glob) for glob in rule.paths or ()] == ["/@scope*name"]


@pytest.mark.parametrize("path", ["/a//b", "/a;x/b", "/a\\x1b[31m", "/\u202e", "", "x", "/a b", "/" + "a" * 2000])
def test_egress_case_066_paths_that_no_rule_can_name_are_comments(path):
    text = smallest_rules([request("a.example", 443, "GET", path), request("a.example", 443, "GET", "/good")])
    assert text.isascii()
    assert "no rule can name the path" in text
    assert [shown(rule)[3] for rule in parse_policy(text, source="x").egress.allow] == [("/good",)]


def test_egress_case_103_folded_denials_are_counted():
    text = smallest_rules([connect(None, None, count=500), request("a.example", 443, None, None, count=30)])
    assert "not for want of a rule, 500 times: host_not_allowed (folded" in text
    assert "# a.example: asked for 30 times" in text


def test_a_flood_of_hosts_and_paths_still_makes_a_policy_that_loads():
    hosts = [request(f"h{index}.example", 443, "GET", "/x") for index in range(700)]
    paths = [
        request("a.example", 443, "GET", "/" + "/".join(f"{index >> bit & 1}" for bit in range(12)))
        for index in range(4096)
    ]
    text = smallest_rules([*hosts, *paths])
    assert len(parse_policy(text, source="x").egress.allow) <= 500
    assert "more rules than a policy has room for" in text
    assert len(text) < 1 << 20


def test_egress_case_092_text_from_inside_cannot_add_a_rule():
    evil = "a.example}\n    - {host: evil.example"
    for event in (
        request(evil, 443, "GET", "/x"),
        request("a.example", 443, "GET'}\n    - {host: evil.example", "/x"),
        request("a.example", 443, "GET", "/x']}\n    - {host: evil.example}"),
        connect(evil, 443),
        lookup("x\n    - {host: evil.example}"),
        request("a.example", 443, "GET", "/", reason="x\n    - {host: evil.example}"),
    ):
        assert all("evil" not in rule.host.text for rule in learnt(event))


def met(host: str, port: int = 443) -> dict[str, object]:
    """A tunnel that a learning run let come, to look into it."""
    return {**connect(host, port), "verdict": "allowed", "reason": "allowed", "rule": "learn"}


def ended(host: str, reason: str, port: int = 443) -> dict[str, object]:
    return {"kind": "net.end", "verdict": "observed", "reason": reason, "server.address": host, "server.port": port}


def test_what_a_learning_run_met_is_asked_for_by_what_came_inside():
    events = [met("a.example"), ended("a.example", "inspected"), request("a.example", 443, "GET", "/x")]
    [rule] = learnt(*events, {**lookup("a.example"), "verdict": "allowed", "reason": "allowed", "rule": "learn"})
    assert shown(rule) == ("a.example", (443,), ("GET",), ("/x",))
    other = {**met("b.example"), "rule": "allow b.example line 4"}
    assert learnt(other, ended("b.example", "completed")) == ()


def test_a_tunnel_in_which_nothing_was_asked_for_says_only_that_much():
    [rule] = learnt(met("a.example"))
    assert (rule.host.text, rule.read_only) == ("a.example", True)
    named = {**lookup("c.example"), "verdict": "allowed", "reason": "allowed", "rule": "learn"}
    assert "by name only, once: c.example" in smallest_rules([named])


def test_a_client_that_takes_no_certificate_of_ours_gets_an_opaque_rule_only_by_hand():
    text = smallest_rules([met("a.example"), ended("a.example", "client_tls")])
    assert "    # - {host: 'a.example', ports: [443], tls: opaque}" in text
    assert "refused the run's own certificate" in text
    assert parse_policy(text, source="x").egress.allow == ()
    assert learnt(met("a.example"), ended("a.example", "client_tls"), request("a.example", 443, "GET", "/x"))


@pytest.mark.parametrize("reason", ["malformed_request", "header_timeout"])
@pytest.mark.parametrize("port", [22, 443, 9418])
def test_bytes_that_are_neither_tls_nor_http_get_a_tcp_rule_only_by_hand(reason, port):
    text = smallest_rules([request("a.example", port, None, None, reason=reason)])
    assert f"    # - {{host: 'a.example', ports: [{port}], tcp: true}}" in text
    assert parse_policy(text, source="x").egress.allow == ()


TEXT = st.one_of(
    st.text(max_size=20), st.sampled_from(["GET", "POST", "/a", "/a/b%2Fc", "a.example", "*.example", "::1", "'"])
)
EVENT = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["net.request", "net.connect", "net.dns", "net.end"]),
        "verdict": st.sampled_from(["denied", "allowed", "observed"]),
        "reason": st.one_of(st.sampled_from(["host_not_allowed", "client_tls", "malformed_request"]), TEXT),
        "rule": st.one_of(st.none(), st.just("learn"), TEXT),
        "server.address": st.one_of(st.none(), TEXT),
        "server.port": st.one_of(st.none(), st.integers(-1, 70_000)),
        "http.request.method": st.one_of(st.none(), TEXT),
        "url.path": st.one_of(st.none(), TEXT.map(lambda text: "/" + text)),
        "dns.question.name": st.one_of(st.none(), TEXT),
        "count": st.one_of(st.none(), st.integers()),
    }
)


@given(st.lists(EVENT, max_size=12), st.integers(1, 4))
def test_any_events_make_a_policy_of_exact_hosts(events, siblings):
    text = smallest_rules(events, siblings=siblings)
    for rule in parse_policy(text, source="x").egress.allow:
        assert not rule.tcp
        assert not rule.tunnel
        assert not rule.unsafe_many_owners
        assert not rule.host.is_suffix
    assert text.isascii()
