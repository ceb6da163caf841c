"""From a node's worker through a gateway's to an origin: two policies, one way, and addresses checked at the last hop."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from pathlib import Path
from typing import Any

import pytest
import trustme

from stockade.egress import ChainSettings, Equipment, Role, Settings
from stockade.ids import new_rollout_id
from tests.egress.gateway.conftest import (
    CHAIN,
    GATEWAY,
    GATEWAY_POLICY,
    IP,
    NODE_POLICY,
    PORT,
    Chained,
    chain_parts,
    client_context,
    dialled,
)
from tests.egress.netlab import NetLab, response
from tests.egress.proxy.harness import Client, Worker, post, rules
from tests.egress.proxy.sites import Sites, ask, policy


def said(decisions: list[dict], *names: str) -> list[tuple]:
    return [tuple(event.get(name) for name in names) for event in decisions]


def test_a_request_in_clear_is_judged_twice_and_looked_up_once(pair: Chained) -> None:
    rollout = pair.rollout()
    with rollout.connect() as client:
        for path in ("/data", "/x/1"):
            assert client.get(f"http://both.test{path}", "X-Rollout-Id: somebody-else").body == b"hello"
        refused = client.get("http://both.test/other")
    assert (refused.status, refused.reason) == (502, "upstream_failed")
    assert b"the gateway said path_not_allowed" in refused.body
    assert [request.line for request in pair.plain.received] == [b"GET /data HTTP/1.1", b"GET /x/1 HTTP/1.1"]
    assert all(not request.header("x-rollout-id") for request in pair.plain.received)
    assert [name for name, _ in pair.lab.dns.queries if name != "both.test"] == []
    assert len(pair.lab.dns.queries) <= 4, "by the gateway alone: two types, and its answers hold for no time"
    at_node = rollout.wait("net.request", 3)
    assert said(at_node, "verdict", "url.path") == [("allowed", "/data"), ("allowed", "/x/1"), ("allowed", "/other")]
    assert all("address checked at the gateway" in event["detail"] for event in at_node)
    assert all("network.peer.address" not in event for event in at_node)
    at_gateway = pair.events("net.request", 3)
    assert said(at_gateway, "verdict", "url.path", "reason") == [
        ("allowed", "/data", "allowed"),
        ("allowed", "/x/1", "allowed"),
        ("denied", "/other", "path_not_allowed"),
    ]
    # Who asks is a claim; which node it is, its certificate says.
    for event in at_gateway:
        assert f"claims x-rollout-id: {rollout.rollout_id}" in event["detail"]
        assert "certificate node7.test" in event["detail"]
        assert "somebody-else" not in event["detail"]
    assert at_gateway[0]["network.peer.address"] == IP
    end = rollout.wait("net.end", 3)[-1]
    assert (end["reason"], end["http.response.status_code"]) == ("upstream_failed", 502)
    assert end["detail"] == "the gateway said path_not_allowed"


def test_bodies_pass_both_ways_and_are_counted_by_both(pair: Chained) -> None:
    rollout, body = pair.rollout(), b"x" * 300_000
    pair.plain.respond = lambda request: response(request.body)
    try:
        with rollout.connect() as client:
            assert client.send(post("http://both.test/data", body)).reply().status == 502  # POST: the gateway says no
            assert not pair.plain.received
        with pair.node.inside(rollout, "both.test") as client:
            pair.secret.respond = lambda request: response(request.body)
            assert ask(client, "both.test", "/up", method="POST", body=body).body == body
    finally:
        pair.plain.respond = pair.secret.respond = lambda _request: response(b"hello")
    end = rollout.wait("net.end", 3)[-1]
    assert min(end["bytes_out"], end["bytes_in"]) > len(body)
    tunnel = next(event for event in pair.events("net.end", 1) if event["server.port"] == 443)
    assert tunnel["bytes_out"] > end["bytes_out"], "TLS has its price"


def test_tls_is_looked_into_on_the_node_and_verified_at_the_gateway(pair: Chained) -> None:
    rollout = pair.rollout()
    with pair.node.inside(rollout, "both.test") as client:
        for path in ("/anything", "/more"):
            assert ask(client, "both.test", path).body == b"hello"
        assert ask(client, "both.test", "/x", method="DELETE").status == 403
    assert [request.line for request in pair.secret.received] == [b"GET /anything HTTP/1.1", b"GET /more HTTP/1.1"]
    [tunnel] = pair.events("net.connect")
    assert (tunnel["verdict"], tunnel["server.address"], tunnel["server.port"]) == ("allowed", "both.test", 443)
    assert f"claims x-rollout-id: {rollout.rollout_id}" in tunnel["detail"]
    [end] = pair.events("net.end")
    assert (end["tls.client.server_name"], end["network.peer.address"]) == ("both.test", IP)


def test_an_opaque_tunnel_reaches_through_both(pair: Chained) -> None:
    rollout = pair.rollout()
    trust = ssl.create_default_context(cadata=pair.node.roots.cert_pem.bytes().decode())
    with pair.node.inside(rollout, "opaque.test", context=trust) as client:
        assert ask(client, "opaque.test", "/x").body == b"hello"
    [tunnel] = pair.events("net.connect")
    assert (tunnel["verdict"], tunnel.get("handling")) == ("allowed", None)


def test_both_look_into_tls_where_the_node_trusts_the_gateways_authority(pair: Chained) -> None:
    rollout = pair.rollout()
    with pair.node.inside(rollout, "looked.test") as client:
        assert ask(client, "looked.test", "/public/a").body == b"hello"
        refused = ask(client, "looked.test", "/private/a")
    assert refused.status == 403, "inside the inner TLS the gateway is a server like any other"
    assert [request.line for request in pair.secret.received] == [b"GET /public/a HTTP/1.1"]
    assert said(pair.events("net.request", 2), "verdict", "url.path", "way") == [
        ("allowed", "/public/a", "tls"),
        ("denied", "/private/a", "tls"),
    ]


def test_egress_case_095_wildcards_hold_because_the_gateway_checks(pair: Chained) -> None:
    rollout = pair.rollout()
    with rollout.connect() as client:
        assert client.get("http://a.wild.test/x").body == b"hello"
    with pair.node.inside(rollout, "a.wild.test") as client:
        assert ask(client, "a.wild.test").body == b"hello"
    assert {event["server.address"] for event in pair.all_events() if "server.address" in event} == {"a.wild.test"}


def test_what_the_node_denies_the_gateway_never_hears_of(pair: Chained) -> None:
    rollout = pair.rollout()
    with rollout.connect() as client, rollout.connect() as other:
        assert (client.get("http://gate.test/x").status, other.connect("gate.test").status) == (403, 403)
    assert said(rollout.wait("net.request"), "verdict", "reason") == [("denied", "host_not_allowed")]
    assert pair.all_events() == []
    assert (pair.reached(), pair.lab.dns.queries) == (0, [])


def test_what_the_gateway_denies_is_a_failure_on_the_node(pair: Chained) -> None:
    rollout = pair.rollout()
    with rollout.connect() as client:
        plain = client.get("http://node.test/x")
    with pair.node.inside(rollout, "node.test") as client:
        inside = ask(client, "node.test")
    for reply in (plain, inside):
        assert (reply.status, reply.reason) == (502, "upstream_failed")
        assert b"said host_not_allowed" in reply.body
    assert [event["reason"] for event in pair.all_events()] == ["host_not_allowed"] * 2
    assert (pair.reached(), pair.lab.dns.queries) == (0, [])


@pytest.mark.parametrize("tls", [False, True])
def test_egress_case_095_an_internal_address_is_refused_at_the_last_hop(pair: Chained, tls: bool) -> None:
    rollout = pair.rollout()
    if tls:
        with pair.node.inside(rollout, "inside.test") as client:
            reply = ask(client, "inside.test")
    else:
        with rollout.connect() as client:
            reply = client.get("http://inside.test/x")
    assert (reply.status, reply.reason) == (502, "upstream_failed")
    assert b"said internal_address" in reply.body
    assert said(pair.all_events(), "verdict", "reason") == [("denied", "internal_address")]
    assert {name for name, _ in pair.lab.dns.queries} == {"inside.test"}
    assert pair.reached() == 0


def test_an_address_that_is_written_as_one_is_judged_by_both(pair: Chained) -> None:
    origin = pair.lab.http("11.0.0.99")
    rollout = pair.rollout()
    with rollout.connect() as client:
        assert client.get("http://11.0.0.99/x").body == b"hello"
    assert origin.connections == 1
    [event] = pair.events("net.request")
    assert event["network.peer.address"] == "11.0.0.99"


# ---- getting there


@contextlib.contextmanager
def node(pair: Chained, folder: Path, settings: Settings = CHAIN, **parts: Any):
    """A node of one's own that would go through the gateway."""
    with Sites(pair.lab, folder, settings=settings, **parts) as made:
        made.roots = pair.node.roots
        yield made


