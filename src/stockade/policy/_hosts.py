"""Host patterns: one grammar, one canonical spelling, one meaning of ``*.``.

A pattern is an exact name, ``*.`` and a name (any depth below it, never the name itself), or an exact address. All
are kept as lower-case A-labels (RFC 5890), so what is matched on the wire is compared with nothing but itself
(egress.md cases 3, 4, 8-20, 92). Names go through IDNA 2008 *without* the compatibility mapping of UTS 46, which
would turn ``１２７。0。0。1`` into an address.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from stockade.policy._addresses import embeds_ipv4
from stockade.policy._errors import BadValue, shown, text_of

_MAX_NAME = 253
_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_QUAD = re.compile(
    r"(?:(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])\.){3}(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
)
_NUMERIC = re.compile(r"[0-9]+|0x[0-9a-f]*")
_IPV6 = re.compile(r"[0-9A-Fa-f:.]+")
_EXAMPLE = "write a name like 'abc.test' or '*.files.hosts.test'"


@dataclass(frozen=True, slots=True)
class HostPattern:
    """A host pattern in canonical spelling; ``HostPattern("Bücher.example").text`` is ``xn--bcher-kva.example``.

    Raises:
        PolicyError: if the text is not a host pattern.
    """

    text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", _canonical(self.text))

    def __str__(self) -> str:
        return self.text

    @property
    def is_suffix(self) -> bool:
        """Whether the pattern begins with ``*.``."""
        return self.text.startswith("*.")

    @property
    def is_address(self) -> bool:
        """Whether the pattern is a literal IPv4 or IPv6 address."""
        return ":" in self.text or _QUAD.fullmatch(self.text) is not None

    @property
    def name(self) -> str:
        """The name without ``*.``."""
        return self.text.removeprefix("*.")

    def matches(self, host: str) -> bool:
        """Tell whether a canonical host matches: lower-case A-labels without a dot at the end, or an address."""
        if self.is_suffix:
            stem = self.text[1:]
            return len(host) > len(stem) and host.endswith(stem)
        return host == self.text

    def covers(self, other: HostPattern) -> bool:
        """Tell whether every host that ``other`` matches is matched by this pattern too."""
        if self.text == other.text:
            return True
        return self.is_suffix and not other.is_address and other.name.endswith(self.text[1:])

    def overlaps(self, other: HostPattern) -> bool:
        """Tell whether some host is matched by both."""
        return self.covers(other) or other.covers(self)


def _canonical(text: str) -> str:
    if not text_of(text):
        raise BadValue("the host is empty", hint=_EXAMPLE)
    if len(text) > _MAX_NAME + 2:
        raise BadValue(f"the host is longer than {_MAX_NAME} characters", hint=_EXAMPLE)
    if text in {"*", "*."}:
        raise BadValue("'*' would match every host", hint="name the hosts; a rule never covers all of them")
    _refuse_lookalikes(text)
    if ":" in text:
        return _ipv6(text)
    prefix, name = ("*.", text[2:]) if text.startswith("*.") else ("", text)
    if "*" in name:
        hint = "'*.' at the start stands for any names below; there is no other wildcard"
        raise BadValue(f"'*' inside the host {shown(text)}", hint=hint)
    canonical = ".".join(_label(label, text) for label in name.split("."))
    if len(canonical) > _MAX_NAME:
        raise BadValue(f"the host is longer than {_MAX_NAME} characters", hint=_EXAMPLE)
    if _NUMERIC.fullmatch(canonical.rsplit(".", 1)[-1]):
        # inet_aton reads 127.1, 0x7f.1 and 017700000001 as addresses: all but a strict quad is a disguise.
        if not _QUAD.fullmatch(canonical):
            hint = "an address is four decimal numbers without leading zeros, like 192.0.2.1"
            raise BadValue(f"{shown(text)} is an odd spelling of an address", hint=hint)
        if prefix:
            raise BadValue("a wildcard before an address", hint="list the address itself")
    return prefix + canonical


def _refuse_lookalikes(text: str) -> None:
    if "/" in text:
        hint = "drop the scheme and put the path under 'paths'"
        raise BadValue(f"{shown(text)} is a URL, not a host", hint=hint)
    if "@" in text:
        raise BadValue(f"{shown(text)} holds '@'", hint="a host has no user name; " + _EXAMPLE)
    if "[" in text or "]" in text:
        hint = "write an IPv6 address without them and the port under 'ports'"
        raise BadValue(f"{shown(text)} holds brackets", hint=hint)
    if text.endswith("."):
        raise BadValue(f"{shown(text)} ends with a dot", hint="remove it; rules are absolute names")


def _label(label: str, text: str) -> str:
    lowered = label.lower()
    if lowered.isascii() and not lowered.startswith("xn--"):
        if _LABEL.fullmatch(lowered):
            return lowered
        what = f"{shown(label)} in {shown(text)} is not" if label else f"{shown(text)} has an empty label, not"
        hint = "labels are 1 to 63 letters, digits and inner hyphens"
        raise BadValue(f"{what} a label of a host name", hint=hint)
    import idna

    try:
        encoded = idna.alabel(lowered).decode("ascii")
        idna.ulabel(encoded)
    except (ValueError, IndexError):  # idna.IDNAError is a UnicodeError, and so a ValueError
        encoded = ""
    if not _LABEL.fullmatch(encoded):
        hint = "write it in lower case and normal form (IDNA 2008), or as an A-label ('xn--...')"
        raise BadValue(f"{shown(label)} in {shown(text)} is not an internationalised label", hint=hint)
    return encoded


def _ipv6(text: str) -> str:
    if not _IPV6.fullmatch(text):
        raise BadValue(f"{shown(text)} is not a host", hint="put the port under 'ports'; an address has no zone")
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError:
        raise BadValue(f"{shown(text)} is not an IPv6 address", hint="put the port under 'ports'") from None
    if embeds_ipv4(address):
        raise BadValue(f"{shown(text)} carries an IPv4 address inside", hint="write the IPv4 address")
    if text.lower() != str(address):
        raise BadValue(f"{shown(text)} is an odd spelling of an address", hint=f"write {address} (RFC 5952)")
    return str(address)


def _parse_host(value: Any) -> HostPattern:
    return value if isinstance(value, HostPattern) else HostPattern(text_of(value))


HostPatternField = Annotated[
    HostPattern,
    PlainValidator(_parse_host),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string", "minLength": 1, "maxLength": _MAX_NAME + 2}),
]
