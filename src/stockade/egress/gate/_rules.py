"""The rules of one rollout as plain values: what crosses from the agent to the worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import msgspec

from stockade.egress.gate._address import Address, Cidr
from stockade.egress.gate._budget import RuleLimits
from stockade.egress.gate._destination import Request
from stockade.egress.gate._head import HeadLimits
from stockade.egress.gate._host import Host, parse_host
from stockade.egress.gate._index import Index, decide_by, judge_name_by
from stockade.egress.gate._reason import Malformed
from stockade.egress.gate._rule import Credential, Mode, Pairs, Rule, Secret, ServiceRule, check_credentials
from stockade.egress.gate._secrets import Scanner
from stockade.egress.gate._verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stockade.policy import DenyRule, HostRule, OperatorConfig, Policy
    from stockade.policy import RuleLimits as RuleBounds
    from stockade.policy import RunLimits as RunBounds


_VERSION = 2


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Budgets of one rollout, shared by all its connections; the fields are those of the policy's ``limits``.

    ``query_bytes`` is the longest query of a request, ``names`` how many names under wildcards a rollout may use,
    ``wildcard_label`` the longest label (bytes) that a wildcard stands for: names are looked up, so they carry data
    out (case 43).
    """

    requests_per_minute: int = 120
    connections: int = 16
    bytes_out: int = 1 << 20
    bytes_in: int = 256 << 20
    bytes_out_per_request: int = 64 << 10
    header_bytes: int = 64 << 10
    header_count: int = 100
    idle_s: float = 60.0
    total_s: float = 600.0
    query_bytes: int = 4096
    names: int = 256
    wildcard_label: int = 40

    @property
    def head(self) -> HeadLimits:
        """The limits of one head."""
        return HeadLimits(self.header_bytes, self.header_count)


@dataclass(frozen=True)
class Rules:
    """What one rollout may reach; immutable. ``Rules()`` allows nothing.

    ``own_addresses`` and ``own_names`` are this host's; ``deny_cidrs`` the operator's and the policy's;
    ``unsafe_allow_cidrs`` the operator's. ``inspection`` says that there is an authority by which TLS can be
    terminated. ``credentials`` are what rules name, ``secrets`` what never leaves; neither is in a repr. ``learn`` is for
    finding out which rules are missing: see :func:`decide`.
    """

    limits: Limits = field(default_factory=Limits)
    allow: tuple[Rule, ...] = ()
    deny: tuple[Rule, ...] = ()
    services: tuple[ServiceRule, ...] = ()
    own_addresses: frozenset[Address] = frozenset()
    own_names: frozenset[str] = frozenset()
    deny_cidrs: tuple[Cidr, ...] = ()
    unsafe_allow_cidrs: tuple[Cidr, ...] = ()
    mode: Mode = Mode.LIVE
    inspection: bool = False
    credentials: tuple[Credential, ...] = field(default=(), repr=False)
    secrets: tuple[Secret, ...] = field(default=(), repr=False)
    run_limits: RuleLimits | None = None
    learn: bool = False

    def __post_init__(self) -> None:
        # Rules that cannot be compiled must not exist.
        check_credentials(self.allow, self.credentials)
        self.index  # noqa: B018
        self.scanner  # noqa: B018

    @cached_property
    def index(self) -> Index:
        """The compiled form that :func:`decide` walks."""
        return Index(
            self.allow,
            self.deny,
            self.services,
            self.own_names,
            query_bytes=self.limits.query_bytes,
            label_max=self.limits.wildcard_label,
            mode=self.mode,
            inspection=self.inspection,
            learn=self.learn,
        )

    @cached_property
    def scanner(self) -> Scanner | None:
        """Looks for ``secrets`` in what goes out; None where there are none."""
        return Scanner(self.secrets) if self.secrets else None

    @cached_property
    def rule_limits(self) -> tuple[RuleLimits, ...]:
        """The limits of those allow rules that have their own, in the order of ``Grant.limited``."""
        return tuple(rule.limits for rule in self.allow if rule.limits is not None)

    @classmethod
    def from_policy(
        cls,
        policy: Policy,
        operator: OperatorConfig,
        *,
        own_addresses: Iterable[str] = (),
        own_names: Iterable[str] = (),
        mode: Mode | None = None,
        inspection: bool = False,
        credentials: Iterable[Credential] = (),
        secrets: Iterable[Secret] = (),
        learn: bool = False,
    ) -> Rules:
        """Compile the policy and the operator's settings.

        ``own_addresses`` are the addresses of this host's interfaces (case 38; no loopback needed, zones are cut
        off), ``own_names`` its host names (case 96). ``mode`` is that of the policy if None. Raises ValueError for a
        rule that names a credential which is not among ``credentials``.
        """
        egress = policy.egress
        limits = egress.limits
        closed = dict.fromkeys((*operator.deny_cidrs, *egress.deny_cidrs))
        return cls(
            limits=Limits(**{name: getattr(limits, name) for name in Limits.__struct_fields__}),
            allow=tuple(map(_allow_rule, egress.allow)),
            deny=tuple(map(_deny_rule, egress.deny)),
            services=tuple(
                ServiceRule(
                    s.name, Address.parse(s.address), s.port, s.methods, tuple(map(str, s.paths)), s.source_line
                )
                for s in policy.services
            ),
            own_addresses=frozenset(Address.parse(text.partition("%")[0]) for text in own_addresses),
            own_names=frozenset(filter(None, map(_canonical, own_names))),
            deny_cidrs=tuple(Cidr.parse(str(network)) for network in closed),
            unsafe_allow_cidrs=tuple(Cidr.parse(str(network)) for network in operator.unsafe_allow_cidrs),
            mode=Mode(egress.mode) if mode is None else mode,
            inspection=inspection,
            credentials=tuple(credentials),
            secrets=tuple(secrets),
            run_limits=_limits(egress.run_limits),
            learn=learn,
        )

    def to_json(self) -> str:
        """Return the rules as one line of JSON; equal rules give equal text. It holds the secrets."""
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
            mode=self.mode,
            inspection=self.inspection,
            credentials=self.credentials,
            secrets=self.secrets,
            run_limits=self.run_limits,
            learn=self.learn,
        )
        return msgspec.json.encode(document).decode("utf-8")

    @classmethod
    def from_json(cls, text: str | bytes) -> Rules:
        """Return the rules of :meth:`to_json`; anything else, also an unknown key, raises ValueError (case 91).

        Equal text gives the same object while it is in use: a thousand rollouts of one policy share what is compiled.
        """
        shared = _SHARED.get(text)
        if shared is not None:
            return shared
        try:
            document = msgspec.json.decode(text, type=_Document)
        except msgspec.DecodeError as error:
            raise ValueError(f"not the rules of a rollout: {error}") from None
        if document.version != _VERSION:
            raise ValueError(f"rules of version {document.version}")
        made = cls(
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
            mode=document.mode,
            inspection=document.inspection,
            credentials=document.credentials,
            secrets=document.secrets,
            run_limits=document.run_limits,
            learn=document.learn,
        )
        _SHARED[text] = made
        return made


