"""Cases that several parts of the gate answer together: 26, 29, 45, 61, 94 and 95 of the bypass table."""

from __future__ import annotations

from stockade.egress.gate import (
    Address,
    Destination,
    HeadLimits,
    Reason,
    Request,
    Rule,
    Rules,
    Way,
    decide,
    find_head,
    judge_addresses,
    judge_hello,
    parse_head,
    parse_host,
    render_request_head,
)
from stockade.egress.gate._tls import Hello

RULES = Rules(allow=(Rule("*.files.example", None, None, (443,), 1), Rule("files.example", None, None, (80,), 2)))
HOST = parse_host(b"a.files.example")


def test_egress_case_026_each_answer_is_judged_anew():
    """No verdict on a name outlives its addresses: the second answer is judged like the first."""
    public, internal = Address.parse("140.82.114.4"), Address.parse("127.0.0.1")
    assert judge_addresses([public], RULES).allowed
    assert judge_addresses([internal], RULES).reason is Reason.INTERNAL_ADDRESS
    assert judge_addresses([public], RULES).allowed


def test_egress_case_029_and_021_the_name_says_nothing_about_the_address():
    for name in (b"x.files.example", b"169.254.169.254.files.example", b"10-0-0-1.files.example"):
        request = Request(Destination(Way.CONNECT, parse_host(name), 443), "CONNECT", "", None, "")
        assert decide(request, RULES).allowed
    for final in ("10.0.0.5", "169.254.169.254", "::ffff:10.0.0.5"):
        assert not judge_addresses([Address.parse(final)], RULES).allowed


def test_egress_case_045_another_tenant_of_the_same_address():
    assert judge_hello(Hello(("a.files.example",), ech=False), HOST, wildcard=True).allowed
    other = judge_hello(Hello(("b.files.example",), ech=False), HOST, wildcard=True)
    assert other.reason is Reason.SNI_MISMATCH, "allowed by the same rule, but not what was decided"


def test_egress_case_061_what_comes_before_the_200_is_no_part_of_the_head():
    raw = b"CONNECT a.files.example:443 HTTP/1.1\r\nHost: a.files.example:443\r\n\r\n"
    early = b"\x16\x03\x01\x00\x05hello"
    end = find_head(bytearray(raw + early), HeadLimits())
    assert end == len(raw)
    assert parse_head(raw, HeadLimits()).request.tunnel


def test_egress_case_094_the_client_chooses_no_upstream():
    raw = (
        b"GET http://files.example/ HTTP/1.1\r\nHost: files.example\r\nX-Upstream-Https-Proxy: http://evil.example\r\n"
        b"X_Upstream_Https_Proxy: http://evil.example\r\nProxy-Connection: keep-alive\r\n\r\n"
    )
    head = parse_head(raw, HeadLimits())
    assert b"evil" not in render_request_head(head)
    assert head.dropped == ("proxy-connection", "x-upstream-https-proxy", "x_upstream_https_proxy")


def test_egress_case_095_whoever_resolves_asks_for_an_exact_rule():
    """Where an upstream resolves the name there is no address to check: the verdict says whether the rule is exact."""
    wild = decide(Request(Destination(Way.CONNECT, HOST, 443), "CONNECT", "", None, ""), RULES)
    assert wild.allowed
    assert wild.wildcard
    exact = decide(Request(Destination(Way.HTTP, parse_host(b"files.example"), 80), "GET", "/"), RULES)
    assert exact.allowed
    assert not exact.wildcard
