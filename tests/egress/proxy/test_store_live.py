"""Rules that share answers in live mode: cheap the second time, and no way from one rollout into another."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Iterator

import msgspec
import pytest

from stockade.egress.gate import Credential
from tests.egress.netlab import NetLab, Origin, read_request, response
from tests.egress.proxy.harness import Attached, Client, Reply, rules
from tests.egress.proxy.sites import IP, LIMITS, Sites, ask, cpu_s, eventually, policy, rss_kib
from tests.egress.proxy.test_record_replay import MIB, Shelves, at, damage, rollout_is_quiet

HOST = "files.test"
LIVE = policy(
    "{host: files.test, methods: [GET, HEAD, POST], store: true, ports: [80, 443]}",
    "{host: other.test, methods: [GET]}",
    limits=LIMITS,
)
KEYS = (Credential("key", "Authorization", "Bearer s3cret"),)


@pytest.fixture(scope="module")
def sites(lab: NetLab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelves]:
    with Shelves(lab, tmp_path_factory.mktemp("shelves")) as made:
        made.start()
        yield made


@pytest.fixture
def site(sites: Shelves) -> Iterator[Origin]:
    made = sites.site(HOST, "other.test", "key.test")
    made.respond = lambda request: response(b"body of " + request.line)
    yield made
    made.close()


@pytest.fixture(scope="module")
def plain(lab: NetLab) -> Origin:
    return lab.http(IP, 80, lambda _request: response(b"in clear"))


@pytest.fixture(autouse=True)
def _own_paths() -> None:
    from tests.egress.proxy import test_record_replay as shared

    shared._PREFIX[0] = f"/live{next(shared._NUMBERS)}"


@pytest.fixture
def rollout(sites: Shelves) -> Attached:
    return sites.attach(LIVE)


def fetch(sites: Sites, rollout: Attached, path: str = "/x", *lines: str, host: str = HOST, **more: object) -> Reply:
    with sites.inside(rollout, host) as client:
        reply: Reply = ask(client, host, at(path), *lines, **more)  # type: ignore[arg-type]
    eventually(lambda: rollout_is_quiet(rollout))
    return reply


def test_the_second_time_nobody_is_asked(sites: Shelves, rollout: Attached, site: Origin) -> None:
    body = os.urandom(2 * MIB)
    site.respond = lambda _request: response(body, "200 OK", "Content-Type: x/wheel")
    first = fetch(sites, rollout)
    connections, queries = site.connections, len(sites.lab.dns.queries)
    others = [rollout, sites.attach(LIVE), sites.attach(LIVE, worker=sites.second)]
    for other in others:
        reply = fetch(sites, other)
        assert (reply.body, reply.head) == (body, first.head)
        event = other.events("net.request")[-1]
        assert (event["verdict"], event["source"]) == ("allowed", "store")
        assert other.events("net.end")[-1]["bytes_in"] == len(body)
    assert (site.connections, len(sites.lab.dns.queries)) == (connections, queries)


def test_a_client_without_tls_is_served_too(sites: Shelves, rollout: Attached, site: Origin, plain: Origin) -> None:
    body = os.urandom(20 * MIB)
    plain.respond = lambda _request: response(body)
    plain.received.clear()
    for _ in range(3):
        with rollout.connect() as client:
            assert client.get(f"http://{HOST}{at()}").body == body
    assert len(plain.received) == 1
    old = f"GET http://{HOST}{at()} HTTP/1.0\r\nHost: {HOST}\r\n\r\n"
    with rollout.connect() as client:
        assert client.send(old.encode()).reply().body == body
        assert client.rest() == b""


def test_kept_answers_in_a_row_on_one_connection(sites: Shelves, rollout: Attached, site: Origin) -> None:
    """Three hundred in one packet: each is served after the one before, not from within it."""
    fetch(sites, rollout)
    head = f"GET {at()} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()
    with sites.inside(rollout, HOST) as client:
        client.send(head * 300)
        bodies = {client.reply().body for _ in range(300)}
    assert bodies == {f"body of GET {at()} HTTP/1.1".encode()}
    assert len(site.received) == 1
    assert rollout.wait("net.end", 303)[-1]["reason"] == "completed"


NOT_SHARED = {
    "cookie": ("Cookie: a=b",),
    "authorization": ("Authorization: Bearer mine",),
    "range": ("Range: bytes=0-3",),
    "conditional": ("If-None-Match: x",),
    "no_cache": ("Cache-Control: no-cache",),
    "pragma": ("Pragma: no-cache",),
}


@pytest.mark.parametrize("case", NOT_SHARED)
def test_what_is_somebodys_own_is_not_shared(case: str, sites: Shelves, rollout: Attached, site: Origin) -> None:
    for _ in range(2):
        assert fetch(sites, rollout, "/x", *NOT_SHARED[case]).status == 200
    assert len(site.received) == 2
    assert sites.entries() == []


ANSWERS = {
    "set_cookie": response(b"x", "200 OK", "Set-Cookie: a=b"),
    "private": response(b"x", "200 OK", "Cache-Control: private"),
    "no_store": response(b"x", "200 OK", "Cache-Control: max-age=1, no-store"),
    "vary": response(b"x", "200 OK", "Vary: *"),
    "not_found": response(b"x", "404 Not Found"),
    "redirect": response(b"x", "302 Found", "Location: /y"),
    "partial": response(b"x", "206 Partial Content", "Content-Range: bytes 0-0/9"),
    "by_close": b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nx",
    "error": response(b"x", "500 Internal Server Error"),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_answers_that_are_not_for_everybody_are_not_kept(
    case: str, sites: Shelves, rollout: Attached, site: Origin
) -> None:
    site.respond = lambda _request: ANSWERS[case]
    for _ in range(2):
        fetch(sites, rollout)
    assert len(site.received) == 2
    assert sites.entries() == []


def test_rules_without_store_and_other_methods_share_nothing(sites: Shelves, rollout: Attached, site: Origin) -> None:
    for _ in range(2):
        fetch(sites, rollout, host="other.test")
        fetch(sites, rollout, method="HEAD")
        fetch(sites, rollout, method="POST", body=b"data")
    assert len(site.received) == 6
    assert sites.entries() == []


def test_what_a_credential_opened_is_not_shared(sites: Shelves, site: Origin) -> None:
    """No policy says so; rules that say it all the same share nothing."""
    compiled = rules(policy("{host: key.test, credential: key}"), inspection=True, credentials=KEYS)
    careless = tuple(msgspec.structs.replace(rule, store=True) for rule in compiled.allow)
    rollout = sites.worker.attach(dataclasses.replace(compiled, allow=careless))
    for _ in range(2):
        assert fetch(sites, rollout, host="key.test").status == 200
    assert [one.header("authorization") for one in site.received] == [[b"Bearer s3cret"]] * 2
    assert sites.entries() == []


@pytest.mark.parametrize(
    "line", ["X-Forwarded-Path: /evil", "X-Any: evil", "Accept: evil", "User-Agent: evil/1", "Origin: x"]
)
def test_one_rollout_cannot_poison_what_another_gets(
    line: str, sites: Shelves, rollout: Attached, site: Origin
) -> None:
    """A header that the origin obeys and the store does not look at is how caches are poisoned."""
    site.respond = lambda request: response(
        b"evil" if b"evil" in request.head or b"Origin" in request.head else b"good"
    )
    fetch(sites, rollout, "/x", line)
    assert fetch(sites, sites.attach(LIVE)).body == b"good"
    assert fetch(sites, sites.attach(LIVE, worker=sites.second)).body == b"good"


def test_a_get_with_a_body_is_neither_served_nor_kept(sites: Shelves, site: Origin) -> None:
    rollout = sites.attach(policy("{host: files.test, store: true}", limits=LIMITS))
    site.respond = lambda request: response(b"said " + request.body)
    assert fetch(sites, rollout, body=b"one").body == b"said one"
    assert fetch(sites, rollout).body == b"said "
    assert fetch(sites, rollout, body=b"two").body == b"said two"
    assert fetch(sites, rollout).body == b"said "
    assert len(site.received) == 3


def test_an_upload_to_such_a_host_is_not_waited_for(sites: Shelves, rollout: Attached, site: Origin) -> None:
    """It streams: the origin sees the first half before the second is sent."""
    seen: list[bytes] = []

    def answer(_origin: Origin, sock: socket.socket) -> None:
        data = b""
        while not data.endswith(b"half"):
            data += sock.recv(65536)
        seen.append(data)
        while not data.endswith(b"rest"):
            data += sock.recv(65536)
        sock.sendall(response(b"done"))

    other = sites.site(HOST, ip="11.0.0.91", inner=answer)
    with sites.inside(rollout, HOST) as client:
        client.send(f"POST {at()} HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 8\r\n\r\nhalf".encode())
        eventually(lambda: seen)
        assert client.send(b"rest").reply().body == b"done"
    other.close()
    sites.lab.add_host(HOST, IP)


def test_a_damaged_store_only_costs_the_way(sites: Shelves, rollout: Attached, site: Origin) -> None:
    body = os.urandom(100_000)
    site.respond = lambda _request: response(body)
    fetch(sites, rollout)
    (entry,) = sites.entries()
    damage(entry, 100)
    assert fetch(sites, rollout).body == body
    assert len(site.received) == 2
    entry.unlink()


def test_a_damaged_body_is_not_served(sites: Shelves, rollout: Attached, site: Origin) -> None:
    body = os.urandom(100_000)
    site.respond = lambda _request: response(body)
    fetch(sites, rollout)
    damage(sites.blob(body), 50_000)
    for worker in (sites.worker, sites.second):
        reply = fetch(sites, sites.attach(LIVE, worker=worker))
        assert reply.body == body or (reply.status, reply.reason) == (503, "store_failed")
    sites.blob(body).unlink()


def test_a_cut_answer_is_not_kept(sites: Shelves, rollout: Attached, site: Origin) -> None:
    def cut(origin: Origin, sock: socket.socket) -> None:
        read_request(sock)
        sock.sendall(
            response(b"whole") if origin.connections > 1 else b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nx"
        )

    other = sites.site(HOST, ip="11.0.0.92", inner=cut)
    with sites.inside(rollout, HOST) as client, pytest.raises((OSError, EOFError)):
        ask(client, HOST, at())
    assert fetch(sites, rollout).body == b"whole"
    assert fetch(sites, rollout).body == b"whole"
    assert other.connections == 2
    other.close()
    sites.lab.add_host(HOST, IP)


@pytest.mark.parametrize("clear", [True, False])
def test_egress_case_105_what_is_served_counts_to_the_byte(
    *, clear: bool, sites: Shelves, site: Origin, plain: Origin
) -> None:
    body = os.urandom(600_000)
    site.respond = plain.respond = lambda _request: response(body)
    filler = sites.attach(LIVE)
    fetch(sites, filler)
    with filler.connect() as client:
        assert client.get(f"http://{HOST}{at()}").body == body
    cap = 500_000
    rollout = sites.attach(LIVE.replace("bytes_in: 256 MiB", f"bytes_in: {cap}"))
    client = rollout.connect() if clear else sites.inside(rollout, HOST)
    target = f"http://{HOST}{at()}" if clear else at()
    with client:
        client.send(f"GET {target} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
        with pytest.raises((OSError, EOFError)):
            client.reply()
    end = rollout.wait("net.end", 1 if clear else 2)[-1]
    assert (end["reason"], end["bytes_in"]) == ("bytes_in_exceeded", cap)


def stuck(sites: Shelves, filler: Attached, site: Origin, plain: Origin, *, clear: bool) -> Client:
    """Return a client that asked for a large kept answer and takes none of it."""
    body = os.urandom(40 * MIB)
    site.respond = plain.respond = lambda _request: response(body)
    if clear:
        with filler.connect() as client:
            client.get(f"http://{HOST}{at()}")
    else:
        fetch(sites, filler)
    client = filler.connect() if clear else sites.inside(filler, HOST)
    target = f"http://{HOST}{at()}" if clear else at()
    return client.send(f"GET {target} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())


@pytest.mark.parametrize("clear", [True, False])
def test_a_client_that_reads_nothing_costs_neither_memory_nor_time(
    *, clear: bool, sites: Shelves, rollout: Attached, site: Origin, plain: Origin
) -> None:
    with stuck(sites, rollout, site, plain, clear=clear) as client:
        time.sleep(1)
        client.send(b"GET /more HTTP/1.1\r\n")  # it goes on talking, too
        pid = sites.worker.process.pid
        memory, used, begin = rss_kib(pid), cpu_s(pid), time.monotonic()
        time.sleep(1.5)
        assert rss_kib(pid) - memory < 1024
        assert cpu_s(pid) - used < 0.1 * (time.monotonic() - begin)


@pytest.mark.parametrize("clear", [True, False])
def test_egress_case_087_revocation_ends_what_is_being_served(
    *, clear: bool, sites: Shelves, rollout: Attached, site: Origin, plain: Origin
) -> None:
    with stuck(sites, rollout, site, plain, clear=clear) as client:
        client.take(1000)
        begin = time.monotonic()
        assert sites.worker.ask("revoke", rollout_id=rollout.rollout_id)["closed"] == 1
        with pytest.raises((OSError, EOFError)):
            client.take(40 * MIB)
        assert time.monotonic() - begin < 1
    eventually(lambda: rollout.events("net.end")[-1]["reason"] == "revoked")


def test_a_client_that_leaves_is_forgotten(sites: Shelves, rollout: Attached, site: Origin, plain: Origin) -> None:
    client = stuck(sites, rollout, site, plain, clear=True)
    client.take(1000)
    client.sock.close()
    eventually(lambda: rollout.events("net.end")[-1]["reason"] == "client_closed")
    assert sites.worker.ask("stats")["connections"] == 0


def test_the_workers_have_counted_no_fault(sites: Shelves) -> None:
    """Stays last: none of the above went through an exception that nobody expected."""
    assert sites.worker.ask("stats")["faults"] == sites.second.ask("stats")["faults"] == 0
