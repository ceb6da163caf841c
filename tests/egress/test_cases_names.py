"""Hosts as they came through other proxies, at the real worker and by every way in: cases 1 to 24 of the bypass table.

What is refused leaves one line on record, and nothing else: no question to a name server, no connection. What must work
reaches its origin.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest

from tests.egress.netlab import NetLab, Origin
from tests.egress.proxy import hellos
from tests.egress.proxy.harness import Attached, Worker
from tests.support import requires

ORIGIN = "11.0.0.5"
POLICY = """
version: 1
egress:
  allow:
    - {host: allowed.test, ports: [80, 443]}
    - {host: bücher.test, ports: [80, 443]}
    - {host: "*.wild.test", ports: [80, 443]}
    - {host: 11.0.0.6, ports: [80]}
  limits: {requests_per_minute: 6000}
"""
ADDRESS, MALFORMED, RULE = "host_not_allowed", "malformed_host", "host_not_allowed"


@pytest.fixture(scope="module")
def lab() -> Iterator[NetLab]:
    requires(NetLab.possible(), "no network namespace can be made here")
    with NetLab() as made:
        for name in (
            "allowed",
            "xn--bcher-kva",
            "a.wild",
            "a.b.wild",
            "wild",
            "evil",
            "notallowed",
            "allowed.test.evil",
        ):
            made.add_host(f"{name}.test", ORIGIN)
        yield made


@pytest.fixture(scope="module")
def worker(lab: NetLab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with Worker(lab, tmp_path_factory.mktemp("record")) as made:
        yield made


@pytest.fixture(scope="module")
def origins(lab: NetLab) -> list[Origin]:
    return [lab.http(ORIGIN, 80), lab.echo(ORIGIN, 443), lab.http("11.0.0.6", 80), lab.http("127.0.0.1", 80)]


@pytest.fixture
def rollout(worker: Worker) -> Iterator[Attached]:
    attached = worker.attach(POLICY)
    yield attached
    assert worker.ask("detach", rollout_id=attached.rollout_id)["ok"]
    attached.close()


def by_http(rollout: Attached, host: bytes) -> str:
    """Return why a GET to ``host`` was refused, ``""`` if it was not."""
    with rollout.connect() as client:
        reply = client.send(b"GET http://%b/x HTTP/1.1\r\nHost: %b\r\n\r\n" % (host, host)).reply()
    assert (reply.status < 400) == (reply.reason == ""), reply
    return reply.reason


def by_connect(rollout: Attached, host: bytes) -> str:
    """Return why a tunnel to ``host`` was refused."""
    with rollout.connect() as client:
        reply = client.send(b"CONNECT %b:443 HTTP/1.1\r\nHost: %b:443\r\n\r\n" % (host, host)).reply()
        if reply.status == 200:
            # What is allowed must also lead somewhere: the origin sends the hello back.
            hello = hellos.made(host.lower().removesuffix(b"."))
            assert client.send(hello).take(len(hello)) == hello
    assert (reply.status < 400) == (reply.reason == ""), reply
    return reply.reason


def by_socks(rollout: Attached, host: bytes) -> str:
    """Return why SOCKS5 to ``host`` was refused, as the record has it."""
    with rollout.connect() as client:
        client.send(b"\5\1\0").take(2)
        code = client.send(b"\5\1\0\3" + bytes((len(host),)) + host + b"\1\xbb").take(10)[1]
    if code == 0:
        return ""
    return str(rollout.last("net.connect")["reason"])


WAYS: dict[str, Callable[[Attached, bytes], str]] = {"http": by_http, "connect": by_connect, "socks5": by_socks}

REFUSED: dict[str, tuple[bytes, str]] = {
    "case_001_public_literal": (b"11.0.0.5", RULE),
    "case_002_v6_literal": (b"[::1]", RULE),
    "case_002_v6_without_brackets": (b"::1", MALFORMED),
    "case_003_two_parts": (b"127.1", MALFORMED),
    "case_003_decimal": (b"2130706433", MALFORMED),
    "case_003_hex": (b"0x7f.1", MALFORMED),
    "case_003_octal": (b"0177.0.0.1", MALFORMED),
    "case_003_long_octal": (b"017700000001", MALFORMED),
    "case_004_leading_zero": (b"012.0.0.1", MALFORMED),
    "case_005_unspecified": (b"0.0.0.0", RULE),
    "case_005_zero": (b"0", MALFORMED),
    "case_005_unspecified_v6": (b"[::]", RULE),
    "case_006_denied_with_a_dot": (b"evil.test.", RULE),
    "case_006_two_dots": (b"allowed.test..", MALFORMED),
    "case_008_name_in_brackets": (b"[evil.test]", MALFORMED),
    "case_008_bracket_inside": (b"a]b.test", MALFORMED),
    "case_008_brackets_behind": (b"prefix.[v1.allowed.test]", MALFORMED),
    "case_010_nul_encoded": (b"evil.test%00.allowed.test", MALFORMED),
    "case_010_dots_encoded": (b"127%2e0%2e0%2e1", MALFORMED),
    "case_011_zone": (b"[::1%25.allowed.test]", MALFORMED),
    "case_011_mapped_with_zone": (b"[::ffff:1.2.3.4%x.allowed.test]", MALFORMED),
    "case_012_userinfo": (b"allowed.test@evil.test", MALFORMED),
    "case_012_two_ats": (b"a@allowed.test@evil.test", MALFORMED),
    "case_013_backslash": (b"evil.test\\@allowed.test", MALFORMED),
    "case_017_not_on_the_list": (b"xn--bcher-kvb.test", RULE),
    "case_018_no_label_border": (b"notallowed.test", RULE),
    "case_018_behind": (b"allowed.test.evil.test", RULE),
    "case_019_apex": (b"wild.test", RULE),
    "case_024_too_long": (b"a" + b"a." * 122 + b"wild.test", MALFORMED),
    "case_024_label_too_long": (b"a" * 64 + b".wild.test", MALFORMED),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", REFUSED)
def test_egress(case: str, way: str, rollout: Attached, lab: NetLab, origins: list[Origin]) -> None:
    host, reason = REFUSED[case]
    if way == "socks5" and host[:1] != b"[" and b":" in host:
        reason = RULE  # where an address has a form of its own, IPv6 needs no brackets
    before = [origin.connections for origin in origins], len(lab.dns.queries)
    assert WAYS[way](rollout, host) == reason
    assert ([origin.connections for origin in origins], len(lab.dns.queries)) == before, "something went out"
    (event,) = (event for event in rollout.events() if event["kind"] in ("net.request", "net.connect"))
    assert (event["verdict"], event["reason"]) == ("denied", reason)
    assert rollout.events("net.end") == []


# Bytes that are no text of a request line are refused with the line that they are in.
SPLIT: dict[str, bytes] = {
    "case_009_nul": b"evil.test\0.allowed.test",
    "case_009_nul_behind": b"allowed.test\0.evil.test",
    "case_014_tab": b"allowed.test\t.evil.test",
    "case_014_space": b"allowed.test .evil.test",
    "case_014_lf": b"allowed.test\n.evil.test",
    "case_014_cr": b"allowed.test\r.evil.test",
    "case_014_cr_lf": b"allowed.test\r\nHost: evil.test",
    "case_015_fragment": b"evil.test#@allowed.test",
    "case_016_ideographic_stops": "127。0。0。1".encode(),
    "case_016_full_width_digits": "１２７.0.0.1".encode(),
    "case_017_not_an_a_label": "bücher.test".encode(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", SPLIT)
def test_egress_on_the_wire(case: str, way: str, rollout: Attached, lab: NetLab, origins: list[Origin]) -> None:
    before = [origin.connections for origin in origins], len(lab.dns.queries)
    assert WAYS[way](rollout, SPLIT[case]) in ("malformed_host", "malformed_request", "malformed_path")
    assert ([origin.connections for origin in origins], len(lab.dns.queries)) == before, "something went out"
    events = [event for event in rollout.events() if event["kind"] in ("net.request", "net.connect")]
    assert [event["verdict"] for event in events] == ["denied"]


ALLOWED: dict[str, bytes] = {
    "case_006_one_dot": b"allowed.test.",
    "case_007_case": b"Allowed.TEST",
    "case_017_a_label_of_the_rule": b"xn--bcher-kva.test",
    "case_019_below_a_wildcard": b"a.wild.test",
    "case_019_any_depth": b"a.b.wild.test",
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", ALLOWED)
def test_egress_goes_on(case: str, way: str, rollout: Attached, lab: NetLab, origins: list[Origin]) -> None:
    host, queries = ALLOWED[case], len(lab.dns.queries)
    name = host.decode().lower().removesuffix(".")
    assert WAYS[way](rollout, host) == ""
    decision = rollout.last("net.request" if way == "http" else "net.connect")
    assert (decision["verdict"], decision["server.address"]) == ("allowed", name)
    assert {asked for asked, _ in lab.dns.queries[queries:]} == {name}, "one spelling is matched, asked for and dialled"
    if way == "http":
        assert origins[0].received[-1].header("host") == [name.encode()]


def test_egress_case_001_a_literal_that_is_listed(rollout: Attached, lab: NetLab, origins: list[Origin]) -> None:
    queries = len(lab.dns.queries)
    assert by_http(rollout, b"11.0.0.6") == ""
    assert by_connect(rollout, b"11.0.0.6") == "port_not_allowed"
    assert by_http(rollout, b"11.0.0.6.") == MALFORMED, "a dot belongs behind a name"
    assert len(lab.dns.queries) == queries


def test_egress_case_015_the_authority_ends_at_the_question_mark(
    rollout: Attached, lab: NetLab, origins: list[Origin]
) -> None:
    with rollout.connect() as client:
        reply = client.send(b"GET http://evil.test?@allowed.test/ HTTP/1.1\r\nHost: evil.test\r\n\r\n").reply()
    assert reply.reason == RULE
    with rollout.connect() as client:
        assert (
            client.send(b"GET http://allowed.test?@evil.test/ HTTP/1.1\r\nHost: allowed.test\r\n\r\n").reply().status
            == 200
        )
    assert origins[0].received[-1].line == b"GET /?@evil.test/ HTTP/1.1"


@pytest.mark.parametrize("line", [b"GET http:///x", b"GET http://:80/x", b"CONNECT :443", b"CONNECT 443"])
def test_egress_case_024_no_host(line: bytes, rollout: Attached, origins: list[Origin]) -> None:
    with rollout.connect() as client:
        reply = client.send(line + b" HTTP/1.1\r\nHost: allowed.test\r\n\r\n").reply()
    assert (reply.status, reply.reason) == (400, "malformed_host")


@pytest.mark.parametrize(
    ("name", "address", "reason"),
    [
        ("169.254.169.254.nip.wild.test", "169.254.169.254", "metadata_address"),
        ("10-0-0-1.sslip.wild.test", "10.0.0.1", "internal_address"),
        ("7f000001.08080808.rbndr.wild.test", "127.0.0.1", "internal_address"),
    ],
)
def test_egress_case_021_an_address_spelt_in_a_name(
    name: str, address: str, reason: str, rollout: Attached, lab: NetLab, origins: list[Origin]
) -> None:
    """The wildcard allows the name; where it leads decides."""
    lab.add_host(name, address)
    before = [origin.connections for origin in origins]
    assert by_http(rollout, name.encode()) == reason
    assert by_connect(rollout, name.encode()) == reason
    assert [origin.connections for origin in origins] == before


def test_egress_case_005_a_name_that_leads_to_no_address(rollout: Attached, lab: NetLab) -> None:
    for address in ("0.0.0.0", "::"):
        lab.add_host("allowed.test", address)
        assert by_http(rollout, b"allowed.test") == "internal_address"
    lab.add_host("allowed.test", ORIGIN)


def test_egress_case_009_the_resolver_of_this_machine_would_cut_it_off() -> None:
    """Why NUL is looked for before anybody is asked: the C library takes what comes before it."""
    with pytest.raises((UnicodeError, ValueError, OSError)):
        socket.getaddrinfo("a" * 64 + "\0.allowed.test", 80)
    assert socket.getaddrinfo("127.0.0.1\0.allowed.test", 80)[0][4][0] == "127.0.0.1"
