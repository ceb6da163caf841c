"""Rules that let bytes through as they are, and hostile bytes on every new way in (cases 85, 86, 46)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import socket
import time
from collections.abc import Iterator

import pytest

from tests.egress.netlab import NetLab, Origin, response, serve_sink
from tests.egress.proxy import hellos
from tests.egress.proxy.guestnet import GuestNet
from tests.egress.proxy.harness import Attached, Client
from tests.egress.proxy.sites import IP, LIMITS, Sites, ask, eventually, policy, rss_kib

POLICY = policy(
    "{host: raw.test, tcp: true, ports: [22, 443]}",
    '{host: "*.raw.test", tcp: true, ports: [22]}',
    "{host: read.test, methods: [GET, POST]}",
    "{host: open.test}",
    "{host: plain.test, methods: [GET], ports: [80]}",
    deny=("{host: bad.raw.test}",),
    limits=LIMITS,
)
MIB = 1 << 20


@pytest.fixture(scope="module")
def sites(lab: NetLab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    with Sites(lab, tmp_path_factory.mktemp("record")) as made:
        yield made


@pytest.fixture(scope="module")
def echo(lab: NetLab) -> Origin:
    for name in ("raw.test", "a.raw.test", "bad.raw.test", "plain.test"):
        lab.add_host(name, IP)
    return lab.echo(IP, 22)


@pytest.fixture(scope="module")
def site(sites: Sites) -> Origin:
    return sites.site("read.test", "open.test")


@pytest.fixture
def rollout(sites: Sites) -> Attached:
    return sites.attach(POLICY)


@pytest.mark.parametrize(
    "data", [b"SSH-2.0-x\r\n", b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 100, hellos.made(b"evil.test"), b"\x05\x01\x00"]
)
def test_egress_case_085_any_bytes_pass_and_are_counted(data: bytes, rollout: Attached, echo: Origin) -> None:
    with rollout.connect() as client:
        assert client.connect("raw.test", 22).status == 200
        assert client.send(data).take(len(data)) == data
    decision, end = rollout.last("net.connect"), rollout.last()
    assert (decision["handling"], decision["verdict"]) == ("raw", "allowed")
    assert (end["bytes_out"], end["bytes_in"], end["reason"]) == (len(data), len(data), "client_closed")


def test_egress_case_085_many_megabytes_arrive_as_they_were(rollout: Attached, echo: Origin) -> None:
    body = os.urandom(8 * MIB)
    with rollout.connect() as client:
        assert client.connect("raw.test", 22).status == 200
        got = b"".join(client.send(body[at : at + 65536]).take(65536) for at in range(0, len(body), 65536))
    assert hashlib.sha256(got).digest() == hashlib.sha256(body).digest()
    assert rollout.last()["bytes_out"] == len(body)


@pytest.mark.parametrize(
    ("host", "port", "reason"),
    [
        ("open.test", 22, "port_not_allowed"),
        ("raw.test", 23, "port_not_allowed"),
        ("raw.test", 80, "port_not_allowed"),
        ("bad.raw.test", 22, "denied_by_rule"),
        ("notraw.test", 22, "host_not_allowed"),
        ("a.raw.test", 443, "port_not_allowed"),
    ],
)
def test_egress_case_085_only_where_a_tcp_rule_says_so(
    host: str, port: int, reason: str, lab: NetLab, rollout: Attached, echo: Origin
) -> None:
    connections, queries = echo.connections, len(lab.dns.queries)
    with rollout.connect() as client:
        reply = client.connect(host, port)
    assert (reply.status, reply.reason) == (403, reason)
    assert (echo.connections, len(lab.dns.queries)) == (connections, queries)


def test_a_tcp_rule_takes_no_request_that_is_read_here(rollout: Attached, echo: Origin) -> None:
    with rollout.connect() as client:
        assert client.get("http://raw.test:22/").reason == "port_not_allowed"
    with rollout.connect() as client:
        assert client.get("http://raw.test:443/").status == 403


def test_egress_case_086_half_closes_pass_in_both_directions(lab: NetLab, rollout: Attached, echo: Origin) -> None:
    def counting(origin: Origin, sock: socket.socket) -> None:
        sock.sendall(b"hello")
        serve_sink(origin, sock)
        sock.sendall(b"%d" % len(origin.data))
        sock.shutdown(socket.SHUT_WR)

    other = lab.origin("11.0.0.95", 22, counting)
    lab.add_host("a.raw.test", "11.0.0.95")
    with rollout.connect() as client:
        assert client.connect("a.raw.test", 22).status == 200
        client.send(b"x" * 12345)
        client.sock.shutdown(socket.SHUT_WR)
        assert client.rest() == b"hello12345"
    end = rollout.last()
    assert (end["bytes_out"], end["bytes_in"], end["reason"]) == (12345, 10, "client_closed")
    other.close()


def test_egress_case_086_an_idle_one_ends(sites: Sites, echo: Origin) -> None:
    rollout = sites.attach(POLICY.replace("6000", "6000, idle: 1s"))
    with rollout.connect() as client:
        assert client.connect("raw.test", 22).status == 200
        begin = time.monotonic()
        assert client.rest() == b""
        assert time.monotonic() - begin > 0.8
    assert rollout.last()["reason"] == "idle_timeout"


@pytest.mark.promise("S6.4")
def test_egress_case_087_revocation_ends_it(sites: Sites, rollout: Attached, echo: Origin) -> None:
    with rollout.connect() as client:
        assert client.connect("raw.test", 22).status == 200
        assert client.send(b"x").take(1) == b"x"
        assert sites.worker.ask("revoke", rollout_id=rollout.rollout_id)["closed"] == 1
        assert client.rest() == b""
    assert rollout.last()["reason"] == "revoked"


@pytest.mark.parametrize("deaf", ["client", "server"])
def test_a_side_that_never_reads_does_not_make_the_worker_grow(
    deaf: str, sites: Sites, lab: NetLab, rollout: Attached
) -> None:
    def pour(origin: Origin, sock: socket.socket) -> None:
        sock.settimeout(1)
        with contextlib.suppress(OSError):
            while deaf == "client" and not origin.closed.is_set():
                sock.sendall(bytes(1 << 16))
        origin.closed.wait(30)

    other = lab.origin("11.0.0.96", 22, pour)
    lab.add_host("a.raw.test", "11.0.0.96")
    before = rss_kib(sites.worker.process.pid)
    with contextlib.ExitStack() as opened:
        for _ in range(8):
            client = opened.enter_context(rollout.connect())
            assert client.connect("a.raw.test", 22).status == 200
            client.sock.settimeout(0.3)
            with contextlib.suppress(OSError):
                while deaf == "server":
                    client.sock.sendall(bytes(1 << 16))
        time.sleep(1.5)
        assert rss_kib(sites.worker.process.pid) - before < 8 * 1024
    other.close()


def test_egress_case_046_datagrams_by_no_rule(sites: Sites, echo: Origin) -> None:
    """There is no way for them at all: SOCKS5 refuses the command, and CONNECT-UDP is no method here."""
    rollout = sites.attach(POLICY)
    with rollout.connect() as client:
        assert client.send(b"\x05\x01\x00").take(2) == b"\x05\x00"
        assert client.send(b"\x05\x03\x00\x01" + bytes(6)).take(10)[1] == 7
    with rollout.connect() as client:
        raw = b"GET http://plain.test/.well-known/masque/udp/11.0.0.53/53/ HTTP/1.1\r\nHost: plain.test\r\n"
        reply = client.send(
            raw + b"Connection: Upgrade\r\nUpgrade: connect-udp\r\nCapsule-Protocol: ?1\r\n\r\n"
        ).reply()
    assert reply.status == 502, "a plain request went out, and nobody is there"


# ---- hostile bytes

PIECES = (
    b"\x05\x01\x00",
    b"\x05\x01\x00\x03\x09open.test\x01\xbb",
    b"\x16\x03\x01\x00\x05hello",
    hellos.made(b"read.test"),
    b"CONNECT read.test:443 HTTP/1.1\r\nHost: read.test:443\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: plain.test\r\n\r\n",
    b"GET http://plain.test/ HTTP/1.1\r\nHost: plain.test\r\n",
    b"Transfer-Encoding: chunked\r\n\r\n",
    b"Content-Length: 5\r\n\r\n",
    b"\r\n\r\n",
    b"5\r\nhello\r\n0\r\n\r\n",
    b"\x00",
    b"\xff" * 40,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
)


def mess(dice: random.Random) -> list[bytes]:
    """Return what a hostile client sends, in pieces."""
    made = []
    for _ in range(dice.randrange(1, 7)):
        piece = bytearray(dice.choice(PIECES))
        for _ in range(dice.choice((0, 0, 1, 3))):
            piece[dice.randrange(len(piece))] = dice.randrange(256)
        made.append(bytes(piece))
    return made


@pytest.mark.parametrize("seed", range(3))
def test_the_loop_survives_hostile_bytes_on_every_way_in(seed: int, sites: Sites, echo: Origin, site: Origin) -> None:
    dice = random.Random(seed)
    with GuestNet() as guest:
        rollout = sites.attach(POLICY, sockets=guest.sockets)
        for _ in range(60):
            address, port = dice.choice((("127.0.0.1", 3128), (IP, 443), ("198.18.0.10", 80), ("127.0.0.1", 53)))
            with contextlib.suppress(OSError), guest.connect(address, port) as sock:
                sock.settimeout(0.05)
                for piece in mess(dice):
                    sock.sendall(piece)
                sock.recv(100)
        with Client(guest.connect("127.0.0.1", 3128)) as client:
            assert client.connect("evil.test").status == 403
        sites.worker.ask("detach", rollout_id=rollout.rollout_id)
    assert sites.worker.ask("stats")["faults"] == 0


@pytest.mark.parametrize("seed", range(2))
def test_the_loop_survives_hostile_bytes_inside_tls(seed: int, sites: Sites, rollout: Attached, site: Origin) -> None:
    dice = random.Random(seed)
    for _ in range(30):
        with contextlib.suppress(OSError, EOFError), sites.inside(rollout, "read.test") as client:
            client.sock.settimeout(0.1)
            for piece in mess(dice):
                client.send(piece)
            client.rest()
    site.respond = lambda _request: response(b"hello")
    with sites.inside(rollout, "read.test") as client:
        assert ask(client, "read.test").status == 200
    assert sites.worker.ask("stats")["faults"] == 0
    eventually(lambda: sites.worker.ask("stats")["connections"] == 0)


@pytest.mark.parametrize("seed", range(2))
def test_the_loop_survives_a_hostile_site_behind_tls(seed: int, sites: Sites, rollout: Attached, site: Origin) -> None:
    dice = random.Random(seed)

    def answer(_origin: Origin, sock: socket.socket) -> None:
        sock.settimeout(0.2)
        with contextlib.suppress(OSError):
            while sock.recv(65536):
                start = dice.choice((b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 101 X\r\nUpgrade: websocket\r\n", b""))
                sock.sendall(start + b"".join(mess(dice)))

    other = sites.site("read.test", ip="11.0.0.97", inner=answer)
    for _ in range(30):
        with contextlib.suppress(OSError, EOFError), sites.inside(rollout, "read.test") as client:
            client.sock.settimeout(1)
            ask(client, "read.test")
    other.close()
    sites.lab.add_host("read.test", IP)
    assert sites.worker.ask("stats")["faults"] == 0
    eventually(lambda: sites.worker.ask("stats")["connections"] == 0)


def test_descriptors_do_not_pile_up(sites: Sites, rollout: Attached, echo: Origin, site: Origin) -> None:
    """After all of the above, and after one more of each kind."""
    folder = f"/proc/{sites.worker.process.pid}/fd"

    def once() -> int:
        with rollout.connect() as client:
            client.connect("raw.test", 22)
            client.send(b"x").take(1)
        with sites.inside(rollout, "read.test") as inside:
            ask(inside, "read.test")
        eventually(lambda: sites.worker.ask("stats")["connections"] == 0)
        return len(os.listdir(folder))

    first = once()
    for _ in range(10):
        last = once()
    assert last <= first + 2
