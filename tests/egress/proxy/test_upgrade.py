"""WebSockets and other upgrades: by rule, counted in both directions, and nothing else slips through (cases 60, 82)."""

from __future__ import annotations

import base64
import hashlib
import os
import socket
import ssl
import time
from collections.abc import Iterator

import pytest

from tests.egress.netlab import NetLab, Origin, read_request, response
from tests.egress.proxy.harness import Attached, Client
from tests.egress.proxy.sites import IP, LIMITS, Sites, eventually, policy, rss_kib

KEY = "dGhlIHNhbXBsZSBub25jZQ=="
LINES = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", f"Sec-WebSocket-Key: {KEY}")
POLICY = policy(
    "{host: ws.test, websocket: true, ports: [80, 443]}",
    "{host: read.test, read_only: true, ports: [80, 443]}",
    "{host: api.test, methods: [GET], ports: [80, 443]}",
    limits=LIMITS,
)


def accept(key: str) -> str:
    digest = hashlib.sha1(f"{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11".encode(), usedforsecurity=False).digest()
    return base64.b64encode(digest).decode()


def switch(key: str = KEY) -> bytes:
    """Return what a server says that takes the upgrade (RFC 6455 section 4.2.2)."""
    lines = ["HTTP/1.1 101 Switching Protocols", "Upgrade: websocket", "Connection: Upgrade"]
    return "\r\n".join([*lines, f"Sec-WebSocket-Accept: {accept(key)}", "", ""]).encode()


def frame(data: bytes, *, masked: bool = True) -> bytes:
    """Return a binary frame of RFC 6455 section 5.2."""
    mask = os.urandom(4) if masked else b""
    sizes = bytes([len(data)]) if len(data) < 126 else b"\x7e" + len(data).to_bytes(2, "big")
    sizes = bytes([sizes[0] | (0x80 if masked else 0)]) + sizes[1:]
    body = bytes(byte ^ mask[at % 4] for at, byte in enumerate(data)) if masked else data
    return b"\x82" + sizes + mask + body


def serve(origin: Origin, sock: socket.socket) -> None:
    """Take the upgrade where it is asked for, and send back every byte; answer anything else."""
    while (request := read_request(sock)) is not None:
        origin.received.append(request)
        if not request.header("upgrade"):
            sock.sendall(response(b"plain"))
            continue
        sock.sendall(switch(request.header("sec-websocket-key")[0].decode()))
        while piece := sock.recv(1 << 16):
            origin.data += piece
            sock.sendall(piece)
        return


