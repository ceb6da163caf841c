"""Inspected TLS: what is allowed works with ordinary clients, and what is not is refused in HTTP, inside."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.egress.netlab import NetLab, Origin, response
from tests.egress.proxy import hellos
from tests.egress.proxy.harness import Attached, Client, Worker
from tests.egress.proxy.sites import IP, Sites, ask, nothing_left, policy

HOST = "read.test"


@pytest.fixture(scope="module")
def sites(lab: NetLab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    with Sites(lab, tmp_path_factory.mktemp("record")) as made:
        yield made


@pytest.fixture(scope="module")
def shared(sites: Sites) -> Origin:
    """One address for all names."""
    sites.lab.add_host("clear.test", IP)
    return sites.site(HOST, "api.test", "a.wild.test", "open.test")


@pytest.fixture
def site(shared: Origin) -> Origin:
    shared.received.clear()
    shared.respond = lambda _request: response(b"hello")
    return shared


@pytest.fixture
def rollout(sites: Sites) -> Attached:
    return sites.attach()


@pytest.mark.promise("S3.11")
def test_a_request_inside_is_decided_recorded_and_forwarded(sites: Sites, rollout: Attached, site: Origin) -> None:
    connections = site.connections
    with sites.inside(rollout, HOST) as client:
        for path in ("/one", "/two?x=1"):
            reply = ask(client, HOST, path, "User-Agent: test")
            assert (reply.status, reply.body) == (200, b"hello")
    assert site.connections == connections + 1, "the upstream connection is kept"
    assert [request.line for request in site.received] == [b"GET /one HTTP/1.1", b"GET /two?x=1 HTTP/1.1"]
    assert site.received[0].header("host") == [b"read.test"]
    tunnel, first = rollout.wait("net.end", 3)[:2]
    decision = rollout.events("net.connect")[0]
    assert (decision["verdict"], decision["handling"], decision["server.address"]) == ("allowed", "inspect", HOST)
    assert (tunnel["reason"], tunnel["bytes_out"], tunnel["bytes_in"]) == ("inspected", 0, 0)
    assert tunnel["tls.client.server_name"] == HOST
    request = rollout.events("net.request")[0]
    assert (request["verdict"], request["way"], request["url.scheme"]) == ("allowed", "tls", "https")
    assert (request["http.request.method"], request["url.path"], request["server.port"]) == ("GET", "/one", 443)
    assert first["reason"] == "completed"
    assert first["bytes_out"] == len(site.received[0].head)
    assert first["network.peer.address"] == IP


def curl(rollout: Attached, ca: Path, *argv: str, scheme: str = "http") -> subprocess.CompletedProcess[str]:
    """Run curl through the listener; it knows the run's authority and no other."""
    host, port = rollout.address
    command = ["curl", "-sS", "--max-time", "15", "--cacert", str(ca), "-x", f"{scheme}://{host}:{port}", *argv]
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize("scheme", ["http", "socks5h"])
def test_curl_through_both_kinds_of_proxy(
    scheme: str, sites: Sites, rollout: Attached, site: Origin, tmp_path: Path
) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_bytes(sites.authority.cert_pem)
    done = curl(rollout, ca, f"https://{HOST}/x", scheme=scheme)
    assert (done.returncode, done.stdout) == (0, "hello"), done.stderr
    done = curl(rollout, ca, "-o", os.devnull, "-w", "%{http_code}", "-d", "data", f"https://{HOST}/x", scheme=scheme)
    assert done.stdout == "403"
    done = curl(rollout, ca, f"https://evil.test/{scheme}", scheme=scheme)
    assert done.returncode in (56, 97)  # the proxy's answer, told as HTTP or as SOCKS
    assert [request.line for request in site.received] == [b"GET /x HTTP/1.1"]


def test_a_large_body_arrives_whole_and_counted(sites: Sites, rollout: Attached, site: Origin) -> None:
    body = os.urandom(5 << 20)
    site.respond = lambda _request: response(body)
    with sites.inside(rollout, HOST) as client:
        reply = ask(client, HOST)
    assert hashlib.sha256(reply.body).digest() == hashlib.sha256(body).digest()
    end = rollout.wait("net.end", 2)[-1]
    assert (end["reason"], end["bytes_in"] - len(body)) == ("completed", len(response(body)) - len(body))


