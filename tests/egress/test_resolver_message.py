"""The resolver's messages, against dnspython: whatever our reader takes, dnspython takes too, and reads the same."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

import dns.exception
import dns.message
import dns.name
import dns.rcode
import dns.rdata
import dns.rdataclass
import dns.rdatatype
import dns.rrset
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from stockade.egress._message import (
    NOERROR,
    NXDOMAIN,
    SERVFAIL,
    TYPE_A,
    TYPE_AAAA,
    Query,
    Reply,
    make_query,
    read_reply,
    wire_name,
)
from stockade.egress.gate import Address

CNAME, OPT, TSIG, OTHER = 5, 41, 250, 0xFF01
IN, HS = 1, 4
QR, TC, RD = 0x8000, 0x0200, 0x0100
NAME = "files.example.test"
FIRST = b"\xc0\x0c"
"""A pointer to the question's name."""


def query(rrtype: int = TYPE_A, name: str = NAME, *, mixed: bool = False) -> Query:
    return make_query(wire_name(name), rrtype, mixed=mixed)


def record(owner: bytes, rrtype: int, data: bytes, *, ttl: int = 60, rrclass: int = IN) -> bytes:
    return owner + struct.pack(">HHIH", rrtype, rrclass, ttl, len(data)) + data


def message(
    asked: Query,
    answers: list[bytes] | None = None,
    *,
    authority: list[bytes] | None = None,
    extra: list[bytes] | None = None,
    flags: int = QR | RD,
    code: int = 0,
    question: bytes | None = None,
    ident: int | None = None,
) -> bytes:
    sections = (answers or [], authority or [], extra or [])
    header = (asked.ident if ident is None else ident, flags | code, 1, *map(len, sections))
    body = asked.question if question is None else question
    return struct.pack(">6H", *header) + body + b"".join(b"".join(section) for section in sections)


V4, OTHER_V4 = bytes((11, 0, 0, 5)), bytes((11, 0, 0, 6))
V6 = bytes.fromhex("26000005000000000000000000000005")


# --------------------------------------------------------------------------------------------- queries


@given(st.integers(0, 1).map((TYPE_A, TYPE_AAAA).__getitem__), st.booleans())
def test_a_query_is_what_dnspython_would_send(rrtype: int, mixed: bool) -> None:
    sent = query(rrtype, mixed=mixed)
    theirs = dns.message.make_query(NAME, dns.rdatatype.RdataType(rrtype), use_edns=0, payload=1232, id=sent.ident)
    ours = dns.message.from_wire(sent.wire)
    assert ours == theirs
    assert (ours.flags, ours.edns, ours.payload, ours.ednsflags) == (theirs.flags, 0, 1232, 0)
    assert len(sent.wire) == len(theirs.to_wire())


def test_ids_and_case_are_at_random() -> None:
    sent = [query(mixed=True) for _ in range(200)]
    assert len({one.ident for one in sent}) > 190
    assert len({one.question for one in sent}) > 190
    assert {one.question.lower() for one in sent} == {query().question}
    changed = [sum(a != b for a, b in zip(one.question, query().question, strict=True)) for one in sent]
    letters = sum(character.isalpha() for character in NAME)
    assert letters * 0.4 < sum(changed) / len(changed) < letters * 0.6


@pytest.mark.parametrize("length", [61, 62, 63])
def test_long_names_keep_their_lengths_and_dots(length: int) -> None:
    """A length byte is below every letter: it must never be taken for one whose case can be changed."""
    name = f"{'a' * length}.xn--{'b' * (length - 4)}.{'0-9_' * 10}.test"
    sent = query(name=name, mixed=True)
    assert str(dns.message.from_wire(sent.wire).question[0].name).lower() == f"{name}."


@pytest.mark.parametrize("name", ["", ".", "a..b", ".a", "a.", "a" * 64, ".".join(["a" * 49] * 6), "bücher.test"])
def test_what_is_no_name_is_not_asked(name: str) -> None:
    with pytest.raises(ValueError):
        wire_name(name)


