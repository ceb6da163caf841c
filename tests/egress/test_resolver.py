"""The resolver in its loop: what it keeps, what it joins, whom it believes. The servers run in the same loop."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator

import dns.message
import dns.rdatatype
import dns.rrset
import pytest

from stockade.egress import _question, _resolver
from stockade.egress._loop import READ, Loop
from stockade.egress._question import Outcome, Server
from stockade.egress._resolver import KEPT_S, MAX_KEPT, Answer, Resolver
from stockade.egress.gate import Address

NAME = "files.example.test"
V4, V6 = "11.0.0.5", "2600:5::5"
PATIENCE_S = 20.0

Zone = dict[str, tuple[int, tuple[str, ...]]]
"""What a name resolves to: a TTL and addresses."""


def answer(wire: bytes, zone: Zone) -> bytes:
    asked = dns.message.from_wire(wire)
    reply = dns.message.make_response(asked)
    question = asked.question[0]
    found = zone.get(str(question.name).rstrip(".").lower())
    if found is None:
        reply.set_rcode(dns.rcode.NXDOMAIN)
        return reply.to_wire()
    ttl, addresses = found
    kind = "AAAA" if question.rdtype == dns.rdatatype.AAAA else "A"
    fitting = [address for address in addresses if (":" in address) == (kind == "AAAA")]
    if fitting:
        reply.answer.append(dns.rrset.from_text(question.name, ttl, "IN", kind, *fitting))
    return reply.to_wire()


class Udp:
    """A name server on a UDP port. ``answers`` turns a query into the datagrams that answer it."""

    def __init__(self, loop: Loop, zone: Zone) -> None:
        self.zone = zone
        self.answers: Callable[[bytes], list[bytes]] = lambda wire: [answer(wire, zone)]
        self.queries: list[bytes] = []
        self.ports: list[int] = []
        self.sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.sock.bind(("127.0.0.1", 0))
        self._loop = loop
        self._watch = loop.watch(self.sock.fileno(), self._ready, self._fault, READ)

    @property
    def server(self) -> Server:
        return Server(Address.parse("127.0.0.1"), self.sock.getsockname()[1])

    @property
    def names(self) -> list[str]:
        """The names that were asked for, spelt as they were."""
        return [str(dns.message.from_wire(wire).question[0].name).rstrip(".") for wire in self.queries]

    def close(self) -> None:
        self._loop.unwatch(self._watch)
        self.sock.close()

    def _ready(self, _events: int) -> None:
        wire, peer = self.sock.recvfrom(4096)
        self.queries.append(wire)
        self.ports.append(peer[1])
        for packet in self.answers(wire):
            self.sock.sendto(packet, peer)

    def _fault(self, fault: Exception) -> None:
        raise fault


class Lab:
    """A loop, a resolver and its servers."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.zone: Zone = {NAME: (60, (V4, V6))}
        self.udp = Udp(self.loop, self.zone)
        self.others: list[Udp] = []
        self.resolver = Resolver(self.loop, (self.udp.server,))

    def another(self) -> Udp:
        """Add a server behind the first."""
        udp = Udp(self.loop, self.zone)
        self.others.append(udp)
        self.resolver.servers = (*self.resolver.servers, udp.server)
        return udp

    def close(self) -> None:
        for udp in (self.udp, *self.others):
            udp.close()
        self.loop.close()

    def run(self, until: Callable[[], bool]) -> None:
        """Run the loop until something holds."""

        def check() -> None:
            if until():
                self.loop.stop()
            else:
                self.loop.call_later(0.002, check, self._fault)

        def late() -> None:
            self.loop.stop()

        end = self.loop.call_later(PATIENCE_S, late, self._fault)
        check()
        self.loop.run()
        assert end.callback is not None, "nothing came"
        end.cancel()

    def _fault(self, fault: Exception) -> None:
        raise fault

    def ask(self, name: str = NAME) -> Answer:
        """Look a name up, to the end."""
        found: list[Answer] = []
        self.resolver.resolve(name, found.append)
        assert found == [], "called from within the call"
        self.run(lambda: bool(found))
        assert len(found) == 1
        return found[0]


