"""DNS messages: the query that we send, and what of an answer is believed. Pure but for the chance in a query.

Read by hand and not by a library: a look-up stands before every new tunnel, dnspython's reader costs half a
millisecond for it and ten MiB of record types that nobody asks for. What is read here is a part of what dnspython
reads, and means the same (tests hold the two against each other): one question, repeated byte for byte; names whose
pointers lead strictly backwards; A, AAAA and CNAME of class IN; OPT for the upper bits of the response code. Records of
other types are passed over by their length. Anything else is no answer.
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

from stockade.egress.gate import Address

TYPE_A = 1
TYPE_AAAA = 28
NOERROR, SERVFAIL, NXDOMAIN = 0, 2, 3

EDNS_PAYLOAD_BYTES = 1232
"""What we say that a datagram may hold: no fragments on any usual path (DNS flag day 2020)."""

_ANSWER, _ADDITIONAL = 0, 2
_TYPE_CNAME, _TYPE_OPT, _TYPE_TSIG = 5, 41, 250
_CLASS_IN = 1
_RD, _TC = 0x0100, 0x0200
_QR_AND_OPCODE, _RESPONSE = 0xF800, 0x8000
_RCODE_BITS = 4

_HEADER = struct.Struct(">HHHHHH")
_RECORD = struct.Struct(">HHIH")
_QUESTION_TAIL = struct.Struct(">HH")
_OPT = b"\0" + _RECORD.pack(_TYPE_OPT, EDNS_PAYLOAD_BYTES, 0, 0)
_LABEL_MAX, _NAME_MAX, _POINTER = 63, 255, 0xC0
_SIZES = {TYPE_A: 4, TYPE_AAAA: 16}
_VERSIONS = {TYPE_A: 4, TYPE_AAAA: 6}
_MAX_CHAIN = 16
_MAX_RECORDS = 256
"""Of all sections together: a name costs up to 127 steps, and a message of 64 KiB has room for 5,000 of them."""
_TTL_LIMIT = 1 << 31

# 0x20 where a byte is a small letter, else 0. A label's length is at most 63, so it is never taken for a letter.
_CASE_BITS = bytes(0x20 if 0x61 <= byte <= 0x7A else 0 for byte in range(256))


class Query(NamedTuple):
    """One query: ``wire`` is what is sent; ``name`` is in wire form, small letters; ``mixed``: case is at random."""

    ident: int
    rrtype: int
    name: bytes
    question: bytes
    mixed: bool
    wire: bytes


class Reply(NamedTuple):
    """What an answer says.

    ``code`` is the response code (RFC 6895), :data:`SERVFAIL` also for a chain of aliases that has no end.
    ``addresses`` stand in the order of the answer, each once; ``ttl_s`` is the smallest TTL on the way to them.
    ``truncated``: it must be asked again over TCP. ``respelt``: it repeats the question in other letters than ours,
    so nothing else of it was read.
    """

    code: int = NOERROR
    addresses: tuple[Address, ...] = ()
    ttl_s: int = 0
    truncated: bool = False
    respelt: bool = False


def wire_name(name: str) -> bytes:
    """Return ``name`` (ASCII, no trailing dot) in wire form and small letters; ``ValueError`` if it has none."""
    labels = name.lower().encode("ascii").split(b".")
    if not all(0 < len(label) <= _LABEL_MAX for label in labels):
        raise ValueError(f"{name!a} is not the name of a host")
    wire = b"".join(bytes((len(label),)) + label for label in labels) + b"\0"
    if len(wire) > _NAME_MAX:
        raise ValueError(f"{name!a} is too long")
    return wire


def make_query(name: bytes, rrtype: int, *, mixed: bool) -> Query:
    """Return a query for ``name`` (of :func:`wire_name`) with a random id and, if ``mixed``, random case.

    The case is what a blind forger must guess too (draft-vixie-dnsext-dns0x20): a bit for each letter, on top of the id
    and the source port.
    """
    chance = os.urandom(2 + len(name))
    spelt = name
    if mixed:
        flips = int.from_bytes(chance[2:], "big") & int.from_bytes(name.translate(_CASE_BITS), "big")
        spelt = (int.from_bytes(name, "big") ^ flips).to_bytes(len(name), "big")
    ident = chance[0] << 8 | chance[1]
    question = spelt + _QUESTION_TAIL.pack(rrtype, _CLASS_IN)
    return Query(ident, rrtype, name, question, mixed, _HEADER.pack(ident, _RD, 1, 0, 0, 1) + question + _OPT)


def read_reply(wire: bytes, query: Query) -> Reply | None:
    """Return what ``wire`` says to ``query``, or None where it is no answer to it, or none that can be read."""
    try:
        return _read(wire, query)
    except (ValueError, IndexError, struct.error):
        return None


def _read(wire: bytes, query: Query) -> Reply | None:
    ident, flags, questions, answers, others, extra = _HEADER.unpack_from(wire)
    start = _HEADER.size + len(query.question)
    asked = wire[_HEADER.size : start]
    if ident != query.ident or flags & _QR_AND_OPCODE != _RESPONSE or questions != 1:
        return None
    if asked != query.question:
        if asked.lower() != query.question.lower():
            return None
        if query.mixed:
            return Reply(respelt=True)
    if flags & _TC:
        return Reply(truncated=True)
    if answers + others + extra > _MAX_RECORDS:
        return None
    reader = _Reader(wire, query, start)
    for section, count in enumerate((answers, others, extra)):
        for _ in range(count):
            reader.record(section)
    if reader.at != len(wire):
        return None
    code = reader.upper_code << _RCODE_BITS | flags & 0xF
    return Reply(code) if code != NOERROR else reader.follow()


class _Reader:
    """Walks over the records of one message. Its methods raise ValueError, IndexError and struct.error."""

    __slots__ = ("_addresses", "_aliases", "_opt_seen", "_query", "_wire", "at", "upper_code")

    def __init__(self, wire: bytes, query: Query, at: int) -> None:
        self._wire = wire
        self._query = query
        self._addresses: dict[bytes, dict[Address, int]] = {}
        self._aliases: dict[bytes, tuple[bytes, int]] = {}
        self._opt_seen = False
        self.at = at
        self.upper_code = 0

    def record(self, section: int) -> None:
        """Read the next record; only those of the answer section are kept."""
        owner, rrtype, rrclass, ttl, size = self._head()
        start, self.at = self.at, self.at + size
        if rrtype == _TYPE_OPT:
            if section != _ADDITIONAL or self._opt_seen or owner != b"\0":
                raise ValueError("an OPT record that belongs elsewhere")
            self._opt_seen = True
            self.upper_code = ttl >> 24
        elif rrtype == _TYPE_TSIG:
            raise ValueError("signed with a key that nobody gave us")
        elif rrclass != _CLASS_IN:
            return
        elif rrtype in _SIZES:
            if size != _SIZES[rrtype]:
                raise ValueError("an address of another length")
            if section == _ANSWER and rrtype == self._query.rrtype:
                address = Address(_VERSIONS[rrtype], int.from_bytes(self._wire[start : self.at], "big"))
                known = self._addresses.setdefault(owner, {})
                known[address] = min(_sane(ttl), known.get(address, _TTL_LIMIT))
        elif rrtype == _TYPE_CNAME:
            self.at = start
            target = self._name(start + size)
            if self.at != start + size:
                raise ValueError("bytes behind a name")
            if section == _ANSWER:
                before, least = self._aliases.get(owner, (target, _TTL_LIMIT))
                if before != target:
                    raise ValueError("one name, two aliases")
                self._aliases[owner] = (target, min(_sane(ttl), least))

    def follow(self) -> Reply:
        """Go from the question's name to its addresses, over as many aliases as there are, within reason."""
        name, least = self._query.name, _TTL_LIMIT
        for _ in range(_MAX_CHAIN):
            found = self._addresses.get(name)
            if found is not None:
                return Reply(NOERROR, tuple(found), min(least, *found.values()))
            alias = self._aliases.get(name)
            if alias is None:
                return Reply()
            name, ttl = alias
            least = min(least, ttl)
        return Reply(SERVFAIL)

    def _head(self) -> tuple[bytes, int, int, int, int]:
        owner = self._name(len(self._wire))
        rrtype, rrclass, ttl, size = _RECORD.unpack_from(self._wire, self.at)
        self.at += _RECORD.size
        if self.at + size > len(self._wire):
            raise ValueError("longer than the message")
        return owner, rrtype, rrclass, ttl, size

    def _name(self, limit: int) -> bytes:
        """Read a name that ends before ``limit``; return it in wire form and small letters.

        After a pointer everything that is read lies before the part that the pointer stood in, so no name leads
        around in a circle.
        """
        wire, at = self._wire, self.at
        if wire.startswith(b"\xc0\x0c", at) and at + 2 <= limit:
            self.at = at + 2
            return self._query.name  # the usual case: the name that was asked for
        part, end, size = at, 0, 1
        labels: list[bytes] = []
        while True:
            length = wire[at]
            after = at + 1 + length
            if length <= _LABEL_MAX:
                if after > limit:
                    raise ValueError("a label beyond its place")
                labels.append(wire[at:after])
                size += 1 + length
                if not length:
                    break
                at = after
            elif length >= _POINTER:
                target = (length & ~_POINTER) << 8 | wire[at + 1]
                if at + 2 > limit or target >= part:
                    raise ValueError("a pointer that does not lead back")
                end = end or at + 2
                limit, part, at = part, target, target
            else:
                raise ValueError("a label of an unknown kind")
            if size > _NAME_MAX:
                raise ValueError("a name that is too long")
        self.at = end or after
        return b"".join(labels).lower()


def _sane(ttl: int) -> int:
    """Return a TTL as RFC 2181 section 8 wants it: with the top bit set it is 0."""
    return ttl if ttl < _TTL_LIMIT else 0
