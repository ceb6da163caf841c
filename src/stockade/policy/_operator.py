"""The operator's file: what holds for a machine whatever a rollout's policy says.

.. code-block:: yaml

    version: 1
    unsafe_allow_cidrs:
      - {cidr: 10.20.0.0/24, reason: "package mirror of the site"}
    deny_cidrs: [198.51.100.0/24]
    resolvers: ["10.20.0.2", "[fd00:20::2]:53"]
    uid_range: {first: 1879048192, count: 65536}
"""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from stockade.errors import ConfigError
from stockade.policy._addresses import UNUSABLE, IPNetwork, NetworkField, UnsafeNetworkField, contains
from stockade.policy._errors import BadValue, shown, text_of
from stockade.policy._load import load_document
from stockade.policy._models import SourceLine, StrictModel, Version
from stockade.policy._values import Line

if TYPE_CHECKING:
    from pathlib import Path

_MAX_UID = (1 << 32) - 2  # (uid_t)-1 means "no change" to setresuid(2)
_RESOLVER = re.compile(
    r"(?P<v4>[0-9.]+)(?::(?P<p4>[1-9][0-9]{0,4}))?"
    r"|(?P<v6>[0-9a-fA-F:.]*:[0-9a-fA-F:.]*)"
    r"|\[(?P<b6>[0-9a-fA-F:.]*:[0-9a-fA-F:.]*)\](?::(?P<p6>[1-9][0-9]{0,4}))?"
)
_MAX_PORT = 65_535


def parse_resolver(value: Any) -> str:
    """Return ``ip`` or ``ip:port`` (IPv6 with a port in brackets) in canonical spelling.

    Metadata addresses are accepted: on several clouds the resolver lives there, and only egress workers query it.
    """
    example = "write '10.0.0.2', '10.0.0.2:53', 'fd00::2' or '[fd00::2]:53'"
    match = _RESOLVER.fullmatch(text_of(value))
    if match is None:
        raise BadValue(f"{shown(value)} is not the address of a resolver", hint=example)
    text = match["v4"] or match["v6"] or match["b6"]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise BadValue(f"{shown(value)} is not the address of a resolver", hint=example) from None
    port = match["p4"] or match["p6"]
    if any(address in network for network in UNUSABLE) or (port is not None and int(port) > _MAX_PORT):
        raise BadValue(f"{shown(value)} cannot be asked", hint=example)
    if port is None:
        return str(address)
    return f"{address}:{port}" if address.version == 4 else f"[{address}]:{port}"


ResolverField = Annotated[str, PlainValidator(parse_resolver), WithJsonSchema({"type": "string"})]


class UnsafeCidr(StrictModel):
    """A block of a special-use range that hosts may resolve to on this machine; shown in every report."""

    cidr: UnsafeNetworkField
    reason: Annotated[Line, Field(min_length=10)]
    source_line: SourceLine = 0


class UidRange(StrictModel):
    """Unprivileged uids for sandboxes of an agent that runs as root; no account may have one of them.

    The first one is that of the egress workers. The default begins above what systemd gives to containers (0x00080000 to 0x6FFFFFFF, systemd "UIDS-GIDS").
    """

    first: int = Field(default=0x7000_0000, ge=65_536, le=_MAX_UID)
    count: int = Field(default=65_536, ge=2, le=1 << 24)

    @model_validator(mode="after")
    def _within_uid_t(self) -> Self:
        if self.first + self.count - 1 > _MAX_UID:
            hint = f"first + count must be at most {_MAX_UID + 1}"
            raise BadValue("the range ends beyond the last uid", hint=hint, loc=("count",))
        return self


class OperatorConfig(StrictModel):
    """What the operators of a machine decide."""

    version: Version
    unsafe_allow: tuple[UnsafeCidr, ...] = Field(default=(), max_length=256, validation_alias="unsafe_allow_cidrs")
    deny_cidrs: tuple[NetworkField, ...] = Field(default=(), max_length=1024)
    resolvers: tuple[ResolverField, ...] = Field(default=(), max_length=8)
    uid_range: UidRange = UidRange()

    @property
    def unsafe_allow_cidrs(self) -> tuple[IPNetwork, ...]:
        """The opened blocks without their reasons."""
        return tuple(one.cidr for one in self.unsafe_allow)

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        for index, one in enumerate(self.unsafe_allow):
            for other in self.unsafe_allow[:index]:
                if one.cidr == other.cidr:
                    _conflict(index, f"{one.cidr} is given twice")
            for denied in self.deny_cidrs:
                if contains(denied, one.cidr):
                    _conflict(index, f"{one.cidr} never takes effect: deny_cidrs holds {denied}")
        return self


def _conflict(index: int, message: str) -> None:
    raise BadValue(message, hint="keep one of the two", loc=("unsafe_allow_cidrs", index, "cidr"))


def load_operator(path: Path | None) -> OperatorConfig:
    """Read the operator's file, or return the defaults where there is none (None).

    Raises:
        ConfigError: with file, line, key and hint; also for a named file that does not exist.
    """
    if path is None:
        return OperatorConfig(version=1)
    return load_document(path, OperatorConfig, error=ConfigError)