@pytest.fixture
def lab() -> Iterator[Lab]:
    lab = Lab()
    before = len(os.listdir("/proc/self/fd"))
    try:
        yield lab
        assert len(os.listdir("/proc/self/fd")) == before + len(lab.others), "a socket was left open"
    finally:
        lab.close()


def found(*texts: str) -> Answer:
    return Answer(Outcome.FOUND, tuple(map(Address.parse, texts)))


# -------------------------------------------------------------------------------------- what is kept


def test_both_families_are_asked_and_ipv4_stands_first(lab: Lab) -> None:
    assert lab.ask() == found(V4, V6)
    kinds = sorted(dns.message.from_wire(wire).question[0].rdtype for wire in lab.udp.queries)
    assert kinds == [dns.rdatatype.A, dns.rdatatype.AAAA]
    assert lab.resolver.queries == 2


def test_an_answer_is_kept_for_its_ttl(lab: Lab) -> None:
    assert lab.resolver.cached(NAME) is None
    assert lab.ask() == found(V4, V6)
    assert lab.resolver.cached(NAME) == found(V4, V6)
    lab.loop.now += 55
    assert lab.resolver.cached(NAME) == found(V4, V6)
    lab.loop.now += 5
    assert lab.resolver.cached(NAME) is None
    assert (lab.resolver.hits, lab.resolver.queries) == (2, 2)


def test_the_smallest_ttl_counts(lab: Lab) -> None:
    def answers(wire: bytes) -> list[bytes]:
        aaaa = dns.message.from_wire(wire).question[0].rdtype == dns.rdatatype.AAAA
        return [answer(wire, {NAME: (20 if aaaa else 200, (V4, V6))})]

    lab.udp.answers = answers
    lab.ask()
    lab.loop.now += 19
    assert lab.resolver.cached(NAME) is not None
    lab.loop.now += 2
    assert lab.resolver.cached(NAME) is None


def test_nothing_is_kept_longer_than_five_minutes(lab: Lab) -> None:
    lab.zone[NAME] = (86_400, (V4,))
    lab.ask()
    lab.loop.now += KEPT_S - 1
    assert lab.resolver.cached(NAME) is not None
    lab.loop.now += 2
    assert lab.resolver.cached(NAME) is None


def test_egress_case_026_an_answer_without_a_ttl_is_not_kept(lab: Lab) -> None:
    lab.zone[NAME] = (0, (V4,))
    assert lab.ask() == found(V4)
    assert lab.resolver.cached(NAME) is None
    lab.zone[NAME] = (0, ("10.0.0.26",))
    assert lab.ask() == found("10.0.0.26")


def test_resolve_asks_whatever_is_kept_and_the_new_answer_takes_its_place(lab: Lab) -> None:
    lab.ask()
    lab.zone[NAME] = (60, ("11.0.0.6",))
    assert lab.ask() == found("11.0.0.6") == lab.resolver.cached(NAME)


@pytest.mark.parametrize("what", ["no name", "no address", "failed"])
def test_a_no_is_not_kept(lab: Lab, what: str) -> None:
    lab.zone.clear()
    if what == "no address":
        lab.zone[NAME] = (60, ())
    if what == "failed":
        lab.resolver.servers = ()
    outcome = {"no name": Outcome.NO_NAME, "no address": Outcome.NO_ADDRESS, "failed": Outcome.SERVER_FAILED}[what]
    assert lab.ask() == Answer(outcome)
    assert lab.resolver.cached(NAME) is None


