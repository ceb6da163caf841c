"""DNS as the guest sees it: cases 9, 21, 24, 42 and 43 of the bypass table, with dnspython and dnslib as oracles."""

from __future__ import annotations

import dns.edns
import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.opcode
import dns.rcode
import dns.rdatatype
import dnslib
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stockade.egress.gate import (
    CLASS_IN,
    DNS_FAILED,
    DNS_MALFORMED,
    DNS_MAX,
    DNS_NO_NAME,
    DNS_REFUSED,
    DNS_UNSUPPORTED,
    TYPE_A,
    Address,
    Limits,
    Malformed,
    Mode,
    Query,
    Reason,
    Rule,
    Rules,
    ServiceRule,
    answer,
    judge_name,
    parse_host,
    parse_query,
    refuse,
)

QUESTION = b"\x05files\x07example\x00\x00\x01\x00\x01"
PLAIN = b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00" + QUESTION
OPT = b"\x00\x00\x29\x04\xd0\x00\x00\x00\x00\x00\x00"


def asked(name="files.example", kind="A", **more):
    return dns.message.make_query(name, kind, **more).to_wire()


def header(number=0x1234, flags=0x0100, counts=(1, 0, 0, 0)):
    return b"".join(value.to_bytes(2, "big") for value in (number, flags, *counts))


def refused(packet):
    with pytest.raises(Malformed) as caught:
        parse_query(packet)
    assert caught.value.detail.isascii()
    return caught.value.reason


def attempt(packet):
    try:
        return parse_query(packet)
    except Malformed as error:
        return error


def test_query():
    query = parse_query(PLAIN)
    assert query == Query(0x1234, "files.example", TYPE_A, CLASS_IN, True, QUESTION)
    for kind in (bytearray, memoryview):
        assert parse_query(kind(PLAIN)) == query


@pytest.mark.parametrize("more", [{}, {"use_edns": True}, {"use_edns": True, "payload": 4096}, {"want_dnssec": True},
                                  {"flags": dns.flags.RD | dns.flags.AD}, {"flags": dns.flags.RD | dns.flags.CD}, {"flags": 0},
                                  {"use_edns": True, "options": [dns.edns.GenericOption(dns.edns.OptionType.PADDING, b"\0" * 400)]},
                                  {"use_edns": True, "options": [dns.edns.GenericOption(dns.edns.OptionType.COOKIE, b"c" * 8)]}])  # fmt: skip
@pytest.mark.parametrize("kind", ["A", "AAAA", "HTTPS", "TXT", "MX", "ANY", "SVCB", "PTR"])
def test_what_resolvers_send_is_read(kind, more):
    query = parse_query(asked(kind=kind, **more))
    assert (query.name, query.qtype) == ("files.example", dns.rdatatype.from_text(kind))
    assert query.rd is bool(more.get("flags", dns.flags.RD) & dns.flags.RD)


