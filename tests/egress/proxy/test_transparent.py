"""Clients that know no proxy: they connect to the address that a name has in the sandbox, or to one of their own choice."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.egress.netlab import NetLab, Origin, response, serve_echo
from tests.egress.proxy import hellos
from tests.egress.proxy.guestnet import GuestNet
from tests.egress.proxy.harness import Attached, Client
from tests.egress.proxy.sites import IP, LIMITS, Sites, ask, nothing_left, policy
from tests.egress.proxy.test_dns_inside import addresses, question
from tests.egress.proxy.test_dns_inside import ask as ask_name

POLICY = policy(
    "{host: open.test, ports: [443, 8443]}",
    "{host: read.test, read_only: true, ports: [80, 443]}",
    "{host: clear.test, methods: [GET], ports: [80]}",
    "{host: raw.test, tcp: true, ports: [22]}",
    '{host: "*.wild.test"}',
    "{host: 11.0.0.80, ports: [443]}",
    '{host: "2600:5::5", methods: [GET], ports: [80]}',
    limits=LIMITS,
)
PORTS = (22, 25, 80, 443, 8443)
ACCESS_DENIED = b"\x15\x03\x03\x00\x02\x02\x31"


@pytest.fixture(scope="module")
def sites(lab: NetLab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    with Sites(lab, tmp_path_factory.mktemp("record")) as made:
        yield made


@pytest.fixture(scope="module")
def guest(lab: NetLab) -> Iterator[GuestNet]:
    with GuestNet(PORTS) as made:
        yield made


@pytest.fixture
def rollout(sites: Sites, guest: GuestNet) -> Iterator[Attached]:
    attached = sites.attach(POLICY, sockets=guest.sockets)
    yield attached
    sites.worker.ask("detach", rollout_id=attached.rollout_id)  # the next one has the same sockets


@pytest.fixture(scope="module")
def shared(sites: Sites) -> Origin:
    return sites.site("open.test", "read.test", "a.wild.test")


@pytest.fixture
def site(lab: NetLab, shared: Origin) -> Origin:
    shared.received.clear()
    shared.respond = lambda _request: response(b"hello")
    for name in ("open.test", "read.test", "clear.test", "a.wild.test", "raw.test"):
        lab.add_host(name, IP)
    return shared


@pytest.fixture(scope="module")
def plain(lab: NetLab) -> Iterator[Origin]:
    origin = lab.http(IP, 80, lambda _request: response(b"in clear"))
    yield origin
    origin.close()


def fake(guest: GuestNet, name: str) -> str:
    """Return the address that a name has inside."""
    return addresses(ask_name(guest, question(name)))[0]


def dial(guest: GuestNet, name: str, port: int = 443) -> socket.socket:
    """Connect as a client does that knows nothing of a proxy."""
    return guest.connect(fake(guest, name), port)


def trusting(sites: Sites) -> ssl.SSLContext:
    """Return the trust of a client that talks to the sites themselves."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    sites.roots.configure_trust(context)
    return context


def test_an_opaque_tunnel_by_a_fake_address(sites: Sites, guest: GuestNet, rollout: Attached, site: Origin) -> None:
    with sites.tls(dial(guest, "open.test"), "open.test", trusting(sites)) as client:
        assert ask(client, "open.test", "/x").body == b"hello"
    decision, end = rollout.last("net.connect"), rollout.last()
    assert (decision["way"], decision["server.address"], decision["server.port"]) == ("transparent", "open.test", 443)
    assert "handling" not in decision
    assert end["tls.client.server_name"] == "open.test"
    assert end["network.peer.address"] == IP
    assert end["bytes_out"] > 200


