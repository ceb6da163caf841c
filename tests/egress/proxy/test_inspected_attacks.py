"""Attacks on the inspection itself: names, certificates, protocols, floods, and peers that stall."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import socket
import ssl
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from tests.egress.netlab import NetLab, Origin, response
from tests.egress.proxy import hellos
from tests.egress.proxy.harness import Attached
from tests.egress.proxy.sites import IP, SITES, Sites, ask, eventually, rss_kib

HOST = "read.test"


@pytest.fixture(scope="module")
def sites(lab: NetLab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    with Sites(lab, tmp_path_factory.mktemp("record")) as made:
        yield made


@pytest.fixture(scope="module")
def shared(sites: Sites) -> Origin:
    return sites.site(HOST, "api.test", "a.wild.test", "open.test")


@pytest.fixture
def site(shared: Origin) -> Origin:
    shared.received.clear()
    shared.respond = lambda _request: response(b"hello")
    return shared


@pytest.fixture
def rollout(sites: Sites) -> Attached:
    return sites.attach()


# ---- the first flight

FLIGHTS = {
    "074_other_name": (HOST, hellos.made(b"evil.test"), "sni_mismatch"),
    "074_subdomain": (HOST, hellos.made(b"a.read.test"), "sni_mismatch"),
    "074_another_allowed_name": (HOST, hellos.made(b"api.test"), "sni_mismatch"),
    "074_in_small_records": (HOST, hellos.made(b"evil.test", record_bytes=7), "sni_mismatch"),
    "075_none": (HOST, hellos.made(), "sni_missing"),
    "075_two": (HOST, hellos.made(HOST.encode(), b"evil.test"), "sni_mismatch"),
    "075_address": (HOST, hellos.made(b"11.0.0.80"), "sni_mismatch"),
    "075_name_for_an_address": ("11.0.0.99", hellos.made(b"read.test"), "sni_mismatch"),
    "076_ech_under_a_wildcard": ("a.wild.test", hellos.made(b"a.wild.test", extensions=((hellos.ECH, b"x"),)), "ech"),
    "077_record_of_nothing": (HOST, b"\x16\x03\x01\x00\x00", "not_tls"),
    "077_server_hello": (HOST, b"\x16\x03\x01\x00\x08\x02\x00\x00\x04aaaa", "not_tls"),
}


@pytest.mark.parametrize("case", FLIGHTS)
def test_egress_case(case: str, sites: Sites, rollout: Attached, site: Origin) -> None:
    host, flight, reason = FLIGHTS[case]
    connections, queries = site.connections, len(sites.lab.dns.queries)
    with rollout.connect() as client:
        assert client.connect(host).status == 200
        assert client.send(flight).rest() == b"", "not one byte of a handshake for another name"
    end = rollout.last()
    assert end["reason"] == {"ech": "ech_not_allowed"}.get(reason, reason)
    assert end["verdict"] == "denied"
    assert (site.connections, len(sites.lab.dns.queries)) == (connections, queries)


def test_egress_case_075_case_and_dot_are_folded_inside(sites: Sites, rollout: Attached, site: Origin) -> None:
    with rollout.connect() as client:
        assert client.connect("READ.test.").status == 200
        with sites.tls(client.sock, "READ.test", _careless()) as inside:
            assert ask(inside, "Read.Test", "/").status == 200
    assert site.received[-1].header("host") == [b"read.test"]


def _careless() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def test_egress_case_076_grease_works_where_the_host_is_exact(sites: Sites, rollout: Attached, site: Origin) -> None:
    """A hello that offers ECH passes and is on record; the handshake itself goes on without it."""
    hello = hellos.made(HOST.encode(), extensions=((hellos.ECH, b"\x00" * 40),))
    with rollout.connect() as client:
        assert client.connect(HOST).status == 200
        client.send(hello)
        first = client.take(1)
        assert first in (b"\x15", b"\x16"), "the worker's own TLS answers"
    assert rollout.last()["detail"].startswith(("encrypted client hello offered", "no "))


@pytest.mark.parametrize(
    "banner", [b"SSH-2.0-OpenSSH_9.6\r\n\r\n", b"\x00\x01\x02\x03", b"\x80\x2e\x01\x00\x02", b"\x15\x03\x01"]
)
def test_egress_case_077_what_is_neither_tls_nor_http(banner: bytes, rollout: Attached, site: Origin) -> None:
    connections = site.connections
    with rollout.connect() as client:
        assert client.connect(HOST).status == 200
        reply = client.send(banner).reply()
    assert (reply.status, reply.reason) == (400, "malformed_request")
    assert rollout.last("net.request")["verdict"] == "denied"
    assert site.connections == connections


# ---- what is asked for inside

MISDIRECTED = {
    "other_host": ("/", "evil.test"),
    "other_allowed_host": ("/", "api.test"),
    "other_port": ("/", "read.test:8443"),
    "address_of_the_host": ("/", IP),
    "absolute_other": ("https://evil.test/", "evil.test"),
    "absolute_against_host": ("https://evil.test/", HOST),
    "absolute_in_clear": ("http://read.test/", HOST),
    "suffix": ("/", "read.test.evil.test"),
}


@pytest.mark.parametrize("case", MISDIRECTED)
def test_egress_case_078_the_tunnel_says_where_requests_go(
    case: str, sites: Sites, rollout: Attached, site: Origin
) -> None:
    target, host = MISDIRECTED[case]
    queries = len(sites.lab.dns.queries)
    with sites.inside(rollout, HOST) as client:
        reply = ask(client, host, target)
        assert (reply.status, reply.reason) == (421, "host_mismatch")
        assert client.rest() == b""
    event = rollout.last("net.request")
    assert (event["reason"], event["severity"], event["server.address"]) == ("host_mismatch", 4, HOST)
    assert site.received == []
    assert len(sites.lab.dns.queries) == queries


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: read.test\r\nHost: evil.test\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: read.test, evil.test\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : read.test\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: read.test\r\n :evil.test\r\n\r\n",
        b"CONNECT evil.test:443 HTTP/1.1\r\nHost: evil.test\r\n\r\n",
        b"CONNECT read.test:443 HTTP/1.1\r\nHost: read.test\r\n\r\n",
        b"GET * HTTP/1.1\r\nHost: read.test\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: read.test\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_egress_case_078_heads_without_one_clear_host(
    raw: bytes, sites: Sites, rollout: Attached, site: Origin
) -> None:
    with sites.inside(rollout, HOST) as client:
        assert client.send(raw).reply().status in (400, 421)
    kind = "net.connect" if raw.startswith(b"CONNECT") else "net.request"
    assert rollout.wait(kind, 1 + (kind == "net.connect"))[-1]["verdict"] == "denied"
    assert site.received == []


def test_egress_case_049_a_refused_request_ends_what_was_pipelined(
    sites: Sites, rollout: Attached, site: Origin
) -> None:
    good, bad = f"GET /1 HTTP/1.1\r\nHost: {HOST}\r\n\r\n", "GET /2 HTTP/1.1\r\nHost: evil.test\r\n\r\n"
    with sites.inside(rollout, HOST) as client:
        client.send((good + bad + good).encode())
        assert [client.reply().status, client.reply().status] == [200, 421]
        assert client.rest() == b""
    assert len(site.received) == 1


# ---- certificates of the other side

PAST = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)


def _wrong_certificate(case: str, sites: Sites) -> ssl.SSLContext:
    if case == "expired":
        return sites.context(HOST, not_before=PAST, not_after=PAST + dt.timedelta(days=1))
    if case == "not_yet_valid":
        return sites.context(HOST, not_before=dt.datetime(2099, 1, 1, tzinfo=dt.UTC))
    if case == "other_name":
        return sites.context("evil.test")
    if case == "parent_name":
        return sites.context("test.read.test", "*.read.test")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if case == "the_runs_own_authority":  # known to the sandbox, never to what checks the world
        leaf = sites.authority.key_pem
        path = sites.folder / "leaf.pem"
        path.write_bytes(leaf)
        context.load_cert_chain(path)
        return context
    trustme.CA().issue_cert(HOST).configure_cert(context)
    return context


@pytest.mark.parametrize(
    "case", ["expired", "not_yet_valid", "other_name", "parent_name", "unknown_authority", "the_runs_own_authority"]
)
def test_egress_case_079_a_bad_certificate_is_a_502(case: str, sites: Sites, rollout: Attached) -> None:
    site = sites.site(HOST, ip="11.0.0.82", context=_wrong_certificate(case, sites))
    try:
        with sites.inside(rollout, HOST) as client:
            reply = ask(client, HOST, "/", "Authorization: Bearer secret")
        assert (reply.status, reply.reason) == (502, "upstream_tls")
        end = rollout.wait("net.end", 2)[-1]
        assert (end["reason"], end["http.response.status_code"], end["bytes_out"]) == ("upstream_tls", 502, 0)
        assert end["detail"].startswith("certificate: ")
        assert site.received == []
    finally:
        site.close()
        sites.lab.add_host(HOST, IP)


def _greets_in_clear(origin: Origin, sock: socket.socket) -> None:
    origin.data += sock.recv(65536)
    sock.sendall(response(b"hello"))
    origin.data += sock.recv(65536)


def test_egress_case_079_there_is_no_fallback_to_clear_text(sites: Sites, rollout: Attached) -> None:
    plain = sites.lab.origin("11.0.0.83", 443, _greets_in_clear)
    sites.lab.add_host(HOST, "11.0.0.83")
    try:
        with sites.inside(rollout, HOST) as client:
            reply = ask(client, HOST)
        assert (reply.status, reply.reason) == (502, "upstream_tls")
        assert plain.connections == 1
        assert b"GET" not in plain.data
    finally:
        plain.close()
        sites.lab.add_host(HOST, IP)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_an_old_version_of_tls_is_spoken_by_neither_side(sites: Sites, rollout: Attached) -> None:
    context = sites.context(HOST)
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    site = sites.site(HOST, ip="11.0.0.84", context=context)
    try:
        with sites.inside(rollout, HOST) as client:
            assert ask(client, HOST).reason == "upstream_tls"
    finally:
        site.close()
        sites.lab.add_host(HOST, IP)
    old = sites.client_context()
    old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    old.maximum_version = ssl.TLSVersion.TLSv1_1
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises(OSError):
        sites.inside(rollout, HOST, context=old)


def test_a_certificate_that_was_good_once_is_checked_for_the_next_host(sites: Sites, rollout: Attached) -> None:
    """Sessions are resumed for their own host only."""
    site = sites.site("a.wild.test", ip="11.0.0.85")
    sites.lab.add_host("b.wild.test", "11.0.0.85")
    for _ in range(2):
        with sites.inside(rollout, "a.wild.test") as client:
            assert ask(client, "a.wild.test").status == 200
    with sites.inside(rollout, "b.wild.test") as client:
        assert ask(client, "b.wild.test").reason == "upstream_tls"
    assert len(site.received) == 2
    site.close()
    sites.lab.add_host("a.wild.test", IP)


# ---- the authority


def test_egress_case_080_the_key_of_the_authority_is_nowhere_to_be_found(
    sites: Sites, rollout: Attached, site: Origin
) -> None:
    with sites.inside(rollout, HOST) as client:
        ask(client, HOST)
    pid = sites.worker.process.pid
    secret = _scalar(sites.authority.key_pem)
    places = [Path(f"/proc/{pid}/environ"), Path(f"/proc/{pid}/cmdline"), rollout.record]
    places += [path for path in Path(f"/proc/{pid}/fd").iterdir() if "memfd" in os.readlink(path)]
    assert len(places) > 3, "the leaves' own files are there"
    for place in places:
        data = place.read_bytes()
        assert secret not in data
        for block in data.split(b"-----BEGIN PRIVATE KEY-----")[1:]:
            assert secret != _scalar(b"-----BEGIN PRIVATE KEY-----" + block)


def _scalar(pem: bytes) -> bytes:
    key = serialization.load_pem_private_key(pem, password=None)
    return key.private_numbers().private_value.to_bytes(32, "big")  # type: ignore[union-attr]


def test_egress_case_080_a_leaf_is_for_the_host_that_was_asked_for(
    sites: Sites, rollout: Attached, site: Origin
) -> None:
    with sites.inside(rollout, "a.wild.test") as client:
        assert isinstance(client.sock, ssl.SSLSocket)
        leaf = x509.load_der_x509_certificate(client.sock.getpeercert(binary_form=True) or b"")
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["a.wild.test"]
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_egress_case_081_a_flood_of_names_is_slowed_and_bounded(sites: Sites) -> None:
    text = SITES.replace("bytes_out: 64 MiB", "names: 2000, connections: 400, bytes_out: 64 MiB")
    rollout = sites.attach(text)
    before = rss_kib(sites.worker.process.pid)
    refused = 0
    with contextlib.ExitStack() as opened:
        clients = []
        for number in range(320):
            client = opened.enter_context(rollout.connect())
            name = f"n{number}.wild.test"
            client.send(f"CONNECT {name}:443 HTTP/1.1\r\nHost: {name}\r\n\r\n".encode())
            clients.append((client, name))
        for client, name in clients:
            with contextlib.suppress(ConnectionError):  # some are refused already
                client.send(hellos.real(name))
        for client, _ in clients:
            try:
                assert client.reply().status == 200
                assert client.take(1) == b"\x16"
            except (EOFError, ConnectionError):
                refused += 1
    assert refused > 100, "more than the burst of leaves was made at once"
    rollout.wait("net.end", 320)
    assert "rate_limited" in {event["reason"] for event in rollout.events("net.end")}
    assert rss_kib(sites.worker.process.pid) - before < 24 * 1024
    time.sleep(0.2)
    with sites.inside(sites.attach(), HOST) as client:  # who has a leaf already is not held up
        assert client.sock is not None


def test_egress_case_083_http_2_is_not_offered(sites: Sites, rollout: Attached, site: Origin) -> None:
    both = sites.client_context()
    both.set_alpn_protocols(["h2", "http/1.1"])
    with sites.inside(rollout, HOST, context=both) as client:
        assert isinstance(client.sock, ssl.SSLSocket)
        assert client.sock.selected_alpn_protocol() == "http/1.1"
        assert ask(client, HOST).status == 200
    only = sites.client_context()
    only.set_alpn_protocols(["h2"])
    with sites.inside(rollout, HOST, context=only) as client:
        assert isinstance(client.sock, ssl.SSLSocket)
        assert client.sock.selected_alpn_protocol() is None
        assert client.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(64)).reply().status == 400
    assert len(site.received) == 1


def test_a_client_without_trust_says_so_and_is_on_record(sites: Sites, rollout: Attached, site: Origin) -> None:
    stranger = ssl.create_default_context()
    with pytest.raises(ssl.SSLCertVerificationError):
        sites.inside(rollout, HOST, context=stranger)
    end = rollout.last()
    assert (end["reason"], end["verdict"]) == ("client_tls", "observed")
    assert end["detail"] in ("alert unknown ca", "alert bad certificate", "alert certificate unknown")


# ---- bodies


def test_egress_case_088_nothing_is_ever_decompressed(sites: Sites, rollout: Attached, site: Origin) -> None:
    bomb = zlib.compress(bytes(1 << 27), 9)
    site.respond = lambda _request: response(bomb, "200 OK", "Content-Encoding: deflate")
    before = rss_kib(sites.worker.process.pid)
    with sites.inside(rollout, HOST) as client:
        assert ask(client, HOST).body == bomb
    assert rss_kib(sites.worker.process.pid) - before < 4 * 1024


def test_an_answer_that_is_cut_off_does_not_look_whole(sites: Sites, rollout: Attached) -> None:
    """An end without close_notify may be an attacker's; so may one before the announced length."""

    def cut(_origin: Origin, sock: socket.socket) -> None:
        sock.recv(65536)
        sock.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhalf of it")
        time.sleep(0.05)
        raw = socket.socket(fileno=sock.detach())
        raw.close()

    site = sites.site(HOST, ip="11.0.0.86", inner=cut)
    try:
        client = sites.inside(rollout, HOST)
        client.send(f"GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
        with pytest.raises((ssl.SSLError, ConnectionResetError)):
            while client.sock.recv(4096):
                pass
        client.sock.close()
        assert rollout.wait("net.end", 2)[-1]["reason"] == "upstream_failed"
    finally:
        site.close()
        sites.lab.add_host(HOST, IP)


def test_a_client_that_ends_without_saying_so_sends_no_half_body(sites: Sites, rollout: Attached, site: Origin) -> None:
    client = sites.inside(rollout, "api.test")
    client.send(b"POST /v1/x HTTP/1.1\r\nHost: api.test\r\nContent-Length: 100\r\n\r\nhalf")
    socket.socket(fileno=client.sock.detach()).close()
    eventually(lambda: len(rollout.events("net.end")) == 2)
    assert rollout.events("net.end")[-1]["reason"] == "client_closed"
    assert site.received == []


# ---- peers that stall


def test_slow_handshakes_end_on_both_sides(sites: Sites, rollout: Attached) -> None:
    """Three at once, because each takes its ten seconds."""

    def silent(origin: Origin, sock: socket.socket) -> None:
        while sock.recv(4096):
            origin.closed.wait(0.01)

    mute = sites.lab.origin("11.0.0.87", 443, silent)
    sites.lab.add_host("b.wild.test", "11.0.0.87")
    begin = time.monotonic()
    hello = hellos.real(HOST)
    with rollout.connect() as part, rollout.connect() as whole:
        assert part.connect(HOST).status == whole.connect(HOST).status == 200
        part.send(hello[:50])
        whole.send(hello)
        with sites.inside(rollout, "b.wild.test") as stuck:
            stuck.sock.settimeout(20)
            reply = ask(stuck, "b.wild.test")
        assert (reply.status, reply.reason) == (502, "upstream_tls")
        assert part.rest() == b""
        whole.rest()
    assert 8 < time.monotonic() - begin < 16
    ends = [event["reason"] for event in rollout.wait("net.end", 4)]
    assert sorted(ends) == ["header_timeout", "header_timeout", "inspected", "upstream_tls"]
    mute.close()


def test_a_client_that_never_reads_does_not_make_the_worker_grow(sites: Sites, rollout: Attached) -> None:
    """As much as the buffers hold is read from the site, and no more."""
    sent = [0]

    def pour(origin: Origin, sock: socket.socket) -> None:
        sock.recv(65536)
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 200000000\r\n\r\n")
        while not origin.closed.is_set():
            sock.sendall(bytes(1 << 16))
            sent[0] += 1 << 16

    site = sites.site(HOST, ip="11.0.0.88", inner=pour)
    before = rss_kib(sites.worker.process.pid)
    try:
        with sites.inside(rollout, HOST) as client:
            client.send(f"GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
            seen = -1
            while seen != sent[0] or not seen:
                seen = sent[0]
                time.sleep(0.5)
            assert sent[0] < 32 << 20
            assert rss_kib(sites.worker.process.pid) - before < 4 * 1024
    finally:
        site.close()
        sites.lab.add_host(HOST, IP)


def test_a_site_that_never_reads_does_not_make_the_worker_grow(sites: Sites, rollout: Attached) -> None:
    def deaf(origin: Origin, _sock: socket.socket) -> None:
        origin.closed.wait(30)

    site = sites.site("api.test", ip="11.0.0.89", inner=deaf)
    before = rss_kib(sites.worker.process.pid)
    try:
        with sites.inside(rollout, "api.test") as client:
            client.send(b"POST /v1/x HTTP/1.1\r\nHost: api.test\r\nContent-Length: 16000000\r\n\r\n")
            client.sock.settimeout(1)
            with pytest.raises(TimeoutError):
                for _ in range(240):
                    client.sock.sendall(bytes(1 << 16))
            assert rss_kib(sites.worker.process.pid) - before < 4 * 1024
    finally:
        site.close()
        sites.lab.add_host("api.test", IP)


def say_nothing(origin: Origin, _sock: socket.socket) -> None:
    """Take a request, and answer nothing."""
    origin.closed.wait(30)


@pytest.mark.promise("S6.4")
def test_egress_case_087_revocation_ends_every_stage_within_a_second(sites: Sites) -> None:
    stalled = sites.site("b.wild.test", ip="11.0.0.90", inner=say_nothing)
    rollout = sites.attach()
    with contextlib.ExitStack() as opened:
        flight, shaking = (opened.enter_context(rollout.connect()) for _ in range(2))
        for client in (flight, shaking):
            assert client.connect(HOST).status == 200
        shaking.send(hellos.real(HOST))
        shaking.take(1)
        idle = opened.enter_context(sites.inside(rollout, HOST))
        waiting = opened.enter_context(sites.inside(rollout, "b.wild.test"))
        waiting.send(b"GET / HTTP/1.1\r\nHost: b.wild.test\r\n\r\n")
        rollout.wait("net.request")
        begin = time.monotonic()
        assert sites.worker.ask("revoke", rollout_id=rollout.rollout_id)["closed"] == 4
        for client in (flight, shaking, idle, waiting):
            with contextlib.suppress(OSError):
                client.rest()
        assert time.monotonic() - begin < 1
    reasons = [event["reason"] for event in rollout.wait("net.end", 5)]
    assert reasons.count("revoked") == 3  # the idle one had nothing under way
    with rollout.connect() as client:
        assert client.connect(HOST).reason == "revoked"
    stalled.close()


def test_the_worker_has_counted_no_fault(sites: Sites) -> None:
    """Stays last: none of the above went through an exception that nobody expected."""
    assert sites.worker.ask("stats")["faults"] == 0
