"""A node's worker and a gateway's worker in one lab: between them nothing but the gateway's listener."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import trustme

from stockade.egress import ChainSettings, Equipment, Role, Settings, make_authority
from tests.egress.netlab import NetLab, Origin
from tests.egress.proxy.harness import Attached, Worker, rules
from tests.egress.proxy.sites import PERMITTED, Sites, eventually, policy
from tests.support import requires

IP, GATEWAY, INTERNAL = "11.0.0.80", "11.0.0.70", "10.0.0.80"
PORT = 3129
NAMES = ("both.test", "node.test", "gate.test", "inside.test", "clear.test", "a.wild.test", "looked.test")

NODE_POLICY = policy(
    "{host: both.test, methods: [GET, POST], ports: [80, 443]}",
    "{host: node.test, methods: [GET], ports: [80, 443]}",
    "{host: inside.test, methods: [GET], ports: [80, 443]}",
    "{host: opaque.test, ports: [443]}",
    '{host: "*.wild.test", methods: [GET], ports: [80, 443]}',
    "{host: looked.test, methods: [GET]}",
    "{host: 11.0.0.99, methods: [GET], ports: [80]}",
)
GATEWAY_POLICY = policy(
    "{host: both.test, ports: [443]}",
    '{host: both.test, ports: [80], methods: [GET], paths: ["/data", "/x/**"]}',
    "{host: gate.test, ports: [80, 443]}",
    "{host: inside.test, ports: [80, 443]}",
    "{host: opaque.test, ports: [443]}",
    '{host: "*.wild.test", ports: [80, 443]}',
    '{host: looked.test, methods: [GET], paths: ["/public/**"]}',
    "{host: 11.0.0.99, methods: [GET], ports: [80]}",
)


@dataclass
class Chained:
    """Both workers; ``ca`` signs the gateway's certificate and those of its clients."""

    lab: NetLab
    node: Sites
    gateway: Worker
    ca: trustme.CA
    listener: socket.socket
    plain: Origin
    secret: Origin
    inner: Origin
    at: Attached
    """The gateway's one rollout."""
    seen: int = 0
    queries: list[Any] = field(default_factory=list)

    def rollout(self) -> Attached:
        """Attach a rollout on the node."""
        return self.node.attach(NODE_POLICY)

    def begin(self) -> None:
        """Forget what was before this test."""
        eventually(lambda: self.gateway.ask("stats")["connections"] == 0)
        self.seen = len(self.at.events())
        self.lab.dns.queries.clear()
        for origin in (self.plain, self.secret, self.inner):
            origin.received.clear()
            origin.connections = 0

    def events(self, kind: str, count: int = 1) -> list[dict[str, Any]]:
        """Wait for events of the gateway in this test."""
        before = sum(event["kind"] == kind for event in self.at.events()[: self.seen])
        return self.at.wait(kind, before + count)[before:]

    def all_events(self) -> list[dict[str, Any]]:
        """Return what the gateway has recorded in this test."""
        return self.at.events()[self.seen :]

    def reached(self) -> int:
        """Return how many connections the origins saw."""
        return sum(origin.connections for origin in (self.plain, self.secret, self.inner))


def pem(ca: trustme.CA, *names: str) -> tuple[bytes, bytes]:
    """Return a certificate of ``ca`` for ``names``, with its chain, and the key."""
    leaf = ca.issue_cert(*names)
    return b"".join(blob.bytes() for blob in leaf.cert_chain_pems), leaf.private_key_pem.bytes()


def gateway_parts(ca: trustme.CA, clients: trustme.CA | None = None) -> dict[str, Any]:
    """Return the parts of a gateway's listener."""
    cert, key = pem(ca, "gateway.test", GATEWAY)
    return {"gateway_cert": cert, "gateway_key": key, "gateway_ca": (clients or ca).cert_pem.bytes()}


def chain_parts(ca: trustme.CA, name: str = "node7.test", trust: trustme.CA | None = None) -> dict[str, Any]:
    """Return the parts of a node that goes through a gateway."""
    cert, key = pem(ca, name)
    return {"chain_cert": cert, "chain_key": key, "chain_ca": (trust or ca).cert_pem.bytes()}


CHAIN = Settings(chain=ChainSettings("https", GATEWAY, PORT, name_only=True, gateway=True))


@pytest.fixture(scope="module")
def lab() -> Iterator[NetLab]:
    requires(NetLab.possible(), "no network namespace can be made here")
    with NetLab() as lab:
        for name in NAMES:
            lab.add_host(name, IP)
        lab.add_host("opaque.test", IP)
        lab.add_host("inside.test", INTERNAL)
        yield lab


@pytest.fixture(scope="module")
def gatekeepers() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def chained(lab: NetLab, gatekeepers: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chained]:
    authority = make_authority(PERMITTED, run_id="run-gateway")
    with contextlib.ExitStack() as stack:
        node = Sites(lab, tmp_path_factory.mktemp("node"), settings=CHAIN, worker=False, **chain_parts(gatekeepers))
        stack.callback(node.close)
        own: dict[str, Any] = {
            "roots": node.roots.cert_pem.bytes(),
            "authority_cert": authority.cert_pem,
            "authority_key": authority.key_pem,
        }
        # The node trusts what the gateway looks into, as its operators would say under extra_roots.
        node.equipment = dataclasses.replace(node.equipment, roots=own["roots"] + authority.cert_pem)
        node.start()
        gateway = stack.enter_context(
            Worker(
                lab,
                tmp_path_factory.mktemp("gateway"),
                equipment=Equipment(**own, **gateway_parts(gatekeepers)),
            )
        )
        listener = stack.enter_context(lab._socket("listen", GATEWAY, PORT))
        at = gateway.attach(rules(GATEWAY_POLICY, inspection=True), sockets={listener.fileno(): Role.GATEWAY})
        context = node.context(*NAMES, "opaque.test")
        yield Chained(
            lab,
            node,
            gateway,
            gatekeepers,
            listener,
            lab.http(IP),
            lab.tls(IP, context),
            lab.http(INTERNAL),
            at,
        )


@pytest.fixture
def pair(chained: Chained) -> Chained:
    chained.begin()
    return chained


def client_context(ca: trustme.CA, *, known_by: trustme.CA | None = None, **versions: Any) -> ssl.SSLContext:
    """Return the context of a client of the gateway, with a certificate of ``known_by``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    ca.configure_trust(context)
    for name, value in versions.items():
        setattr(context, name, value)
    if known_by is not None:
        known_by.issue_cert("node7.test").configure_cert(context)
    return context


def dialled(pair: Chained) -> socket.socket:
    """Connect to the gateway from inside the lab."""
    sock = pair.lab.connect(GATEWAY, PORT)
    sock.settimeout(15)
    return sock