def test_the_longest_name() -> None:
    name = ".".join(["a" * 63, "b" * 63, "c" * 63, "d" * 61])
    assert len(name) == 253
    assert len(wire_name(name)) == 255
    with pytest.raises(ValueError):
        wire_name(name + "d")


# --------------------------------------------------------------------------------------------- answers


def addresses(*packed: bytes) -> tuple[Address, ...]:
    return tuple(map(Address.from_packed, packed))


def test_the_usual_answer() -> None:
    asked = query()
    wire = message(
        asked,
        [record(FIRST, TYPE_A, V4, ttl=40), record(FIRST, TYPE_A, OTHER_V4, ttl=50), record(FIRST, TYPE_A, V4)],
        extra=[b"\0" + struct.pack(">HHIH", OPT, 4096, 0, 0)],
    )
    assert read_reply(wire, asked) == Reply(NOERROR, addresses(V4, OTHER_V4), 40)


def test_the_other_family() -> None:
    asked = query(TYPE_AAAA)
    wire = message(asked, [record(FIRST, TYPE_A, V4), record(FIRST, TYPE_AAAA, V6)])
    assert read_reply(wire, asked) == Reply(NOERROR, addresses(V6), 60)


def test_a_chain_in_any_order_with_the_smallest_ttl() -> None:
    asked = query()
    chain = [
        record(wire_name("b.test"), CNAME, wire_name("c.test"), ttl=30),
        record(FIRST, CNAME, wire_name("b.test"), ttl=600),
        record(wire_name("C.test").upper(), TYPE_A, V4, ttl=90),
    ]
    assert read_reply(message(asked, chain), asked) == Reply(NOERROR, addresses(V4), 30)
    assert read_reply(message(asked, chain[:2]), asked) == Reply()


def test_addresses_of_other_names_are_not_taken() -> None:
    asked = query()
    wire = message(asked, [record(wire_name("evil.test"), TYPE_A, V4), record(FIRST, TYPE_A, V4, rrclass=HS)])
    assert read_reply(wire, asked) == Reply()


def test_a_chain_without_an_end_is_a_failure_of_the_server() -> None:
    asked = query()
    assert read_reply(message(asked, [record(FIRST, CNAME, FIRST)]), asked) == Reply(SERVFAIL)
    names = [wire_name(f"n{number}.test") for number in range(20)]
    links = [record(FIRST, CNAME, names[0])]
    links += [record(names[at], CNAME, names[at + 1]) for at in range(15)]
    links.append(record(names[15], TYPE_A, V4))
    assert read_reply(message(asked, links), asked) == Reply(SERVFAIL)


@pytest.mark.parametrize("ttl", [0, 1 << 31, 0xFFFFFFFF])
def test_a_ttl_with_its_top_bit_set_is_none(ttl: int) -> None:
    asked = query()
    reply = read_reply(message(asked, [record(FIRST, TYPE_A, V4, ttl=ttl)]), asked)
    assert reply == Reply(NOERROR, addresses(V4), 0)


@pytest.mark.parametrize("code", [1, SERVFAIL, NXDOMAIN, 4, 5])
def test_a_code_is_the_whole_answer(code: int) -> None:
    asked = query()
    assert read_reply(message(asked, [record(FIRST, TYPE_A, V4)], code=code), asked) == Reply(code)


def test_the_upper_bits_of_a_code_count() -> None:
    """BADVERS is 16: its lower four bits are those of NOERROR."""
    asked = query()
    opt = record(b"\0", OPT, b"", ttl=1 << 24, rrclass=1232)
    assert read_reply(message(asked, extra=[opt]), asked) == Reply(16)


