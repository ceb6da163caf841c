"""Hosts, ports and authorities from raw bytes (cases 1-24).

The grammar is checked on the bytes, before anything is decoded or looked up: NUL, percent, zone
identifiers, userinfo, backslash, whitespace, stray brackets and all non-ASCII are refused, never
stripped. CPython's ``getaddrinfo`` cuts a name at its NUL and folds full-width digits, so what
passes here is the only text that anything later may see.
"""

from __future__ import annotations

import re

import msgspec

from stockade.egress.gate._address import Address
from stockade.egress.gate._reason import Malformed, Reason, safe_text

_NAME_MAX = 253  # RFC 1035 section 2.3.4 without the root dot
_PORT_MAX = 65535
_NAME = re.compile(rb"(?:(?!-)[A-Za-z0-9-]{1,63}+(?<!-)(?:\.|\Z))++")  # RFC 1123 section 2.1
_NUMERIC = re.compile(r"[0-9]+|0[xX].*", re.ASCII)
_PORT = re.compile(rb"[1-9][0-9]{0,4}")
_BRACKETED = re.compile(rb"\[([0-9A-Fa-f:.]{2,45})\]")
_SHOWN = 64

_SIGNS: tuple[tuple[bytes, str], ...] = (
    (b"\x00", "NUL in the host"),
    (b"@", "userinfo in the authority"),
    (b"\\", "backslash in the host"),
    (b"%", "percent sign in the host"),
    (b"[", "bracket in the host"),
    (b"]", "bracket in the host"),
    (b"#", "fragment sign in the host"),
    (b"..", "empty label in the host"),
)


class Host(msgspec.Struct, frozen=True):
    """A canonical host: a lower-case A-label name without trailing dot, or an IP literal.

    ``text`` is what rules, resolver, record and SNI compare (``[]`` never in it); ``address`` is
    set for IP literals only.
    """

    text: str
    address: Address | None = None

    @property
    def wire(self) -> str:
        """The host as a URI writes it: IPv6 in brackets."""
        return f"[{self.text}]" if ":" in self.text else self.text


class Authority(msgspec.Struct, frozen=True):
    """A host with a port of 1 to 65535."""

    host: Host
    port: int


def parse_host(raw: bytes) -> Host:
    """Return the canonical host of ``raw`` (IPv6 in brackets), or raise :class:`Malformed`.

    One trailing dot is stripped (case 6). A name whose last label is a number or starts with 0x is
    an address to some resolver, so only a strict dotted quad passes (cases 3, 4; CVE-2021-29921).
    """
    if len(raw) <= _NAME_MAX + 1 and _NAME.fullmatch(raw):
        text = raw.decode("ascii").lower()
        last = text[text.rfind(".", 0, -1) + 1 :]
        if not _NUMERIC.fullmatch(last.removesuffix(".")):
            text = text.removesuffix(".")
            if len(text) <= _NAME_MAX:
                return Host(text)
            raise _malformed("host over 253 bytes", raw)
        return _quad(text, raw)
    bracketed = _BRACKETED.fullmatch(raw)
    if bracketed:
        return _bracketed(bracketed[1].decode("ascii"), raw)
    raise _malformed(_why(raw), raw)


def parse_authority(raw: bytes, *, default_port: int | None) -> Authority:
    """Return the host and port of ``host[:port]``, or raise :class:`Malformed`.

    Without ``default_port`` the port must be written (CONNECT: RFC 9112 section 3.2.3). A port is
    1 to 65535 without sign, space or leading zero (case 23).
    """
    if raw.startswith(b"["):
        host_raw, bracket, rest = raw.partition(b"]")
        host_raw += bracket
    else:
        host_raw, colon, tail = raw.partition(b":")
        rest = colon + tail
    host = parse_host(host_raw)
    if not rest:
        if default_port is None:
            raise _malformed("no port", raw)
        return Authority(host, default_port)
    if not _PORT.fullmatch(rest, 1) or rest[:1] != b":" or int(rest[1:]) > _PORT_MAX:
        raise _malformed("not a port", rest[1:])
    return Authority(host, int(rest[1:]))


def _quad(text: str, raw: bytes) -> Host:
    try:
        address = Address.parse(text)
    except ValueError:
        raise _malformed("last label is a number and the host no dotted quad", raw) from None
    return Host(text, address)


def _bracketed(text: str, raw: bytes) -> Host:
    try:
        address = Address.parse(text)
    except ValueError:
        address = None
    if address is None or address.version != 6:
        raise _malformed("no IPv6 address in the brackets", raw)
    return Host(str(address), address)


def _why(raw: bytes) -> str:
    """Say what is wrong with a host that no grammar took."""
    if not raw:
        return "empty host"
    for sign, what in _SIGNS:
        if sign in raw:
            return what
    if not raw.isascii():
        return "not ASCII: names go over the wire as A-labels"
    if any(byte <= 0x20 or byte == 0x7F for byte in raw):
        return "whitespace or control in the host"
    if len(raw) > _NAME_MAX:
        return "host over 253 bytes"
    return "not a host name"


def _malformed(what: str, raw: bytes) -> Malformed:
    return Malformed(Reason.MALFORMED_HOST, f"{what}: {safe_text(raw, limit=_SHOWN)}")