_SHARED: WeakValueDictionary[str | bytes, Rules] = WeakValueDictionary()


def decide(request: Request, rules: Rules, *, body: bool = False) -> Verdict:
    """Say whether ``request`` may go on to the resolver, and how; no name is looked up before (case 42).

    One order for every way in: mode off (egress_off); own names (own_address); services, by exact name, port, method
    and path; deny rules (denied_by_rule); allow rules. ``body`` says that the request brings one.

    A *request* meets rules with method, path and query, by ``http`` and ``https`` alike (case 62): never in clear to
    port 443 or with a credential, never by a tcp rule. What came closest is told: host_not_allowed, port_not_allowed,
    label_too_long, method_not_allowed, path_not_allowed, query_not_allowed, query_too_large, body_not_allowed.

    A *tunnel request* is decided by host and port. The most specific pattern that knows the port says how: a tcp rule
    RAW; a rule that needs no look inside OPAQUE; any other INSPECT, which without an authority is
    inspection_required (case 63). A deny rule that speaks of requests makes it INSPECT. Where answers are recorded or
    replayed there is no OPAQUE, and instead of RAW there is not_replayable.

    With ``Rules.learn`` a tunnel that no rule knows is INSPECT, by a grant whose rule is ``learn``: what is asked for
    inside is decided as ever, and so denied and on record. Nothing else is allowed by it, and no deny rule yields.
    """
    return decide_by(rules.index, request, body=body)


def judge_name(host: Host, rules: Rules) -> Verdict:
    """Say whether the guest may know an address for a name: whether some rule may allow it on some port (case 42).

    Reasons: allowed, egress_off, own_address, denied_by_rule (on every port), label_too_long, host_not_allowed (also
    for what is an address already). The verdict's ``wildcard`` says that the name counts against ``Limits.names``.
    With ``Rules.learn`` every name that is nobody's own and that no rule denies may have one.
    """
    return judge_name_by(rules.index, host)


def _allow_rule(rule: HostRule) -> Rule:
    return Rule(
        host=rule.host.text,
        methods=rule.methods,
        paths=_paths(rule),
        ports=rule.ports,
        line=rule.source_line,
        source=rule.source_name,
        query=_query(rule),
        tls=rule.tls,
        tcp=rule.tcp,
        read_only=rule.read_only,
        websocket=rule.websocket,
        ech=rule.ech or "",
        credential=rule.credential,
        strip_credentials=rule.strip_credentials,
        store=rule.store,
        encoded_slash=rule.encoded_slash,
        query_bytes=rule.query_bytes,
        limits=_limits(rule.limits),
    )


def _deny_rule(rule: DenyRule) -> Rule:
    return Rule(
        host=rule.host.text,
        methods=rule.methods,
        paths=_paths(rule),
        ports=rule.ports,
        line=rule.source_line,
        source=rule.source_name,
        query=_query(rule),
    )


def _paths(rule: HostRule | DenyRule) -> tuple[str, ...] | None:
    return None if rule.paths is None else tuple(map(str, rule.paths))


def _query(rule: HostRule | DenyRule) -> Pairs | None:
    return None if rule.query is None else tuple(sorted(rule.query.items()))


def _limits(limits: RuleBounds | RunBounds | None) -> RuleLimits | None:
    if limits is None:
        return None
    return RuleLimits(limits.requests_per_minute, limits.connections, limits.bytes_out, limits.bytes_in)


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
    mode: Mode
    inspection: bool
    credentials: tuple[Credential, ...]
    secrets: tuple[Secret, ...]
    run_limits: RuleLimits | None
    learn: bool
