"""Finding out which rules are missing: what learning meets, and that nothing is let through by it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.egress.gate import (
    Address,
    Destination,
    Handling,
    Mode,
    Reason,
    Request,
    Rule,
    Rules,
    ServiceRule,
    Verdict,
    Way,
    decide,
    judge_name,
    parse_host,
)

TUNNELS = [Way.CONNECT, Way.SOCKS5, Way.TRANSPARENT]
RULES = Rules(
    allow=(
        Rule("read.example", ("GET",), ("/a/**",), (443,), 1),
        Rule("opaque.example", None, None, (443,), 2),
        Rule("raw.example", None, None, (22,), 3, tcp=True),
        Rule("*.wild.example", None, None, (443,), 4),
    ),
    deny=(Rule("closed.example", None, None, None, 5), Rule("half.example", None, ("/x/**",), None, 6)),
    services=(ServiceRule("model", Address.parse("10.0.0.7"), 8000, ("POST",), ("/v1",), 7),),
    own_names=frozenset({"node.example"}),
    inspection=True,
    learn=True,
)


def tunnel(host: str, port: int = 443, way: Way = Way.CONNECT) -> Request:
    return Request(Destination(way, parse_host(host.encode()), port), "CONNECT", "", None, "")


def request(host: str, port: int = 443, method: str = "GET", path: str = "/", scheme: str = "https") -> Request:
    return Request(Destination(Way.TLS, parse_host(host.encode()), port), method, path, None, scheme)


def learns(verdict: Verdict) -> bool:
    return verdict.allowed and verdict.handling is Handling.INSPECT and verdict.rule == "learn"


@pytest.mark.parametrize("way", TUNNELS)
@pytest.mark.parametrize("host", ["new.example", "11.0.0.5", "[2600:5::5]", "raw.example", "read.example"])
def test_a_tunnel_that_no_rule_knows_ends_here(host, way):
    verdict = decide(tunnel(host, 8443, way), RULES)
    assert learns(verdict)
    assert verdict.grant is not None
    assert (verdict.grant.index, verdict.grant.pinned, verdict.grant.credential) == (-1, None, None)
    assert verdict.wildcard, "its names count"


def test_what_a_rule_says_of_a_tunnel_stays_as_it_is():
    expected = {"read.example": Handling.INSPECT, "opaque.example": Handling.OPAQUE, "a.wild.example": Handling.OPAQUE}
    for host, handling in expected.items():
        verdict = decide(tunnel(host), RULES)
        assert (verdict.handling, verdict.rule == "learn") == (handling, False)
    assert decide(tunnel("raw.example", 22), RULES).handling is Handling.RAW


@pytest.mark.parametrize(
    ("host", "port", "reason"),
    [
        ("closed.example", 443, Reason.DENIED_BY_RULE),
        ("node.example", 443, Reason.OWN_ADDRESS),
        ("localhost", 443, Reason.OWN_ADDRESS),
        ("x.localhost", 443, Reason.OWN_ADDRESS),
        ("other.stockade.internal", 443, Reason.HOST_NOT_ALLOWED),
        ("model.stockade.internal", 443, Reason.PORT_NOT_ALLOWED),
        (f"{'a' * 41}.wild.example", 443, Reason.LABEL_TOO_LONG),
    ],
)
def test_what_is_refused_for_another_reason_stays_refused(host, port, reason):
    verdict = decide(tunnel(host, port), RULES)
    assert (verdict.allowed, verdict.reason) == (False, reason)


@given(
    host=st.sampled_from(["new.example", "half.example", "closed.example", "read.example", "11.0.0.5", "localhost"]),
    port=st.sampled_from([22, 80, 443, 8443]),
    method=st.sampled_from(["GET", "HEAD", "POST", "DELETE"]),
    path=st.sampled_from(["/", "/a/b", "/x/y"]),
    scheme=st.sampled_from(["http", "https"]),
    mode=st.sampled_from(list(Mode)),
)
def test_no_request_is_allowed_that_would_not_be_without_it(host, port, method, path, scheme, mode):
    asked = request(host, port, method, path, scheme)
    fields = {name: getattr(RULES, name) for name in ("allow", "deny", "services", "own_names", "inspection")}
    assert decide(asked, Rules(**fields, mode=mode, learn=True)) == decide(asked, Rules(**fields, mode=mode))


def test_every_name_may_have_an_address_that_is_not_refused_for_another_reason():
    for name in ("new.example", "half.example"):
        verdict = judge_name(parse_host(name.encode()), RULES)
        assert (verdict.allowed, verdict.rule) == (True, "learn")
    refused = {
        "closed.example": Reason.DENIED_BY_RULE,
        "localhost": Reason.OWN_ADDRESS,
        "other.stockade.internal": Reason.HOST_NOT_ALLOWED,
        f"{'a' * 41}.wild.example": Reason.LABEL_TOO_LONG,
        "11.0.0.5": Reason.HOST_NOT_ALLOWED,
    }
    for name, reason in refused.items():
        verdict = judge_name(parse_host(name.encode()), RULES)
        assert (verdict.allowed, verdict.reason) == (False, reason)
    assert judge_name(parse_host(b"read.example"), RULES).rule == "allow read.example line 1"


def test_nothing_is_met_without_an_authority_or_with_the_way_out_shut():
    blind = Rules(learn=True)
    assert decide(tunnel("new.example"), blind).reason is Reason.HOST_NOT_ALLOWED
    assert judge_name(parse_host(b"new.example"), blind).reason is Reason.HOST_NOT_ALLOWED
    shut = Rules(learn=True, inspection=True, mode=Mode.OFF)
    assert decide(tunnel("new.example"), shut).reason is Reason.EGRESS_OFF
    assert judge_name(parse_host(b"new.example"), shut).reason is Reason.EGRESS_OFF


def test_it_crosses_to_the_worker_and_is_off_by_itself():
    assert Rules.from_json(RULES.to_json()) == RULES
    assert not Rules().learn
    assert Rules(learn=True).to_json() != Rules().to_json()