MALFORMED = {
    "empty": b"",
    "header_cut": PLAIN[:11],
    "no_question": PLAIN[:12],
    "name_cut": PLAIN[:15],
    "name_without_end": PLAIN[:25],
    "type_cut": PLAIN[:-3],
    "response": header(flags=0x8100) + QUESTION,
    "truncated_flag": header(flags=0x0300) + QUESTION,
    "authoritative_flag": header(flags=0x0500) + QUESTION,
    "recursion_available_flag": header(flags=0x0180) + QUESTION,
    "reserved_flag": header(flags=0x0140) + QUESTION,
    "rcode_in_a_query": header(flags=0x0103) + QUESTION,
    "no_questions": header(counts=(0, 0, 0, 0)),
    "two_questions": header(counts=(2, 0, 0, 0)) + QUESTION + QUESTION,
    "answer_in_a_query": header(counts=(1, 1, 0, 0)) + QUESTION + b"\xc0\x0c\x00\x01\x00\x01\x00\x00\x00\x00\x00\x00",
    "authority_in_a_query": header(counts=(1, 0, 1, 0)) + QUESTION,
    "two_additional": header(counts=(1, 0, 0, 2)) + QUESTION + OPT + OPT,
    "additional_is_no_opt": header(counts=(1, 0, 0, 1)) + QUESTION + b"\x00\x00\x01\x00\x01\x00\x00\x00\x00\x00\x00",
    "opt_has_a_name": header(counts=(1, 0, 0, 1)) + QUESTION + b"\x01a" + OPT,
    "opt_cut": header(counts=(1, 0, 0, 1)) + QUESTION + OPT[:-1],
    "opt_data_cut": header(counts=(1, 0, 0, 1)) + QUESTION + OPT[:-2] + b"\x00\x05abc",
    "opt_missing": header(counts=(1, 0, 0, 1)) + QUESTION,
    "opt_not_counted": PLAIN + OPT,
    "bytes_after": PLAIN + b"\0",
    "pointer": header() + b"\xc0\x0c\x00\x01\x00\x01",
    "pointer_to_itself": header() + b"\x01a\xc0\x0c\x00\x01\x00\x01",
    "pointer_far_away": header() + b"\xff\xff\x00\x01\x00\x01",
    "extended_label": header() + b"\x41\x00\x00\x01\x00\x01",
    "reserved_label": header() + b"\x80\x00\x00\x01\x00\x01",
    "egress_case_024_name_of_256": header() + (b"\x3f" + b"a" * 63) * 4 + b"\x00\x00\x01\x00\x01",
    "too_long": header(counts=(1, 0, 0, 1)) + QUESTION + OPT[:-2] + b"\x04\x00" + b"\0" * 1024,
}


@pytest.mark.parametrize("packet", MALFORMED.values(), ids=MALFORMED)
def test_malformed(packet):
    assert refused(packet) is Reason.MALFORMED_REQUEST


@pytest.mark.parametrize("opcode", [1, 2, 4, 5, 6, 15])
def test_other_opcodes(opcode):
    packet = header(flags=opcode << 11) + QUESTION
    assert refused(packet) is Reason.UNSUPPORTED_COMMAND
    reply = dns.message.from_wire(refuse(packet, DNS_UNSUPPORTED), ignore_trailing=False)
    assert (reply.rcode(), reply.opcode(), reply.id) == (dns.rcode.NOTIMP, opcode, 0x1234)


NO_HOSTS = {
    "root": b"\x00",
    "underscore": b"\x04_dns\x08resolver\x04arpa\x00",
    "egress_case_009_nul": b"\x08evil\0com\x00",
    "dot_in_a_label": b"\x0dfiles.example\x00",
    "hyphen_first": b"\x02-a\x00",
    "not_ascii": b"\x03\xe3\x80\x82\x00",
    "egress_case_003_number_last": b"\x03127\x011\x00",
    "literal": b"\x03127\x010\x010\x011\x00",
    "escape": b"\x05a\x1b[2m\x00",
}


@pytest.mark.parametrize("name", NO_HOSTS.values(), ids=NO_HOSTS)
def test_what_no_host_can_be_called_has_no_name(name):
    query = parse_query(header() + name + b"\x00\x01\x00\x01")
    assert query.name is None
    assert dns.message.from_wire(refuse(query, DNS_NO_NAME)).rcode() == dns.rcode.NXDOMAIN


def test_case_is_folded_for_us_and_kept_for_the_client():
    packet = header() + b"\x05FiLeS\x07eXaMpLe\x00\x00\x01\x00\x01"  # 0x20: resolvers that check it back
    query = parse_query(packet)
    assert query.name == "files.example"
    assert b"\x05FiLeS\x07eXaMpLe\x00" in answer(query, Address.parse("198.18.0.10"), 60)
    assert b"\x05FiLeS\x07eXaMpLe\x00" in refuse(query, DNS_REFUSED)