def test_truncated_and_respelt_answers_are_not_read() -> None:
    asked = query(mixed=True)
    assert read_reply(message(asked, flags=QR | TC) + b"cut", asked) == Reply(truncated=True)
    respelt = message(asked, [record(FIRST, TYPE_A, V4)], question=asked.question.swapcase())
    assert read_reply(respelt, asked) == Reply(respelt=True)
    plain = query()
    wire = message(plain, [record(FIRST, TYPE_A, V4)], question=plain.question.upper())
    assert read_reply(wire, plain) == Reply(NOERROR, addresses(V4), 60)


def spoilt() -> Iterator[tuple[str, bytes]]:
    asked = SPOILT
    a = record(FIRST, TYPE_A, V4)
    opt = record(b"\0", OPT, b"", rrclass=1232)
    yield "another id", message(asked, [a], ident=asked.ident ^ 1)
    yield "a query", message(asked, [a], flags=RD)
    yield "another opcode", message(asked, [a], flags=QR | 0x2800)
    yield "another name", message(asked, [a], question=query(name="other.example.test").question)
    yield "another type", message(asked, [a], question=query(TYPE_AAAA).question)
    yield "another class", message(asked, [a], question=asked.question[:-1] + b"\3")
    yield "no question", message(asked, [a], question=b"")
    yield "no question by count", message(asked, [a])[:4] + b"\0\0" + message(asked, [a])[6:]
    yield "two questions", message(asked, [a])[:4] + b"\0\2" + message(asked, [a])[6:]
    yield "nothing", b""
    yield "a header alone", message(asked)[:12]
    yield "cut short", message(asked, [a])[:-1]
    yield "bytes behind", message(asked, [a]) + b"\0"
    yield "fewer records than counted", message(asked, [a])[:7] + b"\2" + message(asked, [a])[8:]
    yield "an address of three bytes", message(asked, [record(FIRST, TYPE_A, V4[:3])])
    yield "an address of five bytes", message(asked, [record(FIRST, TYPE_A, V4 + b"\0")])
    yield "a pointer to itself", message(asked, [record(b"\xc0\x24", TYPE_A, V4), a])
    yield "a pointer forwards", message(asked, [record(b"\xc0\xff", TYPE_A, V4)])
    yield "a pointer into a pointer's own part", message(asked, [record(b"\1a\xc0\x24", TYPE_A, V4)])
    yield "a label of type 01", message(asked, [record(b"\x41a\0", TYPE_A, V4)])
    yield "a name of 256 bytes", message(asked, [record((b"\x3f" + b"a" * 63) * 4 + b"\0", TYPE_A, V4)])
    yield "an alias with bytes behind", message(asked, [record(FIRST, CNAME, b"\1a\0\0")])
    yield "an alias beyond its record", message(asked, [record(FIRST, CNAME, b"\5a"), a])
    yield "two aliases of one name", message(asked, [record(FIRST, CNAME, b"\1a\0"), record(FIRST, CNAME, b"\1b\0")])
    yield "OPT as an answer", message(asked, [opt])
    yield "OPT in authority", message(asked, authority=[opt])
    yield "OPT twice", message(asked, extra=[opt, opt])
    yield "OPT of a name", message(asked, extra=[record(FIRST, OPT, b"")])
    yield "a signature", message(asked, [a], extra=[record(b"\0", TSIG, b"", rrclass=255)])
    yield "a thousand records", message(asked, [a] * 1000)


SPOILT = query()


@pytest.mark.parametrize(("what", "wire"), list(spoilt()))
def test_what_is_no_answer(what: str, wire: bytes) -> None:
    assert read_reply(wire, SPOILT) is None
    assert read_reply(message(SPOILT, [record(FIRST, TYPE_A, V4)]), SPOILT) is not None


def test_the_dearest_message_is_cheap() -> None:
    """Two hundred and fifty names, each of which takes 120 pointers to read."""
    asked = query()
    start = 12 + len(asked.question) + len(record(FIRST, OTHER, b""))
    last, parts = start, b"\1a\0"
    for _ in range(120):
        parts += b"\1a" + struct.pack(">H", 0xC000 | last)
        last = start + len(parts) - 4
    pointer = struct.pack(">H", 0xC000 | last)
    wire = message(asked, [record(FIRST, OTHER, parts), *[record(pointer, OTHER, b"")] * 250])
    begin = time.process_time()
    assert read_reply(wire, asked) == Reply()
    assert time.process_time() - begin < 1


