"""The stub resolver in the worker, against a resolver that misbehaves."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

import dnslib
import pytest

from tests.egress.netlab import WORKER_OWN, Dns, NetLab, Origin, response
from tests.egress.proxy.harness import Attached, Reply, Worker

URL = "http://plain.example.org/x"
KEPT_POLICY = """
version: 1
egress:
  allow:
    - {host: kept.example.org, methods: [GET], paths: ["/**"], ports: [80]}
"""


@dataclass
class Ttl:
    """For how long an answer of the lab's resolver may be kept."""

    seconds: int = 0


@pytest.fixture(autouse=True)
def ttl(monkeypatch: pytest.MonkeyPatch) -> Ttl:
    """Not at all, unless a test says otherwise: most change what a name means between two look-ups."""
    made, answer = Ttl(), Dns.answer

    def timed(self: Dns, wire: bytes, *, tcp: bool) -> list[bytes]:
        return [aged(packet) for packet in answer(self, wire, tcp=tcp)]

    def aged(packet: bytes) -> bytes:
        if packet.endswith(b"garbage"):
            return packet
        message = dnslib.DNSRecord.parse(packet)
        for record in message.rr:
            record.ttl = made.seconds
        return bytes(message.pack())

    monkeypatch.setattr(Dns, "answer", timed)
    return made


@pytest.fixture(scope="module")
def origin(lab: NetLab) -> Origin:
    return lab.http("11.0.0.5", 80)


@pytest.fixture
def rollout(worker: Worker, lab: NetLab) -> Iterator[Attached]:
    yield worker.attach()
    lab.add_host("plain.example.org", "11.0.0.5")


def ask(rollout: Attached, url: str = URL) -> Reply:
    with rollout.connect() as client:
        return client.get(url)


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("10.0.0.5", "internal_address"),
        ("127.0.0.1", "internal_address"),
        ("169.254.169.254", "metadata_address"),
        ("192.168.7.7", "internal_address"),
        ("100.64.0.9", "internal_address"),
        ("0.0.0.0", "internal_address"),
        ("fd00::5", "internal_address"),
        ("::1", "internal_address"),
        ("::ffff:10.0.0.5", "internal_address"),
        ("64:ff9b::a00:5", "internal_address"),
    ],
)
def test_egress_case_025_internal_answer(
    address: str, reason: str, rollout: Attached, origin: Origin, lab: NetLab
) -> None:
    lab.add_host("plain.example.org", address)
    reply = ask(rollout)
    assert (reply.status, reply.reason) == (403, reason)
    event = rollout.last("net.request")
    assert (event["verdict"], event["reason"]) == ("denied", reason)
    assert rollout.events("net.end") == []


@pytest.mark.parametrize("address", ["10.0.0.5", "169.254.169.254", "100.64.0.9"])
def test_egress_case_025_internal_addresses_can_be_reached_without_the_gate(address: str, lab: NetLab) -> None:
    inner = lab.http(address, 80, lambda _request: response(b"internal"))
    with lab.connect(address, 80) as direct:
        direct.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert direct.recv(100).endswith(b"internal")
    assert inner.connections == 1


@pytest.mark.promise("S3.3")
def test_egress_case_026_the_checked_address_is_the_dialled_one(rollout: Attached, origin: Origin, lab: NetLab) -> None:
    inner = lab.http("10.0.0.26", 80)
    lab.add_host("plain.example.org", "11.0.0.5", then=[("10.0.0.26",)])
    queries = len(lab.dns.queries)
    assert ask(rollout).status == 200
    assert len(lab.dns.queries) == queries + 2, "one A and one AAAA"
    assert ask(rollout).reason == "internal_address"
    assert inner.connections == 0


def test_egress_case_026_a_kept_answer_is_one_resolution_and_is_judged_anew(
    worker: Worker, lab: NetLab, ttl: Ttl
) -> None:
    ttl.seconds = 60
    lab.http("11.0.0.27", 80)
    lab.add_host("kept.example.org", "11.0.0.27", then=[("10.0.0.26",)])
    rollout = worker.attach(KEPT_POLICY)
    queries = len(lab.dns.queries)
    for _ in range(3):
        assert ask(rollout, "http://kept.example.org/x").status == 200
    assert len(lab.dns.queries) == queries + 2, "one A and one AAAA, once"
    # The same kept answer, and the host has got that very address in the meantime.
    other = worker.attach(KEPT_POLICY, own_addresses=[WORKER_OWN, "11.0.0.27"])
    for one in (rollout, other):
        assert ask(one, "http://kept.example.org/x").reason == "own_address"
    worker.attach(own_addresses=[WORKER_OWN])
    assert ask(rollout, "http://kept.example.org/x").status == 200
    assert len(lab.dns.queries) == queries + 2


def test_egress_case_027_mixed_answers_are_refused_as_a_whole(rollout: Attached, origin: Origin, lab: NetLab) -> None:
    connections = origin.connections
    lab.add_host("plain.example.org", "11.0.0.5", "10.0.0.1")
    assert ask(rollout).reason == "mixed_answer"
    lab.add_host("plain.example.org", "11.0.0.5", "fd00::5")
    assert ask(rollout).reason == "mixed_answer"
    assert origin.connections == connections


def test_egress_case_028_fallback_stays_among_the_checked(rollout: Attached, origin: Origin, lab: NetLab) -> None:
    # Nobody listens on the first; the second answers.
    lab.add_host("plain.example.org", "11.0.0.28", "11.0.0.5")
    assert ask(rollout).status == 200
    assert rollout.last()["network.peer.address"] == "11.0.0.5"
    # The public address is dead and the other family is internal: nothing is left to fall back to.
    inner = lab.http("fd00::5", 80)
    lab.add_host("plain.example.org", "11.0.0.28", "fd00::5")
    assert ask(rollout).reason == "mixed_answer"
    assert inner.connections == 0


