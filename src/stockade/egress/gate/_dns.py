"""DNS as the guest sees it: one question in, one address out (RFC 1035, RFC 6891; cases 42, 43).

Nothing is forwarded: a name becomes an address that exists inside the sandbox only, and what is looked up outside is
looked up when a connection was allowed. Queries come from hostile code, so the codec is small, strict and our own.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from stockade.egress.gate._address import Address
from stockade.egress.gate._host import parse_host
from stockade.egress.gate._reason import Malformed, Reason

DNS_MAX: Final = 1024
"""Most bytes of a query: a name, an OPT record and its padding (RFC 8467) fit."""
TYPE_A: Final = 1
TYPE_AAAA: Final = 28
CLASS_IN: Final = 1
DNS_MALFORMED: Final = 1
DNS_FAILED: Final = 2
DNS_NO_NAME: Final = 3
DNS_UNSUPPORTED: Final = 4
DNS_REFUSED: Final = 5
"""How a query is refused (RFC 1035 section 4.1.1: FORMERR, SERVFAIL, NXDOMAIN, NOTIMP, REFUSED)."""

_RCODES = range(DNS_MALFORMED, DNS_REFUSED + 1)
_HEADER = struct.Struct("!HHHHHH")
_QUESTION_TAIL = struct.Struct("!HH")
_RECORD = struct.Struct("!HHIH")
_NAME_POINTER = b"\xc0\x0c"  # to the question, which follows the header (RFC 1035 section 4.1.4)
_NAME_MAX = 255
_LABEL_MAX = 63
_TYPE_OPT = 41
_QR, _OPCODE, _RD, _RA = 0x8000, 0x7800, 0x0100, 0x0080
_TOLERATED = _RD | 0x0020 | 0x0010  # AD and CD ask for DNSSEC, which nobody here can give
_TTL_MAX = 0x7FFFFFFF


class Query(msgspec.Struct, frozen=True):
    """A question. ``name`` is the canonical host name, None where no host can be called so.

    ``question`` is its section as it was sent: the answer repeats it byte for byte, case and all.
    """

    id: int
    name: str | None
    qtype: int
    qclass: int
    rd: bool
    question: bytes


def parse_query(packet: bytes | bytearray | memoryview) -> Query:
    """Return the one question of a query, or raise Malformed.

    unsupported_command for an opcode other than QUERY; malformed_request for all else: a response, no or several
    questions, compression, records that no query has (one OPT record is read over), bytes after the end.
    """
    packet = bytes(packet)
    if not _HEADER.size <= len(packet) <= DNS_MAX:
        raise _malformed(f"a query of {len(packet)} bytes")
    number, flags, questions, answers, authorities, additional = _HEADER.unpack_from(packet)
    if flags & _QR:
        raise _malformed("a DNS response")
    if flags & _OPCODE:
        raise Malformed(Reason.UNSUPPORTED_COMMAND, f"DNS opcode {(flags & _OPCODE) >> 11}")
    if flags & ~_TOLERATED:
        raise _malformed("DNS flags that no query has")
    if questions != 1 or answers or authorities or additional > 1:
        raise _malformed("not one DNS question")
    labels, at = _labels(packet)
    if at + _QUESTION_TAIL.size > len(packet):
        raise _malformed("a DNS question cut short")
    qtype, qclass = _QUESTION_TAIL.unpack_from(packet, at)
    at += _QUESTION_TAIL.size
    question = packet[_HEADER.size : at]
    if additional:
        at = _skip_opt(packet, at)
    if at != len(packet):
        raise _malformed("bytes after the DNS question")
    return Query(number, _host_name(labels), qtype, qclass, bool(flags & _RD), question)


def answer(query: Query, address: Address | None, ttl: int) -> bytes:
    """Return the answer: one address (A or AAAA as asked), or with None no record and no error.

    Raises ValueError for an address of a family that was not asked for, or a ``ttl`` (seconds) that is none.
    """
    if not 0 <= ttl <= _TTL_MAX:
        raise ValueError(f"{ttl} is no time to live")
    record = b""
    if address is not None:
        wanted = TYPE_A if address.version == 4 else TYPE_AAAA
        if (query.qtype, query.qclass) != (wanted, CLASS_IN):
            raise ValueError("an address that was not asked for")
        packed = address.packed
        record = _NAME_POINTER + _RECORD.pack(wanted, CLASS_IN, ttl, len(packed)) + packed
    flags = _QR | _RA | (_RD if query.rd else 0)
    return _HEADER.pack(query.id, flags, 1, 1 if record else 0, 0, 0) + query.question + record


def refuse(query: Query | bytes, rcode: int) -> bytes:
    """Return the answer that there is none.

    ``query`` may be a packet that was no query: then its id and opcode are repeated and nothing else. Raises
    ValueError for one without a header, for a response (two servers must not talk to each other for ever), and for a
    code that refuses nothing.
    """
    if rcode not in _RCODES:
        raise ValueError(f"{rcode} refuses nothing")
    if isinstance(query, Query):
        flags = _QR | _RA | (_RD if query.rd else 0) | rcode
        return _HEADER.pack(query.id, flags, 1, 0, 0, 0) + query.question
    if len(query) < _HEADER.size or query[2] & (_QR >> 8):
        raise ValueError("not a query that could be answered")
    number, flags = struct.unpack_from("!HH", query)
    return _HEADER.pack(number, _QR | flags & (_OPCODE | _RD) | _RA | rcode, 0, 0, 0, 0)


def _labels(packet: bytes) -> tuple[list[bytes], int]:
    """Return the labels of the question's name, and where it ends."""
    labels: list[bytes] = []
    at = _HEADER.size
    while True:
        if at >= len(packet):
            raise _malformed("a DNS name cut short")
        size = packet[at]
        if size == 0:
            return labels, at + 1
        if size > _LABEL_MAX:  # a pointer, or a kind of label that nobody uses (RFC 6891 section 5)
            raise _malformed("a DNS label that is none")
        at += 1 + size
        if at + 1 - _HEADER.size > _NAME_MAX or at > len(packet):
            raise _malformed("a DNS name too long or cut short")
        labels.append(packet[at - size : at])


def _skip_opt(packet: bytes, at: int) -> int:
    """Return where the OPT record at ``at`` ends; nothing in it changes what is answered."""
    start = at + 1
    if start + _RECORD.size > len(packet) or packet[at] != 0:
        raise _malformed("not an OPT record")
    kind, _, _, size = _RECORD.unpack_from(packet, start)
    if kind != _TYPE_OPT:
        raise _malformed("not an OPT record")
    return start + _RECORD.size + int(size)


def _host_name(labels: list[bytes]) -> str | None:
    if any(b"." in label for label in labels):  # within a label it is no separator
        return None
    try:
        host = parse_host(b".".join(labels))
    except Malformed:
        return None
    return host.text if host.address is None else None


def _malformed(what: str) -> Malformed:
    return Malformed(Reason.MALFORMED_REQUEST, what)