def test_an_inspected_tunnel_by_a_fake_address(sites: Sites, guest: GuestNet, rollout: Attached, site: Origin) -> None:
    with sites.tls(dial(guest, "read.test"), "read.test") as client:
        assert ask(client, "read.test", "/x").body == b"hello"
        assert ask(client, "read.test", "/x", method="POST", body=b"x").reason == "method_not_allowed"
    assert [one.line for one in site.received] == [b"GET /x HTTP/1.1"]
    connect, request = rollout.events("net.connect")[0], rollout.events("net.request")[0]
    assert (connect["way"], connect["handling"]) == ("transparent", "inspect")
    assert (request["way"], request["url.scheme"], request["url.path"]) == ("tls", "https", "/x")


def test_plain_requests_by_a_fake_address(
    sites: Sites, guest: GuestNet, rollout: Attached, site: Origin, plain: Origin
) -> None:
    plain.received.clear()
    with Client(dial(guest, "clear.test", 80)) as client:
        for path in ("/a", "/b"):
            assert ask(client, "clear.test", path).body == b"in clear"
        assert ask(client, "clear.test", "/c", method="PUT", body=b"x").reason == "method_not_allowed"
    assert [one.line for one in plain.received] == [b"GET /a HTTP/1.1", b"GET /b HTTP/1.1"]
    event = rollout.events("net.request")[0]
    assert (event["way"], event["url.scheme"], event["server.address"]) == ("transparent", "http", "clear.test")


