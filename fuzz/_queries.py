"""DNS queries of the guest: what is taken, dnspython takes for the same, and every answer is one that it reads."""

from __future__ import annotations

import contextlib
import struct

import dns.message
import dns.name
import dns.rdatatype

from fuzz._common import attempt
from stockade.egress.gate import (
    CLASS_IN,
    DNS_MALFORMED,
    DNS_MAX,
    DNS_NO_NAME,
    DNS_REFUSED,
    TYPE_A,
    TYPE_AAAA,
    Address,
    Malformed,
    Query,
    answer,
    parse_host,
    parse_query,
    refuse,
)

_V4, _V6 = Address.parse("198.18.0.7"), Address.parse("fd00::7")
_STATUSES = frozenset({400})


def check(data: bytes) -> None:
    """Take the bytes for the packet; from a first byte of 0x80 on, for what follows the header of a plain query."""
    if not data:
        return
    packet = data[1:]
    if data[0] & 0x80:
        packet = struct.pack("!HHHHHH", 0x1234, 0x0100, 1, 0, 0, data[0] & 1) + packet
    query = attempt(parse_query, packet, statuses=_STATUSES)
    if isinstance(query, Malformed):
        with contextlib.suppress(ValueError):
            _check_answer(packet, refuse(packet, DNS_MALFORMED), DNS_MALFORMED)
        return
    assert len(packet) <= DNS_MAX
    _check_query(packet, query)
    _check_answer(packet, refuse(query, DNS_REFUSED), DNS_REFUSED)
    _check_answer(packet, refuse(query, DNS_NO_NAME), DNS_NO_NAME)
    _check_answer(packet, answer(query, None, 0), 0)
    for kind, address in ((TYPE_A, _V4), (TYPE_AAAA, _V6)):
        if (query.qtype, query.qclass) == (kind, CLASS_IN):
            wire = answer(query, address, 60)
            _check_answer(packet, wire, 0)
            (rrset,) = dns.message.from_wire(wire).answer
            assert [str(Address.parse(rdata.address)) for rdata in rrset] == [str(address)]
            assert (rrset.name, rrset.ttl) == (dns.message.from_wire(packet, question_only=True).question[0].name, 60)


def _check_query(packet: bytes, query: Query) -> None:
    theirs = dns.message.from_wire(packet, question_only=True)
    (asked,) = theirs.question
    assert (theirs.id, int(asked.rdtype), int(asked.rdclass)) == (query.id, query.qtype, query.qclass)
    assert packet[12 : 12 + len(query.question)] == query.question
    if query.name is not None:
        assert asked.name == dns.name.from_text(query.name + ".")
        host = parse_host(query.name.encode("ascii"))
        assert (host.text, host.address) == (query.name, None)


def _check_answer(packet: bytes, wire: bytes, rcode: int) -> None:
    """It belongs to the query, and is one that a stub resolver reads to its end."""
    theirs = dns.message.from_wire(wire)
    assert wire[:2] == packet[:2] and wire[2] & 0x80
    assert int(theirs.rcode()) == rcode
    assert len(wire) <= len(packet) + 28, "no amplification"