# ----------------------------------------------------------------------------------- against dnspython


class Opaque(dns.rdata.GenericRdata):
    """What dnspython is made to see in a type that we do not read: bytes. ``minimum`` is what it looks for in SOA."""

    minimum = 0


@pytest.fixture(autouse=True, scope="module")
def _opaque() -> Iterator[None]:
    """Types that we pass over by their length are to be no reason for dnspython to refuse what we take."""
    real = dns.rdata.get_rdata_class

    def shown(rdclass: dns.rdataclass.RdataClass, rdtype: dns.rdatatype.RdataType, use_generic: bool = True) -> type:
        known = rdtype == OPT or (rdclass == IN and rdtype in (TYPE_A, TYPE_AAAA, CNAME))
        return real(rdclass, rdtype, use_generic) if known else Opaque

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dns.rdata, "get_rdata_class", shown)
        yield


@dataclass
class Theirs:
    """What dnspython makes of a message; ``None``: nothing."""

    code: int
    addresses: tuple[str, ...]
    ttl: int
    endless: bool = False


def theirs(wire: bytes, asked: Query) -> Theirs | None:
    sent = dns.message.from_wire(asked.wire)
    try:
        read = dns.message.from_wire(wire)
    except (dns.exception.DNSException, ValueError, IndexError, KeyError):
        return None
    if not read.question or not sent.is_response(read) or not isinstance(read, dns.message.QueryMessage):
        return None
    code = int(read.rcode())
    if code != NOERROR:
        return Theirs(code, (), 0)
    try:
        chain = read.resolve_chaining()
    except dns.exception.DNSException:
        return Theirs(SERVFAIL, (), 0, endless=True)
    if chain.answer is None:
        return Theirs(code, (), 0)
    return Theirs(code, tuple(str(Address.parse(rdata.address)) for rdata in chain.answer), chain.minimum_ttl)


def compare(wire: bytes, asked: Query) -> Reply | None:
    ours = read_reply(wire, asked)
    if ours is None or ours.truncated or ours.respelt:
        return ours
    oracle = theirs(wire, asked)
    assert oracle is not None, f"dnspython refuses what we take for {ours}"
    assert (ours.code, tuple(map(str, ours.addresses))) == (oracle.code, oracle.addresses)
    if ours.addresses:
        assert ours.ttl_s == oracle.ttl
    return ours


LABELS = st.sampled_from([b"a", b"b", b"A", b"B", b"files", b"FILES", b"\0x", b"A.b", b"z" * 63])
OFFSETS = st.sampled_from([12, 12, 12, 18, 26, 31] * 4 + [0, 36, 48, 64, 200])
"""Of the question's labels, mostly: a random offset is hardly ever one of a name."""


@st.composite
def names(draw: st.DrawFn) -> bytes:
    """A name in wire form: labels, then a root or a pointer that may lead anywhere."""
    head = b"".join(bytes((len(label),)) + label for label in draw(st.lists(LABELS, max_size=2)))
    return head + (b"\0" if draw(st.booleans()) else struct.pack(">H", 0xC000 | draw(OFFSETS)))


@st.composite
def records(draw: st.DrawFn) -> bytes:
    rrtype = draw(st.sampled_from([TYPE_A, TYPE_A, TYPE_AAAA, CNAME, CNAME, OTHER]))
    data: bytes
    if rrtype == TYPE_A:
        data = draw(st.sampled_from([V4, OTHER_V4] * 8 + [V6, V4[:3], b""]))
    elif rrtype == TYPE_AAAA:
        data = draw(st.just(V6) | st.binary(min_size=16, max_size=16))
    elif rrtype == CNAME:
        data = draw(names())
    else:
        data = draw(st.binary(max_size=8))
    ttl = draw(st.integers(0, 600) | st.integers(0, (1 << 32) - 1))
    rrclass = draw(st.sampled_from([IN, IN, IN, IN, HS]))
    return record(draw(st.just(FIRST) | names()), rrtype, data, ttl=ttl, rrclass=rrclass)


