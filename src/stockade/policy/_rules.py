"""The rules for hosts: what may be reached, by which requests, and how much of it is seen.

A rule that says anything about requests is *inspected*: TLS is terminated outside the sandbox and each request is
decided. A rule that names a host only is *opaque*: a verified TLS tunnel. A ``tcp`` rule is *raw*: bytes as they are.
"""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from stockade.policy import _lint
from stockade.policy._addresses import is_local, refuse_metadata
from stockade.policy._base import SourceLine, SourceName, StrictModel
from stockade.policy._errors import BadValue
from stockade.policy._hosts import HostPattern, HostPatternField
from stockade.policy._paths import PathGlobField
from stockade.policy._query import QueryField
from stockade.policy._suffixes import holds_shared, is_shared
from stockade.policy._values import ByteCount, Label, Method, Port, distinct

SERVICE_ZONE = "stockade.internal"
"""Services are names in this zone; host rules never reach into it."""

Methods = Annotated[tuple[Method, ...], Field(max_length=32), AfterValidator(distinct)]
Paths = Annotated[tuple[PathGlobField, ...], Field(max_length=200), AfterValidator(distinct)]
Ports = Annotated[tuple[Port, ...], Field(max_length=64), AfterValidator(distinct)]
QueryBytes = Annotated[int, Field(ge=0, le=65_536)]

_READS = ("GET", "HEAD")
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_CLEAR_PORT = 80
_SEEN = (
    *("methods", "paths", "query", "read_only", "websocket", "credential", "strip_credentials", "store"),
    *("query_bytes", "encoded_slash"),
)
"""Keys that speak of requests, which nobody sees inside an opaque tunnel."""


class _Bounds(StrictModel):
    """What is counted beside the rollout's own limits; a key left out adds no bound."""

    requests_per_minute: int | None = Field(default=None, ge=1, le=1_000_000)
    connections: int | None = Field(default=None, ge=1, le=100_000)
    bytes_out: ByteCount | None = None
    bytes_in: ByteCount | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if all(getattr(self, name) is None for name in LIMITED):
            raise BadValue("no limit is given", hint="remove the key, or name one of " + ", ".join(LIMITED))
        return self


LIMITED = tuple(_Bounds.model_fields)
"""The names of what a rule and a run may limit."""


class RuleLimits(_Bounds):
    """What one rollout may move through one rule."""


class RunLimits(_Bounds):
    """What all rollouts of a run may move together."""


class _Rule(StrictModel):
    host: HostPatternField
    methods: Methods | None = None
    paths: Paths | None = None
    query: QueryField | None = None
    source_line: SourceLine = 0
    source_name: SourceName = ""

    @field_validator("host")
    @classmethod
    def _not_a_service(cls, host: HostPattern) -> HostPattern:
        if host.name == SERVICE_ZONE or host.name.endswith("." + SERVICE_ZONE):
            hint = "list the service under 'services'; it needs no host rule"
            raise BadValue(f"{SERVICE_ZONE} is the zone of services", hint=hint)
        return host


class HostRule(_Rule):
    """A host that a rollout may reach; what is not listed is denied.

    ``methods``, ``paths`` and ``query`` None mean any. ``ech`` None is the default of the gate: log for an exact host,
    deny under a wildcard. ``source_name`` is ``preset NAME`` for a rule of a preset, else empty.
    """

    ports: Ports = (443,)
    tls: Literal["auto", "opaque", "inspect"] = "auto"
    tcp: bool = False
    read_only: bool = False
    websocket: bool = False
    ech: Literal["allow", "log", "deny"] | None = None
    credential: Label | None = None
    strip_credentials: bool = False
    store: bool = False
    encoded_slash: bool = False
    query_bytes: QueryBytes | None = None
    limits: RuleLimits | None = None
    unsafe_many_owners: bool = False

    @property
    def accepted_methods(self) -> tuple[str, ...] | None:
        """The methods that may be used: those listed, GET and HEAD for a read-only rule without a list, else any."""
        return _READS if self.methods is None and self.read_only else self.methods

    @property
    def inspected(self) -> bool:
        """Whether every request is seen: TLS is terminated outside the sandbox."""
        return self.tls == "inspect" or bool(_set(self, _SEEN))

    @property
    def tunnel(self) -> bool:
        """Whether an opaque TLS tunnel is allowed."""
        return not self.inspected and not self.tcp

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        self._check_tls()
        self._check_reading()
        self._check_store()
        self._check_credential()
        self._not_too_wide()
        return self

    def _check_tls(self) -> None:
        if self.tcp:
            if "ports" not in self.model_fields_set:
                hint = "add 'ports: [22]' or whichever it is"
                raise BadValue("a tcp rule must list its ports", hint=hint, loc=("tcp",))
            given = _set(self, (*_SEEN, "ech")) or (("tls",) if self.tls != "auto" else ())
            if given:
                hint = f"remove {given[0]}, or tcp"
                raise BadValue(f"{given[0]} cannot be held to: a tcp rule is not looked into", hint=hint, loc=("tcp",))
        elif self.tls == "opaque" and (given := _set(self, _SEEN)):
            hint = f"remove {given[0]}, or 'tls: opaque'"
            raise BadValue(f"{given[0]} cannot be held to inside an opaque tunnel", hint=hint, loc=("tls",))

    def _check_reading(self) -> None:
        if self.read_only and self.websocket:
            hint = "remove one of the two"
            raise BadValue(
                "a WebSocket sends in both directions: not on a read_only rule", hint=hint, loc=("websocket",)
            )
        if self.read_only and not set(self.methods or ()) <= _SAFE:
            hint = "list GET, HEAD or OPTIONS only, or remove read_only"
            raise BadValue("a read_only rule lists a method that writes", hint=hint, loc=("methods",))
        if self.websocket and self.methods is not None and "GET" not in self.methods:
            hint = "add GET to methods (RFC 6455 §4.1)"
            raise BadValue("a WebSocket begins with GET, which the rule does not allow", hint=hint, loc=("websocket",))

    def _check_store(self) -> None:
        accepted = self.accepted_methods
        if self.store and accepted is not None and "GET" not in accepted:
            hint = "add GET to methods, or remove store"
            raise BadValue("only answers to GET are stored, which the rule does not allow", hint=hint, loc=("store",))
        if self.store and self.credential is not None:
            hint = "remove one of the two"
            raise BadValue("an answer to a credential must not be served to others", hint=hint, loc=("store",))

    def _check_credential(self) -> None:
        if self.credential is None:
            return
        if self.unsafe_many_owners:
            hint = "name one owner's host"
            raise BadValue("a credential would go to hosts of many owners", hint=hint, loc=("credential",))
        if _CLEAR_PORT in self.ports:
            hint = "list TLS ports only"
            raise BadValue("a credential would be sent in clear text on port 80", hint=hint, loc=("credential",))

    def _not_too_wide(self) -> None:
        if self.host.is_address:
            self._check_address()
        elif not self.unsafe_many_owners:
            if self.host.is_suffix:
                _check_wildcard(self.host)
            elif is_shared(self.host.name):
                self._check_shared()
        elif "." not in self.host.name and not self.host.is_suffix:
            self._check_shared()
        _lint.check_content(self)

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


def _set(rule: HostRule, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return those keys of ``names`` that say something; ``store: false`` says nothing."""
    return tuple(name for name in names if getattr(rule, name) is not None and getattr(rule, name) is not False)


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

    @property
    def needs_sight(self) -> bool:
        """Whether it speaks of requests, which nobody sees inside an opaque tunnel."""
        return not (self.methods is None and self.paths is None and self.query is None)