@pytest.mark.parametrize(("kind", "text"), [("A", "198.18.0.10"), ("AAAA", "fd00::a")])
@pytest.mark.parametrize("ttl", [0, 60, (1 << 31) - 1])
def test_answer_as_others_read_it(kind, text, ttl):
    query = dns.message.make_query("Files.Example", kind)
    packet = answer(parse_query(query.to_wire()), Address.parse(text), ttl)
    reply = dns.message.from_wire(packet, ignore_trailing=False)
    assert query.is_response(reply)
    (record,) = reply.answer
    assert (record.ttl, [item.to_text() for item in record]) == (ttl, [text])
    assert record.name == dns.name.from_text("files.example")
    other = dnslib.DNSRecord.parse(packet)
    assert (str(other.a.rdata), other.a.ttl, other.header.rcode) == (text, ttl, 0)


def test_no_address_is_no_error():
    query = dns.message.make_query("files.example", "AAAA")
    reply = dns.message.from_wire(answer(parse_query(query.to_wire()), None, 60))
    assert query.is_response(reply)
    assert (reply.rcode(), reply.answer) == (dns.rcode.NOERROR, [])


def test_an_address_that_was_not_asked_for_is_no_answer():
    four, six = Address.parse("198.18.0.10"), Address.parse("fd00::a")
    for packet, address in (
        (asked(kind="AAAA"), four),
        (asked(kind="A"), six),
        (asked(kind="TXT"), four),
        (asked(kind="A", rdclass="CH"), four),
    ):
        with pytest.raises(ValueError, match="asked"):
            answer(parse_query(packet), address, 60)
    for ttl in (-1, 1 << 31):
        with pytest.raises(ValueError, match="time to live"):
            answer(parse_query(PLAIN), four, ttl)


@pytest.mark.parametrize("rcode", [DNS_MALFORMED, DNS_FAILED, DNS_NO_NAME, DNS_UNSUPPORTED, DNS_REFUSED])
@pytest.mark.parametrize("rd", [True, False])
def test_refusal_as_others_read_it(rcode, rd):
    query = dns.message.make_query("files.example", "A", flags=dns.flags.RD if rd else 0)
    reply = dns.message.from_wire(refuse(parse_query(query.to_wire()), rcode))
    assert query.is_response(reply)
    assert (reply.rcode(), bool(reply.flags & dns.flags.RD), reply.answer) == (rcode, rd, [])


def test_refusal_of_what_was_no_query():
    reply = dns.message.from_wire(refuse(MALFORMED["two_questions"], DNS_MALFORMED))
    assert (reply.id, reply.rcode(), reply.question) == (0x1234, dns.rcode.FORMERR, [])
    for nobody in (b"", PLAIN[:11], MALFORMED["response"], header(flags=0x8000)):
        with pytest.raises(ValueError, match="answered"):
            refuse(nobody, DNS_MALFORMED)
    for rcode in (0, 6, -1, 16):
        with pytest.raises(ValueError, match="refuses nothing"):
            refuse(PLAIN, rcode)


def test_a_query_is_never_answered_with_more_than_it_asks_to_carry():
    """An answer adds 28 bytes at most: nobody is flooded by way of it."""
    query = parse_query(asked(kind="AAAA"))
    assert len(answer(query, Address.parse("fd00::a"), 60)) <= len(asked(kind="AAAA")) + 28
    assert DNS_MAX == 1024


LABEL = st.binary(min_size=1, max_size=63) | st.from_regex(rb"[a-z0-9-]{1,12}", fullmatch=True)


@settings(max_examples=300)
@given(st.lists(LABEL, max_size=6), st.integers(0, 65535), st.sampled_from([1, 28, 65]), st.booleans())
def test_dnspython_reads_the_same_question(labels, number, qtype, opt):
    wire = b"".join(bytes((len(label),)) + label for label in labels) + b"\0"
    packet = header(number, counts=(1, 0, 0, int(opt))) + wire + qtype.to_bytes(2, "big") + b"\0\1" + OPT * opt
    try:
        query = parse_query(packet)
    except Malformed:
        assert len(wire) > 255
        return
    other = dns.message.from_wire(packet)
    assert (other.id, other.opcode()) == (query.id, dns.opcode.QUERY)
    assert (other.question[0].rdtype, other.question[0].name.labels[:-1]) == (query.qtype, tuple(labels))
    if query.name is not None:
        assert other.question[0].name == dns.name.from_text(query.name)
    other_reply = dns.message.from_wire(refuse(query, DNS_REFUSED))
    assert other.is_response(other_reply)


