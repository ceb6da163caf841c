"""What an address is, and whether a whole answer may be dialled (cases 25-39).

The tables are our own copy of the IANA IPv4 and IPv6 special-purpose address registries (RFC 6890
and its updates), of the multicast and reserved blocks, and of the cloud providers' metadata
endpoints. ``ipaddress.is_global`` and friends are never asked: they call ``64:ff9b::7f00:1``,
``::127.0.0.1``, ``fec0::1`` and ``224.0.0.1`` global, and differ by Python version (case 35,
CVE-2024-4032). IPv6 is denied outside 2000::/3, the only block IANA gives out.
"""

from __future__ import annotations

from bisect import bisect_right
from enum import StrEnum
from typing import TYPE_CHECKING

from stockade.egress.gate._address import Address, Cidr
from stockade.egress.gate._reason import Reason
from stockade.egress.gate._verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from stockade.egress.gate._rules import Rules


class AddressClass(StrEnum):
    """What kind of range an address lies in; only ``PUBLIC`` may be dialled by itself."""

    PUBLIC = "public"
    METADATA = "metadata"
    UNSPECIFIED = "unspecified"
    LOOPBACK = "loopback"
    PRIVATE = "private"
    SHARED = "shared"
    LINK_LOCAL = "link_local"
    MULTICAST = "multicast"
    DOCUMENTATION = "documentation"
    BENCHMARKING = "benchmarking"
    PROTOCOL = "protocol"
    TRANSITION = "transition"
    RESERVED = "reserved"


# Longer prefixes win, so an exception stands beside the range it is cut from.
_V4_SPECIAL: dict[str, AddressClass] = {
    "0.0.0.0/0": AddressClass.PUBLIC,
    "0.0.0.0/8": AddressClass.UNSPECIFIED,  # RFC 791; 0.0.0.0 reaches loopback on Linux (case 5)
    "10.0.0.0/8": AddressClass.PRIVATE,  # RFC 1918
    "100.64.0.0/10": AddressClass.SHARED,  # RFC 6598 (case 34)
    "100.100.100.200/32": AddressClass.METADATA,  # Alibaba Cloud (case 37)
    "127.0.0.0/8": AddressClass.LOOPBACK,  # RFC 1122
    "168.63.129.16/32": AddressClass.METADATA,  # Azure wire server, a public-looking address
    "169.254.0.0/16": AddressClass.LINK_LOCAL,  # RFC 3927
    "169.254.0.23/32": AddressClass.METADATA,  # Tencent Cloud
    "169.254.169.0/24": AddressClass.METADATA,  # nearly everybody: .254, AWS .253 and .123
    "169.254.170.0/24": AddressClass.METADATA,  # AWS task (.2) and pod (.23) credentials
    "172.16.0.0/12": AddressClass.PRIVATE,  # RFC 1918
    "192.0.0.0/24": AddressClass.PROTOCOL,  # RFC 6890
    "192.0.0.192/32": AddressClass.METADATA,  # Oracle Cloud classic (case 37)
    "192.0.2.0/24": AddressClass.DOCUMENTATION,  # RFC 5737
    "192.88.99.0/24": AddressClass.TRANSITION,  # 6to4 relay anycast, RFC 7526
    "192.168.0.0/16": AddressClass.PRIVATE,  # RFC 1918
    "198.18.0.0/15": AddressClass.BENCHMARKING,  # RFC 2544
    "198.51.100.0/24": AddressClass.DOCUMENTATION,  # RFC 5737
    "203.0.113.0/24": AddressClass.DOCUMENTATION,  # RFC 5737
    "224.0.0.0/4": AddressClass.MULTICAST,  # RFC 1112
    "233.252.0.0/24": AddressClass.DOCUMENTATION,  # RFC 6676
    "240.0.0.0/4": AddressClass.RESERVED,  # RFC 1112; holds 255.255.255.255
}
_V6_SPECIAL: dict[str, AddressClass] = {
    "::/0": AddressClass.RESERVED,  # not given out
    "::/96": AddressClass.TRANSITION,  # v4-compatible, RFC 4291 section 2.5.5.1 (case 33)
    "::/128": AddressClass.UNSPECIFIED,
    "::1/128": AddressClass.LOOPBACK,
    "::ffff:0:0/96": AddressClass.PUBLIC,  # v4-mapped: judged by the address inside (case 30)
    "::ffff:0:0:0/96": AddressClass.TRANSITION,  # SIIT, RFC 2765 (case 33)
    "64:ff9b::/96": AddressClass.PUBLIC,  # NAT64, RFC 6052: judged by the address inside (case 31)
    "64:ff9b:1::/48": AddressClass.TRANSITION,  # local-use NAT64, RFC 8215
    "100::/64": AddressClass.RESERVED,  # discard only, RFC 6666
    "2000::/3": AddressClass.PUBLIC,
    "2001::/23": AddressClass.PROTOCOL,  # RFC 2928: ORCHID, DRIP, AS112, AMT, port control
    "2001::/32": AddressClass.TRANSITION,  # Teredo, RFC 4380 (case 32)
    "2001:2::/48": AddressClass.BENCHMARKING,  # RFC 5180
    "2001:db8::/32": AddressClass.DOCUMENTATION,  # RFC 3849
    "2002::/16": AddressClass.TRANSITION,  # 6to4, RFC 3056 (case 32)
    "3fff::/20": AddressClass.DOCUMENTATION,  # RFC 9637
    "5f00::/16": AddressClass.PROTOCOL,  # segment routing SIDs, RFC 9602
    "fc00::/7": AddressClass.PRIVATE,  # RFC 4193
    "fd00:ec2::/32": AddressClass.METADATA,  # AWS ::254, ::253, ::23 (case 37)
    "fd00:42::42/128": AddressClass.METADATA,  # Scaleway
    "fd20:ce::254/128": AddressClass.METADATA,  # Google Cloud (case 37)
    "fe80::/10": AddressClass.LINK_LOCAL,  # RFC 4291
    "fe80::a9fe:a9fe/128": AddressClass.METADATA,  # OpenStack
    "fec0::/10": AddressClass.PRIVATE,  # site-local, RFC 3879
    "ff00::/8": AddressClass.MULTICAST,  # RFC 4291
}