def test_the_oldest_name_makes_room(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_KEPT == 1024
    monkeypatch.setattr(_resolver, "MAX_KEPT", 8)
    names = [f"n{number}.example.test" for number in range(8 + 5)]
    lab.zone.update(dict.fromkeys(names, (60, (V4,))))
    for name in names:
        lab.ask(name)
    kept = [name for name in names if lab.resolver.cached(name) is not None]
    assert kept == names[5:]


# ------------------------------------------------------------------------------------ what is joined


def test_equal_look_ups_are_one(lab: Lab) -> None:
    answers: list[Answer] = []
    for _ in range(50):
        lab.resolver.resolve(NAME, answers.append)
    lab.run(lambda: len(answers) == 50)
    assert set(answers) == {found(V4, V6)}
    assert len(lab.udp.queries) == lab.resolver.queries == 2
    assert lab.resolver.joined == 49
    lab.ask()
    assert len(lab.udp.queries) == 4


def test_one_caller_may_go_and_the_last_ends_the_look_up(lab: Lab) -> None:
    answers: list[str] = []

    def caller(who: str) -> Callable[[Answer], None]:
        return lambda _answer: answers.append(who)

    lookups = [lab.resolver.resolve(NAME, caller(who)) for who in "abc"]
    lookups[0].cancel()
    lookups[0].cancel()
    lab.run(lambda: len(answers) == 2)
    assert answers == ["b", "c"]
    lookups = [lab.resolver.resolve(NAME, lambda _answer: answers.append("never")) for _ in range(2)]
    for lookup in lookups:
        lookup.cancel()
    assert lab.ask() == found(V4, V6)
    assert answers == ["b", "c"]


def test_who_cancels_between_the_answer_and_its_turn_is_not_called(lab: Lab) -> None:
    answers: list[str] = []

    def first(_answer: Answer) -> None:
        answers.append("first")
        second.cancel()

    lab.resolver.resolve(NAME, first)
    second = lab.resolver.resolve(NAME, lambda _answer: answers.append("second"))
    third = lab.resolver.resolve(NAME, lambda _answer: answers.append("third"))
    lab.run(lambda: len(answers) == 2)
    third.cancel()
    assert answers == ["first", "third"]


def test_a_caller_that_fails_keeps_the_answer_from_nobody(lab: Lab) -> None:
    answers: list[Answer] = []

    def fail(_answer: Answer) -> None:
        raise RuntimeError("a broken connection")

    lab.resolver.resolve(NAME, fail)
    lab.resolver.resolve(NAME, answers.append)
    lab.resolver.resolve(NAME, fail)
    lab.resolver.resolve(NAME, answers.append)
    lab.run(lambda: len(answers) == 2 and lab.loop.faults == 2)
    assert answers == [found(V4, V6)] * 2
    assert lab.ask() == found(V4, V6)


def test_a_caller_may_ask_again_from_its_call(lab: Lab) -> None:
    answers: list[Answer] = []

    def again(one: Answer) -> None:
        answers.append(one)
        lab.resolver.resolve(NAME, answers.append)

    lab.resolver.resolve(NAME, again)
    lab.run(lambda: len(answers) == 2)
    assert len(lab.udp.queries) == 4


# -------------------------------------------------------------------------------- whom to believe


def test_ports_and_ids_differ_and_case_is_mixed(lab: Lab) -> None:
    for _ in range(16):
        assert lab.ask() == found(V4, V6)
    assert len(lab.udp.queries) == 32
    assert len(set(lab.udp.ports)) > 16
    assert len({wire[:2] for wire in lab.udp.queries}) > 24
    assert len(set(lab.udp.names)) > 24


def test_a_server_that_changes_the_case_is_asked_once_more_in_small_letters(lab: Lab) -> None:
    lab.udp.answers = lambda wire: [answer(wire[:12] + wire[12:-15].lower() + wire[-15:], lab.zone)]
    assert lab.ask() == found(V4, V6)
    assert len(lab.udp.queries) == 4
    assert lab.udp.names[2:] == [NAME, NAME]
    assert lab.ask() == found(V4, V6)
    assert lab.udp.names[4:] == [NAME, NAME]


def test_a_forgery_in_small_letters_alone_is_not_believed(lab: Lab) -> None:
    """Id, port and name right, case wrong: the truth behind it, or the answer to a fresh question, is what counts."""
    evil: Zone = {NAME: (60, ("11.6.6.6",))}

    def answers(wire: bytes) -> list[bytes]:
        folded = wire[:12] + wire[12:-15].lower() + wire[-15:]
        forged = answer(folded, evil)
        return [answer(wire, lab.zone)] if wire == folded else [forged, answer(wire, lab.zone)]

    lab.udp.answers = answers
    assert lab.ask() == found(V4, V6)


def test_answers_from_elsewhere_and_garbage_are_passed_over(lab: Lab) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.bind(("127.0.0.1", 0))

        def answers(wire: bytes) -> list[bytes]:
            forged = answer(wire, {NAME: (60, ("11.6.6.6", "2600:6::6"))})
            stranger.sendto(forged, ("127.0.0.1", lab.udp.ports[-1]))
            wrong_id = bytes((forged[0] ^ 1,)) + forged[1:]
            return [b"", b"\0garbage", wrong_id, forged[:-1], answer(wire, lab.zone)]

        lab.udp.answers = answers
        assert lab.ask() == found(V4, V6)


# ------------------------------------------------------------------------------- servers that fail


def test_without_a_server_the_answer_is_a_no_and_comes_later(lab: Lab) -> None:
    lab.resolver.servers = ()
    assert lab.ask() == Answer(Outcome.SERVER_FAILED)
    answers: list[Answer] = []
    lab.resolver.resolve(NAME, answers.append).cancel()
    lab.resolver.resolve(NAME, answers.append)
    lab.run(lambda: bool(answers))
    assert answers == [Answer(Outcome.SERVER_FAILED)]


@pytest.mark.parametrize("code", [2, 5])
def test_the_next_server_is_asked_after_a_failure(lab: Lab, code: int) -> None:
    lab.another()
    lab.udp.answers = lambda wire: [wire[:2] + bytes((0x80, code)) + wire[4:]]
    assert lab.ask() == found(V4, V6)
    assert (len(lab.udp.queries), len(lab.others[0].queries), lab.resolver.queries) == (2, 2, 4)


def test_the_next_server_is_asked_where_nobody_listens(lab: Lab) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as gone:
        gone.bind(("127.0.0.1", 0))
        port = gone.getsockname()[1]
    lab.resolver.servers = (Server(Address.parse("127.0.0.1"), port), lab.udp.server)
    assert lab.ask() == found(V4, V6)


def test_the_next_server_is_asked_when_one_is_silent(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_question, "_ATTEMPT_S", 0.02)
    lab.another()
    lab.udp.answers = lambda _wire: []
    assert lab.ask() == found(V4, V6)


def test_a_look_up_ends_whatever_the_servers_do(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_resolver, "TOTAL_S", 0.2)
    monkeypatch.setattr(_question, "_ATTEMPT_S", 0.06)
    lab.udp.answers = lambda _wire: [b"\0garbage"]
    assert lab.ask() == Answer(Outcome.TIMED_OUT)
    assert 2 < lab.resolver.queries <= 8


def test_a_family_that_is_never_answered_is_not_waited_for_long(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_resolver, "TOTAL_S", 3600.0)
    monkeypatch.setattr(_question, "_ATTEMPT_S", 3600.0)
    monkeypatch.setattr(_resolver, "_OTHER_FAMILY_S", 0.05)

    def answers(wire: bytes) -> list[bytes]:
        aaaa = dns.message.from_wire(wire).question[0].rdtype == dns.rdatatype.AAAA
        return [] if aaaa else [answer(wire, lab.zone)]

    lab.udp.answers = answers
    assert lab.ask() == found(V4)
    assert lab.resolver.cached(NAME) == found(V4)
