"""The rules of one rollout as plain values: what crosses from the agent to the worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from stockade.egress.gate._address import Address, Cidr
from stockade.egress.gate._head import HeadLimits
from stockade.egress.gate._host import parse_host
from stockade.egress.gate._index import Index, Rule, ServiceRule, decide_by
from stockade.egress.gate._reason import Malformed, Verdict
from stockade.egress.gate._request import Request

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stockade.policy import DenyRule, HostRule, OperatorConfig, Policy

_VERSION = 1


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Budgets of one rollout, shared by all its connections; the fields are those of the policy's ``limits``."""

    requests_per_minute: int = 120
    connections: int = 16
    bytes_out: int = 1 << 20
    bytes_in: int = 256 << 20
    bytes_out_per_request: int = 64 << 10
    header_bytes: int = 64 << 10
    header_count: int = 100
    idle_s: float = 60.0
    total_s: float = 600.0

    @property
    def head(self) -> HeadLimits:
        """The limits of one head."""
        return HeadLimits(self.header_bytes, self.header_count)


@dataclass(frozen=True)
class Rules:
    """What one rollout may reach; immutable. ``Rules()`` allows nothing.

    ``own_addresses`` and ``own_names`` are this host's; ``deny_cidrs`` and ``unsafe_allow_cidrs`` the operator's.
    """

    limits: Limits = field(default_factory=Limits)
    allow: tuple[Rule, ...] = ()
    deny: tuple[Rule, ...] = ()
    services: tuple[ServiceRule, ...] = ()
    own_addresses: frozenset[Address] = frozenset()
    own_names: frozenset[str] = frozenset()
    deny_cidrs: tuple[Cidr, ...] = ()
    unsafe_allow_cidrs: tuple[Cidr, ...] = ()

    def __post_init__(self) -> None:
        self.index  # noqa: B018  rules that cannot be compiled must not exist

    @cached_property
    def index(self) -> Index:
        """The compiled form that :func:`decide` walks."""
        return Index(self.allow, self.deny, self.services, self.own_names)

    @classmethod
    def from_policy(
        cls,
        policy: Policy,
        operator: OperatorConfig,
        *,
        own_addresses: Iterable[str] = (),
        own_names: Iterable[str] = (),
    ) -> Rules:
        """Compile the policy and the operator's settings.

        ``own_addresses`` are the addresses of this host's interfaces (case 38; no loopback needed, zones are cut
        off), ``own_names`` its host names (case 96).
        """
        limits = policy.egress.limits
        return cls(
            limits=Limits(**{name: getattr(limits, name) for name in Limits.__struct_fields__}),
            allow=tuple(map(_rule, policy.egress.allow)),
            deny=tuple(map(_rule, policy.egress.deny)),
            services=tuple(
                ServiceRule(
                    s.name, Address.parse(s.address), s.port, s.methods, tuple(map(str, s.paths)), s.source_line
                )
                for s in policy.services
            ),
            own_addresses=frozenset(Address.parse(text.partition("%")[0]) for text in own_addresses),
            own_names=frozenset(filter(None, map(_canonical, own_names))),
            deny_cidrs=tuple(Cidr.parse(str(network)) for network in operator.deny_cidrs),
            unsafe_allow_cidrs=tuple(Cidr.parse(str(network)) for network in operator.unsafe_allow_cidrs),
        )

    def to_json(self) -> str:
        """Return the rules as one line of ASCII JSON; equal rules give equal text."""
        document = _Document(
            version=_VERSION,
            limits=self.limits,
            allow=self.allow,
            deny=self.deny,
            services=tuple(
                _ServiceDocument(s.name, str(s.address), s.port, s.methods, s.paths, s.line) for s in self.services
            ),
            own_addresses=tuple(map(str, sorted(self.own_addresses))),
            own_names=tuple(sorted(self.own_names)),
            deny_cidrs=tuple(map(str, self.deny_cidrs)),
            unsafe_allow_cidrs=tuple(map(str, self.unsafe_allow_cidrs)),
        )
        return msgspec.json.encode(document).decode("utf-8")

    @classmethod
    def from_json(cls, text: str | bytes) -> Rules:
        """Return the rules of :meth:`to_json`; anything else, also an unknown key, raises ValueError (case 91)."""
        try:
            document = msgspec.json.decode(text, type=_Document)
        except msgspec.DecodeError as error:
            raise ValueError(f"not the rules of a rollout: {error}") from None
        if document.version != _VERSION:
            raise ValueError(f"rules of version {document.version}")
        return cls(
            limits=document.limits,
            allow=document.allow,
            deny=document.deny,
            services=tuple(
                ServiceRule(s.name, Address.parse(s.address), s.port, s.methods, s.paths, s.line)
                for s in document.services
            ),
            own_addresses=frozenset(map(Address.parse, document.own_addresses)),
            own_names=frozenset(document.own_names),
            deny_cidrs=tuple(map(Cidr.parse, document.deny_cidrs)),
            unsafe_allow_cidrs=tuple(map(Cidr.parse, document.unsafe_allow_cidrs)),
        )


def decide(request: Request, rules: Rules) -> Verdict:
    """Say whether ``request`` may go on to the resolver; no name is looked up before (case 42).

    In this order: own names (own_address); services, by exact name, port, method and path; deny rules; allow rules.
    CONNECT is decided by host and port, and where a rule that matches names methods or paths nothing inside a tunnel
    could be held to it: inspection_required (case 63). Plain HTTP meets the same rules with method and path (case
    62), but never to port 443, where a clear-text request has no business. Reasons: allowed, own_address,
    host_not_allowed, port_not_allowed, method_not_allowed, path_not_allowed, inspection_required, denied_by_rule.
    """
    return decide_by(rules.index, request)


def _rule(rule: HostRule | DenyRule) -> Rule:
    paths = None if rule.paths is None else tuple(map(str, rule.paths))
    return Rule(rule.host.text, rule.methods, paths, rule.ports, rule.source_line)


def _canonical(name: str) -> str | None:
    """Return a host name as the wire has it, None for one that no request can name."""
    try:
        return parse_host(name.encode("ascii", "replace")).text
    except Malformed:
        return None


class _ServiceDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    address: str
    port: int
    methods: tuple[str, ...]
    paths: tuple[str, ...]
    line: int


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    limits: Limits
    allow: tuple[Rule, ...]
    deny: tuple[Rule, ...]
    services: tuple[_ServiceDocument, ...]
    own_addresses: tuple[str, ...]
    own_names: tuple[str, ...]
    deny_cidrs: tuple[str, ...]
    unsafe_allow_cidrs: tuple[str, ...]