def _paint(special: dict[str, AddressClass]) -> tuple[list[int], list[AddressClass]]:
    """Return the starts of all stretches, in order, and the class of each: the longest prefix's."""
    ranges = sorted(
        ((Cidr.parse(text), kind) for text, kind in special.items()),
        key=lambda pair: pair[0].first - pair[0].last,  # widest first, so later ones lie on top
    )
    starts = sorted({r.first for r, _ in ranges} | {r.last + 1 for r, _ in ranges})
    classes = [AddressClass.RESERVED] * len(starts)
    for cidr, kind in ranges:
        for index, start in enumerate(starts):
            if cidr.first <= start <= cidr.last:
                classes[index] = kind
    return starts, classes


_V4_STARTS, _V4_CLASSES = _paint(_V4_SPECIAL)
_V6_STARTS, _V6_CLASSES = _paint(_V6_SPECIAL)

_PUBLIC, _METADATA = AddressClass.PUBLIC, AddressClass.METADATA  # a look-up on an enum's class is slow
_NEVER = frozenset({AddressClass.UNSPECIFIED, AddressClass.LINK_LOCAL, AddressClass.MULTICAST})
"""Classes that no operator opens: they are no host's address, or hold tomorrow's metadata endpoint."""

_LOW32 = 0xFFFFFFFF
_NAT64 = 0x0064_FF9B << 64  # the upper 96 bits of 64:ff9b::/96
_NAT64_LOCAL = 0x0064_FF9B_0001  # the upper 48 bits of 64:ff9b:1::/48
_LAST_96 = {0, 0xFFFF, 0xFFFF_0000, _NAT64}
_6TO4 = 0x2002
_TEREDO = 0x2001_0000
_ISATAP = 0x0000_5EFE
_ISATAP_MASK = 0xFCFF_FFFF  # the universal and group bits may be set, RFC 5214 section 6.1


def _table(address: Address) -> AddressClass:
    """Return the class by the tables alone, without looking inside."""
    if address.version == 4:
        return _V4_CLASSES[bisect_right(_V4_STARTS, address.value) - 1]
    return _V6_CLASSES[bisect_right(_V6_STARTS, address.value) - 1]


