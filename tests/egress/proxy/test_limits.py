"""Budgets, floods, time limits and a record that cannot be written."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.egress.netlab import NetLab, Origin, Received, response
from tests.egress.proxy import hellos
from tests.egress.proxy.harness import POLICY, Attached, Reply, Worker, post, running

URL = "http://plain.example.org/x"
HOST = "tunnel.example.org"
GET = f"GET {URL} HTTP/1.1\r\nHost: plain.example.org\r\n\r\n".encode()


def limited(limits: str) -> str:
    """Return the test policy with other limits."""
    return POLICY.rsplit("  limits:", 1)[0] + f"  limits: {{{limits}}}\n"


@pytest.fixture(scope="module")
def origin(lab: NetLab) -> Origin:
    return lab.http("11.0.0.5", 80)


@pytest.fixture(scope="module")
def echo(lab: NetLab) -> Origin:
    return lab.echo("11.0.0.5", 443)


@pytest.fixture
def rollout(worker: Worker) -> Attached:
    return worker.attach()


def until_closed(ask: Callable[[], Reply], times: int) -> list[Reply]:
    """Return up to ``times`` replies of one connection, which a denial closes."""
    replies: list[Reply] = []
    with contextlib.suppress(EOFError, OSError):
        while len(replies) < times:
            replies += [ask()]
    return replies


@pytest.mark.promise("S3.9")
def test_egress_case_105_many_small_requests(worker: Worker, origin: Origin) -> None:
    rollout = worker.attach(limited("requests_per_minute: 5"))
    replies: list[Reply] = []
    for _ in range(3):  # over several connections: the bucket is the rollout's
        with rollout.connect() as client:
            replies += until_closed(functools.partial(client.get, URL), 3)
    assert [reply.status for reply in replies] == [200] * 5 + [429] * (len(replies) - 5)
    assert len(replies) > 5
    last = replies[-1]
    assert last.reason == "rate_limited"
    assert b"retry-after: " in last.head.lower()
    assert rollout.events("net.request")[-1]["reason"] == "rate_limited"


def test_egress_case_105_one_big_request(worker: Worker, origin: Origin) -> None:
    rollout = worker.attach(limited("bytes_out_per_request: 1000"))
    origin.received.clear()
    with rollout.connect() as client:
        reply = client.send(post(URL, b"x" * 2000)).reply()
    assert (reply.status, reply.reason) == (413, "request_too_large")
    assert origin.received == []
    assert rollout.last("net.request")["reason"] == "request_too_large"
    with rollout.connect() as client:
        assert client.send(post(URL, b"x" * 500)).reply().status == 200


def test_egress_case_105_a_chunked_upload_that_grows(worker: Worker, origin: Origin) -> None:
    rollout = worker.attach(limited("bytes_out_per_request: 5000"))
    head = b"POST http://plain.example.org/x HTTP/1.1\r\nHost: plain.example.org\r\nTransfer-Encoding: chunked\r\n\r\n"
    with rollout.connect() as client:
        client.send(head)
        with contextlib.suppress(OSError):
            for _ in range(100):
                client.send(b"100\r\n" + b"x" * 256 + b"\r\n")
                time.sleep(0.001)
        assert client.reply().reason == "request_too_large"
    end = rollout.last()
    assert end["reason"] == "request_too_large"
    assert 4000 < end["bytes_out"] <= 5000


def test_egress_case_105_pieces_by_range_share_the_cap(worker: Worker, origin: Origin) -> None:
    rollout = worker.attach(limited("bytes_in: 10000"))
    origin.respond = lambda _request: response(b"p" * 3000, "206 Partial Content")
    got = 0
    try:
        with contextlib.suppress(EOFError, OSError):
            for piece in range(10):
                with rollout.connect() as client:
                    got += len(client.get(URL, f"Range: bytes={piece * 3000}-{piece * 3000 + 2999}").body)
    finally:
        origin.respond = lambda _request: response(b"hello")
    assert got < 10_000
    ends = rollout.wait("net.end", 4)
    assert sum(end["bytes_in"] for end in ends) == 10_000
    assert "bytes_in_exceeded" in {end["reason"] for end in ends}


@pytest.mark.promise("S3.9")
def test_egress_case_073_connections_are_capped_per_rollout(worker: Worker, rollout: Attached, origin: Origin) -> None:
    greedy = worker.attach(limited("connections: 4"))
    held = [greedy.connect() for _ in range(4)]
    for client in held:
        assert client.get(URL).status == 200
    crowd = [greedy.connect() for _ in range(200)]
    reply = crowd[0].reply()
    assert (reply.status, reply.reason) == (429, "too_many_connections")
    begin = time.monotonic()
    with rollout.connect() as client:
        assert client.get(URL).status == 200
    assert time.monotonic() - begin < 2, "another rollout was held up"
    for client in [*held, *crowd]:
        client.sock.close()
    time.sleep(0.1)
    with greedy.connect() as client:
        assert client.get(URL).status == 200
    assert counted(greedy, "too_many_connections", 200)


def counted(rollout: Attached, reason: str, expected: int) -> bool:
    """Wait until the record accounts for ``expected`` refusals of ``reason``, singly or folded."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if sum(event.get("count", 1) for event in rollout.events() if event["reason"] == reason) == expected:
            return True
        time.sleep(0.05)
    return False


