"""The models of a policy: frozen, strict, closed. An invalid policy cannot be built, not even in code.

Field names are those of the YAML file, except where a unit is spelt out (``wall`` in the file, ``wall_s`` here).
``source_line`` is the line of the file that a rule came from (0 where it came from code); it is carried for people
and is no part of :func:`~stockade.policy.policy_digest`.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import re
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic.json_schema import SkipJsonSchema

from stockade.policy import _conflicts
from stockade.policy._addresses import AddressField, is_local, refuse_metadata
from stockade.policy._errors import BadValue, found, shown
from stockade.policy._hosts import HostPattern, HostPatternField
from stockade.policy._paths import PathGlobField, parse_mount_source, parse_mount_target
from stockade.policy._suffixes import holds_shared, is_shared
from stockade.policy._values import ByteCount, Line, Method, Port, Seconds, distinct

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SERVICE_ZONE = "stockade.internal"
"""Services are names in this zone; host rules never reach into it."""


def _exact_version(value: object) -> object:
    if type(value) is not int:  # True and 1.0 equal 1
        raise BadValue(f"{found(value)} is not a version of this format", hint="this stockade reads version 1")
    return value


Version = Annotated[Literal[1], BeforeValidator(_exact_version)]
SourceLine = Annotated[SkipJsonSchema[int], Field(ge=0, repr=False)]
Methods = Annotated[tuple[Method, ...], Field(max_length=32), AfterValidator(distinct)]
Paths = Annotated[tuple[PathGlobField, ...], Field(max_length=200), AfterValidator(distinct)]
Ports = Annotated[tuple[Port, ...], Field(max_length=64), AfterValidator(distinct)]


class StrictModel(BaseModel):
    """Base of everything that is read from a file: frozen, no unknown keys, no conversion between types."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, validate_by_name=True, validate_by_alias=True, allow_inf_nan=False
    )

    reserved_keys: ClassVar[frozenset[str]] = frozenset()
    """Keys that a later version will give a meaning; until then they are refused by this name."""


class _Rule(StrictModel):
    host: HostPatternField
    methods: Methods | None = None
    paths: Paths | None = None

    @field_validator("host")
    @classmethod
    def _not_a_service(cls, host: HostPattern) -> HostPattern:
        if host.name == SERVICE_ZONE or host.name.endswith("." + SERVICE_ZONE):
            hint = "list the service under 'services'; it needs no host rule"
            raise BadValue(f"{SERVICE_ZONE} is the zone of services", hint=hint)
        return host


class HostRule(_Rule):
    """A host that a rollout may reach; what is not listed is denied.

    ``methods`` and ``paths`` None mean any; a rule with either is judged request by request and serves plain HTTP
    only, because what happens inside a TLS tunnel cannot be seen.
    """

    ports: Ports = (443,)
    source_line: SourceLine = 0

    @property
    def tunnel(self) -> bool:
        """Whether CONNECT (an opaque TLS tunnel) is allowed."""
        return self.methods is None and self.paths is None

    @model_validator(mode="after")
    def _not_too_wide(self) -> Self:
        if self.host.is_address:
            self._check_address()
        elif self.host.is_suffix:
            _check_wildcard(self.host)
        elif is_shared(self.host.name):
            self._check_shared()
        return self

    def _check_address(self) -> None:
        address = ipaddress.ip_address(self.host.text)
        try:
            refuse_metadata(address)
        except BadValue as error:
            raise BadValue(error.message, hint=error.hint, loc=("host",)) from None
        if is_local(address):
            hint = "an internal endpoint belongs under 'services'"
            raise BadValue(f"{address} is an internal address", hint=hint, loc=("host",))
        if "ports" not in self.model_fields_set:
            hint = f"add 'ports: [443]' to the rule for {address}"
            raise BadValue("a rule for an address must list its ports", hint=hint, loc=("host",))

    def _check_shared(self) -> None:
        if "." not in self.host.name:
            hint = "write the full name with its domain"
            raise BadValue(f"{self.host} has no domain", hint=hint, loc=("host",))
        if self.paths is None or not all(glob.first_segment_is_literal for glob in self.paths):
            hint = "write the full name of one site or bucket, or paths that start with one bucket"
            raise BadValue(f"{self.host} is shared by many owners", hint=hint, loc=("host",))


def _check_wildcard(host: HostPattern) -> None:
    if is_shared(host.name):
        hint = "write the names below it that you mean"
        raise BadValue(f"anybody can own a name under {host.text}", hint=hint, loc=("host",))
    if holds_shared(host.name):
        hint = "a name below it is a public suffix; write longer names"
        raise BadValue(f"anybody can own some names under {host.text}", hint=hint, loc=("host",))


