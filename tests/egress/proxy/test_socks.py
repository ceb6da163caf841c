"""SOCKS5 on the same listener: one policy, one record, and refusals in its own language (case 84)."""

from __future__ import annotations

import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.egress.netlab import NetLab, Origin, response
from tests.egress.proxy import hellos
from tests.egress.proxy.harness import Attached, Client
from tests.egress.proxy.sites import IP, LIMITS, Sites, ask, nothing_left, policy

POLICY = policy(
    "{host: open.test}",
    "{host: read.test, read_only: true, ports: [80, 443]}",
    "{host: raw.test, tcp: true, ports: [22]}",
    '{host: "*.wild.test"}',
    "{host: 11.0.0.80, ports: [443]}",
    '{host: "2600:5::5", tcp: true, ports: [22]}',
    limits=LIMITS,
)
GREETING = b"\x05\x01\x00"
OK, FAILED, NOT_ALLOWED, UNREACHABLE, REFUSED, UNSUPPORTED = 0, 1, 2, 4, 5, 7


@pytest.fixture(scope="module")
def sites(lab: NetLab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    with Sites(lab, tmp_path_factory.mktemp("record")) as made:
        yield made


@pytest.fixture
def rollout(sites: Sites) -> Attached:
    return sites.attach(POLICY)


@pytest.fixture(scope="module")
def shared(sites: Sites) -> Origin:
    return sites.site("open.test", "read.test", "a.wild.test")


@pytest.fixture
def site(lab: NetLab, shared: Origin) -> Origin:
    shared.received.clear()
    shared.respond = lambda _request: response(b"hello")
    for name in ("open.test", "read.test", "a.wild.test", "raw.test"):
        lab.add_host(name, IP)
    return shared


def name(host: bytes, port: int = 443) -> bytes:
    """Return a request for a name."""
    return b"\x05\x01\x00\x03" + bytes([len(host)]) + host + port.to_bytes(2, "big")


def literal(text: str, port: int = 443) -> bytes:
    """Return a request for an address."""
    family, kind = (socket.AF_INET6, 4) if ":" in text else (socket.AF_INET, 1)
    return b"\x05\x01\x00" + bytes([kind]) + socket.inet_pton(family, text) + port.to_bytes(2, "big")


def greet(rollout: Attached) -> Client:
    client = rollout.connect()
    assert client.send(GREETING).take(2) == b"\x05\x00"
    return client


def code(client: Client) -> int:
    """Read a reply and return its code."""
    reply = client.take(10)
    assert (reply[0], reply[2:]) == (5, b"\x00\x01" + bytes(6))
    return reply[1]


def trusting(sites: Sites) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    sites.roots.configure_trust(context)
    return context


# ---- what works


@pytest.mark.parametrize("host", [b"open.test", b"OPEN.Test", b"open.test."])
def test_egress_case_084_an_opaque_tunnel(host: bytes, sites: Sites, rollout: Attached, site: Origin) -> None:
    client = greet(rollout)
    assert code(client.send(name(host))) == OK
    with sites.tls(client.sock, "open.test", trusting(sites)) as inside:
        assert ask(inside, "open.test", "/x").body == b"hello"
    decision = rollout.last("net.connect")
    assert (decision["way"], decision["server.address"], decision["verdict"]) == ("socks5", "open.test", "allowed")
    assert rollout.last()["tls.client.server_name"] == "open.test"


@pytest.mark.promise("S3.14")
def test_egress_case_084_an_inspected_tunnel(sites: Sites, rollout: Attached, site: Origin) -> None:
    client = greet(rollout)
    assert code(client.send(name(b"read.test"))) == OK
    with sites.tls(client.sock, "read.test") as inside:
        assert ask(inside, "read.test", "/x").status == 200
        assert ask(inside, "read.test", "/x", method="POST", body=b"x").reason == "method_not_allowed"
    assert len(site.received) == 1


@pytest.mark.promise("S3.14")
def test_egress_case_062_plain_requests_inside_meet_the_same_rules(
    sites: Sites, rollout: Attached, site: Origin
) -> None:
    plain = sites.lab.http(IP, 80)
    with greet(rollout) as client:
        assert code(client.send(name(b"read.test", 80))) == OK
        assert ask(client, "read.test", "/x").status == 200
        assert ask(client, "read.test", "/x", method="DELETE").reason == "method_not_allowed"
    event = rollout.events("net.request")[0]
    assert (event["way"], event["url.scheme"]) == ("socks5", "http")
    with greet(rollout) as client:
        assert code(client.send(name(b"read.test", 80))) == OK
        assert ask(client, "evil.test").reason == "host_mismatch"
    assert len(plain.received) == 1
    plain.close()


@pytest.mark.parametrize("request_", [literal(IP), name(IP.encode())])
def test_egress_case_084_an_address_is_one_however_it_is_written(
    request_: bytes, rollout: Attached, site: Origin
) -> None:
    with greet(rollout) as client:
        assert code(client.send(request_)) == OK
        assert client.send(hellos.made()).take(1) in (b"\x15", b"\x16")
    assert rollout.last("net.connect")["server.address"] == IP


@pytest.mark.parametrize("request_", [literal("2600:5::5", 22), name(b"2600:5::5", 22), name(b"[2600:5:0::5]", 22)])
def test_egress_case_084_ipv6(request_: bytes, lab: NetLab, rollout: Attached) -> None:
    echo = lab.echo("2600:5::5", 22)
    with greet(rollout) as client:
        assert code(client.send(request_)) == OK
        assert client.send(b"through").take(7) == b"through"
    assert rollout.last("net.connect")["server.address"] == "2600:5::5"
    echo.close()


def test_egress_case_085_raw_bytes_where_a_tcp_rule_says_so(lab: NetLab, rollout: Attached, site: Origin) -> None:
    echo = lab.echo(IP, 22)
    with greet(rollout) as client:
        assert code(client.send(name(b"raw.test", 22))) == OK
        assert client.send(b"SSH-2.0-x\r\n").take(11) == b"SSH-2.0-x\r\n"
    assert rollout.last("net.connect")["handling"] == "raw"
    with greet(rollout) as client:
        assert code(client.send(name(b"open.test", 22))) == NOT_ALLOWED
    assert echo.connections == 1
    echo.close()


def test_in_pieces_and_all_at_once(lab: NetLab, rollout: Attached, site: Origin) -> None:
    echo = lab.echo(IP, 22)
    with rollout.connect() as client:
        for byte in GREETING + name(b"raw.test", 22):
            client.send(bytes([byte]))
            time.sleep(0.002)
        assert client.take(2) == b"\x05\x00"
        assert code(client) == OK
    with rollout.connect() as client:
        client.send(GREETING + name(b"raw.test", 22) + b"early")
        assert client.take(2) == b"\x05\x00"
        assert code(client) == OK
        assert client.take(5) == b"early"
    echo.close()


def test_egress_case_061_early_bytes_of_a_refused_tunnel_go_nowhere(rollout: Attached, site: Origin) -> None:
    connections = site.connections
    with rollout.connect() as client:
        client.send(GREETING + name(b"evil.test") + hellos.real("evil.test"))
        assert client.take(2) == b"\x05\x00"
        assert code(client) == NOT_ALLOWED
        assert client.rest() == b""
    assert site.connections == connections
    assert nothing_left(rollout)


def test_curl_over_socks(sites: Sites, rollout: Attached, site: Origin, tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_bytes(sites.roots.cert_pem.bytes())
    host, port = rollout.address
    for target, status in (("open.test", 0), ("evil.test", 97)):
        command = ["curl", "-sS", "--cacert", str(ca), "-x", f"socks5h://{host}:{port}", f"https://{target}/x"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
    assert len(site.received) == 1


# ---- what does not

DENIED = {
    "other_name": (name(b"evil.test"), NOT_ALLOWED, "host_not_allowed"),
    "other_port": (name(b"open.test", 22), NOT_ALLOWED, "port_not_allowed"),
    "other_address": (literal("11.0.0.5"), NOT_ALLOWED, "host_not_allowed"),
    "metadata": (literal("169.254.169.254", 80), NOT_ALLOWED, "host_not_allowed"),
    "metadata_as_name": (name(b"169.254.169.254", 80), NOT_ALLOWED, "host_not_allowed"),
    "mapped": (literal("::ffff:169.254.169.254", 80), NOT_ALLOWED, "host_not_allowed"),
    "localhost": (name(b"localhost"), NOT_ALLOWED, "own_address"),
    "suffix": (name(b"notopen.test"), NOT_ALLOWED, "host_not_allowed"),
    "apex_of_a_wildcard": (name(b"wild.test"), NOT_ALLOWED, "host_not_allowed"),
    "long_label": (name(b"a" * 41 + b".wild.test"), NOT_ALLOWED, "label_too_long"),
    "nul": (name(b"attacker.example\x00.open.test"), FAILED, "malformed_host"),
    "no_name": (name(b""), FAILED, "malformed_host"),
    "255_bytes": (name(b"a." * 127 + b"a"), FAILED, "malformed_host"),
    "percent": (name(b"open.test%2f"), FAILED, "malformed_host"),
    "at": (name(b"open.test@evil.test"), FAILED, "malformed_host"),
    "port_in_the_name": (name(b"open.test:443"), FAILED, "malformed_host"),
    "short_address": (name(b"127.1"), FAILED, "malformed_host"),
    "number": (name(b"2130706433"), FAILED, "malformed_host"),
    "hex": (name(b"0x7f.1"), FAILED, "malformed_host"),
    "octal": (name(b"0177.0.0.1"), FAILED, "malformed_host"),
    "zone": (name(b"fe80::1%lo"), FAILED, "malformed_host"),
    "not_ascii": (name("öpen.test".encode()), FAILED, "malformed_host"),
    "port_0": (name(b"open.test", 0), FAILED, "malformed_host"),
    "bind": (b"\x05\x02" + name(b"open.test")[2:], UNSUPPORTED, "unsupported_command"),
    "udp": (b"\x05\x03" + name(b"open.test")[2:], UNSUPPORTED, "unsupported_command"),
    "command_0": (b"\x05\x00" + name(b"open.test")[2:], UNSUPPORTED, "unsupported_command"),
    "tor_resolve": (b"\x05\xf0" + name(b"open.test")[2:], UNSUPPORTED, "unsupported_command"),
    "reserved": (b"\x05\x01\x01" + name(b"open.test")[3:], FAILED, "malformed_request"),
    "address_type": (b"\x05\x01\x00\x02" + bytes(8), FAILED, "malformed_request"),
    "version": (b"\x04\x01" + name(b"open.test")[2:], FAILED, "malformed_request"),
}


@pytest.mark.promise("S3.14")
@pytest.mark.parametrize("case", DENIED)
def test_egress_case_084(case: str, lab: NetLab, rollout: Attached, site: Origin) -> None:
    request, wanted, reason = DENIED[case]
    queries, connections = len(lab.dns.queries), site.connections
    with greet(rollout) as client:
        assert code(client.send(request)) == wanted
        assert client.rest() == b""
    event = rollout.last("net.connect")
    assert (event["verdict"], event["reason"]) == ("denied", reason)
    assert (len(lab.dns.queries), site.connections) == (queries, connections)


@pytest.mark.parametrize(
    "greeting",
    [
        b"\x04\x01\x01\xbb\x0b\x00\x00\x50user\x00",  # SOCKS4
        b"\x04\x01\x01\xbb\x00\x00\x00\x01user\x00open.test\x00",  # SOCKS4a
        b"\x05\x01\x02",  # a name and a password, and nothing else
        b"\x05\x02\x01\x02",
        b"\x05\x00",
        b"\x05\xff" + bytes(255),
    ],
)
def test_egress_case_084_greetings_that_are_refused(greeting: bytes, rollout: Attached, site: Origin) -> None:
    connections = site.connections
    with rollout.connect() as client:
        assert client.send(greeting).rest() == b"\x05\xff"
    event = rollout.last("net.connect")
    assert (event["verdict"], event["reason"]) == ("denied", "malformed_request")
    assert site.connections == connections


def test_of_several_methods_the_one_without_authentication_is_taken(rollout: Attached) -> None:
    with rollout.connect() as client:
        assert client.send(b"\x05\x03\x02\x01\x00").take(2) == b"\x05\x00"


def test_what_goes_wrong_behind_the_gate_has_its_own_codes(lab: NetLab, rollout: Attached, site: Origin) -> None:
    lab.dns.zone["raw.test"] = "servfail"
    with greet(rollout) as client:
        assert code(client.send(name(b"raw.test", 22))) == UNREACHABLE
    assert rollout.last("net.connect")["reason"] == "resolve_failed"
    lab.add_host("raw.test", "11.0.0.71")
    with greet(rollout) as client:
        assert code(client.send(name(b"raw.test", 22))) == REFUSED
    assert rollout.last()["reason"] == "upstream_failed"
    lab.add_host("raw.test", "10.0.0.1")
    with greet(rollout) as client:
        assert code(client.send(name(b"raw.test", 22))) == NOT_ALLOWED
    assert rollout.wait("net.connect", 3)[-1]["reason"] == "internal_address"


def test_egress_case_105_the_budget_is_the_same(sites: Sites, site: Origin) -> None:
    rollout = sites.attach(POLICY.replace("requests_per_minute: 6000", "requests_per_minute: 2"))
    codes = []
    for _ in range(3):
        with greet(rollout) as client:
            codes.append(code(client.send(name(b"open.test"))))
    assert codes == [OK, OK, NOT_ALLOWED]
    assert rollout.wait("net.connect", 3)[-1]["reason"] == "rate_limited"


def test_a_revoked_rollout_gets_a_refusal_it_understands(sites: Sites, rollout: Attached) -> None:
    sites.worker.ask("revoke", rollout_id=rollout.rollout_id)
    with greet(rollout) as client:
        assert code(client.send(name(b"open.test"))) == NOT_ALLOWED
    assert rollout.last("net.connect")["reason"] == "revoked"


def test_egress_case_074_the_server_name_is_checked_in_these_tunnels_too(rollout: Attached, site: Origin) -> None:
    connections = site.connections
    with greet(rollout) as client:
        assert code(client.send(name(b"open.test"))) == OK
        assert client.send(hellos.made(b"evil.test")).rest() == b""
    assert rollout.last()["reason"] == "sni_mismatch"
    assert site.connections == connections + 1
    assert nothing_left(rollout)


def test_egress_case_073_a_client_that_stops_halfway_is_told_in_its_language(rollout: Attached) -> None:
    with rollout.connect() as silent, greet(rollout) as half, greet(rollout) as quiet:
        silent.send(b"\x05")
        half.send(name(b"open.test")[:7])
        assert half.rest() == quiet.rest() == b"\x05\x01\x00\x01" + bytes(6)
        assert silent.rest() == b"\x05\xff"
    events = rollout.wait("net.connect", 3)
    assert {event["reason"] for event in events} == {"header_timeout"}


def test_the_worker_has_counted_no_fault(sites: Sites) -> None:
    """Stays last: none of the above went through an exception that nobody expected."""
    assert sites.worker.ask("stats")["faults"] == 0
