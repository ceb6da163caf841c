"""Rules compiled for look-up, and the decision itself (cases 17-22, 62, 63, 66, 69, 96).

A host is found by one dictionary look-up for its exact name and one per label for the wildcards above it; nothing is
scanned. Wildcards are keyed with their leading dot, so ``notallowed.com`` can never meet ``allowed.com`` (case 18).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from stockade.egress.gate._glob import compile_glob
from stockade.egress.gate._host import parse_host
from stockade.egress.gate._path import ambiguous, overrides_method
from stockade.egress.gate._reason import Malformed, Reason, Verdict
from stockade.egress.gate._request import Request, Way

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stockade.egress.gate._address import Address

SERVICE_ZONE = "stockade.internal"
_SERVICE_SUFFIX = "." + SERVICE_ZONE
_LOCALHOST = "localhost"  # RFC 6761 section 6.3: it and all below it mean this host
_LOCALHOST_SUFFIX = ".localhost"
_TLS_PORT = 443


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A host rule as plain values. None means any: methods, paths, and (deny rules only) ports."""

    host: str
    methods: tuple[str, ...] | None
    paths: tuple[str, ...] | None
    ports: tuple[int, ...] | None
    line: int


@dataclass(frozen=True, slots=True)
class ServiceRule:
    """An internal endpoint: reached as ``http://<name>.stockade.internal:<port>``, dialled at ``address:port``."""

    name: str
    address: Address
    port: int
    methods: tuple[str, ...]
    paths: tuple[str, ...]
    line: int


class _Refusal(NamedTuple):
    """Why an allow rule does not take a request; the highest ``rank`` came closest and is told."""

    rank: int
    verdict: Verdict


def _refusal(rank: int, reason: Reason) -> _Refusal:
    return _Refusal(rank, Verdict(allowed=False, reason=reason))


_OWN = Verdict(allowed=False, reason=Reason.OWN_ADDRESS)
_HOST = _refusal(0, Reason.HOST_NOT_ALLOWED)
_PORT = _refusal(1, Reason.PORT_NOT_ALLOWED)
_INSPECTION = _refusal(2, Reason.INSPECTION_REQUIRED)
_METHOD = _refusal(3, Reason.METHOD_NOT_ALLOWED)
_PATH = _refusal(4, Reason.PATH_NOT_ALLOWED)
_CONNECT = Way.CONNECT  # a look-up on an enum's class is slow


class _Compiled:
    """One rule, ready to be asked."""

    __slots__ = ("allowed", "denied", "inspect", "methods", "paths", "ports", "tunnel")

    def __init__(
        self,
        label: str,
        methods: tuple[str, ...] | None,
        paths: tuple[str, ...] | None,
        ports: tuple[int, ...] | None,
        *,
        fold: bool = False,
        wildcard: bool = False,
        pinned: Address | None = None,
    ) -> None:
        self.methods = None if methods is None else frozenset(methods)
        self.paths = None if paths is None else tuple(compile_glob(glob, fold=fold) for glob in paths)
        self.ports = None if ports is None else frozenset(ports)
        self.tunnel = methods is None and paths is None
        self.allowed = Verdict(True, Reason.ALLOWED, label, wildcard=wildcard, pinned=pinned)
        self.denied = Verdict(False, Reason.DENIED_BY_RULE, label)
        self.inspect = Verdict(False, Reason.INSPECTION_REQUIRED, label)

    def refuses(self, request: Request) -> _Refusal | None:
        """Return why this rule does not take a plain request to one of its ports, None if it does."""
        methods, paths = self.methods, self.paths
        if methods is not None:
            if request.method not in methods:
                return _METHOD
            if request.query and overrides_method(request.query):
                return _METHOD
        if paths is not None:
            path = request.path
            if ambiguous(path) or not any(glob.fullmatch(path) for glob in paths):
                return _PATH
        return None

    def meets(self, request: Request) -> bool:
        """Say whether a deny rule meets a plain request to one of its ports; what is doubtful is met."""
        methods, paths = self.methods, self.paths
        if methods is not None and request.method not in methods:
            return bool(request.query) and overrides_method(request.query or "")
        if paths is not None and not ambiguous(request.path):
            return any(glob.fullmatch(request.path) for glob in paths)
        return True


class _Hit:
    """The rules of one host pattern."""

    __slots__ = ("allow", "deny")

    def __init__(self) -> None:
        self.allow: tuple[_Compiled, ...] = ()
        self.deny: tuple[_Compiled, ...] = ()