def test_a_large_upload_arrives_whole_and_counted(sites: Sites, rollout: Attached, site: Origin) -> None:
    body = os.urandom(3 << 20)
    with sites.inside(rollout, "api.test") as client:
        assert ask(client, "api.test", "/v1/up", method="POST", body=body).status == 200
    assert site.received[-1].body == body
    end = rollout.wait("net.end", 2)[-1]
    assert end["bytes_out"] == len(site.received[-1].head) + len(body)


def test_a_chunked_answer_and_one_that_ends_by_close(sites: Sites, rollout: Attached, site: Origin) -> None:
    site.respond = lambda _request: (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4;ext=1\r\nabcd\r\n1\r\ne\r\n0\r\nTrailer: x\r\n\r\n"
    )
    with sites.inside(rollout, HOST) as client:
        assert ask(client, HOST).body == b"abcde"
        site.respond = lambda _request: b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nuntil the end"
        reply = ask(client, HOST)
    assert reply.body == b"until the end"
    assert [end["reason"] for end in rollout.wait("net.end", 3)] == ["inspected", "completed", "completed"]


def test_pipelined_requests_are_answered_in_order(sites: Sites, rollout: Attached, site: Origin) -> None:
    site.respond = lambda request: response(request.line.split()[1])
    lines = "".join(f"GET /{number} HTTP/1.1\r\nHost: {HOST}\r\n\r\n" for number in range(20))
    with sites.inside(rollout, HOST) as client:
        client.send(lines.encode())
        assert [client.reply().body for _ in range(20)] == [f"/{number}".encode() for number in range(20)]


def test_an_address_is_inspected_as_one(sites: Sites, rollout: Attached) -> None:
    site = sites.site("11.0.0.99", ip="11.0.0.99")
    with sites.inside(rollout, "11.0.0.99") as client:
        assert ask(client, "11.0.0.99").status == 200
    assert site.received[0].header("host") == [b"11.0.0.99"]
    site.close()


def test_another_port_has_its_own_origin(sites: Sites, rollout: Attached, site: Origin) -> None:
    other = sites.site("api.test", port=8443)
    with sites.inside(rollout, "api.test", 8443) as client:
        assert ask(client, "api.test:8443", "/v1/x").status == 200
        assert other.received[0].header("host") == [b"api.test:8443"]
        assert ask(client, "api.test", "/v1/x").reason == "host_mismatch"
    assert site.received == []
    other.close()


# ---- refusals: in HTTP, inside; on record; and nothing left