def test_egress_case_073_slow_heads_and_silent_clients(rollout: Attached, origin: Origin) -> None:
    begin = time.monotonic()
    with rollout.connect() as slow, rollout.connect() as silent, rollout.connect() as late:
        slow.sock.settimeout(0.5)
        reply = None
        late.connect(HOST)
        while reply is None and time.monotonic() - begin < 20:
            with contextlib.suppress(OSError):
                slow.send(b"G" if time.monotonic() - begin < 0.4 else b"X")
            with contextlib.suppress(TimeoutError):
                reply = slow.reply()
        assert reply is not None
        assert (reply.status, reply.reason) == (408, "header_timeout")
        assert 9 < time.monotonic() - begin < 13
        assert silent.reply().status == 408
    assert {event["reason"] for event in rollout.events("net.request")} >= {"header_timeout"}


def test_an_origin_that_never_answers(worker: Worker, lab: NetLab) -> None:
    def say_nothing(origin: Origin, _sock: socket.socket) -> None:
        origin.closed.wait(20)

    lab.origin("11.0.0.61", 80, say_nothing)
    lab.add_host("plain.example.org", "11.0.0.61")
    rollout = worker.attach(limited('idle: "1 s"'))
    try:
        with rollout.connect() as client:
            reply = client.get(URL)
    finally:
        lab.add_host("plain.example.org", "11.0.0.5")
    assert (reply.status, reply.reason) == (504, "idle_timeout")
    assert rollout.last()["reason"] == "idle_timeout"


def test_egress_case_103_a_flood_of_denials_is_folded_and_counted(rollout: Attached) -> None:
    many = 1500
    connect = b"CONNECT evil.example.org:443 HTTP/1.1\r\nHost: evil.example.org:443\r\n\r\n"
    for _ in range(many):
        with rollout.connect() as client:
            assert client.send(connect).reply().status == 403
    assert counted(rollout, "host_not_allowed", many)
    assert len(rollout.events()) < many / 3
    assert rollout.record.stat().st_size < many * 300


def test_egress_case_103_varying_the_host_does_not_help(rollout: Attached) -> None:
    many = 600
    for number in range(many):
        with rollout.connect() as client:
            client.send(b"CONNECT h%d.example:443 HTTP/1.1\r\nHost: h%d.example:443\r\n\r\n" % (number, number)).reply()
    assert counted(rollout, "host_not_allowed", many)
    assert len(rollout.events()) < many / 2


@pytest.mark.promise("S3.8")
def test_egress_case_102_a_full_disk_denies(lab: NetLab, origin: Origin, echo: Origin, tmp_path: Path) -> None:
    with running(lab, tmp_path, file_size=20_000) as worker:
        rollout, other = worker.attach(), worker.attach()
        with rollout.connect() as tunnel:
            assert tunnel.connect(HOST).status == 200
            hello = hellos.made(HOST.encode())
            tunnel.send(hello).take(len(hello))
            allowed = 0
            origin.received.clear()
            with contextlib.suppress(EOFError, OSError), rollout.connect() as client:
                while client.get(URL).status == 200:
                    allowed += 1
            assert 5 < allowed < 40
            assert len(origin.received) == allowed, "a request went out that is not on record"
            assert tunnel.rest() == b"", "the tunnel outlives the record"
        with rollout.connect() as client:
            reply = client.get(URL)
        assert reply.reason == "record_failed"
        assert reply.status in (500, 502, 503)
        with other.connect() as client:
            assert client.get(URL).status == 200
        answer = worker.ask("detach", rollout_id=rollout.rollout_id)
        assert answer["broken"] is True
        assert {"event": "broken", "rollout_id": rollout.rollout_id} in worker.news
        raw = rollout.record.read_bytes()
        assert raw.endswith(b"}\n"), "a torn line was left"
        assert answer["head"]["seq"] == len(raw.splitlines())


