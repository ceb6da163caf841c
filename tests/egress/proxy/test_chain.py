"""Through an operator's proxy: asked for the checked address, over TCP, a UNIX socket or TLS, and never gone around."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import trustme

from stockade.egress import ChainSettings, Role, Settings
from tests.egress.netlab import NetLab, Origin, over_tls, response, serve_echo
from tests.egress.proxy import hellos
from tests.egress.proxy.harness import Attached
from tests.egress.proxy.sites import IP, LIMITS, Sites, ask, eventually, nothing_left, policy

PROXY = "11.0.0.250"
POLICY = policy(
    "{host: open.test}",
    "{host: read.test, read_only: true, ports: [80, 443]}",
    "{host: plain.test, ports: [80], methods: [GET, POST]}",
    "{host: raw.test, tcp: true, ports: [22]}",
    '{host: "2600:5::5", tcp: true, ports: [22]}',
    limits=LIMITS,
)
NAMES = ("open.test", "read.test", "plain.test", "raw.test")
Answer = Callable[[socket.socket, str], "bytes | None"]


def granted(_sock: socket.socket, _target: str) -> bytes:
    return b"HTTP/1.1 200 OK\r\n\r\n"


class Forward:
    """A plain upstream proxy, as sites have them: CONNECT, and then bytes. ``targets`` is what it was asked for."""

    def __init__(self, lab: NetLab) -> None:
        self.lab = lab
        self.targets: list[str] = []
        self.heads: list[bytes] = []
        self.answer: Answer = granted
        self.names: dict[str, str] = {}
        self.glue = False
        """Whether the server's first bytes go out in one packet with the answer."""

    def serve(self, _origin: Origin, sock: socket.socket) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            piece = sock.recv(1)
            if not piece:
                return
            head += piece
        self.heads.append(head)
        target = head.split(b" ")[1].decode()
        self.targets.append(target)
        answer = self.answer(sock, target)
        if answer is None:
            return
        if not answer.startswith(b"HTTP/1.1 200"):
            sock.sendall(answer)
            return
        host, _, port = target.rpartition(":")
        host = host.strip("[]")
        with self.lab.connect(self.names.get(host, host), int(port)) as upstream:
            if self.glue:
                answer += upstream.recv(65536)
            sock.sendall(answer)
            _relay(sock, upstream)


def _relay(one: socket.socket, other: socket.socket) -> None:
    def move(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError, ssl.SSLError):
            while piece := source.recv(1 << 16):
                target.sendall(piece)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    back = threading.Thread(target=move, args=(other, one), daemon=True)
    back.start()
    move(one, other)
    back.join(10)


def chain(kind: str = "http", host: str = PROXY, port: int = 3128, **more: bool) -> Settings:
    return Settings(chain=ChainSettings(kind, host, port, **more))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def shared(lab: NetLab) -> Forward:
    made = Forward(lab)
    lab.origin(PROXY, 3128, made.serve)
    return made


