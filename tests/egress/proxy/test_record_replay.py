"""Record and replay through real workers: the same bytes with no network at all, or a refusal that names what is missing."""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stockade.egress import Settings, StoreSettings, prepare_store
from tests.egress.netlab import NetLab, Origin, read_request, response
from tests.egress.proxy.harness import Attached, Reply, Worker, post
from tests.egress.proxy.sites import IP, LIMITS, Sites, ask, eventually, policy

HOST = "read.test"
RULES = (
    "{host: read.test, methods: [GET, HEAD, POST], ports: [80, 443]}",
    "{host: open.test, ports: [443]}",
    "{host: raw.test, tcp: true, ports: [22]}",
    "{host: ws.test, websocket: true}",
)
RECORD, REPLAY = (policy(*RULES, limits=LIMITS, mode=mode) for mode in ("record", "replay"))
MIB = 1 << 20


class Shelves(Sites):
    """Workers that share one store."""

    def __init__(self, lab: NetLab, folder: Path, *, max_bytes: int = 256 * MIB) -> None:
        self.place = folder / "store"
        self.fd = prepare_store(self.place, os.geteuid(), os.getegid())
        super().__init__(lab, folder, settings=Settings(store=StoreSettings(max_bytes)), store=self.fd)

    def close(self) -> None:
        super().close()
        os.close(self.fd)
        shutil.rmtree(self.place)

    @property
    def second(self) -> Worker:
        """Another worker."""
        return self._workers[1]

    def blob(self, body: bytes) -> Path:
        """Return the file of a body."""
        return self.place / "blobs" / hashlib.sha256(body).hexdigest()

    def entries(self) -> list[Path]:
        """Return the files of this test's answers."""
        paths = (self.place / "index").rglob("?" * 64)
        return [path for path in paths if f"\n{_PREFIX[0]}/".encode() in path.read_bytes()]


@pytest.fixture(scope="module")
def sites(lab: NetLab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelves]:
    with Shelves(lab, tmp_path_factory.mktemp("shelves")) as made:
        made.start()
        yield made


_NUMBERS = itertools.count()
_PREFIX = [""]


def at(path: str = "/x") -> str:
    """Return a path of this test's own, which no other test has recorded."""
    return _PREFIX[0] + path


@pytest.fixture(autouse=True)
def _own_paths() -> None:
    _PREFIX[0] = f"/{next(_NUMBERS)}"


@pytest.fixture
def site(sites: Shelves) -> Iterator[Origin]:
    made = sites.site(HOST, "open.test", "ws.test")
    sites.lab.add_host("raw.test", IP)
    made.respond = lambda request: response(b"body of " + request.line)
    yield made
    made.close()


@pytest.fixture
def recording(sites: Shelves) -> Attached:
    return sites.attach(RECORD)


def damage(path: Path, at: int = 0) -> None:
    """Flip a byte in place."""
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def fetch(sites: Sites, rollout: Attached, path: str = "/x", *lines: str, host: str = HOST, **request: object) -> Reply:
    with sites.inside(rollout, host) as client:
        reply: Reply = ask(client, host, at(path), *lines, **request)  # type: ignore[arg-type]
    eventually(lambda: rollout_is_quiet(rollout))
    return reply


def rollout_is_quiet(rollout: Attached) -> bool:
    """Return whether everything that was allowed has its end on record."""
    allowed = [event for event in rollout.events() if event["verdict"] == "allowed"]
    return len(allowed) == len(rollout.events("net.end"))


class Dark:
    """No origin and no resolver: whoever asks one of them is caught."""

    def __init__(self, sites: Sites, origin: Origin) -> None:
        origin.close()
        self._sites = sites
        self._zone, sites.lab.dns.zone = sites.lab.dns.zone, {}
        self._queries = len(sites.lab.dns.queries)

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, *_error: object) -> None:
        self._sites.lab.dns.zone = self._zone
        assert len(self._sites.lab.dns.queries) == self._queries, "something was looked up"


