"""The name server of a sandbox: it knows what the rules allow, asks nobody, and cannot be made to."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import dnslib
import pytest

from stockade.egress._names import FAKE_COUNT, FAKE_FIRST, Names
from stockade.egress.gate import Address, Host
from tests.egress.netlab import NetLab, response
from tests.egress.proxy.guestnet import GuestNet
from tests.egress.proxy.harness import Attached, Client, Worker
from tests.egress.proxy.sites import eventually, policy

ALLOWED = policy(
    "{host: plain.test, ports: [80], methods: [GET]}",
    "{host: tunnel.test}",
    '{host: "*.wild.test"}',
    deny=("{host: bad.wild.test}",),
    limits="{requests_per_minute: 6000, names: 6}",
)
FIRST = str(Address(4, FAKE_FIRST))


@pytest.fixture
def guest(lab: NetLab) -> Iterator[GuestNet]:
    with GuestNet() as made:
        yield made


@pytest.fixture
def rollout(worker: Worker, guest: GuestNet) -> Attached:
    return worker.attach(ALLOWED, sockets=guest.sockets)


def question(name: str, kind: str = "A", **header: int) -> bytes:
    made = dnslib.DNSRecord.question(name, kind)
    for key, value in header.items():
        setattr(made.header, key, value)
    return bytes(made.pack())


def ask(guest: GuestNet, packet: bytes, *, tcp: bool = False, ip: str = "127.0.0.1") -> dnslib.DNSRecord:
    """Ask inside, and return the answer."""
    if tcp:
        with guest.connect(ip, 53) as sock:
            sock.sendall(len(packet).to_bytes(2, "big") + packet)
            client = Client(sock)
            answer = client.take(int.from_bytes(client.take(2), "big"))
    else:
        with guest.datagrams(ip) as sock:
            sock.send(packet)
            answer = sock.recv(4096)
    return dnslib.DNSRecord.parse(answer)


def addresses(answer: dnslib.DNSRecord) -> list[str]:
    return [str(record.rdata) for record in answer.rr]


@pytest.mark.parametrize("tcp", [False, True])
@pytest.mark.parametrize("ip", ["127.0.0.1", "9.9.9.9", "::1", "2620:fe::fe"])
def test_an_allowed_name_has_a_fake_address_whoever_is_asked(
    tcp: bool, ip: str, lab: NetLab, guest: GuestNet, rollout: Attached
) -> None:
    queries = len(lab.dns.queries)
    answer = ask(guest, question("Plain.TEST"), tcp=tcp, ip=ip)
    assert (answer.header.rcode, addresses(answer)) == (0, [FIRST])
    assert str(answer.q.qname) == "Plain.TEST."
    assert len(lab.dns.queries) == queries, "what it really is at is asked when a request to it is allowed"
    event = rollout.last("net.dns")
    assert (event["verdict"], event["dns.question.name"]) == ("allowed", "plain.test")
    assert event["network.peer.address"] == FIRST


def test_each_name_keeps_its_own_address(guest: GuestNet, rollout: Attached) -> None:
    names = ["tunnel.test", "plain.test", "a.wild.test", "plain.test", "tunnel.test"]
    found = [addresses(ask(guest, question(name)))[0] for name in names]
    assert found[0] == found[4] != found[1] == found[3]
    assert len(set(found)) == 3


@pytest.mark.promise("S3.13")
@pytest.mark.parametrize(
    "name", ["evil.test", "test", "wild.test", "bad.wild.test", "plain.test.evil.test", "localhost"]
)
def test_egress_case_042_a_denied_name_does_not_exist_and_is_asked_of_nobody(
    name: str, lab: NetLab, guest: GuestNet, rollout: Attached
) -> None:
    queries = len(lab.dns.queries)
    answer = ask(guest, question(name))
    assert (answer.header.rcode, addresses(answer)) == (3, [])
    event = rollout.last("net.dns")
    assert (event["verdict"], event["dns.question.name"]) == ("denied", name)
    assert event["reason"] == {"bad.wild.test": "denied_by_rule", "localhost": "own_address"}.get(
        name, "host_not_allowed"
    )
    assert len(lab.dns.queries) == queries


def test_egress_case_042_secrets_in_labels_go_nowhere(lab: NetLab, guest: GuestNet, rollout: Attached) -> None:
    queries = len(lab.dns.queries)
    for number in range(40):
        answer = ask(guest, question(f"{'a' * 60}.{number}.evil.test"))
        assert answer.header.rcode == 3
    assert len(lab.dns.queries) == queries
    eventually(lambda: sum(event.get("count", 1) for event in rollout.events("net.dns")) == 40)


@pytest.mark.promise("S3.13")
def test_egress_case_043_long_labels_and_many_names_under_a_wildcard(
    lab: NetLab, guest: GuestNet, rollout: Attached
) -> None:
    queries = len(lab.dns.queries)
    assert ask(guest, question(f"{'a' * 41}.wild.test")).header.rcode == 3
    assert rollout.last("net.dns")["reason"] == "label_too_long"
    for number in range(6):
        assert addresses(ask(guest, question(f"n{number}.wild.test")))
    answer = ask(guest, question("n6.wild.test"))
    assert (answer.header.rcode, addresses(answer)) == (5, [])
    assert rollout.wait("net.dns", 8)[-1]["reason"] == "too_many_names"
    assert addresses(ask(guest, question("n3.wild.test"))), "the ones that are known stay known"
    assert len(lab.dns.queries) == queries


def test_egress_case_043_names_asked_for_by_connect_count_as_well(
    lab: NetLab, guest: GuestNet, rollout: Attached
) -> None:
    queries = len(lab.dns.queries)
    for number in range(7):
        with Client(guest.connect("127.0.0.1", 3128)) as client:
            reply = client.connect(f"c{number}.wild.test")
        assert reply.reason == ("too_many_names" if number == 6 else "resolve_failed")
    assert len(lab.dns.queries) == queries + 12, "A and AAAA of six names"
    with Client(guest.connect("127.0.0.1", 3128)) as client:
        assert client.connect(f"{'a' * 41}.wild.test").reason == "label_too_long"
    assert len(lab.dns.queries) == queries + 12


@pytest.mark.parametrize("kind", ["AAAA", "TXT", "MX", "HTTPS", "SRV", "NS", "ANY", "CNAME", "PTR", "SOA", "DNSKEY"])
def test_other_types_of_an_allowed_name_are_empty(kind: str, guest: GuestNet, rollout: Attached) -> None:
    answer = ask(guest, question("plain.test", kind))
    assert (answer.header.rcode, answer.rr) == (0, [])


@pytest.mark.parametrize("qclass", [3, 4, 254, 255, 0, 65535])
def test_another_class_than_the_internets_is_no_way_to_break_it(
    qclass: int, worker: Worker, guest: GuestNet, rollout: Attached
) -> None:
    faults = worker.ask("stats")["faults"]
    answer = ask(guest, bytes(dnslib.DNSRecord(q=dnslib.DNSQuestion("plain.test", 1, qclass)).pack()))
    assert answer.rr == []
    assert addresses(ask(guest, question("plain.test"))) == [FIRST], "the rollout goes on"
    assert worker.ask("stats")["faults"] == faults


def test_edns_is_tolerated(guest: GuestNet, rollout: Attached) -> None:
    made = dnslib.DNSRecord.question("plain.test")
    made.add_ar(dnslib.EDNS0(udp_len=4096))
    assert addresses(ask(guest, bytes(made.pack()))) == [FIRST]


NOISE = [
    b"",
    b"\x00",
    bytes(12),
    bytes(1024),
    os.urandom(400),
    question("plain.test")[:-1],
    question("plain.test") + b"x",
    question("plain.test", qr=1),
    question("plain.test", opcode=5),
    question("plain.test", opcode=4),
    question("plain.test").replace(b"\x00\x01\x00\x00\x00\x00\x00\x00", b"\x00\x02\x00\x00\x00\x00\x00\x00", 1),
    b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\xc0\x0c\x00\x01\x00\x01",
    b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00" + b"\x3f" + b"a" * 63 + b"\x00\x00\x01",
]


def test_noise_is_dropped_or_refused_and_harms_nobody(worker: Worker, guest: GuestNet, rollout: Attached) -> None:
    faults = worker.ask("stats")["faults"]
    with guest.datagrams() as sock:
        for packet in NOISE:
            sock.send(packet)
        sock.send(question("plain.test"))
        while True:
            answer = dnslib.DNSRecord.parse(sock.recv(4096))
            if answer.rr:
                break
            assert answer.header.rcode != 0
    for packet in NOISE:
        with guest.connect("127.0.0.1", 53) as stream:
            stream.sendall(len(packet).to_bytes(2, "big") + packet)
            stream.shutdown(socket.SHUT_WR)
            while stream.recv(4096):
                pass
    assert addresses(ask(guest, question("plain.test"))) == [FIRST]
    assert worker.ask("stats")["faults"] == faults
    assert "malformed_request" in {event["reason"] for event in rollout.events("net.dns")}


def test_questions_over_tcp_come_in_pieces_and_in_a_row(guest: GuestNet, rollout: Attached) -> None:
    packets = [question(name) for name in ("plain.test", "evil.test", "tunnel.test")]
    framed = b"".join(len(packet).to_bytes(2, "big") + packet for packet in packets)
    with Client(guest.connect("127.0.0.1", 53)) as client:
        for start in range(0, len(framed), 5):
            client.send(framed[start : start + 5])
        answers = [dnslib.DNSRecord.parse(client.take(int.from_bytes(client.take(2), "big"))) for _ in packets]
    assert [(answer.header.rcode, len(answer.rr)) for answer in answers] == [(0, 1), (3, 0), (0, 1)]
    assert [answer.header.id for answer in answers] == [dnslib.DNSRecord.parse(packet).header.id for packet in packets]


def test_tcp_clients_that_say_nothing_do_not_keep_others_out_for_long(guest: GuestNet, rollout: Attached) -> None:
    idle = [guest.connect("127.0.0.1", 53) for _ in range(40)]
    with guest.datagrams() as sock:
        sock.send(question("plain.test"))
        assert sock.recv(4096)
    assert sum(sock.recv(1) == b"" for sock in idle) == 40, "all of them are closed in the end"
    for sock in idle:
        sock.close()
    assert addresses(ask(guest, question("plain.test"), tcp=True)) == [FIRST]


def test_a_tcp_client_that_reads_nothing_is_given_up(worker: Worker, guest: GuestNet, rollout: Attached) -> None:
    """Answers are as large as questions; who takes none of them must not be answered for ever."""
    packet = question("plain.test", "TXT")
    framed = (len(packet).to_bytes(2, "big") + packet) * 1000
    with guest.connect("127.0.0.1", 53) as sock, pytest.raises(ConnectionError):
        sock.settimeout(10)
        for _ in range(2000):
            sock.sendall(framed)
    assert worker.ask("ping")["ok"]


def test_questions_are_limited_as_requests_are(worker: Worker, guest: GuestNet) -> None:
    """Four for each request that the rollout may make: nothing leaves because of one."""
    rollout = worker.attach(ALLOWED.replace("6000", "2"), sockets=guest.sockets)
    rcodes = [ask(guest, question(name)).header.rcode for name in ["plain.test", "evil.test"] * 5]
    assert rcodes[:8] == [0, 3] * 4
    assert rcodes[8:] == [5, 5]
    assert rollout.wait("net.dns", 10)[-1]["reason"] == "rate_limited"


def test_a_revoked_rollout_learns_no_names(worker: Worker, guest: GuestNet, rollout: Attached) -> None:
    worker.ask("revoke", rollout_id=rollout.rollout_id)
    assert ask(guest, question("plain.test")).header.rcode == 5


def test_nothing_is_known_where_egress_is_off(worker: Worker, guest: GuestNet) -> None:
    rollout = worker.attach(ALLOWED.replace("mode: live", '"mode": "off"'), sockets=guest.sockets)
    assert ask(guest, question("plain.test")).header.rcode == 3
    assert rollout.last("net.dns")["reason"] == "egress_off"


def test_fake_addresses_end_with_their_network() -> None:
    """However many names a policy allows: the next network is somebody's."""
    names = Names(None, 1_000_000)
    last = None
    for number in range(FAKE_COUNT + 1):
        address = names.address(Host(f"n{number}.wild.test"))
        last = address or last
    assert address is None
    assert str(last) == "198.19.255.254"
    assert names.host(Address(4, FAKE_FIRST + FAKE_COUNT)) is None


def test_names_lead_to_requests_by_their_address(
    worker: Worker, guest: GuestNet, lab: NetLab, rollout: Attached
) -> None:
    origin = lab.http("11.0.0.70", 80, lambda _request: response(b"found"))
    lab.add_host("plain.test", "11.0.0.70")
    (address,) = addresses(ask(guest, question("plain.test")))
    with Client(guest.connect(address, 80)) as client:
        reply = client.send(b"GET /x HTTP/1.1\r\nHost: plain.test\r\n\r\n").reply()
    assert reply.body == b"found"
    assert origin.received[0].header("host") == [b"plain.test"]
    origin.close()
