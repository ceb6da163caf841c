"""Addresses as integers: parsing and writing that do not depend on the Python or C library.

``ipaddress`` changed how it writes v4-mapped addresses in 3.13 and what it takes for private in
almost every release (case 35); ``getaddrinfo`` and ``inet_aton`` read ``127.1`` and ``0x7f.1``
(case 3). One parser and one writer, tested with the same vectors everywhere, end that.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_QUAD = re.compile(rf"{_OCTET}(?:\.{_OCTET}){{3}}", re.ASCII)
_GROUP = re.compile(r"[0-9A-Fa-f]{1,4}", re.ASCII)
_V6_TEXT_MAX = 45
_V6_GROUPS = 8
_V4_BITS = 32
_V6_BITS = 128


class Address(NamedTuple):
    """An IPv4 or IPv6 address: ``version`` is 4 or 6, ``value`` the address as an integer.

    ``str()`` gives the canonical text (RFC 5952 for IPv6, always in hex groups, no brackets).
    """

    version: int
    value: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Return the address written in ``text``, or raise ``ValueError``.

        Only four plain decimal octets and RFC 4291 text are read; no zones, no brackets (cases 3, 4).
        """
        if ":" in text:
            return cls(6, _parse_v6(text))
        return cls(4, _parse_v4(text))

    @classmethod
    def from_packed(cls, packed: bytes) -> Address:
        """Return the address in 4 or 16 bytes of network order; else ``ValueError``."""
        if len(packed) == _V4_BITS // 8:
            return cls(4, int.from_bytes(packed, "big"))
        if len(packed) == _V6_BITS // 8:
            return cls(6, int.from_bytes(packed, "big"))
        raise ValueError(f"an address has 4 or 16 bytes, not {len(packed)}")

    @property
    def packed(self) -> bytes:
        """The address as 4 or 16 bytes of network order."""
        return self.value.to_bytes(4 if self.version == 4 else 16, "big")

    def __str__(self) -> str:
        return _write_v4(self.value) if self.version == 4 else _write_v6(self.value)


class Cidr(NamedTuple):
    """A range of addresses: ``first`` and ``last`` are integers, both inside."""

    version: int
    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> Cidr:
        """Return the range of ``address/length`` or of one address, or raise ``ValueError``.

        Bits set behind the prefix are an error: whoever wrote ``10.1.2.3/8`` meant something else.
        """
        base, slash, length = text.partition("/")
        address = Address.parse(base)
        bits = _V4_BITS if address.version == 4 else _V6_BITS
        if not slash:
            return cls(address.version, address.value, address.value)
        if not re.fullmatch(r"0|[1-9][0-9]{0,2}", length, re.ASCII) or int(length) > bits:
            raise ValueError(f"{text!r} has no prefix length of 0 to {bits}")
        span = (1 << (bits - int(length))) - 1
        if address.value & span:
            raise ValueError(f"{text!r} has bits set behind its prefix")
        return cls(address.version, address.value, address.value | span)

    def holds(self, address: Address) -> bool:
        """Say whether ``address`` lies in the range."""
        return address.version == self.version and self.first <= address.value <= self.last

    def __str__(self) -> str:
        bits = _V4_BITS if self.version == 4 else _V6_BITS
        length = bits - (self.last - self.first).bit_length()
        return f"{Address(self.version, self.first)}/{length}"


def _parse_v4(text: str) -> int:
    if not _QUAD.fullmatch(text):
        raise ValueError(f"{text!r} is not an address of four decimal octets")
    a, b, c, d = text.split(".")
    return int(a) << 24 | int(b) << 16 | int(c) << 8 | int(d)


def _write_v4(value: int) -> str:
    return f"{value >> 24}.{value >> 16 & 255}.{value >> 8 & 255}.{value & 255}"


def _parse_v6(text: str) -> int:
    if len(text) > _V6_TEXT_MAX:
        raise ValueError("an IPv6 address has at most 45 characters")
    if "." in text:  # RFC 4291 section 2.2, form 3
        head, _, tail = text.rpartition(":")
        quad = _parse_v4(tail)
        text = f"{head}:{quad >> 16:x}:{quad & 0xFFFF:x}"
    left_text, gap, right_text = text.partition("::")
    left = left_text.split(":") if left_text else []
    right = right_text.split(":") if right_text else []
    missing = _V6_GROUPS - len(left) - len(right)
    if not all(map(_GROUP.fullmatch, left + right)) or (missing < 1 if gap else missing != 0):
        raise ValueError(f"{text!r} is not an IPv6 address")
    value = 0
    for group in [*left, *["0"] * missing, *right]:
        value = value << 16 | int(group, 16)
    return value


def _write_v6(value: int) -> str:
    groups = [f"{value >> shift & 0xFFFF:x}" for shift in range(112, -1, -16)]
    start, length = _longest_zero_run(groups)
    if length < 2:  # RFC 5952 section 4.2.2: never shorten a single group
        return ":".join(groups)
    return ":".join(groups[:start]) + "::" + ":".join(groups[start + length :])


def _longest_zero_run(groups: list[str]) -> tuple[int, int]:
    """Return start and length of the first longest run of zero groups (RFC 5952 section 4.2.3)."""
    best, best_length, start = 0, 0, -1
    for index, group in enumerate([*groups, "end"]):
        if group == "0":
            start = index if start < 0 else start
        elif start >= 0:
            if index - start > best_length:
                best, best_length = start, index - start
            start = -1
    return best, best_length