def test_an_ipv6_origin(rollout: Attached, lab: NetLab) -> None:
    lab.http("2600:5::5", 80, lambda _request: response(b"six"))
    lab.add_host("plain.example.org", "2600:5::5")
    assert ask(rollout).body == b"six"
    assert rollout.last()["network.peer.address"] == "2600:5::5"


def test_egress_case_029_a_cname_is_judged_by_where_it_ends(rollout: Attached, origin: Origin, lab: NetLab) -> None:
    lab.add_host("db.corp.internal", "10.0.0.5")
    lab.dns.zone["plain.example.org"] = "cname db.corp.internal"
    assert ask(rollout).reason == "internal_address"
    lab.add_host("cdn.example.net", "11.0.0.5")
    lab.dns.zone["plain.example.org"] = "cname cdn.example.net"
    assert ask(rollout).status == 200


def test_egress_case_040_names_are_absolute(rollout: Attached, lab: NetLab) -> None:
    del lab.dns.zone["plain.example.org"]
    for suffix in ("cluster.local", "example.org", "localdomain"):
        lab.add_host(f"plain.example.org.{suffix}", "11.0.0.5")
    queries = len(lab.dns.queries)
    reply = ask(rollout)
    assert (reply.status, reply.reason) == (502, "resolve_failed")
    assert set(lab.dns.queries[queries:]) == {("plain.example.org", "A"), ("plain.example.org", "AAAA")}


@pytest.mark.parametrize("word", ["servfail", "refused"])
def test_egress_case_041_a_failed_look_up_is_a_no(word: str, rollout: Attached, lab: NetLab) -> None:
    lab.dns.zone["plain.example.org"] = word
    reply = ask(rollout)
    assert (reply.status, reply.reason) == (502, "resolve_failed")
    event = rollout.last("net.request")
    assert (event["verdict"], event["detail"]) == ("denied", "server_failed")


def test_egress_case_041_a_silent_server_is_a_no_after_five_seconds(rollout: Attached, lab: NetLab) -> None:
    lab.dns.zone["plain.example.org"] = "silence"
    begin = time.monotonic()
    reply = ask(rollout)
    assert (reply.status, reply.reason) == (504, "resolve_failed")
    assert 4.5 < time.monotonic() - begin < 8


@pytest.mark.promise("S3.3")
def test_egress_case_042_nothing_is_asked_about_a_denied_name(rollout: Attached, lab: NetLab) -> None:
    queries = len(lab.dns.queries)
    secret = "mfrggzdfmztwq2lk.evil.example"
    with rollout.connect() as client:
        assert client.connect(secret).reason == "host_not_allowed"
    assert ask(rollout, f"http://{secret}/").reason == "host_not_allowed"
    with rollout.connect() as client:
        assert client.connect("tunnel.example.org", 22).reason == "port_not_allowed"
    assert lab.dns.queries[queries:] == []
    # Without the gate the name would have left with the query.
    lab.dns.answer(
        bytes.fromhex("000101000001000000000000") + b"\x06secret\x04evil\x07example\x00\x00\x01\x00\x01", tcp=False
    )
    assert lab.dns.queries[-1] == ("secret.evil.example", "A")


def test_truncated_answers_are_asked_again_over_tcp(rollout: Attached, origin: Origin, lab: NetLab) -> None:
    lab.dns.zone["plain.example.org"] = "truncated"
    assert ask(rollout).status == 200


def test_forged_answers_are_passed_over(rollout: Attached, origin: Origin, lab: NetLab) -> None:
    evil = lab.http("11.6.6.6", 80)
    lab.dns.zone["plain.example.org"] = "forged"
    assert ask(rollout).status == 200
    assert evil.connections == 0


def test_a_server_that_does_not_keep_the_case_of_a_question(rollout: Attached, origin: Origin, lab: NetLab) -> None:
    answer = lab.dns.answer

    def folding(wire: bytes, *, tcp: bool) -> list[bytes]:
        return answer(wire[:12] + wire[12:-15].lower() + wire[-15:], tcp=tcp)

    lab.dns.answer = folding  # type: ignore[method-assign]
    try:
        assert ask(rollout).status == 200
        lab.dns.zone["plain.example.org"] = "truncated"
        assert ask(rollout).status == 200
    finally:
        del lab.dns.answer


def test_queries_come_from_many_ports_with_many_ids(worker: Worker, rollout: Attached, lab: NetLab) -> None:
    seen: set[tuple[int, bytes]] = set()
    answer, serve = lab.dns.answer, rollout

    def spy(wire: bytes, *, tcp: bool) -> list[bytes]:
        seen.add((len(seen), wire[:2]))
        return answer(wire, tcp=tcp)

    lab.dns.answer = spy  # type: ignore[method-assign]
    try:
        for _ in range(8):
            ask(serve)
    finally:
        del lab.dns.answer
    ids = [packed for _, packed in sorted(seen)]
    assert len(ids) == 16
    assert len(set(ids)) > 12
    steps = {int.from_bytes(b, "big") - int.from_bytes(a, "big") for a, b in itertools.pairwise(ids)}
    assert len(steps) > 8, "ids follow a pattern"


def test_egress_case_096_the_workers_own_address(rollout: Attached, lab: NetLab) -> None:
    lab.http(WORKER_OWN, 80)
    lab.add_host("plain.example.org", WORKER_OWN)
    assert ask(rollout).reason == "own_address"
    with lab.connect(WORKER_OWN, 80) as direct:
        assert direct.getpeername()[0] == WORKER_OWN