OPTS = st.builds(
    lambda owner, ttl, data: record(owner, OPT, data, ttl=ttl, rrclass=1232),
    st.sampled_from([b"\0"] * 9 + [FIRST]),
    st.sampled_from([0, 0, 0x8000, 1 << 24, 1 << 16]),
    st.just(b""),
)


@st.composite
def messages(draw: st.DrawFn) -> tuple[bytes, Query]:
    asked = query(draw(st.sampled_from([TYPE_A, TYPE_AAAA])), mixed=draw(st.booleans()))
    wire = message(
        asked,
        draw(st.lists(records(), max_size=6)),
        authority=draw(st.lists(records(), max_size=2)),
        extra=draw(st.lists(records() | OPTS, max_size=2)),
        flags=QR | draw(st.sampled_from([0, RD, 0x0480, 0x0030])),
        code=draw(st.sampled_from([0, 0, 0, 0, SERVFAIL, NXDOMAIN])),
    )
    return wire, asked


@given(messages())
def test_what_we_take_dnspython_takes_and_reads_the_same(made: tuple[bytes, Query]) -> None:
    compare(*made)


@given(messages(), st.data())
def test_so_too_for_damaged_messages(made: tuple[bytes, Query], data: st.DataObject) -> None:
    wire, asked = bytearray(made[0]), made[1]
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(wire) - 1))
        wire[at] = data.draw(st.integers(0, 255) | st.sampled_from([0, 12, 0xC0]))
    cut = data.draw(st.integers(0, len(wire)) | st.just(len(wire)))
    compare(bytes(wire[:cut]) + data.draw(st.sampled_from([b"", b"", b"\0"])), asked)


@example(b"")
@given(st.binary(max_size=200))
def test_so_too_for_any_bytes_behind_a_good_head(tail: bytes) -> None:
    asked = query()
    compare(struct.pack(">6H", asked.ident, QR, 1, 1, 0, 0) + asked.question + tail, asked)


@given(st.binary(max_size=600))
def test_any_bytes_at_all_are_read_or_refused(wire: bytes) -> None:
    asked = query()
    assert read_reply(wire, asked) is None or wire[:2] == asked.ident.to_bytes(2, "big")


GOOD_V4 = st.integers(0, (1 << 32) - 1).map(lambda value: value.to_bytes(4, "big"))


@given(st.lists(GOOD_V4, min_size=1, max_size=20), st.lists(LABELS, max_size=3), st.integers(0, 3))
def test_what_a_server_really_sends_is_taken(packed: list[bytes], labels: list[bytes], links: int) -> None:
    """Messages written by dnspython, with its own compression: none of these may be refused."""
    asked = query()
    owner = dns.name.from_text(NAME)
    reply = dns.message.make_response(dns.message.from_wire(asked.wire))
    for number in range(links):
        target = dns.name.Name([f"link{number}".encode(), *labels, b"test", b""])
        reply.answer.append(dns.rrset.from_text(owner, 300, "IN", "CNAME", str(target)))
        assume(len({str(rrset.name).lower() for rrset in reply.answer}) == len(reply.answer))
        owner = target
    texts = [str(Address.from_packed(one)) for one in packed]
    reply.answer.append(dns.rrset.from_text(owner, 60, "IN", "A", *texts))
    assume(str(owner).lower() not in {str(rrset.name).lower() for rrset in reply.answer[:-1]})
    ours = compare(reply.to_wire(), asked)
    assert ours is not None
    assert sorted(map(str, ours.addresses)) == sorted(set(texts))