class DenyRule(_Rule):
    """A host that stays closed although an allow rule opens it; ``ports`` None means every port.

    A deny rule may be as wide as its author likes (``*.io``): it only ever takes away.
    """

    ports: Ports | None = None
    source_line: SourceLine = 0


class EgressLimits(StrictModel):
    """What one rollout may move, over all its connections together."""

    requests_per_minute: int = Field(default=120, ge=1, le=1_000_000)
    connections: int = Field(default=16, ge=1, le=10_000)
    bytes_out: ByteCount = MIB
    bytes_in: ByteCount = 256 * MIB
    bytes_out_per_request: ByteCount = 64 * KIB
    header_bytes: ByteCount = 64 * KIB
    header_count: int = Field(default=100, ge=1, le=10_000)
    idle_s: Seconds = Field(default=60.0, validation_alias="idle")
    total_s: Seconds = Field(default=600.0, validation_alias="total")


class Egress(StrictModel):
    """The hosts of the internet that a rollout may reach; ``deny`` beats ``allow``."""

    reserved_keys = frozenset({"mode", "deny_cidrs"})

    allow: tuple[HostRule, ...] = Field(default=(), max_length=500)
    deny: tuple[DenyRule, ...] = Field(default=(), max_length=500)
    limits: EgressLimits = EgressLimits()


class Service(StrictModel):
    """An internal endpoint by exact address and port, reached as ``http://<name>.stockade.internal:<port>/``."""

    name: str
    address: AddressField
    port: Port
    methods: Methods
    paths: Paths
    source_line: SourceLine = 0

    @field_validator("name")
    @classmethod
    def _is_label(cls, name: str) -> str:
        if not re.fullmatch(r"[a-z](?:[a-z0-9-]{0,29}[a-z0-9])?", name) or name.startswith("xn--"):
            hint = "a lower-case letter, then at most 30 letters, digits and inner hyphens"
            raise BadValue(f"{shown(name)} is not a name of a service", hint=hint)
        return name

    @property
    def host(self) -> str:
        """The name by which a sandbox reaches the service."""
        return f"{self.name}.{SERVICE_ZONE}"


class SandboxLimits(StrictModel):
    """What one sandbox may use; sizes in bytes, times in seconds."""

    backend: Literal["auto", "bubblewrap"] = "auto"
    memory: ByteCount = 2 * GIB
    cpus: float = Field(default=1.0, gt=0, le=1024)
    pids: int = Field(default=256, ge=1, le=1_000_000)
    disk: ByteCount = GIB
    inodes: int = Field(default=65_536, ge=1, le=1_000_000_000)
    wall_s: Seconds = Field(default=600.0, validation_alias="wall")
    cpu_s: Seconds = Field(default=600.0, validation_alias="cpu")
    file_size: ByteCount = 256 * MIB
    open_files: int = Field(default=1024, ge=16, le=1_048_576)
    output: ByteCount = 16 * MIB


class Mount(StrictModel):
    """A directory or file of the host that the sandbox sees, read-only."""

    source: Annotated[str, AfterValidator(parse_mount_source)]
    target: Annotated[str, AfterValidator(parse_mount_target)]
    read_only: bool = True
    source_line: SourceLine = 0

    @field_validator("read_only")
    @classmethod
    def _never_writable(cls, read_only: bool) -> bool:  # noqa: FBT001  pydantic's signature
        if not read_only:
            hint = "copy the data into the workspace instead; results are collected from there"
            raise BadValue("writable mounts do not exist in this version", hint=hint)
        return read_only


class Data(StrictModel):
    """What is known about the data that a rollout sees."""

    private: bool = False
    source_line: SourceLine = 0


class Waiver(StrictModel):
    """A person's written acceptance of a refused combination, until a date."""

    waives: Literal["trifecta"]
    person: Line
    reason: Annotated[Line, Field(min_length=10)]
    expires: dt.date
    source_line: SourceLine = 0


class Policy(StrictModel):
    """What a rollout may do. Everything left out is denied or has a small default."""

    reserved_keys = frozenset({"stages"})

    version: Version
    egress: Egress = Egress()
    services: tuple[Service, ...] = Field(default=(), max_length=64)
    sandbox: SandboxLimits = SandboxLimits()
    mounts: tuple[Mount, ...] = Field(default=(), max_length=64)
    data: Data = Data()
    waivers: tuple[Waiver, ...] = Field(default=(), max_length=16)

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        _conflicts.check_rules(self.egress.allow, self.egress.deny)
        _conflicts.check_services(self.services)
        _conflicts.check_mounts(self.mounts)
        return self