def curl(guest: GuestNet, sites: Sites, folder: Path, url: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run curl inside, without a proxy; the name leads where the sandbox's name server says."""
    host, port = url.split("/")[2], "443" if url.startswith("https") else "80"
    bundle = folder / "bundle.pem"
    bundle.write_bytes(sites.authority.cert_pem + sites.roots.cert_pem.bytes())
    command = ["curl", "-sS", "--noproxy", "*", "--max-time", "15", "--cacert", str(bundle)]
    command += ["--resolve", f"{host}:{port}:{fake(guest, host)}", *argv, url]
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    return subprocess.run(guest.command(command), capture_output=True, text=True, check=False, env=environment)


@pytest.mark.promise("S3.13")
def test_curl_without_a_proxy(
    sites: Sites, guest: GuestNet, rollout: Attached, site: Origin, plain: Origin, tmp_path: Path
) -> None:
    for url, body in (
        ("https://open.test/x", "hello"),
        ("https://read.test/x", "hello"),
        ("http://read.test/x", "in clear"),
        ("http://clear.test/x", "in clear"),
    ):
        done = curl(guest, sites, tmp_path, url)
        assert (done.returncode, done.stdout) == (0, body), (url, done.stderr)
    done = curl(guest, sites, tmp_path, "https://read.test/x", "-X", "DELETE")
    assert done.stdout == "stockade: method_not_allowed\n"


def test_by_address_where_a_rule_names_the_address(
    sites: Sites, guest: GuestNet, rollout: Attached, site: Origin
) -> None:
    connections = site.connections
    with Client(guest.connect(IP, 443)) as client:
        assert client.send(hellos.made()).take(1) in (b"\x15", b"\x16")
    assert site.connections == connections + 1
    assert rollout.last("net.connect")["server.address"] == IP
    with Client(guest.connect(IP, 443)) as client:  # RFC 6066: no names there
        assert client.send(hellos.made(b"open.test")).rest() == b""
    # Which of the two connections is seen to end first is not said.
    assert "sni_mismatch" in {event["reason"] for event in rollout.wait("net.end", 2)}


def test_by_an_address_of_ipv6(lab: NetLab, guest: GuestNet, rollout: Attached) -> None:
    origin = lab.http("2600:5::5", 80)
    with Client(guest.connect("2600:5::5", 80)) as client:
        assert ask(client, "[2600:5::5]").body == b"hello"
    assert rollout.last("net.request")["server.address"] == "2600:5::5"
    origin.close()


def test_a_tcp_rule_lets_the_server_speak_first(lab: NetLab, guest: GuestNet, rollout: Attached, site: Origin) -> None:
    def banner(origin: Origin, sock: socket.socket) -> None:
        sock.sendall(b"SSH-2.0-test\r\n")
        serve_echo(origin, sock)

    origin = lab.origin(IP, 22, banner)
    with Client(dial(guest, "raw.test", 22)) as client:
        assert client.take(14) == b"SSH-2.0-test\r\n"
        assert client.send(b"\x00anything").take(9) == b"\x00anything"
    decision, end = rollout.last("net.connect"), rollout.last()
    assert (decision["way"], decision["handling"]) == ("transparent", "raw")
    assert (end["bytes_out"], end["bytes_in"]) == (9, 23)
    origin.close()


def test_the_runs_own_services_by_every_way_in(lab: NetLab, sites: Sites, site: Origin) -> None:
    """They speak HTTP in clear, so tunnels to them are looked into, and each request is judged."""
    name, url = "model.stockade.internal", "model.stockade.internal:8000"
    origin = lab.http("10.0.0.9", 8000)
    more = 'services:\n  - {name: model, address: 10.0.0.9, port: 8000, methods: [GET], paths: ["/v1/**"]}\n'
    with GuestNet((8000,)) as own:
        rollout = sites.attach(POLICY + more, sockets=own.sockets)
        address = fake(own, name)

        def by_connect() -> Client:
            client = Client(own.connect("127.0.0.1", 3128))
            assert client.connect(name, 8000).status == 200
            return client

        def by_socks() -> Client:
            client = Client(own.connect("127.0.0.1", 3128))
            wanted = b"\x05\x01\x00\x03%c%b" % (len(name), name.encode()) + (8000).to_bytes(2, "big")
            client.send(b"\x05\x01\x00" + wanted)
            assert client.take(12)[:4] == b"\x05\x00\x05\x00"
            return client

        for way in (lambda: Client(own.connect(address, 8000)), by_connect, by_socks):
            with way() as client:
                assert ask(client, url, "/v1/x").status == 200
                assert ask(client, url, "/v2/x").reason == "path_not_allowed"
            with way() as client:
                assert ask(client, url, "/v1/x", method="POST", body=b"x").reason == "method_not_allowed"
        assert {event["service"] for event in rollout.events("net.request") if event["verdict"] == "allowed"} == {name}
        sites.worker.ask("detach", rollout_id=rollout.rollout_id)
    assert len(origin.received) == 3
    origin.close()


# ---- refusals


@pytest.mark.promise("S3.13")
@pytest.mark.parametrize(
    ("address", "port", "reason"),
    [
        ("11.0.0.5", 443, "host_not_allowed"),
        ("198.18.99.99", 443, "host_not_allowed"),
        ("127.0.0.1", 443, "host_not_allowed"),
        ("169.254.169.254", 443, "host_not_allowed"),
        ("10.0.0.1", 443, "host_not_allowed"),
        ("2600:5::6", 443, "host_not_allowed"),
        ("::ffff:169.254.169.254", 443, "host_not_allowed"),
        ("11.0.0.80", 8443, "port_not_allowed"),
    ],
)
def test_egress_case_046_whatever_address_is_taken_leads_to_the_gate(
    address: str, port: int, reason: str, lab: NetLab, guest: GuestNet, rollout: Attached, site: Origin
) -> None:
    queries, connections = len(lab.dns.queries), site.connections
    with Client(guest.connect(address, port)) as client:
        assert client.send(hellos.real("evil.test")).rest() == ACCESS_DENIED
    event = rollout.last("net.connect")
    assert (event["verdict"], event["reason"], event["way"]) == ("denied", reason, "transparent")
    assert event["server.address"] == address.removeprefix("::ffff:")
    assert (len(lab.dns.queries), site.connections) == (queries, connections)


def test_a_tls_client_understands_the_refusal(sites: Sites, guest: GuestNet, rollout: Attached) -> None:
    with pytest.raises(ssl.SSLError, match="ACCESS_DENIED"):
        sites.tls(guest.connect("11.0.0.5", 443), "evil.test")


@pytest.mark.parametrize("address", ["11.0.0.5", "169.254.169.254", "198.18.77.1", "fd00::5"])
def test_a_plain_client_understands_the_refusal(address: str, lab: NetLab, guest: GuestNet, rollout: Attached) -> None:
    with Client(guest.connect(address, 80)) as client:
        reply = ask(client, f"[{address}]" if ":" in address else address, "/latest/meta-data")
    assert (reply.status, reply.reason) == (403, "host_not_allowed")
    assert rollout.last("net.request")["server.address"] == address


@pytest.mark.parametrize("address", ["11.0.0.5", "198.18.0.10", "2600:5::5", "8.8.8.8"])
@pytest.mark.parametrize("port", [21, 1234, 3306, 6379, 65535])
def test_egress_case_046_other_ports_have_no_route(address: str, port: int, guest: GuestNet, rollout: Attached) -> None:
    with pytest.raises(OSError) as caught:
        guest.connect(address, port)
    assert caught.value.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ECONNREFUSED, errno.EACCES)


