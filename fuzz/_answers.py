"""DNS answers from outside: whatever the resolver takes, dnspython takes too, and reads the same addresses out of it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dns.exception
import dns.message
import dns.rdata

from stockade.egress._message import NOERROR, SERVFAIL, TYPE_A, TYPE_AAAA, Query, read_reply, wire_name
from stockade.egress.gate import Address

_NAME = wire_name("files.example.test")
_IDENT, _IN, _CNAME, _OPT = 0x4D2E, 1, 5, 41
_FLAGS = (0x8180, 0x8580, 0x8000, 0x8182, 0x8183, 0x8380)


def query(rrtype: int, *, mixed: bool) -> Query:
    """Return a query without chance in it."""
    name = _NAME.replace(b"files", b"fIlEs") if mixed else _NAME
    question = name + struct.pack(">HH", rrtype, _IN)
    head = struct.pack(">HHHHHH", _IDENT, 0x0100, 1, 0, 0, 1)
    opt = b"\0" + struct.pack(">HHIH", _OPT, 1232, 0, 0)
    return Query(_IDENT, rrtype, _NAME, question, mixed, head + question + opt)


def check(data: bytes) -> None:
    """Take the first byte for the query; the rest is the message, or (from 0x80 on) flags, counts and records."""
    if len(data) < 3:
        return
    asked = query(TYPE_AAAA if data[0] & 1 else TYPE_A, mixed=bool(data[0] & 2))
    wire = data[1:]
    if data[0] & 0x80:
        counts = data[1] & 7, data[1] >> 3 & 3, data[1] >> 5 & 3
        wire = struct.pack(">6H", _IDENT, _FLAGS[data[2] % len(_FLAGS)], 1, *counts) + asked.question + data[3:]
    ours = read_reply(wire, asked)
    if ours is None or ours.truncated or ours.respelt:
        return
    assert all(address.version == (6 if data[0] & 1 else 4) for address in ours.addresses)
    assert 0 <= ours.ttl_s < 1 << 31
    theirs = by_dnspython(wire, asked)
    assert theirs is not None, f"dnspython refuses what we take for {ours}"
    code, addresses, ttl = theirs
    assert (ours.code, tuple(map(str, ours.addresses))) == (code, addresses), (ours, theirs)
    assert not ours.addresses or ours.ttl_s == ttl, (ours, theirs)


def by_dnspython(wire: bytes, asked: Query) -> tuple[int, tuple[str, ...], int] | None:
    """Return code, addresses and the smallest TTL as dnspython reads them; None where it refuses."""
    with _opaque():
        try:
            read = dns.message.from_wire(wire)
        except (dns.exception.DNSException, ValueError, IndexError, KeyError):
            return None
    answers = dns.message.from_wire(asked.wire).is_response(read)
    if not (read.question and answers and isinstance(read, dns.message.QueryMessage)):
        return None
    code = int(read.rcode())
    if code != NOERROR:
        return code, (), 0
    try:
        chain = read.resolve_chaining()
    except dns.exception.DNSException:
        return SERVFAIL, (), 0
    if chain.answer is None:
        return code, (), 0
    return code, tuple(str(Address.parse(rdata.address)) for rdata in chain.answer), chain.minimum_ttl


class _Opaque(dns.rdata.GenericRdata):
    """What dnspython is made to see in a type that we pass over: bytes. ``minimum`` is what it looks for in SOA."""

    minimum = 0


@contextmanager
def _opaque() -> Iterator[None]:
    """What is passed over by its length is to be no reason for dnspython to refuse what we take: it reads options too."""
    real: Any = dns.rdata.get_rdata_class

    def shown(rdclass: int, rdtype: int, *rest: bool, **options: bool) -> Any:
        known = rdclass == _IN and rdtype in (TYPE_A, TYPE_AAAA, _CNAME)
        return real(rdclass, rdtype, *rest, **options) if known else _Opaque

    dns.rdata.get_rdata_class = shown
    try:
        yield
    finally:
        dns.rdata.get_rdata_class = real
