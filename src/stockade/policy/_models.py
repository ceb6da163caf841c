"""The models of a policy: frozen, strict, closed. An invalid policy cannot be built, not even in code.

Field names are those of the YAML file, except where a unit is spelt out (``wall`` in the file, ``wall_s`` here).
``source_line`` is the line of the file that a rule came from (0 where it came from code) and ``source_name`` says
which preset's file that is (empty: the policy itself); both are carried for people and are no part of
:func:`~stockade.policy.policy_digest`.
"""

from __future__ import annotations

import datetime as dt
import re
from typing import Annotated, Literal, NoReturn, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from stockade.policy import _conflicts, _presets
from stockade.policy._addresses import AddressField, NetworkField
from stockade.policy._base import SourceLine, StrictModel, Version
from stockade.policy._errors import BadValue, Loc, shown
from stockade.policy._paths import parse_mount_source, parse_mount_target
from stockade.policy._rules import LIMITED, SERVICE_ZONE, DenyRule, HostRule, Methods, Paths, QueryBytes, RunLimits
from stockade.policy._values import ByteCount, Line, Port, RecordingName, Seconds, unique

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
MAX_RULES = 500
"""Rules of one kind that a file may list; those of presets come on top."""


class EgressLimits(StrictModel):
    """What one rollout may move, over all its connections together."""

    requests_per_minute: int = Field(default=120, ge=1, le=1_000_000)
    connections: int = Field(default=16, ge=1, le=10_000)
    bytes_out: ByteCount = MIB
    bytes_in: ByteCount = 256 * MIB
    bytes_out_per_request: ByteCount = 64 * KIB
    header_bytes: ByteCount = 64 * KIB
    header_count: int = Field(default=100, ge=1, le=10_000)
    query_bytes: QueryBytes = 4 * KIB
    names: int = Field(default=256, ge=1, le=1_000_000)
    wildcard_label: int = Field(default=40, ge=1, le=63)
    idle_s: Seconds = Field(default=60.0, validation_alias="idle")
    total_s: Seconds = Field(default=600.0, validation_alias="total")


class Egress(StrictModel):
    """The hosts of the internet that a rollout may reach; ``deny`` beats ``allow``.

    The rules of ``presets`` stand in ``allow`` and ``deny`` before those of the file, with their ``source_name``.
    """

    mode: Literal["live", "record", "replay", "off"] = "live"
    recording: RecordingName = "default"
    presets: Annotated[tuple[_presets.PresetName, ...], AfterValidator(unique)] = ()
    allow: tuple[HostRule, ...] = Field(default=(), max_length=2 * MAX_RULES, json_schema_extra={"maxItems": MAX_RULES})
    deny: tuple[DenyRule, ...] = Field(default=(), max_length=2 * MAX_RULES, json_schema_extra={"maxItems": MAX_RULES})
    limits: EgressLimits = EgressLimits()
    run_limits: RunLimits | None = None
    deny_cidrs: Annotated[tuple[NetworkField, ...], Field(max_length=1024), AfterValidator(unique)] = ()

    @field_validator("allow", "deny")
    @classmethod
    def _not_too_many(cls, rules: tuple[HostRule | DenyRule, ...]) -> tuple[HostRule | DenyRule, ...]:
        if sum(not rule.source_name for rule in rules) > MAX_RULES:
            raise BadValue("the list is too long", hint=f"list at most {MAX_RULES}")
        return rules

    @model_validator(mode="after")
    def _with_presets(self) -> Self:
        """Put in the rules of the presets, unless they are there already: a policy is also read back from JSON."""
        there = {rule.source_name for rule in (*self.allow, *self.deny)}
        found = [preset for name in self.presets if (preset := _presets.load_preset(name)).source_name not in there]
        if found:
            allow = (*(rule for preset in found for rule in preset.allow), *self.allow)
            deny = (*(rule for preset in found for rule in preset.deny), *self.deny)
            # The model is frozen for its users; here it is still being made.
            object.__setattr__(self, "allow", allow)
            object.__setattr__(self, "deny", deny)
        return self

    @model_validator(mode="after")
    def _bounds_have_effect(self) -> Self:
        for index, rule in enumerate(rule for rule in self.allow if not rule.source_name):
            given = {} if rule.limits is None else {name: getattr(rule.limits, name) for name in LIMITED}
            for name, value in given.items():
                if value is not None and value > getattr(self.limits, name):
                    _unbounded(("allow", index, "limits", name), name, getattr(self.limits, name))
            if rule.query_bytes is not None and rule.query_bytes > self.limits.query_bytes:
                _unbounded(("allow", index, "query_bytes"), "query_bytes", self.limits.query_bytes)
        return self


def _unbounded(loc: Loc, name: str, bound: int) -> NoReturn:
    hint = f"raise egress.limits.{name} too, or write at most {bound}"
    raise BadValue(f"{name} of the rule never takes effect: egress.limits.{name} is {bound}", hint=hint, loc=loc)


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