def test_what_was_recorded_is_replayed_without_a_network(sites: Shelves, recording: Attached, site: Origin) -> None:
    body = os.urandom(3 * MIB)
    site.respond = lambda _request: response(body, "200 OK", "Content-Type: x/y", "ETag: abc", "Set-Cookie: a=b")
    first = fetch(sites, recording)
    assert first.body == body
    event, end = recording.events("net.request")[0], recording.wait("net.end", 2)[-1]
    assert "source" not in event
    assert end["bytes_in"] > len(body)
    other = sites.second  # a worker that has seen none of it
    with Dark(sites, site):
        rollout = sites.attach(REPLAY, worker=other)
        second = fetch(sites, rollout)
        assert second.body == body
        assert second.head == first.head
    event, end = rollout.last("net.request"), rollout.wait("net.end", 2)[-1]
    assert (event["verdict"], event["source"]) == ("allowed", "store")
    assert "network.peer.address" not in event
    assert (end["reason"], end["http.response.status_code"], end["bytes_in"]) == ("completed", 200, len(body))


MISSING: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "path": ("/other", (), {}),
    "query": ("/x?a=1", (), {}),
    "method": ("/x", (), {"method": "HEAD"}),
    "accept": ("/x", ("Accept: text/html",), {}),
    "range": ("/x", ("Range: bytes=0-1",), {}),
    "body": ("/x", (), {"method": "POST", "body": b"other"}),
    "unknown_header": ("/x", ("X-Any: 1",), {}),
    "credential": ("/x", ("Authorization: Bearer other",), {}),
}


@pytest.mark.parametrize("case", MISSING)
def test_what_was_not_recorded_is_denied_by_name(case: str, sites: Shelves, recording: Attached, site: Origin) -> None:
    path, lines, request = MISSING[case]
    fetch(sites, recording)
    fetch(sites, recording, method="POST", body=b"one")
    with Dark(sites, site):
        rollout = sites.attach(REPLAY)
        reply = fetch(sites, rollout, path, *lines, **request)
    assert (reply.status, reply.reason) == (504, "not_recorded")
    method = request.get("method", "GET")
    event = rollout.last("net.request")
    assert (event["verdict"], event["reason"]) == ("denied", "not_recorded")
    assert event["detail"].startswith(f"{method} https://{HOST}{at(path)}")
    if method != "HEAD":
        assert f"{method} https://{HOST}{at(path)}".encode() in reply.body
    assert "Bearer other" not in rollout.record.read_text()


def test_another_host_or_scheme_is_something_else(sites: Shelves, recording: Attached, site: Origin) -> None:
    fetch(sites, recording)
    with Dark(sites, site):
        rollout = sites.attach(REPLAY)
        assert fetch(sites, rollout, host="open.test").reason == "not_recorded"
        with rollout.connect() as client:
            assert client.get(f"http://{HOST}{at()}").reason == "not_recorded"