REFUSED = {
    "062_post": ("POST", "/x", (), b"data", 403, "method_not_allowed"),
    "062_put": ("PUT", "/x", (), b"data", 403, "method_not_allowed"),
    "062_delete": ("DELETE", "/x", (), b"", 403, "method_not_allowed"),
    "062_options": ("OPTIONS", "/x", (), b"", 403, "method_not_allowed"),
    "062_patch": ("PATCH", "/x", (), b"data", 403, "method_not_allowed"),
    "062_unknown": ("BREW", "/x", (), b"", 403, "method_not_allowed"),
    "069_query": ("GET", "/x?_method=DELETE", (), b"", 403, "method_not_allowed"),
    "099_body_on_get": ("GET", "/x", (), b"stolen", 403, "body_not_allowed"),
    "099_long_query": ("GET", "/x?" + "a" * 4097, (), b"", 414, "query_too_large"),
    "072_big_head": ("GET", "/x", ("X-Big: " + "a" * 70000,), b"", 431, "header_too_large"),
    "072_many_headers": ("GET", "/x", tuple(f"X-{number}: 1" for number in range(120)), b"", 431, "too_many_headers"),
    "082_upgrade": ("GET", "/x", ("Connection: Upgrade", "Upgrade: websocket"), b"", 403, "upgrade_not_allowed"),
    "050_two_lengths": ("POST", "/x", ("Transfer-Encoding: chunked",), b"abc", 400, "malformed_request"),
    "057_bare_cr": ("GET", "/x", ("X-A: a\rb",), b"", 400, "malformed_request"),
    "066_dots": ("GET", "/a/../b", (), b"", 400, "malformed_path"),
    "066_encoded_dots": ("GET", "/a/%2e%2e/b", (), b"", 400, "malformed_path"),
    "066_backslash": ("GET", "/a%5cb", (), b"", 400, "malformed_path"),
    "066_double_encoding": ("GET", "/a%252fb", (), b"", 400, "malformed_path"),
    "066_encoded_slash": ("GET", "/a%2fb", (), b"", 403, "path_not_allowed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_egress_case(case: str, sites: Sites, rollout: Attached, site: Origin) -> None:
    method, path, lines, body, status, reason = REFUSED[case]
    queries = len(sites.lab.dns.queries)
    with sites.inside(rollout, HOST) as client:
        reply = ask(client, HOST, path, *lines, method=method, body=body)
    assert (reply.status, reply.reason) == (status, reason)
    event = rollout.last("net.request")
    assert (event["verdict"], event["reason"]) == ("denied", reason)
    assert event["server.address"] == HOST
    assert site.received == []
    assert len(sites.lab.dns.queries) == queries, "nothing is asked for a refused request"
    assert nothing_left(rollout)


PATHS = [
    "/v1/../secret",
    "/v1/..;/secret",
    "/v1//x",
    "/v1/x;y",
    "/v2/x",
    "/V1/x",
    "/v1%2Fx",
    "/v1/%2e%2e%2fsecret",
    "/",
]


@pytest.mark.parametrize("path", PATHS)
def test_egress_case_066_a_path_rule_cannot_be_walked_around(
    path: str, sites: Sites, rollout: Attached, site: Origin
) -> None:
    with sites.inside(rollout, "api.test") as client:
        reply = ask(client, "api.test", path)
    assert reply.reason in ("path_not_allowed", "malformed_path")
    assert reply.status in (400, 403)
    assert site.received == []


def test_egress_case_066_an_encoded_slash_passes_where_the_rule_says_so(sites: Sites, site: Origin) -> None:
    rollout = sites.attach(policy('{host: api.test, paths: ["/v1/*"], encoded_slash: true}'))
    with sites.inside(rollout, "api.test") as client:
        assert ask(client, "api.test", "/v1/a%2fb").status == 200
        assert site.received[-1].line == b"GET /v1/a%2Fb HTTP/1.1"
        assert ask(client, "api.test", "/v1/a/b").reason == "path_not_allowed"


@pytest.mark.promise("S3.11")
def test_egress_case_062_the_same_rules_by_every_way_in(sites: Sites, site: Origin) -> None:
    rollout = sites.attach(policy("{host: clear.test, read_only: true, ports: [80, 443]}"))
    plain = sites.lab.http(IP, 80)
    secure = sites.site("clear.test", ip="11.0.0.81")
    sites.lab.add_host("clear.test", IP)
    with rollout.connect() as client:
        client.send(b"POST http://clear.test/x HTTP/1.1\r\nHost: clear.test\r\nContent-Length: 1\r\n\r\nx")
        assert client.reply().reason == "method_not_allowed"
    with rollout.connect() as client:  # in clear, inside a tunnel
        assert client.connect("clear.test", 80).status == 200
        assert ask(client, "clear.test", "/x", method="POST", body=b"x").reason == "method_not_allowed"
    with sites.inside(rollout, "clear.test") as client:
        assert ask(client, "clear.test", "/x", method="POST", body=b"x").reason == "method_not_allowed"
    assert plain.received == secure.received == []
    with rollout.connect() as client:
        assert client.connect("clear.test", 80).status == 200
        assert ask(client, "clear.test", "/x").status == 200
    assert len(plain.received) == 1
    plain.close()
    secure.close()


def test_clear_text_in_a_tunnel_to_the_tls_port_is_refused(sites: Sites, rollout: Attached, site: Origin) -> None:
    connections = site.connections
    with rollout.connect() as client:
        assert client.connect(HOST).status == 200
        assert ask(client, f"{HOST}:443", "/x").reason == "port_not_allowed"
    assert site.connections == connections


@pytest.mark.promise("S3.11")
def test_egress_case_063_without_an_authority_nothing_is_let_through_unseen(
    worker: Worker, sites: Sites, site: Origin
) -> None:
    rollout = sites.attach(worker=worker, inspection=False)
    connections, queries = site.connections, len(sites.lab.dns.queries)
    with rollout.connect() as client:
        reply = client.connect(HOST)
    assert (reply.status, reply.reason) == (403, "inspection_required")
    assert rollout.last("net.connect")["reason"] == "inspection_required"
    assert (site.connections, len(sites.lab.dns.queries)) == (connections, queries)


def test_egress_case_063_a_worker_without_its_key_refuses_too(worker: Worker, sites: Sites, site: Origin) -> None:
    """Rules that say there is an authority, and a worker that was given none."""
    rollout = sites.attach(worker=worker)
    connections = site.connections
    with rollout.connect() as client, pytest.raises(OSError):
        assert client.connect(HOST).status == 200
        sites.tls(client.sock, HOST)
    assert rollout.last()["reason"] == "inspection_required"
    assert site.connections == connections


@pytest.mark.promise("S3.15")
def test_egress_case_069_method_override_headers_stay_here(sites: Sites, rollout: Attached, site: Origin) -> None:
    names = ("X-HTTP-Method-Override", "X-Method-Override", "X-HTTP-Method", "X_HTTP_METHOD_OVERRIDE", "X-Original-URL")
    with sites.inside(rollout, HOST) as client:
        assert ask(client, HOST, "/x", *(f"{name}: DELETE" for name in names)).status == 200
    head = site.received[-1].head.lower()
    assert b"override" not in head
    assert b"delete" not in head


def test_egress_case_070_a_redirect_inside_is_only_passed_on(sites: Sites, rollout: Attached, site: Origin) -> None:
    site.respond = lambda _request: response(b"", "302 Found", "Location: https://evil.test/stolen")
    queries = len(sites.lab.dns.queries)
    with sites.inside(rollout, HOST) as client:
        reply = ask(client, HOST)
    assert reply.status == 302
    assert b"location: https://evil.test/stolen" in reply.head.lower()
    with rollout.connect() as client:
        assert client.connect("evil.test").reason == "host_not_allowed"
    assert not any("evil" in name for name, _ in sites.lab.dns.queries[queries:])


def test_egress_case_071_what_is_meant_for_a_proxy_stays_here(sites: Sites, rollout: Attached, site: Origin) -> None:
    lines = ("Proxy-Authorization: Basic eDp5", "Proxy-Connection: keep-alive", "Connection: keep-alive, X-Hop")
    with sites.inside(rollout, HOST) as client:
        reply = ask(
            client, HOST, "/", *lines, "X-Hop: secret", "X-Stays: yes", "TE: trailers", "X-Forwarded-For: 1.2.3.4"
        )
    assert reply.status == 200
    head = site.received[-1].head.lower()
    for name in (b"proxy-", b"x-hop", b"secret", b"te:", b"x-forwarded"):
        assert name not in head
    assert site.received[-1].header("x-stays") == [b"yes"]


def test_egress_case_089_a_claim_inside_tls_is_only_a_claim(sites: Sites, rollout: Attached, site: Origin) -> None:
    with sites.inside(rollout, HOST) as client:
        assert ask(client, HOST, "/", "X-Rollout-Id: ep_other", "X-Stockade-Run: other").status == 200
    event = rollout.events("net.request")[0]
    assert event["rollout_id"] == rollout.rollout_id
    assert event["detail"] == "claims x-rollout-id: ep_other, x-stockade-run: other"
    assert b"ep_other" not in site.received[-1].head


def test_a_head_request_has_no_body_and_the_connection_goes_on(sites: Sites, rollout: Attached, site: Origin) -> None:
    site.respond = lambda request: (
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n" if request.line.startswith(b"HEAD") else response(b"hello")
    )
    with sites.inside(rollout, HOST) as client:
        reply = ask(client, HOST, method="HEAD")
        assert (reply.status, reply.body) == (200, b"")
        assert ask(client, HOST).body == b"hello"


def test_expect_continue_is_answered_inside(sites: Sites, rollout: Attached, site: Origin) -> None:
    head = b"POST /v1/x HTTP/1.1\r\nHost: api.test\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n"
    with sites.inside(rollout, "api.test") as client:
        assert client.send(head).reply().status == 100
        assert client.send(b"body").reply().status == 200
    assert site.received[-1].body == b"body"


def test_many_clients_at_once(sites: Sites, site: Origin) -> None:
    rollouts = [sites.attach() for _ in range(4)]
    site.respond = lambda request: response(request.line.split()[1])
    clients = [(sites.inside(rollouts[number % 4], HOST), f"/{number}") for number in range(32)]
    for client, path in clients:
        client.send(f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
    for client, path in clients:
        assert client.reply().body == path.encode()
        client.sock.close()
    assert {event["rollout_id"] for one in rollouts for event in one.events()} == {one.rollout_id for one in rollouts}


def test_a_session_of_tls_1_2_works_as_well(sites: Sites, rollout: Attached, site: Origin) -> None:
    context = sites.client_context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with sites.inside(rollout, HOST, context=context) as client:
        assert isinstance(client.sock, ssl.SSLSocket)
        assert client.sock.version() == "TLSv1.2"
        assert ask(client, HOST).status == 200


class Hand:
    """A handshake by hand, so that a test has each flight in its own hands."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=HOST)

    def first(self) -> bytes:
        """Return the first flight."""
        with contextlib.suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
        return self._outgoing.read()

    def finish(self, client: Client, piece: int = 1 << 16) -> bytes:
        """Go on from there, ``piece`` bytes a time; return the answer to a GET."""
        request = f"GET /x HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()
        answer = b""
        while not answer.endswith(b"hello"):
            self._incoming.write(client.take(1))
            try:
                self._tls.do_handshake()
                if request:
                    self._tls.write(request)
                    request = b""
                answer += self._tls.read()
            except ssl.SSLWantReadError:
                pass
            data = self._outgoing.read()
            for start in range(0, len(data), piece):
                client.send(data[start : start + piece])
        return answer


def test_egress_case_061_a_hello_right_behind_the_connect(sites: Sites, rollout: Attached, site: Origin) -> None:
    head = f"CONNECT {HOST}:443 HTTP/1.1\r\nHost: {HOST}:443\r\n\r\n".encode()
    connections = site.connections
    with rollout.connect() as client:
        hand = Hand(sites.client_context())
        assert client.send(head + hand.first()).reply().status == 200
        assert hand.finish(client).endswith(b"hello")
    assert site.connections == connections + 1
    with rollout.connect() as client:
        client.send(head.replace(HOST.encode(), b"evil.test") + hellos.real("evil.test"))
        assert client.reply().reason == "host_not_allowed"
    assert site.connections == connections + 1


@pytest.mark.parametrize("piece", [1, 7, 100])
def test_a_handshake_in_small_pieces(piece: int, sites: Sites, rollout: Attached, site: Origin) -> None:
    with rollout.connect() as client:
        assert client.connect(HOST).status == 200
        client.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hand = Hand(sites.client_context())
        flight = hand.first()
        for start in range(0, len(flight), piece):
            client.send(flight[start : start + piece])
        assert hand.finish(client, piece).endswith(b"hello")


def test_egress_case_102_what_cannot_be_recorded_is_refused_inside(sites: Sites, site: Origin, tmp_path: Path) -> None:
    """The record of this worker may not grow beyond a few events."""
    worker = sites.start(file_size=6000)
    rollout = sites.attach(worker=worker)
    statuses: list[int] = []
    with contextlib.suppress(OSError, EOFError, AssertionError), sites.inside(rollout, HOST) as client:
        statuses.extend(ask(client, HOST).status for _ in range(20))
    assert 0 < statuses.count(200) < 20
    permitted = [event for event in rollout.events("net.request") if event["verdict"] == "allowed"]
    assert len(site.received) <= len(permitted)
    with rollout.connect() as client:
        assert client.connect(HOST).reason == "record_failed"
    worker.ask("ping")
    assert {"event": "broken", "rollout_id": rollout.rollout_id} in worker.news, "the agent is told"


def test_egress_case_086_a_client_that_says_its_end_inside(sites: Sites, rollout: Attached, site: Origin) -> None:
    with sites.inside(rollout, HOST) as client:
        assert ask(client, HOST).status == 200
        assert isinstance(client.sock, ssl.SSLSocket)
        plain = client.sock.unwrap()  # returns once the other side has said its own
        assert plain.recv(1) == b""
        plain.close()
    assert [end["reason"] for end in rollout.wait("net.end", 2)] == ["inspected", "completed"]