@settings(max_examples=300)
@given(
    st.binary(max_size=80)
    | st.builds(
        lambda at, piece: PLAIN[:at] + piece + PLAIN[at + len(piece) :],
        st.integers(0, len(PLAIN)),
        st.binary(min_size=1, max_size=4),
    )
)
def test_any_packet_has_an_answer_or_none(packet):
    query = attempt(packet)
    if isinstance(query, Malformed):
        assert query.reason in (Reason.MALFORMED_REQUEST, Reason.UNSUPPORTED_COMMAND)
        return
    assert packet.startswith(query.question, 12)
    dns.message.from_wire(refuse(query, DNS_NO_NAME), ignore_trailing=False)
    assert parse_query(packet) == query
    if query.name is not None:
        assert parse_host(query.name.encode()).text == query.name


RULES = Rules(
    allow=(
        Rule("files.example", ("GET",), ("/a/**",), (80,), 1),
        Rule("*.wild.example", None, None, (443,), 2),
        Rule("git.example", None, None, (22,), 3, tcp=True),
        Rule("closed.example", None, None, (443,), 4),
        Rule("half.example", None, None, (80, 443), 5),
        Rule("140.82.114.4", None, None, (443,), 6),
    ),
    deny=(
        Rule("closed.example", None, None, None, 7),
        Rule("half.example", None, None, (443,), 8),
        Rule("files.example", None, ("/b/**",), None, 9),
        Rule("bad.wild.example", None, None, None, 10),
    ),
    services=(ServiceRule("model", Address.parse("127.0.0.1"), 8000, ("POST",), ("/v1/x",), 11),),
    own_names=frozenset({"node7.cluster.example"}),
)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("files.example", Reason.ALLOWED),
        ("a.wild.example", Reason.ALLOWED),
        ("git.example", Reason.ALLOWED),
        ("half.example", Reason.ALLOWED),
        ("model.stockade.internal", Reason.ALLOWED),
        ("wild.example", Reason.HOST_NOT_ALLOWED),
        ("evil.example", Reason.HOST_NOT_ALLOWED),
        ("files.example.evil.example", Reason.HOST_NOT_ALLOWED),
        ("other.stockade.internal", Reason.HOST_NOT_ALLOWED),
        ("stockade.internal", Reason.HOST_NOT_ALLOWED),
        ("140.82.114.4", Reason.HOST_NOT_ALLOWED),
        ("closed.example", Reason.DENIED_BY_RULE),
        ("bad.wild.example", Reason.DENIED_BY_RULE),
        ("localhost", Reason.OWN_ADDRESS),
        ("x.localhost", Reason.OWN_ADDRESS),
        ("node7.cluster.example", Reason.OWN_ADDRESS),
        ("a" * 41 + ".wild.example", Reason.LABEL_TOO_LONG),
        ("mfzwizltoq2gc3lqnrsq.evil.example", Reason.HOST_NOT_ALLOWED),
    ],
)
def test_egress_case_042_a_name_that_no_rule_allows_has_no_address(name, reason):
    verdict = judge_name(parse_host(name.encode()), RULES)
    assert (verdict.allowed, verdict.reason) == (reason is Reason.ALLOWED, reason)


def test_egress_case_043_the_verdict_says_which_names_count():
    assert judge_name(parse_host(b"a.wild.example"), RULES).wildcard
    assert not judge_name(parse_host(b"files.example"), RULES).wildcard
    narrow = Rules(allow=RULES.allow, limits=Limits(wildcard_label=3))
    assert judge_name(parse_host(b"abcd.wild.example"), narrow).reason is Reason.LABEL_TOO_LONG


def test_mode_off_knows_no_name():
    off = Rules(allow=RULES.allow, services=RULES.services, mode=Mode.OFF)
    for name in (b"files.example", b"model.stockade.internal", b"evil.example"):
        assert judge_name(parse_host(name), off).reason is Reason.EGRESS_OFF
