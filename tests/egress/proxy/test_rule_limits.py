"""Limits of a single rule within those of its rollout (case 105)."""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections.abc import Iterator

import pytest

from tests.egress.netlab import NetLab, Origin, response
from tests.egress.proxy import hellos
from tests.egress.proxy.harness import Attached, Client, Reply, post
from tests.egress.proxy.sites import IP, LIMITS, Sites, ask, eventually, policy

PLAIN = "http://plain.test/x"


@pytest.fixture(scope="module")
def sites(lab: NetLab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    with Sites(lab, tmp_path_factory.mktemp("record")) as made:
        yield made


@pytest.fixture(scope="module")
def shared(sites: Sites) -> Origin:
    return sites.site("read.test", "other.test")


@pytest.fixture
def site(sites: Sites, shared: Origin) -> Origin:
    shared.received.clear()
    shared.respond = lambda _request: response(b"hello")
    for name in ("read.test", "other.test", "plain.test", "tunnel.test", "raw.test"):
        sites.lab.add_host(name, IP)
    return shared


@pytest.fixture(scope="module")
def plain(lab: NetLab) -> Origin:
    return lab.http(IP, 80)


@pytest.fixture(scope="module")
def echo(lab: NetLab) -> Origin:
    return lab.echo(IP, 22)


def limited(limits: str, *more: str) -> str:
    """Return a policy whose rules for read, plain and raw each have these limits of their own."""
    rules = (
        f"{{host: read.test, methods: [GET, POST], limits: {limits}}}",
        f"{{host: plain.test, methods: [GET, POST], ports: [80], limits: {limits}}}",
        f"{{host: raw.test, tcp: true, ports: [22], limits: {limits}}}",
        "{host: other.test, methods: [GET, POST]}",
    )
    return policy(*rules, *more, limits=LIMITS)


def get(rollout: Attached, url: str = PLAIN) -> Reply:
    with rollout.connect() as client:
        return client.get(url)


def test_egress_case_105_requests_of_one_rule(sites: Sites, site: Origin, plain: Origin) -> None:
    rollout = sites.attach(limited("{requests_per_minute: 2}"))
    replies = [get(rollout) for _ in range(3)]
    assert [reply.status for reply in replies] == [200, 200, 429]
    assert replies[2].reason == "rate_limited"
    retry = next(line for line in replies[2].head.split(b"\r\n") if line.lower().startswith(b"retry-after:"))
    assert 20 < int(retry.split(b":")[1]) <= 30, "what that rule refills in, not what the rollout does"
    assert rollout.last("net.request")["rule"].startswith("allow plain.test")
    with sites.inside(rollout, "other.test") as client:
        assert [ask(client, "other.test").status for _ in range(5)] == [200] * 5, "another rule has its own"


def test_egress_case_105_requests_inside_a_tunnel_are_counted_one_by_one(sites: Sites, site: Origin) -> None:
    rollout = sites.attach(limited("{requests_per_minute: 4}"))
    with sites.inside(rollout, "read.test") as client:  # opening it is one
        statuses = [ask(client, "read.test").status for _ in range(4)]
    assert statuses == [200, 200, 200, 429]
    assert len(site.received) == 3


@pytest.mark.parametrize("count", [1, 3])
def test_egress_case_105_connections_of_one_rule(count: int, sites: Sites, site: Origin, echo: Origin) -> None:
    rollout = sites.attach(limited(f"{{connections: {count}}}"))
    with contextlib.ExitStack() as opened:
        held = [opened.enter_context(rollout.connect()) for _ in range(count)]
        for client in held:
            assert client.connect("raw.test", 22).status == 200
        with rollout.connect() as late:
            reply = late.connect("raw.test", 22)
            assert (reply.status, reply.reason) == (429, "too_many_connections")
    rollout.wait("net.end", count)
    with rollout.connect() as client:
        assert client.connect("raw.test", 22).status == 200


def test_egress_case_105_the_cap_holds_while_names_are_looked_up(sites: Sites, site: Origin, echo: Origin) -> None:
    """Many that ask at once, before the first is connected, are still many."""
    rollout = sites.attach(limited("{connections: 2}"))
    sites.lab.dns.hold = threading.Event()
    try:
        with contextlib.ExitStack() as opened:
            clients = [opened.enter_context(rollout.connect()) for _ in range(8)]
            for client in clients:
                client.send(b"CONNECT raw.test:22 HTTP/1.1\r\nHost: raw.test:22\r\n\r\n")
            eventually(lambda: any(name == "raw.test" for name, _ in sites.lab.dns.queries))
            # All of them have been read: a later request of the same worker is answered.
            assert get(rollout, "http://evil.test/").status == 403
            sites.lab.dns.hold.set()
            replies = [client.reply() for client in clients]
            assert sorted(reply.status for reply in replies) == [200] * 2 + [429] * 6
            assert {reply.reason for reply in replies} == {"", "too_many_connections"}
    finally:
        sites.lab.dns.hold.set()
        sites.lab.dns.hold = None
    rollout.wait("net.end", 2)
    with rollout.connect() as client:
        assert client.connect("raw.test", 22).status == 200, "those that were refused gave nothing back"


def test_egress_case_105_one_rule_is_shared_by_requests_and_tunnels(sites: Sites, site: Origin, plain: Origin) -> None:
    rollout = sites.attach(policy("{host: plain.test, ports: [80, 443], limits: {requests_per_minute: 3}}"))
    with rollout.connect() as client:
        assert client.connect("plain.test").status == 200
    assert [get(rollout).status for _ in range(3)] == [200, 200, 429]


def test_egress_case_105_bytes_out_of_one_rule(sites: Sites, site: Origin, plain: Origin) -> None:
    cap = 10_000
    rollout = sites.attach(limited(f"{{bytes_out: {cap}}}"))
    with rollout.connect() as client:
        assert client.send(post(PLAIN, b"x" * 6000)).reply().status == 200
    with rollout.connect() as client:
        reply = client.send(post(PLAIN, b"x" * 6000)).reply()
    assert (reply.status, reply.reason) == (403, "bytes_out_exceeded")
    assert get(rollout).status == 200, "what is left is left"
    with sites.inside(rollout, "other.test") as client:
        assert ask(client, "other.test", method="POST", body=b"x" * 20_000).status == 200


@pytest.mark.parametrize("up", [True, False])
def test_egress_case_105_bytes_of_a_raw_tunnel_to_the_byte(
    *, up: bool, sites: Sites, site: Origin, echo: Origin
) -> None:
    cap = 300_000
    rollout = sites.attach(limited(f"{{bytes_{'out' if up else 'in'}: {cap}}}"))
    echo.data.clear()
    with rollout.connect() as client:
        assert client.connect("raw.test", 22).status == 200
        with contextlib.suppress(OSError, EOFError):
            for _ in range(10):
                client.send(b"x" * 65536).take(65536)
    end = rollout.last()
    assert end["reason"] == ("bytes_out_exceeded" if up else "bytes_in_exceeded")
    assert end["bytes_out" if up else "bytes_in"] == cap
    if up:
        assert len(echo.data) <= cap
    with rollout.connect() as client:
        assert client.connect("raw.test", 22).status == 200
        assert client.send(b"y").rest() == b""


def test_egress_case_105_bytes_in_of_an_inspected_answer(sites: Sites, site: Origin) -> None:
    cap = 50_000
    rollout = sites.attach(limited(f"{{bytes_in: {cap}}}"))
    site.respond = lambda _request: response(b"p" * 30_000)
    with sites.inside(rollout, "read.test") as client:
        assert len(ask(client, "read.test").body) == 30_000
        with pytest.raises((ssl.SSLError, OSError, EOFError)):
            ask(client, "read.test")
    ends = rollout.wait("net.end", 3)
    assert ends[-1]["reason"] == "bytes_in_exceeded"
    assert sum(end["bytes_in"] for end in ends) == cap


def test_egress_case_105_a_gathered_body_counts_on_its_rule(sites: Sites, site: Origin) -> None:
    """Where a body is read first, for the store, its cap is the same."""
    rollout = sites.attach(
        policy("{host: read.test, methods: [GET, POST], store: true, limits: {bytes_out: 5000}}", limits=LIMITS)
    )
    with sites.inside(rollout, "read.test") as client:
        reply = ask(client, "read.test", method="POST", body=b"x" * 6000)
    assert reply.reason in ("bytes_out_exceeded", "store_failed")
    assert site.received == []


def test_opaque_tunnels_count_on_their_rule(sites: Sites, site: Origin) -> None:
    rollout = sites.attach(policy("{host: read.test, limits: {bytes_out: 4000}}", limits=LIMITS))
    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    sites.roots.configure_trust(trust)
    client = rollout.connect()
    assert client.connect("read.test").status == 200
    with sites.tls(client.sock, "read.test", trust) as inside, pytest.raises((OSError, EOFError)):
        ask(inside, "read.test", "/" + "a" * 5000)
    assert rollout.last()["bytes_out"] == 4000
    with rollout.connect() as again:
        again.connect("read.test")
        assert again.send(hellos.real("read.test")).rest() == b""


def test_refused_requests_take_nothing_from_a_rule(sites: Sites, site: Origin, plain: Origin) -> None:
    rollout = sites.attach(limited("{requests_per_minute: 1}"))
    for _ in range(5):
        with rollout.connect() as client:
            client.send(b"PUT http://plain.test/x HTTP/1.1\r\nHost: plain.test\r\nContent-Length: 0\r\n\r\n")
            assert client.reply().reason == "method_not_allowed"
    assert get(rollout).status == 200


def test_each_rollout_has_its_own(sites: Sites, site: Origin, plain: Origin) -> None:
    text = limited("{requests_per_minute: 1}")
    first, second = sites.attach(text), sites.attach(text)
    assert [get(first).status, get(first).status, get(second).status] == [200, 429, 200]


def test_a_connection_is_given_back_however_it_ends(sites: Sites, site: Origin, plain: Origin) -> None:
    rollout = sites.attach(limited("{connections: 1}"))
    for _ in range(5):
        assert get(rollout).status == 200
    sites.lab.add_host("plain.test", "11.0.0.79")
    for _ in range(3):
        assert get(rollout).reason == "upstream_failed"
    sites.lab.dns.zone["plain.test"] = "servfail"
    for _ in range(3):
        assert get(rollout).reason == "resolve_failed"
    sites.lab.add_host("plain.test", IP)
    for _ in range(3):
        with sites.inside(rollout, "read.test") as client:
            assert ask(client, "read.test").status == 200
    with Client(rollout.connect().sock) as client:
        client.send(b"GET http://plain.test/x HTTP/1.1\r\nHost: plain.test\r\n\r\n")
    eventually(lambda: get(rollout).status == 200)


def test_the_worker_has_counted_no_fault(sites: Sites) -> None:
    """Stays last: none of the above went through an exception that nobody expected."""
    assert sites.worker.ask("stats")["faults"] == 0
