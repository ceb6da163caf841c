"""CONNECT through the real worker: the first flight, the relay, its caps and its ends."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator

import pytest
import trustme

from tests.egress.netlab import WORKER_OWN, NetLab, Origin
from tests.egress.proxy import hellos
from tests.egress.proxy.harness import POLICY, Attached, Client, Worker

HOST = "tunnel.example.org"
HELLO = hellos.made(HOST.encode())
MIB = 1 << 20


@pytest.fixture(scope="module")
def shared_echo(lab: NetLab) -> Origin:
    return lab.echo("11.0.0.5", 443)


@pytest.fixture
def echo(shared_echo: Origin) -> Origin:
    shared_echo.data.clear()
    return shared_echo


@pytest.fixture
def rollout(worker: Worker) -> Attached:
    return worker.attach()


@pytest.fixture
def tunnel(rollout: Attached, echo: Origin) -> Iterator[Client]:
    """An open tunnel: the hello went through and came back."""
    with rollout.connect() as client:
        assert client.connect(HOST).status == 200
        client.send(HELLO)
        assert client.take(len(HELLO)) == HELLO
        yield client


def limited(**limits: object) -> str:
    """Return the test policy with other limits."""
    line = ", ".join(f"{name}: {value}" for name, value in limits.items())
    return POLICY.rsplit("  limits:", 1)[0] + f"  limits: {{requests_per_minute: 6000, {line}}}\n"


def test_real_tls_end_to_end(rollout: Attached, lab: NetLab) -> None:
    authority = trustme.CA()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("a.wild.example.org").configure_cert(server)
    client_context = ssl.create_default_context()
    authority.configure_trust(client_context)
    lab.tls("11.0.0.40", server)
    lab.add_host("a.wild.example.org", "11.0.0.40")
    with rollout.connect() as client:
        assert client.connect("a.wild.example.org").status == 200
        with client_context.wrap_socket(client.sock, server_hostname="a.wild.example.org") as tls:
            tls.sendall(b"GET / HTTP/1.1\r\nHost: a.wild.example.org\r\n\r\n")
            assert tls.recv(4096).endswith(b"hello")
    decision, end = rollout.last("net.connect"), rollout.last("net.end")
    assert (decision["verdict"], decision["server.address"]) == ("allowed", "a.wild.example.org")
    assert (end["reason"], end["tls.client.server_name"]) == ("client_closed", "a.wild.example.org")
    assert end["bytes_out"] > 200
    assert end["bytes_in"] > 200
    assert end["http.response.status_code"] == 200


@pytest.mark.parametrize("port", [22, 25, 80, 6379])
def test_egress_case_022_listed_host_unlisted_port(port: int, rollout: Attached, lab: NetLab) -> None:
    origin = lab.echo("11.0.0.5", port)
    with rollout.connect() as client:
        reply = client.connect(HOST, port)
    assert (reply.status, reply.reason) == (403, "port_not_allowed")
    assert origin.connections == 0
    with lab.connect("11.0.0.5", port) as direct:
        direct.sendall(b"reached")
        assert direct.recv(16) == b"reached"
    origin.close()


@pytest.mark.parametrize("port", ["83616", "+443", " 443", "0443", "0", "", "４４３", "99999999999999999999"])
def test_egress_case_023_port_syntax(port: str, worker: Worker, rollout: Attached, echo: Origin) -> None:
    connections, faults = echo.connections, worker.ask("stats")["faults"]
    with rollout.connect() as client:
        reply = client.send(f"CONNECT {HOST}:{port} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()).reply()
    assert reply.status == 400
    assert rollout.last("net.connect")["verdict"] == "denied"
    assert echo.connections == connections
    assert worker.ask("stats")["faults"] == faults


def test_egress_case_061_early_data_goes_only_after_the_checks(rollout: Attached, echo: Origin) -> None:
    head = f"CONNECT {HOST}:443 HTTP/1.1\r\nHost: {HOST}:443\r\n\r\n".encode()
    with rollout.connect() as client:
        assert client.send(head + HELLO + b"early").reply().status == 200
        assert client.take(len(HELLO) + 5) == HELLO + b"early"
    connections = echo.connections
    with rollout.connect() as client:
        assert client.send(head.replace(b"tunnel", b"evil") + HELLO).reply().status == 403
    assert echo.connections == connections
    echo.data.clear()
    with rollout.connect() as client:
        assert client.send(head + b"GET / HTTP/1.1\r\n\r\n").reply().status == 200
        assert client.rest() == b""
    assert bytes(echo.data) == b""


REFUSED = {
    "074_other_name": (hellos.made(b"evil.example.org"), "sni_mismatch"),
    "074_subdomain": (hellos.made(b"a.tunnel.example.org"), "sni_mismatch"),
    "075_none": (hellos.made(), "sni_missing"),
    "075_ip": (hellos.made(b"11.0.0.5"), "sni_mismatch"),
    "075_two": (hellos.made(HOST.encode(), b"evil.example.org"), "sni_mismatch"),
    "077_ssh": (b"SSH-2.0-OpenSSH_9.9\r\n", "not_tls"),
    "077_http": (b"POST / HTTP/1.1\r\nHost: tunnel.example.org\r\n\r\n", "not_tls"),
    "077_alert": (b"\x15\x03\x01\x00\x02\x02\x28", "not_tls"),
    "077_zeros": (bytes(64), "not_tls"),
}


@pytest.mark.promise("S3.7")
@pytest.mark.parametrize("case", REFUSED)
def test_egress_case(case: str, rollout: Attached, echo: Origin, lab: NetLab) -> None:
    flight, reason = REFUSED[case]
    with rollout.connect() as client:
        assert client.connect(HOST).status == 200
        client.send(flight)
        assert client.rest() == b""
    end = rollout.last()
    assert (end["verdict"], end["reason"], end["bytes_out"]) == ("denied", reason, 0)
    assert bytes(echo.data) == b""
    with lab.connect("11.0.0.5", 443) as direct:
        direct.sendall(flight)
        assert direct.recv(len(flight)) == flight


@pytest.mark.parametrize("name", ["TUNNEL.Example.ORG", "tunnel.example.org."])
def test_egress_case_075_case_and_dot_are_folded(name: str, rollout: Attached, echo: Origin) -> None:
    hello = hellos.made(name.encode())
    with rollout.connect() as client:
        assert client.connect(HOST).status == 200
        assert client.send(hello).take(len(hello)) == hello


def test_egress_case_076_ech_is_logged_for_exact_hosts_and_refused_for_wildcards(
    rollout: Attached, echo: Origin, lab: NetLab
) -> None:
    lab.add_host("b.wild.example.org", "11.0.0.5")
    hello = hellos.made(HOST.encode(), extensions=((hellos.ECH, bytes(8)),))
    with rollout.connect() as client:
        assert client.connect(HOST).status == 200
        assert client.send(hello).take(len(hello)) == hello
    assert "encrypted client hello" in rollout.last()["detail"]
    with rollout.connect() as client:
        assert client.connect("b.wild.example.org").status == 200
        client.send(hellos.made(b"b.wild.example.org", extensions=((hellos.ECH, bytes(8)),)))
        assert client.rest() == b""
    assert rollout.wait("net.end", 2)[-1]["reason"] == "ech_not_allowed"


def test_a_first_flight_in_small_pieces(rollout: Attached, echo: Origin) -> None:
    hello = hellos.made(HOST.encode(), record_bytes=7)
    with rollout.connect() as client:
        assert client.connect(HOST).status == 200
        for start in range(0, len(hello), 5):
            client.send(hello[start : start + 5])
        assert client.take(len(hello)) == hello


def test_a_first_flight_that_is_too_large(rollout: Attached, echo: Origin) -> None:
    big = hellos.made(HOST.encode(), extensions=((21, bytes(65400)),), record_bytes=1000)
    assert len(big) > 65536
    with rollout.connect() as client:
        assert client.connect(HOST).status == 200
        client.send(big)
        assert client.rest() == b""
    end = rollout.last()
    assert (end["verdict"], end["reason"], end["bytes_out"]) == ("denied", "not_tls", 0)
    assert bytes(echo.data) == b""


def test_egress_case_086_a_half_close_is_passed_on(rollout: Attached, lab: NetLab) -> None:
    def answer_at_the_end(origin: Origin, sock: socket.socket) -> None:
        while piece := sock.recv(65536):
            origin.data += piece
        sock.sendall(b"after the end: %d" % len(origin.data))

    lab.origin("11.0.0.41", 443, answer_at_the_end)
    lab.add_host("c.wild.example.org", "11.0.0.41")
    hello = hellos.made(b"c.wild.example.org")
    with rollout.connect() as client:
        assert client.connect("c.wild.example.org").status == 200
        client.send(hello)
        client.sock.shutdown(socket.SHUT_WR)
        assert client.rest() == b"after the end: %d" % len(hello)
    end = rollout.last()
    assert (end["reason"], end["bytes_out"]) == ("client_closed", len(hello))


def test_egress_case_086_a_reset_reaches_the_client(rollout: Attached, tunnel: Client, echo: Origin) -> None:
    echo.drop(reset=True)
    # The origin's thread sleeps in recv: one byte wakes it, and the kernel answers with RST.
    tunnel.send(b"x")
    assert not tunnel.ended()
    assert rollout.last()["reason"] == "upstream_closed"


@pytest.mark.promise("S3.9")
def test_egress_case_086_an_idle_tunnel_ends(worker: Worker, echo: Origin) -> None:
    rollout = worker.attach(limited(idle="1 s"))
    with rollout.connect() as client:
        assert client.connect(HOST).status == 200
        client.send(HELLO)
        assert client.take(len(HELLO)) == HELLO
        for _ in range(4):  # bytes keep it alive
            time.sleep(0.4)
            assert client.send(b"x").take(1) == b"x"
        begin = time.monotonic()
        client.rest()
    assert 0.8 < time.monotonic() - begin < 3
    assert rollout.last()["reason"] == "idle_timeout"


def test_a_tunnel_has_a_total_time(worker: Worker, echo: Origin) -> None:
    rollout = worker.attach(limited(total="1 s"))
    with rollout.connect() as client:
        assert client.connect(HOST).status == 200
        client.send(HELLO)
        begin = time.monotonic()
        with contextlib.suppress(EOFError, OSError):
            while time.monotonic() - begin < 5:
                client.send(b"x").take(1)
                time.sleep(0.05)
    assert time.monotonic() - begin < 3
    assert rollout.last()["reason"] == "total_timeout"


def test_egress_case_087_revocation_closes_live_tunnels_within_a_second(
    worker: Worker, rollout: Attached, tunnel: Client
) -> None:
    begin = time.monotonic()
    assert worker.ask("revoke", rollout_id=rollout.rollout_id)["closed"] == 1
    assert tunnel.rest() == b""
    assert time.monotonic() - begin < 1
    assert rollout.last()["reason"] == "revoked"
    with rollout.connect() as client:
        reply = client.connect(HOST)
    assert (reply.status, reply.reason) == (403, "revoked")


def test_egress_case_096_own_address_by_literal(rollout: Attached, lab: NetLab) -> None:
    lab.add_host("own.wild.example.org", WORKER_OWN)
    with rollout.connect() as client:
        assert client.connect("own.wild.example.org").reason == "own_address"
    with rollout.connect() as client:
        assert client.connect(WORKER_OWN).status == 403


def test_100_mb_are_spliced_with_exact_counts(worker: Worker, lab: NetLab) -> None:
    size = 100 * 1000 * 1000

    def hash_and_echo(origin: Origin, sock: socket.socket) -> None:
        """Check what came by its digest, then send as much back."""
        digest, seen = hashlib.sha256(), 0
        while piece := sock.recv(MIB):
            digest.update(piece)
            seen += len(piece)
        origin.data += digest.digest()
        block = bytes(range(256)) * 4096
        for _ in range(size // len(block)):
            sock.sendall(block)
        sock.sendall(block[: size % len(block)])

    origin = lab.origin("11.0.0.42", 443, hash_and_echo)
    lab.add_host("d.wild.example.org", "11.0.0.42")
    hello = hellos.made(b"d.wild.example.org")
    rollout = worker.attach(limited(bytes_out="200 MiB", bytes_in="200 MiB"))
    block = bytes(range(255, -1, -1)) * 4096
    sent, received = hashlib.sha256(hello), hashlib.sha256()
    begin = time.monotonic()
    with rollout.connect() as client:
        assert client.connect("d.wild.example.org").status == 200
        client.send(hello)
        left = size
        while left:
            piece = block[: min(left, len(block))]
            client.send(piece)
            sent.update(piece)
            left -= len(piece)
        client.sock.shutdown(socket.SHUT_WR)
        got = 0
        while piece := client.sock.recv(MIB):
            received.update(piece)
            got += len(piece)
    elapsed = time.monotonic() - begin
    end = rollout.last()
    assert (end["bytes_out"], end["bytes_in"]) == (len(hello) + size, size)
    assert got == size
    assert bytes(origin.data) == sent.digest()
    down = bytes(range(256)) * 4096
    expected = hashlib.sha256(down * (size // len(down)) + down[: size % len(down)])
    assert received.digest() == expected.digest()
    assert elapsed < 60


@pytest.mark.promise("S3.9")
@pytest.mark.parametrize("over", [0, 1, 4096])
def test_bytes_out_cap_holds_to_the_byte(over: int, worker: Worker, echo: Origin) -> None:
    cap = 65536
    rollout = worker.attach(limited(bytes_out=cap))
    with rollout.connect() as client:
        assert client.connect(HOST).status == 200
        client.send(HELLO + b"x" * (cap - len(HELLO)))
        assert len(client.take(cap)) == cap
        if over:
            client.send(b"y" * over)
        else:
            client.sock.shutdown(socket.SHUT_WR)
        clean = client.ended()
    end = rollout.last()
    assert (clean, end["reason"]) == ((True, "client_closed") if not over else (False, "bytes_out_exceeded"))
    assert end["bytes_out"] == cap
    assert len(echo.data) == cap


@pytest.mark.promise("S3.9")
@pytest.mark.parametrize("over", [0, 1])
def test_bytes_in_cap_holds_to_the_byte(over: int, worker: Worker, lab: NetLab) -> None:
    cap = 100_000

    def push(_origin: Origin, sock: socket.socket) -> None:
        sock.recv(65536)
        sock.sendall(b"z" * (cap + over))

    lab.origin(f"11.0.0.{50 + over}", 443, push)
    lab.add_host("e.wild.example.org", f"11.0.0.{50 + over}")
    rollout = worker.attach(limited(bytes_in=cap))
    with rollout.connect() as client:
        assert client.connect("e.wild.example.org").status == 200
        client.send(hellos.made(b"e.wild.example.org"))
        client.sock.shutdown(socket.SHUT_WR)
        assert len(client.rest()) <= cap
    end = rollout.last()
    assert end["bytes_in"] == cap
    # Both sides end at once when nothing is over: either may be seen first.
    assert end["reason"] in (("bytes_in_exceeded",) if over else ("client_closed", "upstream_closed"))


def test_egress_case_105_the_byte_cap_is_shared_by_all_connections(worker: Worker, echo: Origin) -> None:
    cap = 512 * 1024
    rollout = worker.attach(limited(bytes_out=cap))
    clients = [rollout.connect() for _ in range(4)]

    def pour(client: Client) -> None:
        try:
            assert client.connect(HOST).status == 200
            for _ in range(64):
                client.send(HELLO if _ == 0 else b"x" * 16384)
                client.sock.recv(65536)
        except (OSError, EOFError):
            return

    threads = [threading.Thread(target=pour, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for client in clients:
        client.sock.close()
    ends = rollout.wait("net.end", 4)
    assert sum(end["bytes_out"] for end in ends) == cap
    assert "bytes_out_exceeded" in {end["reason"] for end in ends}
    with rollout.connect() as late:
        assert late.connect(HOST).status == 200
        late.send(HELLO)
        assert late.rest() == b""
    assert rollout.last()["reason"] == "bytes_out_exceeded"


def test_a_slow_reader_does_not_make_the_worker_grow(worker: Worker, rollout: Attached, lab: NetLab) -> None:
    def swallow_nothing(_origin: Origin, sock: socket.socket) -> None:
        sock.recv(1)
        _origin.closed.wait(10)

    lab.origin("11.0.0.43", 443, swallow_nothing)
    lab.add_host("f.wild.example.org", "11.0.0.43")
    before = rss(worker.process.pid)
    with rollout.connect() as client:
        assert client.connect("f.wild.example.org").status == 200
        client.send(hellos.made(b"f.wild.example.org"))
        client.sock.settimeout(0.5)
        with pytest.raises(TimeoutError):
            client.sock.sendall(bytes(256 * MIB))
    assert rss(worker.process.pid) - before < 4 * MIB


def rss(pid: int) -> int:
    """Return the resident memory of a process in bytes."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * 4096