def test_a_gateway_that_is_gone_means_no(pair: Chained, tmp_path: Path, gatekeepers: trustme.CA) -> None:
    gone = Settings(chain=ChainSettings("https", GATEWAY, PORT + 1, name_only=True, gateway=True))
    with node(pair, tmp_path, gone, **chain_parts(gatekeepers)) as alone:
        rollout = alone.attach(NODE_POLICY)
        with rollout.connect() as client:
            plain = client.get("http://both.test/data")
        with rollout.connect() as client:
            tunnel = client.connect("opaque.test")
        with alone.inside(rollout, "both.test") as client:
            inside = ask(client, "both.test")
        for reply in (plain, tunnel, inside):
            assert (reply.status, reply.reason) == (502, "upstream_failed")
        assert [end["reason"] for end in rollout.wait("net.end", 4)].count("upstream_failed") == 3
    assert (pair.reached(), pair.lab.dns.queries, pair.all_events()) == (0, [], [])


@pytest.mark.parametrize("wrong", ["none", "stranger", "trusts another"])
def test_a_node_without_the_right_certificate_gets_nowhere(
    pair: Chained, tmp_path: Path, gatekeepers: trustme.CA, wrong: str
) -> None:
    stranger = trustme.CA()
    parts: dict[str, Any] = {
        "none": {"chain_ca": gatekeepers.cert_pem.bytes()},
        "stranger": chain_parts(stranger, trust=gatekeepers),
        "trusts another": chain_parts(gatekeepers, trust=stranger),
    }[wrong]
    with node(pair, tmp_path, **parts) as outsider:
        rollout = outsider.attach(NODE_POLICY)
        with rollout.connect() as client:
            reply = client.get("http://both.test/data")
        assert (reply.status, reply.reason) == (502, "upstream_failed")
    [event] = pair.events("net.request")
    assert (event["verdict"], event["reason"], event["server.address"]) == ("denied", "client_tls", None)
    assert (pair.reached(), pair.lab.dns.queries) == (0, [])