@pytest.fixture(scope="module")
def sites(lab: NetLab, shared: Forward, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    with Sites(lab, tmp_path_factory.mktemp("record"), settings=chain()) as made:
        yield made


@pytest.fixture(scope="module")
def shared_site(sites: Sites) -> Origin:
    return sites.site("open.test", "read.test")


@pytest.fixture(scope="module")
def plain(lab: NetLab) -> Origin:
    return lab.http(IP, 80, lambda _request: response(b"in clear"))


@pytest.fixture
def site(lab: NetLab, shared_site: Origin) -> Origin:
    shared_site.received.clear()
    for name in NAMES:
        lab.add_host(name, IP)
    return shared_site


@pytest.fixture
def forward(shared: Forward) -> Forward:
    shared.targets.clear()
    shared.heads.clear()
    shared.answer, shared.glue, shared.names = granted, False, {}
    return shared


@pytest.fixture
def rollout(sites: Sites) -> Attached:
    return sites.attach(POLICY)


def trusting(sites: Sites) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    sites.roots.configure_trust(context)
    return context


def by_tunnel(sites: Sites, rollout: Attached) -> bytes:
    """Fetch through an opaque tunnel; return the body."""
    client = rollout.connect()
    reply = client.connect("open.test")
    assert reply.status == 200, reply
    with sites.tls(client.sock, "open.test", trusting(sites)) as inside:
        body: bytes = ask(inside, "open.test", "/x").body
    return body


# ---- what works


def test_egress_case_095_the_proxy_is_asked_for_the_checked_address(
    sites: Sites, rollout: Attached, site: Origin, forward: Forward
) -> None:
    assert by_tunnel(sites, rollout) == b"hello"
    assert forward.targets == [f"{IP}:443"]
    assert forward.heads[0] == f"CONNECT {IP}:443 HTTP/1.1\r\nHost: {IP}:443\r\n\r\n".encode()
    decision, end = rollout.last("net.connect"), rollout.last()
    assert decision["network.peer.address"] == end["network.peer.address"] == IP
    assert end["tls.client.server_name"] == "open.test"
    assert "detail" not in decision


def test_egress_case_095_inspected_requests_verify_the_site_through_it(
    sites: Sites, rollout: Attached, site: Origin, forward: Forward
) -> None:
    with sites.inside(rollout, "read.test") as client:
        for _ in range(3):
            assert ask(client, "read.test", "/x").body == b"hello"
    assert forward.targets == [f"{IP}:443"], "one tunnel is kept"
    impostor = sites.site("read.test", ip="11.0.0.84", context=sites.context("evil.test"))
    with sites.inside(rollout, "read.test") as client:
        assert ask(client, "read.test", "/x").reason == "upstream_tls"
    assert impostor.received == []
    impostor.close()


def test_plain_requests_go_through_it_too(
    sites: Sites, rollout: Attached, site: Origin, plain: Origin, forward: Forward
) -> None:
    plain.received.clear()
    with rollout.connect() as client:
        assert client.get("http://plain.test/x").body == b"in clear"
        assert client.get("http://plain.test/y").body == b"in clear"
    assert forward.targets == [f"{IP}:80"]
    assert [one.line for one in plain.received] == [b"GET /x HTTP/1.1", b"GET /y HTTP/1.1"]


def test_an_address_of_ipv6_is_in_brackets(lab: NetLab, rollout: Attached, forward: Forward) -> None:
    echo = lab.echo("2600:5::5", 22)
    with rollout.connect() as client:
        assert client.connect("[2600:5::5]", 22).status == 200
        assert client.send(b"through").take(7) == b"through"
    assert forward.targets == ["[2600:5::5]:22"]
    echo.close()


@pytest.mark.parametrize("glue", [False, True])
def test_egress_case_085_a_server_that_speaks_first(
    *, glue: bool, lab: NetLab, rollout: Attached, site: Origin, forward: Forward
) -> None:
    """Its first bytes may come in one packet with the proxy's answer; they are the tunnel's, and counted."""

    def banner(origin: Origin, sock: socket.socket) -> None:
        sock.sendall(b"SSH-2.0-test\r\n")
        serve_echo(origin, sock)

    origin = lab.origin(IP, 22, banner)
    forward.glue = glue
    with rollout.connect() as client:
        assert client.connect("raw.test", 22).status == 200
        assert client.take(14) == b"SSH-2.0-test\r\n"
        assert client.send(b"x" * 100_000).take(100_000) == b"x" * 100_000
    end = rollout.last()
    assert (end["bytes_out"], end["bytes_in"]) == (100_000, 100_014)
    origin.close()


def test_the_proxy_itself_may_have_a_name(
    lab: NetLab, site: Origin, forward: Forward, tmp_path: Path, sites: Sites
) -> None:
    lab.add_host("proxy.test", PROXY)
    worker = sites.start(settings=chain(host="proxy.test"))
    assert by_tunnel(sites, sites.attach(POLICY, worker=worker)) == b"hello"
    lab.dns.zone["proxy.test"] = "servfail"
    with sites.attach(POLICY, worker=worker).connect() as client:
        reply = client.connect("open.test")
    assert (reply.status, reply.reason) == (502, "upstream_failed")


def test_the_runs_own_services_are_reached_directly(sites: Sites, lab: NetLab, forward: Forward) -> None:
    origin = lab.http("10.0.0.9", 8000, lambda _request: response(b"model"))
    more = 'services:\n  - {name: model, address: 10.0.0.9, port: 8000, methods: [GET], paths: ["/**"]}\n'
    with sites.attach(POLICY + more).connect() as client:
        assert client.get("http://model.stockade.internal:8000/").body == b"model"
    assert forward.targets == []
    origin.close()


# ---- what is refused before anybody is asked


def test_egress_case_095_addresses_are_judged_here(
    lab: NetLab, sites: Sites, rollout: Attached, site: Origin, forward: Forward
) -> None:
    for address in ("10.0.0.1", "169.254.169.254", "127.0.0.1", "198.18.0.10", "11.0.0.200"):
        lab.add_host("open.test", address)
        with rollout.connect() as client:
            reply = client.connect("open.test")
        assert (reply.status, reply.reason) == (
            403,
            {"169.254.169.254": "metadata_address", "11.0.0.200": "own_address"}.get(address, "internal_address"),
        )
    lab.dns.zone["open.test"] = "servfail"
    with rollout.connect() as client:
        assert client.connect("open.test").reason == "resolve_failed"
    with rollout.connect() as client:
        assert client.connect("evil.test").reason == "host_not_allowed"
    assert forward.targets == []


@pytest.mark.parametrize("line", ["X-Upstream-Https-Proxy: http://11.0.0.66:3128", "Proxy-Connection: close", "Via: x"])
def test_egress_case_094_no_client_chooses_the_proxy(
    line: str, lab: NetLab, rollout: Attached, site: Origin, plain: Origin, forward: Forward
) -> None:
    other = lab.echo("11.0.0.66", 3128)
    plain.received.clear()
    with rollout.connect() as client:
        assert client.get("http://plain.test/", line).status == 200
    assert forward.targets == [f"{IP}:80"]
    assert other.connections == 0
    assert b"11.0.0.66" not in plain.received[0].head
    other.close()


# ---- when it does not do what it was asked

ANSWERS = {
    "403": (b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n", "the operator's proxy said 403"),
    "407": (b"HTTP/1.1 407 Auth\r\nProxy-Authenticate: Basic\r\n\r\n", "status 407"),
    "502": (b"HTTP/1.1 502 Bad Gateway\r\n\r\n", "the operator's proxy said 502"),
    "302": (b"HTTP/1.1 302 Found\r\nLocation: http://evil.test/\r\n\r\n", "the operator's proxy said 302"),
    "101": (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", "status 101"),
    "100": (b"HTTP/1.1 100 Continue\r\n\r\n", "the operator's proxy said 100"),
    "garbage": (b"SSH-2.0-OpenSSH\r\n\r\n", "not a status line"),
    "binary": (b"\x16\x03\x01\x00\x05hello", "first byte"),
    "http_0_9": (b"<html>hello</html>", "first byte"),
    "bare_lf": (b"HTTP/1.1 200 OK\n\n", "bare LF"),
    "huge": (b"HTTP/1.1 200 OK\r\nX-A: " + b"a" * 20_000 + b"\r\n\r\n", "head over"),
    "nothing": (b"", "closed"),
    "half": (b"HTTP/1.1 200 O", "closed"),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_a_proxy_that_refuses_is_a_failure_of_the_request(
    case: str, sites: Sites, rollout: Attached, site: Origin, plain: Origin, forward: Forward
) -> None:
    answer, detail = ANSWERS[case]

    def refuse(sock: socket.socket, _target: str) -> None:
        with contextlib.suppress(OSError):
            sock.sendall(answer)

    forward.answer = refuse
    connections = (site.connections, plain.connections)
    with rollout.connect() as client:
        reply = client.connect("open.test")
    assert (reply.status, reply.reason) == (502, "upstream_failed")
    assert detail in rollout.last()["detail"]
    with sites.inside(rollout, "read.test") as client:
        assert ask(client, "read.test").reason == "upstream_failed"
    with rollout.connect() as client:
        reply = client.get("http://plain.test/")
    assert (reply.status, reply.reason) == (502, "upstream_failed")
    assert b"authenticate" not in reply.head.lower()
    assert (site.connections, plain.connections) == connections, "there is no other way"
    assert nothing_left(rollout)


def test_bytes_behind_the_answer_are_nobodys_where_the_client_speaks_first(
    rollout: Attached, site: Origin, forward: Forward
) -> None:
    """Else a proxy could answer in the place of a site that was never asked."""

    def inject(sock: socket.socket, _target: str) -> None:
        sock.sendall(b"HTTP/1.1 200 OK\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged")
        sock.recv(1)

    forward.answer = inject
    with rollout.connect() as client:
        reply = client.get("http://plain.test/")
    assert reply.body != b"forged"
    assert (reply.status, reply.reason) == (502, "upstream_failed")


def test_a_lost_proxy_means_no(sites: Sites, site: Origin, plain: Origin) -> None:
    worker = sites.start(settings=chain(port=3999))
    rollout = sites.attach(POLICY, worker=worker)
    connections = (site.connections, plain.connections)
    with rollout.connect() as client:
        reply = client.connect("open.test")
    assert (reply.status, reply.reason) == (502, "upstream_failed")
    assert rollout.last()["detail"] == "the operator's proxy: connection refused"
    with rollout.connect() as client:
        assert client.get("http://plain.test/").reason == "upstream_failed"
    with sites.inside(rollout, "read.test") as inside:
        assert ask(inside, "read.test").reason == "upstream_failed"
    assert (site.connections, plain.connections) == connections


def test_a_proxy_that_is_lost_in_the_middle_ends_the_tunnel(
    sites: Sites, lab: NetLab, site: Origin, tmp_path: Path
) -> None:
    own = Forward(lab)
    origin = lab.origin("11.0.0.251", 3128, own.serve)
    rollout = sites.attach(POLICY, worker=sites.start(settings=chain(host="11.0.0.251")))
    echo = lab.echo(IP, 22)
    with rollout.connect() as client:
        assert client.connect("raw.test", 22).status == 200
        assert client.send(b"x").take(1) == b"x"
        origin.close()
        assert client.rest() == b""
    assert rollout.last()["reason"] == "upstream_closed"
    with rollout.connect() as client:
        assert client.connect("raw.test", 22).reason == "upstream_failed"
    assert echo.connections == 1
    echo.close()


def test_a_silent_proxy_is_given_up_after_ten_seconds(
    sites: Sites, rollout: Attached, site: Origin, forward: Forward
) -> None:
    forward.answer = lambda sock, _target: sock.recv(1) and None
    begin = time.monotonic()
    with rollout.connect() as client:
        reply = client.connect("open.test")
    assert (reply.status, reply.reason) == (502, "upstream_failed")
    assert 9 < time.monotonic() - begin < 14
    assert rollout.last()["detail"] == "the operator's proxy does not answer"


def test_egress_case_087_revocation_ends_what_waits_for_the_proxy(
    sites: Sites, rollout: Attached, site: Origin, forward: Forward
) -> None:
    forward.answer = lambda sock, _target: sock.recv(1) and None
    with rollout.connect() as client:
        client.send(b"CONNECT open.test:443 HTTP/1.1\r\nHost: open.test:443\r\n\r\n")
        eventually(lambda: forward.targets)
        assert sites.worker.ask("revoke", rollout_id=rollout.rollout_id)["closed"] == 1
        assert client.rest() == b""
    assert rollout.last()["reason"] == "revoked"


# ---- a site without DNS


def test_egress_case_095_where_the_proxy_resolves_that_is_on_record(
    sites: Sites, lab: NetLab, site: Origin, plain: Origin, forward: Forward
) -> None:
    forward.names = dict.fromkeys(NAMES, IP)
    rollout = sites.attach(POLICY, worker=sites.start(settings=chain(name_only=True)))
    queries = len(lab.dns.queries)
    assert by_tunnel(sites, rollout) == b"hello"
    with sites.inside(rollout, "read.test") as inside:
        assert ask(inside, "read.test").status == 200
    with rollout.connect() as client:
        assert client.get("http://plain.test/").status == 200
    assert forward.targets == ["open.test:443", "read.test:443", "plain.test:80"]
    assert len(lab.dns.queries) == queries
    decision = rollout.events("net.connect")[0]
    assert decision["detail"].startswith("address unchecked")
    assert "network.peer.address" not in decision
    with rollout.connect() as client:
        assert client.send(b"CONNECT open.test:443 HTTP/1.1\r\nHost: open.test:443\r\n\r\n").reply().status == 200
        assert client.send(hellos.made(b"evil.test")).rest() == b""
    assert rollout.wait("net.end", 5)[-1]["reason"] == "sni_mismatch"


# ---- other ways to reach it


@contextlib.contextmanager
def listening(path: Path, serve: Callable[[Origin, socket.socket], None]) -> Iterator[Origin]:
    """Serve on a UNIX socket."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(64)
    origin = _UnixOrigin(listener, serve)
    try:
        yield origin
    finally:
        origin.close()


class _UnixOrigin(Origin):
    def __init__(self, listener: socket.socket, serve: Callable[[Origin, socket.socket], None]) -> None:
        super().__init__(_Named(listener), serve)  # type: ignore[arg-type]


class _Named:
    """A UNIX listener with a name like that of a TCP one."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener

    def getsockname(self) -> tuple[str, int]:
        return str(self._listener.getsockname()), 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._listener, name)


def test_over_a_unix_socket(sites: Sites, lab: NetLab, site: Origin, plain: Origin, tmp_path: Path) -> None:
    own, path = Forward(lab), tmp_path / "s"
    worker = sites.start(settings=chain("unix", str(path), 0))
    rollout = sites.attach(POLICY, worker=worker)
    with rollout.connect() as client:
        assert client.connect("open.test").reason == "upstream_failed", "nobody is there yet"
    with listening(path, own.serve):
        assert by_tunnel(sites, rollout) == b"hello"
        with rollout.connect() as client:
            assert client.get("http://plain.test/").body == b"in clear"
        assert own.targets == [f"{IP}:443", f"{IP}:80"]
    with rollout.connect() as client:
        assert client.connect("open.test").reason == "upstream_failed"


class Secured:
    """An upstream proxy behind TLS 1.3 that asks for certificates, and the equipment to reach it with."""

    def __init__(self, lab: NetLab) -> None:
        self.forward = Forward(lab)
        self.server_ca, self.client_ca = trustme.CA(), trustme.CA()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.verify_mode = ssl.CERT_REQUIRED
        self.client_ca.configure_trust(self.context)
        self.server_ca.issue_cert(PROXY).configure_cert(self.context)

    def parts(self, ca: trustme.CA | None = None, client: trustme.CA | None = None) -> dict[str, Any]:
        leaf = (client or self.client_ca).issue_cert("node.test")
        return {
            "chain_ca": (ca or self.server_ca).cert_pem.bytes(),
            "chain_cert": b"".join(blob.bytes() for blob in leaf.cert_chain_pems),
            "chain_key": leaf.private_key_pem.bytes(),
        }

    def serve(self, origin: Origin, sock: socket.socket) -> None:
        over_tls(self.context, self.forward.serve)(origin, sock)


def test_over_tls_with_certificates_on_both_sides(lab: NetLab, tmp_path: Path) -> None:
    secured = Secured(lab)
    proxy = lab.origin("11.0.0.252", 3128, secured.serve)
    secured.server_ca.issue_cert("11.0.0.252").configure_cert(secured.context)
    with Sites(lab, tmp_path, settings=chain("https", "11.0.0.252"), **secured.parts()) as sites:
        site = sites.site("open.test", "read.test", ip="11.0.0.93")
        lab.add_host("raw.test", "11.0.0.93")
        rollout = sites.attach(POLICY)
        assert by_tunnel(sites, rollout) == b"hello"
        with sites.inside(rollout, "read.test") as inside:  # TLS within TLS
            body = os.urandom(500_000)
            site.respond = lambda _request: response(body)
            assert ask(inside, "read.test").body == body
        echo = lab.echo("11.0.0.93", 22)
        with rollout.connect() as client:
            assert client.connect("raw.test", 22).status == 200
            assert client.send(b"x" * 300_000).take(300_000) == b"x" * 300_000
        assert secured.forward.targets == ["11.0.0.93:443", "11.0.0.93:443", "11.0.0.93:22"]
        echo.close()
        site.close()
    proxy.close()


@pytest.mark.parametrize("case", ["unknown_server", "other_name", "unknown_client", "no_client", "old_tls"])
def test_over_tls_nothing_less_will_do(case: str, lab: NetLab, tmp_path: Path) -> None:
    secured = Secured(lab)
    proxy = lab.origin("11.0.0.252", 3128, secured.serve)
    secured.server_ca.issue_cert("evil.test" if case == "other_name" else "11.0.0.252").configure_cert(secured.context)
    parts: dict[str, Any] = secured.parts(
        ca=trustme.CA() if case == "unknown_server" else None,
        client=trustme.CA() if case == "unknown_client" else None,
    )
    if case == "no_client":
        parts = {"chain_ca": parts["chain_ca"]}
    if case == "old_tls":
        secured.context.maximum_version = ssl.TLSVersion.TLSv1_2
    with Sites(lab, tmp_path, settings=chain("https", "11.0.0.252"), **parts) as sites:
        site = sites.site("open.test", ip="11.0.0.94")
        rollout = sites.attach(POLICY)
        with rollout.connect() as client:
            reply = client.connect("open.test")
        assert (reply.status, reply.reason) == (502, "upstream_failed")
        assert rollout.last()["detail"].startswith("the operator's proxy")
        assert site.connections == 0
        assert secured.forward.targets == []
        site.close()
    proxy.close()


def gateway(sites: Sites, path: Path, rules: Sequence[str]) -> Attached:
    """Let a worker without a chain serve a UNIX socket, with a policy of its own."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen(64)
        worker = sites.start(settings=Settings())
        return sites.attach(policy(*rules, limits=LIMITS), worker=worker, sockets={listener.fileno(): Role.PROXY})


def test_our_own_worker_as_the_upstream(sites: Sites, lab: NetLab, site: Origin, plain: Origin, tmp_path: Path) -> None:
    """It applies its own policy once more, resolves and checks: both say yes, or nothing is dialled."""
    path = tmp_path / "s"
    upper = gateway(sites, path, ["{host: open.test}", "{host: raw.test, tcp: true, ports: [22]}"])
    worker = sites.start(settings=chain("unix", str(path), 0, name_only=True))
    rollout = sites.attach(POLICY, worker=worker)
    assert by_tunnel(sites, rollout) == b"hello"
    for one, asked in ((rollout, "address unchecked: the operator's proxy resolves"), (upper, None)):
        decision = one.last("net.connect")
        assert (decision["server.address"], decision["verdict"]) == ("open.test", "allowed")
        assert decision.get("detail") == asked
    echo = lab.echo(IP, 22)
    with rollout.connect() as client:
        assert client.connect("raw.test", 22).status == 200
        assert client.send(b"x" * 100).take(100) == b"x" * 100
    echo.close()
    connections = site.connections
    with sites.inside(rollout, "read.test") as inside:  # allowed here, and not there
        reply = ask(inside, "read.test")
    assert (reply.status, reply.reason) == (502, "upstream_failed")
    assert upper.wait("net.connect", 3)[-1]["reason"] == "host_not_allowed"
    lab.add_host("open.test", "10.0.0.1")
    with rollout.connect() as client:
        assert client.connect("open.test").reason == "upstream_failed"
    assert upper.wait("net.connect", 4)[-1]["reason"] == "internal_address"
    assert site.connections == connections


def test_the_workers_have_counted_no_fault(sites: Sites) -> None:
    """Stays last: none of the above went through an exception that nobody expected."""
    assert sites.worker.ask("stats")["faults"] == 0