ANSWERS = {
    "404": response(b"gone", "404 Not Found"),
    "302": response(b"", "302 Found", "Location: https://elsewhere.test/"),
    "204": b"HTTP/1.1 204 No Content\r\nX-A: 1\r\n\r\n",
    "304": b"HTTP/1.1 304 Not Modified\r\nETag: x\r\n\r\n",
    "empty": response(b""),
    "chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n",
    "by_close": b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nuntil the end",
    "interim": b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + response(b"after hints"),
    "many_headers": response(b"x", "200 OK", *(f"X-{number}: {'v' * 100}" for number in range(60))),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_every_kind_of_answer_comes_back(case: str, sites: Shelves, recording: Attached, site: Origin) -> None:
    site.respond = lambda _request: ANSWERS[case]
    first = fetch(sites, recording)
    with Dark(sites, site):
        second = fetch(sites, sites.attach(REPLAY))
    assert (second.status, second.body) == (first.status, first.body)
    assert _own(second) == _own(first)


def _own(reply: Reply) -> list[bytes]:
    """Return the header lines that are not about framing."""
    framing = (b"content-length", b"transfer-encoding", b"connection")
    lines = reply.head.split(b"\r\n")[1:]
    return sorted(line for line in lines if line and not line.lower().startswith(framing))


def test_bodies_are_part_of_what_is_asked(sites: Shelves, recording: Attached, site: Origin) -> None:
    site.respond = lambda request: response(b"you said " + request.body)
    for body in (b"one", b"two", b"x" * 300_000):
        assert fetch(sites, recording, method="POST", body=body).body == b"you said " + body
    assert [one.body for one in site.received] == [b"one", b"two", b"x" * 300_000]
    with Dark(sites, site):
        rollout = sites.attach(REPLAY)
        for body in (b"two", b"x" * 300_000, b"one"):
            assert fetch(sites, rollout, method="POST", body=body).body == b"you said " + body
        chunked = f"POST {at()} HTTP/1.1\r\nHost: read.test\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        with sites.inside(rollout, HOST) as client:  # the same bytes, framed in another way
            client.send(chunked + b"1\r\no\r\n2;e\r\nne\r\n0\r\n\r\n")
            assert client.reply().body == b"you said one"


@pytest.mark.parametrize("status", ["500 Internal Server Error", "503 Service Unavailable", "429 Too Many Requests"])
def test_failures_that_pass_are_not_kept(status: str, sites: Shelves, recording: Attached, site: Origin) -> None:
    site.respond = lambda _request: response(b"later", status)
    assert fetch(sites, recording).status == int(status[:3])
    site.respond = lambda _request: response(b"now")
    assert fetch(sites, recording).body == b"now"
    with Dark(sites, site):
        assert fetch(sites, sites.attach(REPLAY)).body == b"now"


def test_recording_serves_what_it_has_kept(sites: Shelves, recording: Attached, site: Origin) -> None:
    """So that what a rollout sees is what its replay will see; and the first one wins."""
    site.respond = lambda _request: response(b"first")
    assert fetch(sites, recording).body == b"first"
    site.respond = lambda _request: response(b"second")
    connections = site.connections
    assert fetch(sites, sites.attach(RECORD)).body == b"first"
    assert fetch(sites, sites.attach(RECORD, worker=sites.second)).body == b"first"
    assert site.connections == connections


def test_two_that_fetch_at_once_leave_one_answer(sites: Shelves, site: Origin) -> None:
    """The slower one gets its own bytes whole, and everybody after them the ones that were kept first."""
    gate = threading.Event()
    answers = iter([b"slow" * 10_000, b"fast" * 10_000])

    def respond(_request: object) -> bytes:
        body = next(answers)
        if body.startswith(b"slow"):
            gate.wait(10)
        return response(body)

    site.respond = respond
    slow, fast = sites.attach(RECORD), sites.attach(RECORD, worker=sites.second)
    with sites.inside(slow, HOST) as client:
        client.send(f"GET {at()} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
        eventually(lambda: len(site.received) == 1)
        assert fetch(sites, fast).body == b"fast" * 10_000
        gate.set()
        assert client.reply().body == b"slow" * 10_000
    with Dark(sites, site):
        for worker in (sites.worker, sites.second):
            assert fetch(sites, sites.attach(REPLAY, worker=worker)).body == b"fast" * 10_000


def test_an_answer_that_was_cut_off_is_not_kept(sites: Shelves, recording: Attached, site: Origin) -> None:
    plain = sites.lab.origin(IP, 80, _cut_off)
    with recording.connect() as client:
        client.send(f"GET http://{HOST}{at()} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
        with pytest.raises((EOFError, OSError)):
            client.reply()
    assert sites.entries() == []
    with recording.connect() as client:
        assert client.get(f"http://{HOST}{at()}").body == b"whole"
    assert len(sites.entries()) == 1
    plain.close()


def _cut_off(origin: Origin, sock: socket.socket) -> None:
    read_request(sock)
    sock.sendall(response(b"whole") if origin.connections > 1 else response(b"half").replace(b"4", b"4000"))


def test_a_client_that_leaves_early_leaves_no_half_answer(sites: Shelves, recording: Attached, site: Origin) -> None:
    body = os.urandom(8 * MIB)
    site.respond = lambda _request: response(body)
    client = sites.inside(recording, HOST)
    client.send(f"GET {at()} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()).take(1000)
    client.sock.close()
    recording.wait("net.end", 2)
    assert sites.entries() == []
    assert not sites.blob(body).exists()
    assert fetch(sites, recording).body == body


# ---- what cannot be replayed


def test_raw_bytes_and_websockets_have_no_replay(sites: Shelves, recording: Attached, site: Origin) -> None:
    echo = sites.lab.echo(IP, 22)
    for rollout in (recording, sites.attach(REPLAY)):
        with rollout.connect() as client:
            reply = client.connect("raw.test", 22)
        assert (reply.status, reply.reason) == (403, "not_replayable")
        lines = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: x")
        reply = fetch(sites, rollout, "/", *lines, host="ws.test")
        assert (reply.status, reply.reason) == (403, "not_replayable")
    assert echo.connections == 0
    assert site.received == []
    echo.close()


def test_opaque_tunnels_are_looked_into(sites: Shelves, recording: Attached, site: Origin) -> None:
    assert fetch(sites, recording, "/x", host="open.test").status == 200
    assert recording.events("net.connect")[0]["handling"] == "inspect"
    with Dark(sites, site):
        assert fetch(sites, sites.attach(REPLAY), "/x", host="open.test").status == 200


def test_the_runs_own_services_are_never_kept(sites: Shelves, lab: NetLab) -> None:
    answers = iter([b"one", b"two", b"three"])
    origin = lab.http("10.0.0.9", 8000, lambda _request: response(next(answers)))
    more = 'services:\n  - {name: model, address: 10.0.0.9, port: 8000, methods: [POST], paths: ["/v1/**"]}\n'
    for mode, body in ((RECORD, b"one"), (RECORD, b"two"), (REPLAY, b"three")):
        rollout = sites.attach(mode + more)
        with rollout.connect() as client:
            client.send(post("http://model.stockade.internal:8000/v1/x", b"prompt"))
            assert client.reply().body == body
        assert "source" not in rollout.last("net.request")
    assert sites.entries() == []
    origin.close()


def test_a_mode_that_is_off_allows_nothing(sites: Shelves, site: Origin) -> None:
    rollout = sites.attach(RECORD.replace("mode: record", 'mode: "off"'))
    with rollout.connect() as client:
        assert client.connect(HOST).reason == "egress_off"
    with rollout.connect() as client:
        assert client.get(f"http://{HOST}/").reason == "egress_off"
    assert site.connections == 0


# ---- a store that is not what it must be


def test_a_poisoned_body_is_never_served(sites: Shelves, recording: Attached, site: Origin) -> None:
    body = os.urandom(600_000)
    site.respond = lambda _request: response(body)
    fetch(sites, recording)
    damage(sites.blob(body), 500_000)
    for rollout in (sites.attach(REPLAY), sites.attach(REPLAY, worker=sites.second), recording):
        reply = fetch(sites, rollout)
        assert (reply.status, reply.reason) == (503, "store_failed")
        assert rollout.wait("net.end", 2)[-1]["reason"] == "store_failed"
    assert len(site.received) == 1, "in a recording there is no second answer"


@pytest.mark.parametrize("how", ["flipped", "shortened", "empty", "lengthened", "link", "directory"])
@pytest.mark.parametrize("what", ["entry", "blob"])
def test_a_poisoned_store_denies(
    what: str, how: str, sites: Shelves, recording: Attached, site: Origin, tmp_path: Path
) -> None:
    body = f"the true body of {what} {how}".encode()
    site.respond = lambda _request: response(body)
    fetch(sites, recording)
    path = sites.blob(body) if what == "blob" else sites.entries()[0]
    raw = path.read_bytes()
    path.unlink()
    if how == "link":
        elsewhere = tmp_path / "elsewhere"
        elsewhere.write_bytes(raw)
        path.symlink_to(elsewhere)
    elif how == "directory":
        path.mkdir()
    else:
        changed = {"flipped": raw[:-1] + bytes([raw[-1] ^ 1]), "shortened": raw[:-1], "empty": b""}
        path.write_bytes(changed.get(how, raw + b"x"))
    try:
        for worker in (sites.worker, sites.second):
            reply = fetch(sites, sites.attach(REPLAY, worker=worker))
            assert (reply.status, reply.reason) == (503, "store_failed")
            assert body not in reply.body
    finally:
        path.rmdir() if how == "directory" else path.unlink()  # other tests read this folder


def test_a_body_that_is_gone_is_a_failure(sites: Shelves, recording: Attached, site: Origin) -> None:
    site.respond = lambda _request: response(b"soon gone")
    fetch(sites, recording)
    sites.blob(b"soon gone").unlink()
    reply = fetch(sites, sites.attach(REPLAY, worker=sites.second))
    assert (reply.status, reply.reason) == (503, "store_failed")


def test_a_full_store_ends_a_recording(lab: NetLab, tmp_path: Path) -> None:
    with Shelves(lab, tmp_path, max_bytes=2 * MIB) as sites:
        site = sites.site(HOST)
        site.respond = lambda _request: response(os.urandom(MIB + (MIB >> 1)))
        rollout = sites.attach(RECORD)
        assert fetch(sites, rollout, "/1").status == 200
        reply = fetch(sites, rollout, "/2")
        assert (reply.status, reply.reason) == (503, "store_full")
        assert rollout.wait("net.end", 4)[-1]["reason"] == "store_full"
        assert fetch(sites, rollout, "/1").status == 200, "what is there is served"
        chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"10000\r\n" + bytes(65536) + b"\r\n"
        site.respond = lambda _request: chunked + b"10000\r\n%b\r\n" % bytes(65536) * 40 + b"0\r\n\r\n"
        with sites.inside(rollout, HOST) as client:
            client.send(f"GET /3 HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
            with pytest.raises((EOFError, OSError)):
                client.reply()
        site.close()


def test_without_a_store_there_is_no_recording(lab: NetLab, tmp_path: Path) -> None:
    with Sites(lab, tmp_path) as sites:
        site = sites.site(HOST)
        for mode in (RECORD, REPLAY):
            reply = fetch(sites, sites.attach(mode))
            assert (reply.status, reply.reason) == (503, "store_failed")
        assert site.connections == 0
        site.close()


# ---- bodies that are read first


def test_a_body_that_stops_halfway_is_on_record(sites: Shelves, site: Origin) -> None:
    rollout = sites.attach(RECORD.replace("6000", "6000, idle: 1s"))
    with sites.inside(rollout, HOST) as client:
        client.send(b"POST /x HTTP/1.1\r\nHost: read.test\r\nContent-Length: 100\r\n\r\nhalf")
        reply = client.reply()
    assert (reply.status, reply.reason) == (504, "idle_timeout")
    event = rollout.last("net.request")
    assert (event["verdict"], event["reason"]) == ("denied", "idle_timeout")
    assert site.received == []


def test_egress_case_088_a_body_over_the_buffer_is_denied(sites: Shelves, site: Origin) -> None:
    rollout = sites.attach(RECORD.replace("bytes_out_per_request: 16 MiB", "bytes_out_per_request: 10000"))
    assert fetch(sites, rollout, method="POST", body=b"x" * 20_000).reason == "request_too_large"
    with sites.inside(rollout, HOST) as client:
        client.send(b"POST /x HTTP/1.1\r\nHost: read.test\r\nTransfer-Encoding: chunked\r\n\r\n")
        client.send(b"1000\r\n%b\r\n" % bytes(4096) * 3)
        assert client.reply().reason == "request_too_large"
    assert {event["reason"] for event in rollout.wait("net.request", 2)} == {"request_too_large"}
    assert site.received == []


def test_curl_that_asks_before_it_sends(sites: Shelves, recording: Attached, site: Origin, tmp_path: Path) -> None:
    ca, body = tmp_path / "ca.pem", tmp_path / "body"
    ca.write_bytes(sites.authority.cert_pem)
    body.write_bytes(os.urandom(2 * MIB))
    host, port = recording.address
    command = ["curl", "-sS", "--http1.1", "--cacert", str(ca), "-x", f"http://{host}:{port}", f"https://{HOST}{at()}"]
    done = subprocess.run([*command, "--data-binary", f"@{body}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"body of POST {at()} HTTP/1.1"), done.stderr
    assert site.received[-1].body == body.read_bytes()


def test_bodies_are_looked_at_for_secrets_and_malformed_ones_refused(
    sites: Shelves, recording: Attached, site: Origin
) -> None:
    bad = b"POST /x HTTP/1.1\r\nHost: read.test\r\nTransfer-Encoding: chunked\r\n\r\n"
    with sites.inside(recording, HOST) as client:
        client.send(bad + b"3\r\nabc\r\n")
        time.sleep(0.05)
        reply = client.send(b"0x3\r\n").reply()
    assert (reply.status, reply.reason) == (400, "malformed_body")
    assert recording.last("net.request")["reason"] == "malformed_body"
    assert site.received == []


def test_the_workers_have_counted_no_fault(sites: Shelves) -> None:
    """Stays last: none of the above went through an exception that nobody expected."""
    assert sites.worker.ask("stats")["faults"] == sites.second.ask("stats")["faults"] == 0