def refused(pair: Chained, context: ssl.SSLContext) -> str:
    """Try to speak to the gateway; return how it fails."""
    with dialled(pair) as sock:
        try:
            with context.wrap_socket(sock, server_hostname="gateway.test") as tls:
                tls.sendall(b"GET http://both.test/data HTTP/1.1\r\nHost: both.test\r\n\r\n")
                return f"it answered: {tls.recv(100)!r}"
        except OSError as error:  # ssl.SSLError is one
            return str(error).lower()


def test_the_listener_speaks_tls_1_3_to_known_certificates_alone(pair: Chained, gatekeepers: trustme.CA) -> None:
    old = client_context(gatekeepers, known_by=gatekeepers, maximum_version=ssl.TLSVersion.TLSv1_2)
    assert "protocol version" in refused(pair, old)
    assert "certificate required" in refused(pair, client_context(gatekeepers))
    assert "unknown ca" in refused(pair, client_context(gatekeepers, known_by=trustme.CA()))
    events = pair.events("net.request", 3)
    assert [event["reason"] for event in events] == ["client_tls"] * 3
    # A client that resets the connection at once leaves nothing to tell.
    assert any(event.get("detail") for event in events)
    good = client_context(gatekeepers, known_by=gatekeepers)
    with dialled(pair) as sock, good.wrap_socket(sock, server_hostname="gateway.test") as tls:
        assert Client(tls).get("http://both.test/data").body == b"hello"
        assert tls.version() == "TLSv1.3"
    assert pair.gateway.ask("stats")["tls gateway done"] >= 1


def test_nothing_is_said_to_a_client_in_clear(pair: Chained) -> None:
    for words in (b"GET http://both.test/data HTTP/1.1\r\nHost: both.test\r\n\r\n", b"\x05\x01\x00", b"\0" * 20):
        with dialled(pair) as sock:
            sock.sendall(words)
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while piece := sock.recv(100):
                    answer += piece
        assert answer == b"\x15\x03\x03\x00\x02\x02\x31"
    assert [event["reason"] for event in pair.events("net.request", 3)] == ["not_tls"] * 3
    assert pair.reached() == 0


def test_a_handshake_that_does_not_go_on_is_ended_and_recorded(pair: Chained) -> None:
    with dialled(pair) as sock:
        sock.sendall(b"\x16\x03\x01\x02\x00\x01")
        sock.settimeout(30)
        with contextlib.suppress(ConnectionResetError):
            assert not sock.recv(100)
    [event] = pair.events("net.request")
    assert (event["verdict"], event["reason"]) == ("denied", "header_timeout")
    assert pair.gateway.ask("stats")["connections"] == 0


def test_inside_its_tls_a_gateway_speaks_socks_too(pair: Chained, gatekeepers: trustme.CA) -> None:
    context = client_context(gatekeepers, known_by=gatekeepers)
    with dialled(pair) as sock, context.wrap_socket(sock, server_hostname="gateway.test") as tls:
        client = Client(tls)
        client.send(b"\x05\x01\x00\x05\x01\x00\x03\x09gate.test\x01\xbb")
        assert client.take(2) == b"\x05\x00"
        assert client.take(10)[:2] == b"\x05\x00"
    [event] = pair.events("net.connect")
    assert (event["way"], event["server.address"], event["detail"]) == ("socks5", "gate.test", "certificate node7.test")