@pytest.fixture(scope="module")
def sites(lab: NetLab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    with Sites(lab, tmp_path_factory.mktemp("record")) as made:
        yield made


@pytest.fixture(scope="module")
def shared(sites: Sites) -> Origin:
    return sites.site("ws.test", "read.test", "api.test", inner=serve)


@pytest.fixture(scope="module")
def shared_plain(sites: Sites, shared: Origin) -> Origin:
    return sites.lab.origin(IP, 80, serve)


@pytest.fixture
def site(sites: Sites, shared: Origin) -> Origin:
    shared.received.clear()
    shared.data.clear()
    for name in ("ws.test", "read.test", "api.test"):
        sites.lab.add_host(name, IP)
    return shared


@pytest.fixture
def rollout(sites: Sites) -> Attached:
    return sites.attach(POLICY)


def upgrade(client: Client, host: str, *lines: str) -> bytes:
    """Ask for a WebSocket; return the head of the answer."""
    head = ["GET /socket HTTP/1.1", f"Host: {host}", *(lines or LINES)]
    client.send("\r\n".join(head).encode() + b"\r\n\r\n")
    return client.reply().head


def test_egress_case_082_a_websocket_where_the_rule_says_so(sites: Sites, rollout: Attached, site: Origin) -> None:
    sent = [frame(os.urandom(size)) for size in (1, 100, 5000, 60000)]
    with sites.inside(rollout, "ws.test") as client:
        head = upgrade(client, "ws.test")
        assert head.startswith(b"HTTP/1.1 101 ")
        assert f"sec-websocket-accept: {accept(KEY)}".lower().encode() in head.lower()
        for one in sent:
            assert client.send(one).take(len(one)) == one
    request = site.received[0]
    assert request.header("connection") == [b"Upgrade"]
    assert request.header("upgrade") == [b"websocket"]
    assert request.header("sec-websocket-key") == [KEY.encode()]
    end = rollout.wait("net.end", 2)[-1]
    assert (end["reason"], end["http.response.status_code"]) == ("client_closed", 101)
    total = sum(map(len, sent))
    assert end["bytes_out"] == len(request.head) + total
    assert end["bytes_in"] == len(switch()) + total


def test_egress_case_082_in_clear_as_well(sites: Sites, rollout: Attached, site: Origin, shared_plain: Origin) -> None:
    with rollout.connect() as client:
        lines = ["GET http://ws.test/socket HTTP/1.1", "Host: ws.test", *LINES]
        client.send("\r\n".join(lines).encode() + b"\r\n\r\n")
        assert client.reply().status == 101
        big = frame(b"x" * 60000)
        for _ in range(20):
            assert client.send(big).take(len(big)) == big
    end = rollout.last()
    assert end["bytes_out"] > 20 * 60000
    assert end["reason"] == "client_closed"


REFUSED = {
    "read_only": ("read.test", LINES),
    "no_rule": ("api.test", LINES),
    "case": ("api.test", ("Connection: upgrade", "Upgrade: WebSocket")),
    "in_a_list": ("api.test", ("Connection: keep-alive, Upgrade", "Upgrade: h2c, websocket")),
    "two_lines": ("read.test", ("Connection: Upgrade", "Upgrade: h2c", "Upgrade: websocket")),
    "post": ("ws.test", None),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("clear", [False, True])
def test_egress_case_082_denied(
    case: str, *, clear: bool, sites: Sites, rollout: Attached, site: Origin, shared_plain: Origin
) -> None:
    host, lines = REFUSED[case]
    shared_plain.received.clear()
    method, more = ("GET", lines) if lines is not None else ("POST", LINES)
    client = rollout.connect() if clear else sites.inside(rollout, host)
    with client:
        target = f"http://{host}/socket" if clear else "/socket"
        client.send("\r\n".join([f"{method} {target} HTTP/1.1", f"Host: {host}", *more]).encode() + b"\r\n\r\n")
        reply = client.reply()
    assert (reply.status, reply.reason) == (403, "upgrade_not_allowed")
    event = rollout.last("net.request")
    assert (event["verdict"], event["reason"]) == ("denied", "upgrade_not_allowed")
    assert site.received == shared_plain.received == []


@pytest.mark.parametrize("host", ["ws.test", "api.test", "read.test"])
@pytest.mark.parametrize("what", ["h2c", "TLS/1.0", "foo", "HTTP/2.0, h2c"])
def test_egress_case_060_any_other_upgrade_is_left_out(
    host: str, what: str, sites: Sites, rollout: Attached, site: Origin
) -> None:
    lines = ("Connection: Upgrade, HTTP2-Settings", f"Upgrade: {what}", "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA")
    with sites.inside(rollout, host) as client:
        head = upgrade(client, host, *lines)
        assert head.startswith(b"HTTP/1.1 200 ")
        assert client.get(f"https://{host}/").status == 200, "the connection goes on"
    assert b"upgrade" not in site.received[0].head.lower()
    assert b"http2" not in site.received[0].head.lower()


def test_a_connection_header_alone_is_no_upgrade(sites: Sites, rollout: Attached, site: Origin) -> None:
    with sites.inside(rollout, "api.test") as client:
        assert upgrade(client, "api.test", "Upgrade: websocket").startswith(b"HTTP/1.1 200 ")
    assert b"upgrade" not in site.received[0].head.lower()


BAD_SWITCHES = {
    "another_protocol": switch().replace(b"Upgrade: websocket", b"Upgrade: h2c"),
    "no_protocol": switch().replace(b"Upgrade: websocket\r\n", b""),
    "two_protocols": switch().replace(b"Upgrade: websocket", b"Upgrade: websocket\r\nUpgrade: h2c"),
    "not_in_connection": switch().replace(b"Connection: Upgrade\r\n", b""),
    "old_version": switch().replace(b"HTTP/1.1", b"HTTP/1.0"),
    "with_a_length": switch().replace(b"\r\n\r\n", b"\r\nContent-Length: 5\r\n\r\n"),
    "chunked": switch().replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n"),
}


@pytest.mark.parametrize("case", BAD_SWITCHES)
def test_a_101_that_is_no_websocket_is_a_502(case: str, sites: Sites, rollout: Attached, site: Origin) -> None:
    def answer(_origin: Origin, sock: socket.socket) -> None:
        read_request(sock)
        sock.sendall(BAD_SWITCHES[case] + b"then anything")
        sock.recv(1)

    other = sites.site("ws.test", ip="11.0.0.83", inner=answer)
    with sites.inside(rollout, "ws.test") as client:
        head = upgrade(client, "ws.test")
    assert head.startswith(b"HTTP/1.1 502 ")
    assert b"upstream_malformed" in head
    other.close()


@pytest.mark.parametrize("host", ["api.test", "ws.test"])
def test_an_unasked_101_is_a_502(host: str, sites: Sites, rollout: Attached, site: Origin) -> None:
    def answer(_origin: Origin, sock: socket.socket) -> None:
        read_request(sock)
        sock.sendall(switch())
        sock.recv(1)

    other = sites.site(host, ip="11.0.0.84", inner=answer)
    with sites.inside(rollout, host) as client:
        client.send(f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        reply = client.reply()
    assert (reply.status, reply.reason) == (502, "upstream_malformed")
    other.close()


def test_a_server_may_refuse_the_upgrade(sites: Sites, rollout: Attached, site: Origin) -> None:
    def answer(_origin: Origin, sock: socket.socket) -> None:
        while read_request(sock) is not None:
            sock.sendall(response(b"no", "426 Upgrade Required", "Upgrade: websocket"))

    other = sites.site("ws.test", ip="11.0.0.85", inner=answer)
    with sites.inside(rollout, "ws.test") as client:
        assert upgrade(client, "ws.test").startswith(b"HTTP/1.1 426 ")
        assert upgrade(client, "ws.test").startswith(b"HTTP/1.1 426 ")
    other.close()


def test_bytes_right_behind_either_head_are_not_lost(sites: Sites, rollout: Attached, site: Origin) -> None:
    early, greeting = frame(b"early"), frame(b"greeting", masked=False)

    def answer(origin: Origin, sock: socket.socket) -> None:
        request = read_request(sock)
        assert request is not None
        sock.sendall(switch() + greeting)
        origin.data += request.body + sock.recv(1 << 16)
        sock.recv(1)

    other = sites.site("ws.test", ip="11.0.0.86", inner=answer)
    with sites.inside(rollout, "ws.test") as client:
        lines = ["GET /socket HTTP/1.1", "Host: ws.test", *LINES]
        client.send("\r\n".join(lines).encode() + b"\r\n\r\n" + early)
        assert client.reply().status == 101
        assert client.take(len(greeting)) == greeting
        eventually(lambda: bytes(other.data) == early)
    end = rollout.wait("net.end", 2)[-1]
    assert end["bytes_in"] == len(switch() + greeting)
    other.close()


@pytest.mark.parametrize("up", [True, False])
def test_egress_case_105_the_caps_hold_to_the_byte(*, up: bool, sites: Sites, site: Origin) -> None:
    cap = 100_000
    limits = f"{{requests_per_minute: 600, bytes_{'out' if up else 'in'}: {cap}, bytes_out_per_request: 1 MiB}}"
    if not up:
        limits = limits.replace("bytes_out_per_request", "bytes_out: 1 MiB, bytes_out_per_request")
    rollout = sites.attach(policy("{host: ws.test, websocket: true}", limits=limits))
    with sites.inside(rollout, "ws.test") as client:
        assert upgrade(client, "ws.test").startswith(b"HTTP/1.1 101 ")
        with pytest.raises((ssl.SSLError, OSError)):
            while True:
                client.send(b"x" * 10_000).take(10_000)
    end = rollout.wait("net.end", 2)[-1]
    assert end["reason"] == ("bytes_out_exceeded" if up else "bytes_in_exceeded")
    assert end["verdict"] == "denied"
    assert end["bytes_out" if up else "bytes_in"] == cap


def test_a_websocket_is_bounded_as_a_request_is(sites: Sites, site: Origin) -> None:
    limits = "{requests_per_minute: 600, bytes_out: 1 MiB, bytes_out_per_request: 5000}"
    rollout = sites.attach(policy("{host: ws.test, websocket: true}", limits=limits))
    with sites.inside(rollout, "ws.test") as client:
        assert upgrade(client, "ws.test").startswith(b"HTTP/1.1 101 ")
        with pytest.raises((ssl.SSLError, OSError)):
            while True:
                client.send(b"x" * 1000).take(1000)
    assert rollout.wait("net.end", 2)[-1]["bytes_out"] == 5000


def test_egress_case_087_revocation_ends_it(sites: Sites, rollout: Attached, site: Origin) -> None:
    with sites.inside(rollout, "ws.test") as client:
        upgrade(client, "ws.test")
        begin = time.monotonic()
        assert sites.worker.ask("revoke", rollout_id=rollout.rollout_id)["closed"] == 1
        with pytest.raises((ssl.SSLError, OSError)):
            client.sock.recv(1)
        assert time.monotonic() - begin < 1
    assert rollout.wait("net.end", 2)[-1]["reason"] == "revoked"


def test_egress_case_086_the_ends_are_passed_on(sites: Sites, rollout: Attached, site: Origin) -> None:
    with sites.inside(rollout, "ws.test") as client:
        upgrade(client, "ws.test")
        assert isinstance(client.sock, ssl.SSLSocket)
        plain = client.sock.unwrap()  # close_notify in both directions
        plain.close()
    assert rollout.wait("net.end", 2)[-1]["reason"] == "client_closed"
    with sites.inside(rollout, "ws.test") as client:
        upgrade(client, "ws.test")
        eventually(lambda: len(site.received) == 2)
        site.drop()
        with pytest.raises((ssl.SSLError, OSError)):
            client.sock.recv(1)
    assert rollout.wait("net.end", 4)[-1]["reason"] == "upstream_closed"


@pytest.mark.parametrize("deaf", ["client", "server"])
def test_a_side_that_never_reads_does_not_make_the_worker_grow(
    deaf: str, sites: Sites, rollout: Attached, site: Origin
) -> None:
    def pour(origin: Origin, sock: socket.socket) -> None:
        read_request(sock)
        sock.sendall(switch())
        sock.settimeout(1)
        while not origin.closed.is_set() and deaf == "client":
            try:
                sock.sendall(bytes(1 << 16))
            except TimeoutError:
                break
        origin.closed.wait(30)

    other = sites.site("ws.test", ip="11.0.0.87", inner=pour)
    before = rss_kib(sites.worker.process.pid)
    with sites.inside(rollout, "ws.test") as client:
        upgrade(client, "ws.test")
        if deaf == "server":
            client.sock.settimeout(1)
            with pytest.raises(TimeoutError):
                for _ in range(240):
                    client.sock.sendall(bytes(1 << 16))
        else:
            time.sleep(2)
        assert rss_kib(sites.worker.process.pid) - before < 4 * 1024
    other.close()


def test_the_worker_has_counted_no_fault(sites: Sites) -> None:
    """Stays last: none of the above went through an exception that nobody expected."""
    assert sites.worker.ask("stats")["faults"] == 0