def test_running_out_of_descriptors_does_not_spin_or_kill(lab: NetLab, origin: Origin, tmp_path: Path) -> None:
    with running(lab, tmp_path, nofile=40) as worker:
        rollout = worker.attach(limited("connections: 200"))
        crowd = [rollout.connect() for _ in range(60)]
        time.sleep(0.5)
        before = cpu_s(worker.process.pid)
        time.sleep(1)
        assert cpu_s(worker.process.pid) - before < 0.5, "the worker spins"
        for client in crowd:
            client.sock.close()
        time.sleep(0.5)
        with rollout.connect() as client:
            assert client.get(URL).status == 200


def cpu_s(pid: int) -> float:
    """Return the CPU time a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def pieces(seed: int) -> Iterator[bytes]:
    """Yield hostile input: valid requests with bytes changed, cut, doubled or made up."""
    rng = random.Random(seed)
    hello = hellos.made(HOST.encode())
    seeds = [
        GET,
        post(URL, b"body"),
        b"POST http://plain.example.org/x HTTP/1.1\r\nHost: plain.example.org\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3\r\nabc\r\n0\r\n\r\n",
        f"CONNECT {HOST}:443 HTTP/1.1\r\nHost: {HOST}:443\r\n\r\n".encode() + hello,
        bytes(range(256)),
    ]
    for _ in range(60):
        data = bytearray(rng.choice(seeds) * rng.choice((1, 1, 2)))
        for _ in range(rng.randrange(6)):
            at = rng.randrange(len(data))
            what = rng.randrange(4)
            if what == 0:
                data[at] = rng.randrange(256)
            elif what == 1:
                del data[at : at + rng.randrange(1, 20)]
            elif what == 2:
                data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9)))
            else:
                data[at:at] = rng.choice((b"\r\n", b"\0", b":", b" ", b"%00", b"@", b"\xff" * 3, b"0" * 20))
            data = data or bytearray(b"\n")
        yield bytes(data)


@pytest.mark.parametrize("seed", range(4))
def test_the_loop_survives_hostile_input(seed: int, worker: Worker, origin: Origin, echo: Origin) -> None:
    rollout = worker.attach()
    rng = random.Random(seed)
    before = worker.ask("stats")
    for data in pieces(seed):
        with rollout.connect() as client, contextlib.suppress(OSError, EOFError):
            cut = rng.randrange(len(data))
            client.send(data[:cut])
            client.send(data[cut:])
            if rng.random() < 0.3:
                client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                client.sock.settimeout(0.05)
                client.rest()
    with rollout.connect() as client:
        assert client.get(URL).status == 200
    after = worker.ask("stats")
    assert after["faults"] == before["faults"]
    assert not [event for event in rollout.events() if event["reason"] == "internal_error"]
    answer = worker.ask("detach", rollout_id=rollout.rollout_id)
    assert not answer["broken"]
    assert worker.ask("stats")["connections"] == before["connections"]


def test_a_hostile_origin_does_not_end_the_loop(worker: Worker, rollout: Attached, origin: Origin) -> None:
    rng = random.Random(7)
    good = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nA: b\r\n\r\nhello"

    def respond(_request: Received) -> bytes:
        data = bytearray(good)
        for _ in range(rng.randrange(1, 5)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        return bytes(data).replace(b"OK", b"OK\r\nConnection: close", 1)

    before = worker.ask("stats")["faults"]
    origin.respond = respond
    try:
        for _ in range(60):
            with rollout.connect() as client, contextlib.suppress(OSError, EOFError, ValueError):
                client.sock.settimeout(0.1)
                client.get(URL)
    finally:
        origin.respond = lambda _request: response(b"hello")
        origin.drop()
    with rollout.connect() as client:
        assert client.get(URL).status == 200
    assert worker.ask("stats")["faults"] == before