class Index:
    """The compiled form of a rollout's rules. Raises ValueError for a rule that is none."""

    __slots__ = ("exact", "own_names", "services", "suffixes")

    def __init__(
        self,
        allow: Iterable[Rule],
        deny: Iterable[Rule],
        services: Iterable[ServiceRule],
        own_names: frozenset[str],
    ) -> None:
        self.exact: dict[str, _Hit] = {}
        self.suffixes: dict[str, _Hit] = {}
        self.own_names = own_names | {_LOCALHOST}
        self.services: dict[str, tuple[_Compiled, ...]] = {}
        for rule in allow:
            if not rule.ports:
                raise ValueError(f"the allow rule for {rule.host} has no ports")
            self._hit(rule).allow += (_compile("allow", rule),)
        for rule in deny:
            self._hit(rule).deny += (_compile("deny", rule),)
        for service in services:
            name = service.name + _SERVICE_SUFFIX
            self.services[name] = (*self.services.get(name, ()), _compile_service(service))

    def _hit(self, rule: Rule) -> _Hit:
        name = rule.host.removeprefix("*.")
        try:
            wire = f"[{name}]" if ":" in name else name
            host = parse_host(wire.encode("ascii"))
        except (Malformed, UnicodeError) as error:
            raise ValueError(f"not a host pattern: {rule.host!r}: {error}") from None
        if name == rule.host:
            return self.exact.setdefault(host.text, _Hit())
        if host.address is not None:
            raise ValueError(f"a wildcard over an address: {rule.host!r}")
        return self.suffixes.setdefault("." + host.text, _Hit())

    def find(self, request: Request) -> list[_Hit]:
        """Return the rules whose pattern matches, the exact name's first; addresses match exactly only."""
        host = request.destination.host
        name = host.text
        hit = self.exact.get(name)
        hits = [] if hit is None else [hit]
        suffixes = self.suffixes
        if suffixes and host.address is None:
            dot = name.find(".")
            while dot >= 0:
                hit = suffixes.get(name[dot:])
                if hit is not None:
                    hits.append(hit)
                dot = name.find(".", dot + 1)
        return hits


def _compile(kind: str, rule: Rule) -> _Compiled:
    label = f"{kind} {rule.host} line {rule.line}" if rule.line else f"{kind} {rule.host}"
    wildcard = rule.host.startswith("*.")
    return _Compiled(label, rule.methods, rule.paths, rule.ports, fold=kind == "deny", wildcard=wildcard)


def _compile_service(service: ServiceRule) -> _Compiled:
    label = f"service {service.name} line {service.line}" if service.line else f"service {service.name}"
    return _Compiled(label, service.methods, service.paths, (service.port,), pinned=service.address)


def decide_by(index: Index, request: Request) -> Verdict:
    """Decide; the order and the reasons are told at :func:`decide`."""
    name = request.destination.host.text
    if name in index.own_names or name.endswith(_LOCALHOST_SUFFIX):
        return _OWN
    if name.endswith(_SERVICE_SUFFIX) or name == SERVICE_ZONE:
        return _decide_service(index.services.get(name, ()), request)
    hits = index.find(request)
    if not hits:
        return _HOST.verdict
    for hit in hits:
        if hit.deny:
            verdict = _denied(hit.deny, request)
            if verdict is not None:
                return verdict
    return _allowed(hits, request)


def _denied(rules: tuple[_Compiled, ...], request: Request) -> Verdict | None:
    connect = request.destination.way is _CONNECT
    for rule in rules:
        if rule.ports is not None and request.destination.port not in rule.ports:
            continue
        if connect:
            return rule.denied if rule.tunnel else rule.inspect
        if rule.meets(request):
            return rule.denied
    return None


def _allowed(hits: list[_Hit], request: Request) -> Verdict:
    """Return the verdict of the first allow rule that takes the request, else the reason that came closest."""
    where = request.destination
    port, connect = where.port, where.way is _CONNECT
    closest = _HOST
    for hit in hits:
        for rule in hit.allow:
            if rule.ports is None or port not in rule.ports or (port == _TLS_PORT and not connect):
                refusal: _Refusal | None = _PORT
            elif connect:
                refusal = None if rule.tunnel else _INSPECTION
            else:
                refusal = rule.refuses(request)
            if refusal is None:
                return rule.allowed
            if refusal.rank > closest.rank:
                closest = refusal
    return closest.verdict


def _decide_service(rules: tuple[_Compiled, ...], request: Request) -> Verdict:
    closest = _HOST
    for rule in rules:
        if rule.ports is None or request.destination.port not in rule.ports:
            refusal: _Refusal | None = _PORT
        elif request.destination.way is _CONNECT:
            refusal = _INSPECTION
        else:
            refusal = rule.refuses(request)
        if refusal is None:
            return rule.allowed
        if refusal.rank > closest.rank:
            closest = refusal
    return closest.verdict
