"""Plain HTTP through the real worker: framing, heads, keep-alive. Case numbers are those of the bypass table."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.egress.netlab import NetLab, Origin, Received, response, serve_http
from tests.egress.proxy.harness import Attached, Worker, post

URL = "http://plain.example.org/x"
HEAD = b"POST http://plain.example.org/x HTTP/1.1\r\nHost: plain.example.org\r\n"


@pytest.fixture(scope="module")
def shared_origin(lab: NetLab) -> Origin:
    return lab.http("11.0.0.5", 80)


@pytest.fixture
def origin(shared_origin: Origin) -> Origin:
    shared_origin.received.clear()
    shared_origin.respond = lambda _request: response(b"hello")
    return shared_origin


@pytest.fixture
def rollout(worker: Worker) -> Iterator[Attached]:
    attached = worker.attach()
    yield attached
    assert worker.ask("detach", rollout_id=attached.rollout_id)["ok"]
    attached.close()


def test_get_is_recorded_before_and_after(rollout: Attached, origin: Origin) -> None:
    with rollout.connect() as client:
        reply = client.get(f"{URL}?token=secret", "User-Agent: test")
    assert (reply.status, reply.body) == (200, b"hello")
    assert origin.received[0].line == b"GET /x?token=secret HTTP/1.1"
    decision, end = rollout.last("net.request"), rollout.last("net.end")
    assert (decision["verdict"], decision["reason"], decision["url.path"]) == ("allowed", "allowed", "/x")
    assert decision["network.peer.address"] == "11.0.0.5"
    assert "secret" not in rollout.record.read_text()
    assert (end["reason"], end["http.response.status_code"]) == ("completed", 200)
    assert end["request_id"] == decision["id"]
    assert end["bytes_out"] == len(origin.received[0].head)
    assert end["bytes_in"] == len(response(b"hello"))
    assert end["duration_ns"] > 0


@pytest.mark.promise("S3.8")
def test_the_decision_is_on_record_when_the_origin_sees_the_request(rollout: Attached, origin: Origin) -> None:
    seen: list[int] = []

    def respond(_request: Received) -> bytes:
        seen.append(len(rollout.events("net.request")))
        return response()

    origin.respond = respond
    with rollout.connect() as client:
        client.get(URL)
    assert seen == [1]


def test_egress_case_047_host_header_is_rebuilt_from_the_uri(rollout: Attached, origin: Origin) -> None:
    with rollout.connect() as client:
        client.send(b"GET http://plain.example.org/x HTTP/1.1\r\nHost: evil.example.org\r\n\r\n")
        reply = client.reply()
    hosts = [request.header("host") for request in origin.received]
    assert reply.status == 400 or hosts == [[b"plain.example.org"]]
    assert [b"evil.example.org"] not in hosts


MALFORMED = {
    "048_two_hosts": b"GET http://plain.example.org/ HTTP/1.1\r\nHost: plain.example.org\r\nHost: b\r\n\r\n",
    "048_space_before_colon": b"GET http://plain.example.org/ HTTP/1.1\r\nHost : plain.example.org\r\n\r\n",
    "048_no_host": b"GET http://plain.example.org/ HTTP/1.1\r\nA: b\r\n\r\n",
    "050_length_and_chunked": HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "051_two_lengths": HEAD + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
    "051_length_list": HEAD + b"Content-Length: 3, 3\r\n\r\nabc",
    "052_xchunked": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "052_gzip_chunked": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "052_chunked_twice": HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "052_chunked_in_http_1_0": HEAD.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "053_plus": HEAD + b"Content-Length: +3\r\n\r\nabc",
    "053_hex": HEAD + b"Content-Length: 0x3\r\n\r\nabc",
    "053_20_digits": HEAD + b"Content-Length: 00000000000000000003\r\n\r\nabc",
    "054_hex_prefix": HEAD + b"Transfer-Encoding: chunked\r\n\r\n0x3\r\nabc\r\n0\r\n\r\n",
    "054_underscore": HEAD + b"Transfer-Encoding: chunked\r\n\r\n0_3\r\nabc\r\n0\r\n\r\n",
    "054_space": HEAD + b"Transfer-Encoding: chunked\r\n\r\n3 \r\nabc\r\n0\r\n\r\n",
    "054_17_digits": HEAD + b"Transfer-Encoding: chunked\r\n\r\n00000000000000003\r\nabc\r\n0\r\n\r\n",
    "055_lf_in_extension": HEAD + b"Transfer-Encoding: chunked\r\n\r\n3;a\nb\r\nabc\r\n0\r\n\r\n",
    "055_crlf_in_quotes": HEAD + b'Transfer-Encoding: chunked\r\n\r\n3;a="\r\n"\r\nabc\r\n0\r\n\r\n',
    "056_no_crlf_after_data": HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nabXX0\r\n\r\n",
    "057_obs_fold": HEAD + b"A: b\r\n c\r\nContent-Length: 0\r\n\r\n",
    "057_bare_cr": HEAD + b"A: b\rC: d\r\nContent-Length: 0\r\n\r\n",
    "057_bare_lf": HEAD + b"A: b\nC: d\r\nContent-Length: 0\r\n\r\n",
    "057_nul": HEAD + b"A: b\0c\r\nContent-Length: 0\r\n\r\n",
    "064_https_in_clear": b"GET https://plain.example.org/ HTTP/1.1\r\nHost: plain.example.org\r\n\r\n",
}


@pytest.mark.parametrize("case", MALFORMED)
def test_egress_case(case: str, rollout: Attached, origin: Origin, lab: NetLab) -> None:
    raw = MALFORMED[case]
    connections = origin.connections
    with rollout.connect() as client:
        reply = client.send(raw).reply()
        assert client.rest() == b""
    assert reply.status in (400, 501), reply
    assert origin.received == []
    assert origin.connections == connections, "the upstream was dialled"
    event = rollout.last("net.request")
    assert event["verdict"] == "denied"
    assert event["reason"] == reply.reason
    # Without the gate these very bytes reach the origin.
    with lab.connect(origin.ip, origin.port) as direct:
        direct.sendall(raw)
        assert direct.recv(64).startswith(b"HTTP/1.1 200")
    assert origin.received


@pytest.mark.promise("S3.6")
def test_egress_case_049_each_request_of_a_connection_is_decided(rollout: Attached, origin: Origin) -> None:
    with rollout.connect() as client:
        assert client.get(URL).status == 200
        assert client.get(URL).status == 200
        assert origin.received[1].line == b"GET /x HTTP/1.1"
        denied = client.get("http://evil.example.org/x")
    assert (denied.status, denied.reason) == (403, "host_not_allowed")
    assert [event["verdict"] for event in rollout.events("net.request")] == ["allowed", "allowed", "denied"]


@pytest.mark.promise("S3.6")
def test_egress_case_049_pipelined_to_another_host(rollout: Attached, origin: Origin) -> None:
    good = f"GET {URL} HTTP/1.1\r\nHost: plain.example.org\r\n\r\n".encode()
    with rollout.connect() as client:
        client.send(good + good + good.replace(b"plain", b"evil") + good)
        replies = [client.reply() for _ in range(3)]
        assert client.rest() == b""
    assert [reply.status for reply in replies] == [200, 200, 403]
    assert len(origin.received) == 2


def test_one_upstream_connection_serves_one_destination(rollout: Attached, origin: Origin, lab: NetLab) -> None:
    second = lab.http("11.0.0.5", 8080, lambda _request: response(b"second"))
    before, queries = origin.connections, len(lab.dns.queries)
    with rollout.connect() as client:
        for _ in range(3):
            assert client.get(URL).body == b"hello"
        assert (origin.connections - before, len(lab.dns.queries) - queries) == (1, 2)
        assert client.get("http://plain.example.org:8080/x").body == b"second"
        assert client.get(URL).body == b"hello"
    assert (origin.connections - before, second.connections) == (2, 1)


def test_a_kept_connection_that_went_stale_is_replaced(rollout: Attached, origin: Origin) -> None:
    with rollout.connect() as client:
        assert client.get(URL).status == 200
        origin.drop()
        time.sleep(0.05)
        assert client.get(URL).status == 200
    assert len(origin.received) == 2


def test_a_request_is_repeated_once_when_the_kept_connection_closes_on_it(rollout: Attached, lab: NetLab) -> None:
    served: list[int] = []

    def once(origin: Origin, sock: socket.socket) -> None:
        """Serve one request per connection without saying so, and close on the second."""
        sock.sendall(origin.respond(origin_request(sock)))
        served.append(1)
        sock.recv(1)

    def origin_request(sock: socket.socket) -> Received:
        data = b""
        while b"\r\n\r\n" not in data:
            data += sock.recv(65536)
        return Received(data, b"")

    with_once = lab.origin("11.0.0.31", 80, once)
    lab.add_host("plain.example.org", "11.0.0.31")
    try:
        with rollout.connect() as client:
            assert client.get(URL).status == 200
            assert client.get(URL).status == 200
            refused = client.send(post(URL, b"x")).reply()
    finally:
        lab.add_host("plain.example.org", "11.0.0.5")
    assert (refused.status, refused.reason) == (502, "upstream_failed")
    assert with_once.connections == 2, "a POST must not be repeated"


@pytest.mark.parametrize("size", [0, 1, 70_000, 1_000_000])
def test_bodies_by_length(size: int, rollout: Attached, origin: Origin) -> None:
    body = bytes(range(256)) * (size // 256) + b"z" * (size % 256)
    origin.respond = lambda request: response(request.body)
    with rollout.connect() as client:
        for _ in range(2):
            assert client.send(post(URL, body)).reply().body == body
    assert [request.body for request in origin.received] == [body, body]


def test_chunked_request_is_framed_anew_without_extensions(rollout: Attached, origin: Origin) -> None:
    pieces = [
        HEAD,
        b"Transfer-Encoding: chunked\r\n\r\n",
        b"3;secret=1\r\nab",
        b"c\r\n1",
        b"0\r\n",
        b"d" * 16,
        b"\r\n0\r\n",
    ]
    with rollout.connect() as client:
        for piece in [*pieces, b"X-Trailer: secret\r\n", b"\r\n"]:
            client.send(piece)
            time.sleep(0.01)
        assert client.reply().status == 200
        assert client.get(URL).status == 200
    body = origin.received[0].body
    assert b"secret" not in body
    assert body == b"2\r\nab\r\n1\r\nc\r\n10\r\n" + b"d" * 16 + b"\r\n0\r\n\r\n"


def test_egress_case_054_bad_chunk_after_the_head_ends_the_exchange(rollout: Attached, origin: Origin) -> None:
    with rollout.connect() as client:
        client.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        rollout.wait("net.request")
        time.sleep(0.1)
        reply = client.send(b"0x1\r\nsmuggled\r\n0\r\n\r\n").reply()
    assert (reply.status, reply.reason) == (400, "malformed_body")
    assert rollout.last()["reason"] == "malformed_body"
    assert origin.received == []


@pytest.mark.parametrize(
    ("raw", "body"),
    [
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=1\r\nabc\r\n2\r\nde\r\n0\r\nT: v\r\n\r\n",
            b"abcde",
        ),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nuntil the end", b"until the end"),
        (b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", b"ok"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", b"ok"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 99\r\n\r\n", b""),
    ],
    ids=["chunked", "until_close", "early_hints", "continue", "204", "304"],
)
def test_responses_by_every_framing(raw: bytes, body: bytes, rollout: Attached, origin: Origin) -> None:
    origin.respond = lambda _request: raw
    with rollout.connect() as client:
        assert client.get(URL).body == body
    end = rollout.last()
    assert (end["reason"], end["bytes_in"]) == ("completed", len(raw))


def test_chunked_response_to_an_http_1_0_client_ends_by_close(rollout: Attached, origin: Origin) -> None:
    origin.respond = lambda _request: b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    with rollout.connect() as client:
        reply = client.send(b"GET http://plain.example.org/x HTTP/1.0\r\nHost: plain.example.org\r\n\r\n").reply()
    assert (reply.status, reply.body) == (200, b"abc")
    assert b"chunked" not in reply.head


def test_head_has_no_body_and_keeps_the_connection(rollout: Attached, origin: Origin) -> None:
    origin.respond = lambda request: response(b"hello" if request.line.startswith(b"GET") else b"")
    with rollout.connect() as client:
        client.send(b"HEAD http://plain.example.org/x HTTP/1.1\r\nHost: plain.example.org\r\n\r\n")
        assert client.reply(head=True).status == 200
        assert client.get(URL).body == b"hello"


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
    ],
    ids=["length", "chunked"],
)
def test_a_response_cut_short_does_not_look_whole(raw: bytes, rollout: Attached, origin: Origin) -> None:
    origin.respond = lambda _request: raw.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
    with rollout.connect() as client:
        client.send(f"GET {URL} HTTP/1.1\r\nHost: plain.example.org\r\n\r\n".encode())
        assert not client.ended(), "a clean end"
    assert rollout.last()["reason"] == "upstream_failed"


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nA: b\0c\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n",
        b"nonsense\r\n\r\n",
    ],
    ids=["two_lengths", "nul", "switch", "nonsense"],
)
def test_a_malformed_response_is_not_passed_on(raw: bytes, rollout: Attached, origin: Origin) -> None:
    origin.respond = lambda _request: raw
    with rollout.connect() as client:
        reply = client.get(URL)
    assert (reply.status, reply.reason) == (502, "upstream_malformed")
    assert rollout.last()["reason"] == "upstream_malformed"


def test_no_listener_at_the_origin(rollout: Attached, lab: NetLab) -> None:
    lab.add_host("plain.example.org", "11.0.0.77")
    try:
        with rollout.connect() as client:
            reply = client.get(URL)
    finally:
        lab.add_host("plain.example.org", "11.0.0.5")
    assert (reply.status, reply.reason) == (502, "upstream_failed")
    end = rollout.last()
    assert (end["reason"], end["http.response.status_code"]) == ("upstream_failed", 502)


def test_expect_continue_is_answered_here(rollout: Attached, origin: Origin) -> None:
    with rollout.connect() as client:
        client.send(HEAD + b"Content-Length: 3\r\nExpect: 100-continue\r\n\r\n")
        assert client.reply().status == 100
        assert client.send(b"abc").reply().status == 200
    assert origin.received[0].body == b"abc"
    assert origin.received[0].header("expect") == []


def test_expect_continue_of_a_denied_request_gets_no_continue(rollout: Attached, origin: Origin) -> None:
    with rollout.connect() as client:
        head = HEAD.replace(b"plain", b"evil")
        assert client.send(head + b"Content-Length: 3\r\nExpect: 100-continue\r\n\r\n").reply().status == 403


def test_an_early_answer_ends_the_connection_after_it(rollout: Attached, lab: NetLab) -> None:
    def reject(_origin: Origin, sock: socket.socket) -> None:
        sock.recv(65536)
        sock.sendall(response(b"too large", "413 Content Too Large", "Connection: close"))
        while sock.recv(65536):
            pass

    lab.origin("11.0.0.32", 80, reject)
    lab.add_host("plain.example.org", "11.0.0.32")
    try:
        with rollout.connect() as client:
            client.send(HEAD + b"Content-Length: 1000000\r\n\r\n" + b"x" * 1000)
            reply = client.reply()
    finally:
        lab.add_host("plain.example.org", "11.0.0.5")
    assert (reply.status, reply.body) == (413, b"too large")
    assert b"connection: close" in reply.head.lower()


def test_egress_case_060_and_071_hop_by_hop_and_credentials_stay_here(rollout: Attached, origin: Origin) -> None:
    fields = ("Connection: X-Hop, Upgrade, HTTP2-Settings", "X-Hop: 1", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
    with rollout.connect() as client:
        reply = client.get(
            URL, *fields, "Proxy-Authorization: Basic c2VjcmV0", "Proxy-Connection: keep-alive", "X-Keep: 1"
        )
    assert reply.status == 200
    request = origin.received[0]
    for name in ("X-Hop", "Upgrade", "HTTP2-Settings", "Proxy-Authorization", "Proxy-Connection"):
        assert request.header(name) == [], name
    assert request.header("X-Keep") == [b"1"]
    assert b"c2VjcmV0" not in rollout.record.read_bytes()


def test_egress_case_062_plain_http_meets_the_same_rules(rollout: Attached, origin: Origin) -> None:
    for line, reason in (
        ("DELETE http://plain.example.org/x", "method_not_allowed"),
        ("GET http://other.example.org/private", "path_not_allowed"),
        ("GET http://tunnel.example.org/x", "port_not_allowed"),
    ):
        with rollout.connect() as client:
            host = line.split("/")[2]
            reply = client.send(f"{line} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()).reply()
        assert (reply.status, reply.reason) == (403, reason), line
    assert origin.received == []


def test_egress_case_070_redirects_are_not_followed(rollout: Attached, origin: Origin, lab: NetLab) -> None:
    inner = lab.http("10.0.0.5", 80, lambda _request: response(b"internal"))
    origin.respond = lambda _request: response(b"", "302 Found", "Location: http://10.0.0.5/")
    with rollout.connect() as client:
        assert client.get(URL).status == 302
        assert client.get("http://10.0.0.5/").status == 403
    assert inner.received == []
    with lab.connect("10.0.0.5", 80) as direct:
        direct.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert direct.recv(100).endswith(b"internal")


@pytest.mark.promise("S3.9")
@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (HEAD + b"X: " + b"a" * 256 * 1024 + b"\r\n\r\n", "header_too_large"),
        (HEAD + b"".join(b"X-%d: 1\r\n" % number for number in range(1000)) + b"\r\n", "too_many_headers"),
    ],
    ids=["256_KiB_line", "1000_lines"],
)
def test_egress_case_072(raw: bytes, reason: str, rollout: Attached, origin: Origin) -> None:
    with rollout.connect() as client:
        sender = threading.Thread(target=_send_ignoring, args=(client.sock, raw))
        sender.start()
        reply = client.reply()
        sender.join()
    assert (reply.status, reply.reason) == (431, reason)
    assert origin.received == []
    assert rollout.last("net.request")["reason"] == reason


def _send_ignoring(sock: socket.socket, raw: bytes) -> None:
    try:
        sock.sendall(raw)
    except OSError:
        return


@pytest.mark.promise("S3.2")
def test_egress_case_089_a_claimed_identity_is_only_a_claim(worker: Worker, rollout: Attached, origin: Origin) -> None:
    other = worker.attach()
    claims = (f"X-Rollout-Id: {other.rollout_id}", "Proxy-Authorization: Basic b3RoZXI6eA==")
    with rollout.connect() as client:
        assert client.get(URL, *claims).status == 200
    event = rollout.last("net.request")
    assert event["rollout_id"] == rollout.rollout_id
    assert "claims" in event["detail"]
    assert other.events() == []
    assert origin.received[0].header("X-Rollout-Id") == []


def test_egress_case_101_nothing_forges_the_log(rollout: Attached) -> None:
    hosts = [b"a\x1b[31m.example.org", b'a".example.org', b"a" * 65000 + b".example.org", b'evil\r\n{"seq":1}']
    for host in hosts:
        with rollout.connect() as client:
            client.send(
                b"GET http://" + host + b"/\x1b]0;x HTTP/1.1\r\nHost: x\r\nX-A: \xff\xe2\x80\xae\r\n\r\n"
            ).rest()
    rollout.wait("net.request", len(hosts))
    raw = rollout.record.read_bytes()
    assert raw.isascii()
    assert all(0x20 <= byte < 0x7F or byte == 0x0A for byte in raw)
    assert max(map(len, raw.splitlines())) < 4096
    assert [event["seq"] for event in rollout.events()] == list(range(1, len(rollout.events()) + 1))


def test_egress_case_104_a_denial_is_403_with_its_reason(rollout: Attached) -> None:
    with rollout.connect() as client:
        reply = client.get("http://evil.example.org/")
        assert client.rest() == b""
    assert (reply.status, reply.reason) == (403, "host_not_allowed")
    assert b"host_not_allowed" in reply.body
    assert b"authenticate" not in reply.head.lower()


def test_a_client_that_does_not_read_stops_the_upstream(rollout: Attached, lab: NetLab) -> None:
    sent = [0]
    size = 32 << 20

    def flood(_origin: Origin, sock: socket.socket) -> None:
        sock.recv(65536)
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        piece = b"x" * (1 << 18)
        while sent[0] < size:
            sock.sendall(piece)
            sent[0] += len(piece)

    lab.origin("11.0.0.33", 80, flood)
    lab.add_host("plain.example.org", "11.0.0.33")
    try:
        with rollout.connect() as client:
            client.send(f"GET {URL} HTTP/1.1\r\nHost: plain.example.org\r\n\r\n".encode())
            stalled = -1
            while stalled != sent[0] or sent[0] == 0:
                stalled = sent[0]
                time.sleep(0.3)
            assert stalled < size, "everything was buffered for a client that reads nothing"
            assert len(client.reply().body) == size
    finally:
        lab.add_host("plain.example.org", "11.0.0.5")


def test_services_are_reached_by_name_only(worker: Worker, lab: NetLab) -> None:
    policy = """
version: 1
services:
  - {name: model, address: 10.0.0.9, port: 8000, methods: [POST], paths: ["/v1/**"]}
"""
    model = lab.origin("10.0.0.9", 8000, serve_http)
    rollout = worker.attach(policy)
    queries = len(lab.dns.queries)
    url = "http://model.stockade.internal:8000/v1/completions"
    with rollout.connect() as client:
        assert client.send(post(url, b"{}")).reply().status == 200
    for wrong, reason in (
        (url.replace("model.stockade.internal", "10.0.0.9"), "host_not_allowed"),
        (url.replace("8000", "80"), "port_not_allowed"),
        (url.replace("/v1", "/v2"), "path_not_allowed"),
    ):
        with rollout.connect() as client:
            assert client.send(post(wrong, b"{}")).reply().reason == reason
    assert len(model.received) == 1
    assert len(lab.dns.queries) == queries, "a service is not resolved"
    assert rollout.events("net.request")[0]["service"] == "model.stockade.internal"