def test_a_worker_without_keys_takes_no_gateways_socket(lab: NetLab, tmp_path: Path) -> None:
    with Worker(lab, tmp_path) as bare, socket.create_server(("127.0.0.1", 0)) as listener:
        attached = bare.attach(GATEWAY_POLICY)
        attached.rollout_id = new_rollout_id()
        answer = bare.ask_attach(attached, rules(GATEWAY_POLICY), {listener.fileno(): Role.GATEWAY})
        assert "without its certificate" in answer["error"]


# ---- other ways to it


class Relay:
    """What ``ssh -L /path:/path`` does: bytes from one UNIX socket to another, and no look at them."""

    def __init__(self, here: Path, there: Path) -> None:
        self._there = str(there)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(here))
        self._listener.listen(16)
        self._open: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.socket(socket.AF_UNIX)
                far.connect(self._there)
                self._open += [near, far]
                for source, target in ((near, far), (far, near)):
                    thread = threading.Thread(target=self._copy, args=(source, target), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(65536):
                target.sendall(piece)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for sock in self._open:
            sock.close()


def test_a_unix_socket_forwarded_by_ssh_leads_there_too(pair: Chained, tmp_path: Path) -> None:
    here, there = tmp_path / "node.sock", tmp_path / "login.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(there))
    listener.listen(16)
    at = pair.gateway.attach(rules(GATEWAY_POLICY, inspection=True), sockets={listener.fileno(): Role.PROXY})
    listener.close()
    settings = Settings(chain=ChainSettings("unix", str(here), 0, name_only=True, gateway=True))
    with contextlib.closing(Relay(here, there)), node(pair, tmp_path, settings, roots=pair.node.equipment.roots) as far:
        rollout = far.attach(NODE_POLICY)
        with rollout.connect() as client:
            assert client.get("http://both.test/data").body == b"hello"
            assert client.get("http://both.test/other").status == 502
        with far.inside(rollout, "both.test") as client:
            assert ask(client, "both.test").body == b"hello"
        trust = ssl.create_default_context(cadata=pair.node.roots.cert_pem.bytes().decode())
        with far.inside(rollout, "opaque.test", context=trust) as client:
            assert ask(client, "opaque.test").body == b"hello"
    claims = [event["detail"] for event in at.events() if "detail" in event]
    assert claims == [f"claims x-rollout-id: {rollout.rollout_id}"] * 4


def test_egress_case_095_another_proxy_is_asked_for_checked_addresses_and_told_nothing(
    pair: Chained, tmp_path: Path
) -> None:
    heads: list[bytes] = []

    def proxy(_origin: object, sock: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            head += sock.recv(4096)
        heads.append(head)
        sock.sendall(b"HTTP/1.1 503 Not today\r\nX-Stockade-Reason: denied_by_rule\r\nContent-Length: 0\r\n\r\n")

    origin = pair.lab.origin("11.0.0.71", 3128, proxy)
    settings = Settings(chain=ChainSettings("http", "11.0.0.71", 3128))
    with node(pair, tmp_path, settings) as other:
        rollout = other.attach(NODE_POLICY)
        with rollout.connect() as client:
            assert client.get("http://both.test/data").status == 502
        with rollout.connect() as client:
            assert client.get("http://inside.test/data").reason == "internal_address"
    assert heads == [f"CONNECT {IP}:80 HTTP/1.1\r\nHost: {IP}:80\r\n\r\n".encode()]
    assert origin.connections == 1
    assert pair.reached() == 0


def test_a_service_of_the_run_is_reached_without_the_gateway(pair: Chained, tmp_path: Path) -> None:
    pair.lab.origin("11.0.0.72", 8000, lambda _origin, sock: sock.sendall(response(b"model")))
    text = policy("{host: both.test, methods: [GET]}") + (
        "services:\n  - {name: model, address: 11.0.0.72, port: 8000, methods: [GET], paths: [/v1]}\n"
    )
    rollout = pair.node.attach(text)
    with rollout.connect() as client:
        assert client.get("http://model.stockade.internal:8000/v1").body == b"model"
    assert pair.all_events() == []


def test_an_equipment_that_is_half_a_gateway_is_refused(lab: NetLab, tmp_path: Path, gatekeepers: trustme.CA) -> None:
    worker = Worker(lab, tmp_path, equipment=Equipment(gateway_ca=gatekeepers.cert_pem.bytes()))
    try:
        assert "a gateway without certificate" in worker.ready["error"]
    finally:
        worker.close()