@pytest.mark.parametrize("address", ["8.8.8.8", "11.0.0.53", "2620:fe::fe"])
@pytest.mark.parametrize("port", [443, 123, 4500])
def test_egress_case_046_datagrams_go_nowhere(address: str, port: int, guest: GuestNet, rollout: Attached) -> None:
    with pytest.raises(OSError), guest.datagrams(address, port) as sock:
        sock.send(b"x" * 1200)


@pytest.mark.parametrize(
    ("name", "flight", "reason"),
    [
        ("open.test", hellos.made(b"read.test"), "sni_mismatch"),
        ("open.test", hellos.made(b"evil.test"), "sni_mismatch"),
        ("read.test", hellos.made(b"open.test"), "sni_mismatch"),
        ("open.test", hellos.made(), "sni_missing"),
        ("a.wild.test", hellos.made(b"b.wild.test"), "sni_mismatch"),
        ("a.wild.test", hellos.made(b"a.wild.test", extensions=((hellos.ECH, b"x"),)), "ech_not_allowed"),
    ],
)
def test_egress_case_045_and_074_the_server_name_is_the_one_of_the_address(
    name: str, flight: bytes, reason: str, guest: GuestNet, rollout: Attached, site: Origin
) -> None:
    with Client(dial(guest, name)) as client:
        assert client.send(flight).rest() == b""
    assert rollout.last()["reason"] == reason
    assert nothing_left(rollout)


@pytest.mark.parametrize("host", ["evil.test", "read.test", "clear.test:8080", "198.18.0.10", "127.0.0.1"])
def test_egress_case_047_the_host_header_is_the_one_of_the_address(
    host: str, guest: GuestNet, rollout: Attached, site: Origin, plain: Origin
) -> None:
    plain.received.clear()
    with Client(dial(guest, "clear.test", 80)) as client:
        reply = ask(client, host)
    assert (reply.status, reply.reason) == (421, "host_mismatch")
    event = rollout.last("net.request")
    assert (event["reason"], event["server.address"]) == ("host_mismatch", "clear.test")
    assert plain.received == []


def test_egress_case_049_a_later_request_is_judged_anew(
    guest: GuestNet, rollout: Attached, site: Origin, plain: Origin
) -> None:
    plain.received.clear()
    with Client(dial(guest, "clear.test", 80)) as client:
        assert ask(client, "clear.test").status == 200
        assert ask(client, "evil.test").status == 421
    assert len(plain.received) == 1


