"""The addresses that a policy or an operator may name: canonical spelling, and never a metadata service.

This is not the table by which traffic is judged (that is the gate's, with every special-use range): here only what
no configuration may open is refused, early and with a line number. ``ipaddress.is_*`` decides nothing: its answers
differ between Python versions (egress.md cases 31-37).
"""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any, Final, TypeAlias

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from stockade.policy._errors import BadValue, shown, text_of

IPAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
IPNetwork: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network


def _networks(*texts: str) -> tuple[IPNetwork, ...]:
    return tuple(ipaddress.ip_network(text) for text in texts)


METADATA: Final = _networks(
    *("169.254.0.0/16", "fe80::/10"),  # link-local: 169.254.169.254, 169.254.170.2 (ECS), and whatever comes next
    "100.100.100.200/32",  # Alibaba Cloud
    "168.63.129.16/32",  # Azure WireServer
    "192.0.0.192/32",  # Oracle Cloud
    "fd00:ec2::/32",  # AWS: fd00:ec2::254 (metadata), ::23 (pod identity), ::253 (resolver)
    "fd20:ce::254/128",  # Google Cloud
)
"""Where clouds hand out credentials; no policy and no operator may open them (egress.md cases 27, 30, 37)."""

UNUSABLE: Final = _networks(
    *("0.0.0.0/8", "224.0.0.0/4", "240.0.0.0/4", "::/128", "ff00::/8"),  # "this host" reaches loopback on Linux
)
LOOPBACK: Final = _networks("127.0.0.0/8", "::1/128")
LOCAL: Final = _networks("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "::1/128", "fc00::/7")
"""Loopback, RFC 1918 and ULA: a service there is not *external communication* by itself."""

_EMBEDDING: Final = _networks(
    *("::/96", "::ffff:0:0/96", "::ffff:0:0:0/96"),  # compatible, mapped (RFC 4291 §2.5.5), translated (RFC 2765)
    *("64:ff9b::/96", "64:ff9b:1::/48"),  # NAT64 (RFC 6052, RFC 8215)
    *("2002::/16", "2001::/32"),  # 6to4 (RFC 3056), Teredo (RFC 4380)
)
_ISATAP = 0x5EFE


def embeds_ipv4(address: ipaddress.IPv6Address) -> bool:
    """Tell whether an IPv6 address carries an IPv4 one in a known form (other than ``::`` and ``::1``)."""
    if int(address) <= 1:
        return False
    if int(address) >> 32 & 0xFFFF == _ISATAP and int(address) >> 48 & 0xFCFF == 0:  # RFC 5214 §6.1
        return True
    return any(address in network for network in _EMBEDDING)


def is_metadata(address: IPAddress) -> bool:
    """Tell whether an address belongs to a cloud's metadata services or is link-local."""
    return any(address in network for network in METADATA)


def is_local(address: IPAddress) -> bool:
    """Tell whether an address is loopback, RFC 1918 or ULA."""
    return any(address in network for network in LOCAL)


def parse_address(value: Any) -> str:
    """Return a dialable IP literal in canonical spelling.

    Raises:
        PolicyError: for names, odd spellings, embedded IPv4, metadata, unspecified, multicast, reserved, broadcast.
    """
    text = text_of(value)
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        hint = "a service is an address, never a name; write 127.0.0.1 or ::1 without brackets and port"
        raise BadValue(f"{shown(text)} is not an IP address", hint=hint) from None
    if text.lower() != str(address):  # also a zone in upper case; a zone of any kind goes next
        raise BadValue(f"{shown(text)} is an odd spelling of an address", hint=f"write {address}")
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None:
            raise BadValue("an address with a zone ('%')", hint="zones name interfaces; write the address alone")
        if embeds_ipv4(address):
            raise BadValue(f"{shown(text)} carries an IPv4 address inside", hint="write the IPv4 address")
    refuse_metadata(address)
    if any(address in network for network in UNUSABLE):
        raise BadValue(
            f"{address} is unspecified, multicast, reserved or broadcast", hint="write the address of one host"
        )
    return str(address)


def refuse_metadata(address: IPAddress) -> None:
    """Raise :class:`PolicyError` for an address of :data:`METADATA`."""
    if is_metadata(address):
        hint = "it hands out the machine's credentials; it can never be opened"
        raise BadValue(f"{address} is a link-local or cloud metadata address", hint=hint)


def parse_network(value: Any) -> IPNetwork:
    """Return a CIDR block without host bits."""
    if isinstance(value, ipaddress.IPv4Network | ipaddress.IPv6Network):
        return value
    if not re.fullmatch(r"[0-9a-fA-F:.]+/[0-9]{1,3}", text_of(value)):
        raise BadValue(f"{shown(value)} is not a CIDR block", hint="write it like 10.20.0.0/16")
    try:
        network = ipaddress.ip_network(value)
    except ValueError as error:
        raise BadValue(f"{shown(value)} is not a CIDR block: {error}", hint="write it like 10.20.0.0/16") from None
    if isinstance(network, ipaddress.IPv6Network) and embeds_ipv4(network.network_address):
        raise BadValue(f"{network} carries IPv4 addresses inside", hint="write the IPv4 block; the gate unwraps")
    return network


def parse_unsafe_network(value: Any) -> IPNetwork:
    """Return a CIDR block that an operator may open: no metadata, nothing that cannot be dialled, not everything."""
    network = parse_network(value)
    for closed in (*METADATA, *UNUSABLE):
        if _overlap(network, closed):
            hint = "name the smallest block of your hosts that does not touch it"
            raise BadValue(f"{network} touches {closed}, which can never be opened", hint=hint)
    return network


def _overlap(one: IPNetwork, other: IPNetwork) -> bool:
    if isinstance(one, ipaddress.IPv4Network) and isinstance(other, ipaddress.IPv4Network):
        return one.overlaps(other)
    if isinstance(one, ipaddress.IPv6Network) and isinstance(other, ipaddress.IPv6Network):
        return one.overlaps(other)
    return False


def contains(outer: IPNetwork, inner: IPNetwork) -> bool:
    """Tell whether all of ``inner`` lies in ``outer``."""
    if isinstance(outer, ipaddress.IPv4Network) and isinstance(inner, ipaddress.IPv4Network):
        return inner.subnet_of(outer)
    if isinstance(outer, ipaddress.IPv6Network) and isinstance(inner, ipaddress.IPv6Network):
        return inner.subnet_of(outer)
    return False


_CIDR_SCHEMA = {"type": "string", "pattern": "^[0-9a-fA-F:.]+/[0-9]{1,3}$"}

AddressField = Annotated[str, PlainValidator(parse_address), WithJsonSchema({"type": "string", "format": "ip"})]
NetworkField = Annotated[
    IPNetwork,
    PlainValidator(parse_network),
    PlainSerializer(str, return_type=str),
    WithJsonSchema(_CIDR_SCHEMA),
]
UnsafeNetworkField = Annotated[
    IPNetwork,
    PlainValidator(parse_unsafe_network),
    PlainSerializer(str, return_type=str),
    WithJsonSchema(_CIDR_SCHEMA),
]