def _inside(value: int) -> list[int]:
    """Return every IPv4 address that some mechanism may read out of an IPv6 address."""
    top = value >> 32
    if top in _LAST_96:
        return [value & _LOW32] if value > 1 else []  # :: and ::1 are what they are
    found: list[int] = []
    if top >> 80 == _6TO4:
        found.append(value >> 80 & _LOW32)
    elif top >> 64 == _TEREDO:  # the server in clear, the client inverted (RFC 4380 section 4)
        found += [value >> 64 & _LOW32, value & _LOW32 ^ _LOW32]
    elif top >> 48 == _NAT64_LOCAL:
        found += _nat64_layouts(value)
    if top & _ISATAP_MASK == _ISATAP:
        found.append(value & _LOW32)
    return found


def _nat64_layouts(value: int) -> list[int]:
    """Return the readings of 64:ff9b:1::/48 by each layout of RFC 6052 section 2.2.

    Which length a site uses is unknown. A reading in 0.0.0.0/8 is a shorter prefix read wrongly.
    """
    at48 = (value >> 64 & 0xFFFF) << 16 | value >> 40 & 0xFFFF
    at56 = (value >> 64 & 0xFF) << 24 | value >> 32 & 0xFFFFFF
    at64 = value >> 24 & _LOW32
    return [value & _LOW32, *(v4 for v4 in (at48, at56, at64) if v4 >> 24)]


def views(address: Address) -> tuple[Address, ...]:
    """Return ``address`` and every IPv4 address that is embedded in it (cases 30-33)."""
    if address.version == 4:
        return (address,)
    inside = _inside(address.value)
    return (address, *[Address(4, value) for value in inside]) if inside else (address,)


def classify(address: Address) -> AddressClass:
    """Return the class of ``address``, the worst one of it and every IPv4 address inside it.

    A metadata endpoint is METADATA in whatever it is wrapped; else a special class inside is told
    before that of the wrapping (``::127.0.0.1`` is LOOPBACK, ``2002:808:808::`` TRANSITION).
    """
    kind = _table(address)
    if address.version == 4 or kind is _METADATA:
        return kind
    for value in _inside(address.value):
        inner = _table(Address(4, value))
        if inner is _METADATA:
            return inner
        if inner is not _PUBLIC:
            kind = inner
    return kind


def judge_addresses(
    addresses: Iterable[Address],
    rules: Rules,
    *,
    own: Collection[Address] = (),
    pinned: bool = False,
) -> Verdict:
    """Say whether a whole answer set may be dialled (cases 25-39).

    Call it once with everything the resolver gave (or the literal, or the service's address with
    ``pinned=True``: then only metadata and what is no host's address are refused) and dial only these. ``own`` adds addresses of
    this host read at dial time. Reasons: resolve_failed (empty), metadata_address, own_address,
    denied_address, internal_address, mixed_answer (some public, some not: case 27).
    """
    reasons = [_judge(address, rules, own, pinned=pinned) for address in addresses]
    if reasons and all(reason is _ALLOWED.reason for reason in reasons):
        return _ALLOWED
    for worst in (Reason.METADATA_ADDRESS, Reason.OWN_ADDRESS, Reason.DENIED_ADDRESS):
        if worst in reasons:
            return Verdict(allowed=False, reason=worst)
    if not reasons:
        return Verdict(allowed=False, reason=Reason.RESOLVE_FAILED)
    mixed = Reason.ALLOWED in reasons
    return Verdict(allowed=False, reason=Reason.MIXED_ANSWER if mixed else Reason.INTERNAL_ADDRESS)


_ALLOWED = Verdict(allowed=True, reason=Reason.ALLOWED)


def _judge(address: Address, rules: Rules, own: Collection[Address], *, pinned: bool) -> Reason:
    """Judge one address with all that it carries; every view must pass."""
    seen = views(address)
    kinds = [_table(view) for view in seen]
    if _METADATA in kinds:
        return Reason.METADATA_ADDRESS
    if pinned:
        return _ALLOWED.reason if _NEVER.isdisjoint(kinds) else Reason.INTERNAL_ADDRESS
    for view in seen:
        if view in rules.own_addresses or (own and view in own):
            return Reason.OWN_ADDRESS
    for cidr in rules.deny_cidrs:
        if any(map(cidr.holds, seen)):
            return Reason.DENIED_ADDRESS
    for view, kind in zip(seen, kinds, strict=True):
        if kind is not _PUBLIC and (kind in _NEVER or not _opened(view, rules)):
            return Reason.INTERNAL_ADDRESS
    return _ALLOWED.reason


def _opened(address: Address, rules: Rules) -> bool:
    return any(cidr.holds(address) for cidr in rules.unsafe_allow_cidrs)