def test_egress_case_025_the_name_is_looked_up_and_judged_outside(
    lab: NetLab, guest: GuestNet, rollout: Attached, site: Origin, plain: Origin
) -> None:
    """The fake address says which name; what that is really at is asked now, and may be internal now."""
    plain.received.clear()
    address = fake(guest, "clear.test")
    for inner in ("10.0.0.1", "169.254.169.254", "127.0.0.1", "198.18.0.10"):
        lab.add_host("clear.test", inner)
        with Client(guest.connect(address, 80)) as client:
            reply = ask(client, "clear.test")
        assert reply.status == 403
        assert reply.reason in ("internal_address", "metadata_address")
    lab.add_host("open.test", "10.0.0.1")
    with Client(dial(guest, "open.test")) as client:
        assert client.send(hellos.real("open.test")).rest() == ACCESS_DENIED
    assert rollout.last("net.connect")["reason"] == "internal_address"
    lab.dns.zone["open.test"] = "servfail"
    with Client(dial(guest, "open.test")) as client:
        assert client.send(hellos.real("open.test")).rest() == ACCESS_DENIED
    assert rollout.wait("net.connect", 2)[-1]["reason"] == "resolve_failed"


def test_egress_case_077_clear_text_to_the_tls_port(guest: GuestNet, rollout: Attached, site: Origin) -> None:
    connections = site.connections
    with Client(dial(guest, "open.test")) as client:
        reply = ask(client, "open.test:443")
    assert (reply.status, reply.reason) == (403, "port_not_allowed")
    with Client(dial(guest, "open.test")) as client:
        assert client.send(b"SSH-2.0-x\r\n\r\n").reply().status == 400
    assert site.connections == connections


@pytest.mark.parametrize(
    "raw", [b"CONNECT evil.test:443 HTTP/1.1\r\nHost: evil.test:443\r\n\r\n", b"\x05\x01\x00", b"\x04\x01"]
)
def test_it_is_no_proxy_there(raw: bytes, guest: GuestNet, rollout: Attached, site: Origin) -> None:
    with Client(dial(guest, "clear.test", 80)) as client:
        assert client.send(raw).reply().status == 400


def test_what_goes_to_an_absolute_target_goes_to_the_address_or_nowhere(
    guest: GuestNet, rollout: Attached, site: Origin, plain: Origin
) -> None:
    plain.received.clear()
    with Client(dial(guest, "clear.test", 80)) as client:
        assert client.get("http://read.test/").status == 421
    with Client(dial(guest, "clear.test", 80)) as client:
        assert client.get("http://clear.test/").status == 200
    assert len(plain.received) == 1


@pytest.mark.promise("S6.4")
def test_egress_case_087_revocation_ends_transparent_tunnels(
    sites: Sites, guest: GuestNet, rollout: Attached, site: Origin
) -> None:
    with sites.tls(dial(guest, "open.test"), "open.test", trusting(sites)) as client:
        address = fake(guest, "open.test")
        assert sites.worker.ask("revoke", rollout_id=rollout.rollout_id)["closed"] == 1
        with pytest.raises((ssl.SSLError, ConnectionError)):
            client.sock.recv(1)
    with Client(guest.connect(address, 443)) as late:
        assert late.send(hellos.real("open.test")).rest() == ACCESS_DENIED
    with Client(guest.connect(address, 80)) as late:
        assert ask(late, "open.test").reason == "revoked"


def test_too_many_connections_are_refused_there_too(sites: Sites, guest: GuestNet, site: Origin) -> None:
    rollout = sites.attach(POLICY.replace("6000", "6000, connections: 2"), sockets=guest.sockets)
    held = [guest.connect(IP, 443) for _ in range(2)]
    with Client(guest.connect(IP, 443)) as late:
        assert late.reply().reason == "too_many_connections"
    for sock in held:
        sock.close()
    sites.worker.ask("detach", rollout_id=rollout.rollout_id)


def test_the_worker_has_counted_no_fault(sites: Sites) -> None:
    """Stays last: none of the above went through an exception that nobody expected."""
    assert sites.worker.ask("stats")["faults"] == 0
