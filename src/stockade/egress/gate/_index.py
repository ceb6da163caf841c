"""Rules compiled for look-up, and the decision itself (cases 17-22, 42, 43, 62, 63, 96).

A host is found by one dictionary look-up for its exact name and one per label for the wildcards above it; nothing is
scanned. Wildcards are keyed with their leading dot, so ``notallowed.com`` can never meet ``allowed.com`` (case 18).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stockade.egress.gate._compiled import (
    LONG_LABEL,
    NO_HOST,
    NO_PORT,
    Allowing,
    Denying,
    Refusal,
    check,
    label_of,
    of_service,
)
from stockade.egress.gate._destination import Way
from stockade.egress.gate._host import Host, parse_host
from stockade.egress.gate._reason import Malformed, Reason
from stockade.egress.gate._rule import Mode
from stockade.egress.gate._verdict import Grant, Handling, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stockade.egress.gate._destination import Request
    from stockade.egress.gate._rule import Rule, ServiceRule

SERVICE_ZONE = "stockade.internal"
_SERVICE_SUFFIX = "." + SERVICE_ZONE
_LOCALHOST = "localhost"  # RFC 6761 section 6.3: it and all below it mean this host
_LOCALHOST_SUFFIX = ".localhost"
_RESERVED = (_LOCALHOST_SUFFIX, _SERVICE_SUFFIX)
_CONNECT = "CONNECT"
_HTTPS = "https"
_BY_CONNECT = Way.CONNECT  # a look-up on an enum's class is slow

_OWN = Verdict(allowed=False, reason=Reason.OWN_ADDRESS)
_OFF = Verdict(allowed=False, reason=Reason.EGRESS_OFF)
_LEARN = Verdict(
    True, Reason.ALLOWED, "learn", wildcard=True, handling=Handling.INSPECT, grant=Grant("learn", wildcard=True)
)
"""A look into a tunnel that no rule knows: it ends here, and what is asked for inside is denied by the rules."""


class Pattern:
    """The rules of one host pattern. ``clear`` and ``secure`` hold those that take requests by ``http`` or ``https``."""

    __slots__ = ("allow", "clear", "deny", "secure")

    def __init__(self) -> None:
        self.allow: dict[int, tuple[Allowing, ...]] = {}
        self.clear: dict[int, tuple[Allowing, ...]] = {}
        self.secure: dict[int, tuple[Allowing, ...]] = {}
        self.deny: tuple[Denying, ...] = ()

    def add(self, ports: Iterable[int], rule: Allowing) -> None:
        """Add an allow rule; a tcp rule takes no request that somebody parsed."""
        for port in dict.fromkeys(ports):
            tables = [self.allow]
            if rule.raw is None:
                tables += [self.secure, self.clear] if port in rule.clear_ports else [self.secure]
            for table in tables:
                table[port] = (*table.get(port, ()), rule)


class Index:
    """The compiled form of a rollout's rules. Raises ValueError for a rule that is none."""

    __slots__ = ("exact", "label_max", "learn", "live", "off", "own_names", "reserved", "services", "sight", "suffixes")

    def __init__(
        self,
        allow: Iterable[Rule],
        deny: Iterable[Rule],
        services: Iterable[ServiceRule],
        own_names: frozenset[str],
        *,
        query_bytes: int = 4096,
        label_max: int = 40,
        mode: Mode = Mode.LIVE,
        inspection: bool = False,
        learn: bool = False,
    ) -> None:
        self.exact: dict[str, Pattern] = {}
        self.suffixes: dict[str, Pattern] = {}
        self.own_names = own_names | {_LOCALHOST}
        self.reserved = self.own_names | {SERVICE_ZONE}
        self.services: dict[str, Pattern] = {}
        self.label_max = label_max
        self.live = mode is Mode.LIVE
        self.off = mode is Mode.OFF
        self.sight = inspection
        self.learn = learn and inspection
        rules = [(rule, self._pattern(rule)) for rule in allow]
        guarded = {id(pattern) for rule, pattern in rules if rule.credential is not None}
        limited = 0
        for number, (rule, pattern) in enumerate(rules):
            check(rule)
            grant = _grant(rule, number, limited, guarded=id(pattern) in guarded)
            limited += rule.limits is not None
            pattern.add(rule.ports or (), Allowing(grant, rule, query_bytes))
        for rule in deny:
            self._pattern(rule).deny += (Denying(label_of("deny", rule), rule),)
        for service in services:
            there = self.services.setdefault(service.name + _SERVICE_SUFFIX, Pattern())
            there.add((service.port,), of_service(service, query_bytes))

    def _pattern(self, rule: Rule) -> Pattern:
        name = rule.host.removeprefix("*.")
        try:
            wire = f"[{name}]" if ":" in name else name
            host = parse_host(wire.encode("ascii"))
        except (Malformed, UnicodeError) as error:
            raise ValueError(f"not a host pattern: {rule.host!r}: {error}") from None
        if name == rule.host:
            return self.exact.setdefault(host.text, Pattern())
        if host.address is not None:
            raise ValueError(f"a wildcard over an address: {rule.host!r}")
        return self.suffixes.setdefault("." + host.text, Pattern())

    def find(self, name: str) -> list[tuple[Pattern, int]]:
        """Return the patterns that match a name or address, the exact one first.

        With each comes how many bytes of the name its wildcard stands for (0: none).
        """
        hit = self.exact.get(name)
        hits = [] if hit is None else [(hit, 0)]
        suffixes = self.suffixes
        if suffixes:
            # An address has no suffix in here: a pattern is never a number and has no colon.
            dot = name.find(".")
            while dot >= 0:
                hit = suffixes.get(name[dot:])
                if hit is not None:
                    hits.append((hit, dot))
                dot = name.find(".", dot + 1)
        return hits

    def is_own(self, name: str) -> bool:
        """Say whether a reserved name means this host (case 96); all others are services."""
        return name in self.own_names or name.endswith(_LOCALHOST_SUFFIX)

    def long_label(self, name: str, stem: int) -> bool:
        """Say whether a label that a wildcard stands for can carry more than names need (case 43)."""
        most = self.label_max
        return stem > most and max(map(len, name[:stem].split("."))) > most


def _grant(rule: Rule, number: int, limited: int, *, guarded: bool) -> Grant:
    wildcard = rule.host.startswith("*.")
    return Grant(
        rule=label_of("allow", rule),
        wildcard=wildcard,
        index=number,
        ech=rule.ech or ("deny" if wildcard else "log"),
        websocket=rule.websocket,
        credential=rule.credential,
        strip_credentials=rule.strip_credentials,
        store=rule.store,
        read_only=rule.read_only,
        limited=-1 if rule.limits is None else limited,
        guarded=guarded,
    )


def decide_by(index: Index, request: Request, *, body: bool = False) -> Verdict:
    """Decide; the order and the reasons are told at :func:`decide`."""
    if index.off:
        return _OFF
    name = request.destination.host.text
    if name in index.reserved or name.endswith(_RESERVED):
        return _OWN if index.is_own(name) else _decide_service(index, request, body=body)
    hits = index.find(name)
    if not hits:
        return _LEARN if index.learn and request.method == _CONNECT else NO_HOST.verdict
    if request.method == _CONNECT:
        return _decide_tunnel(index, request, hits)
    verdict = _denied(hits, request)
    return _allowed(index, hits, request, body=body) if verdict is None else verdict


def _denied(hits: list[tuple[Pattern, int]], request: Request) -> Verdict | None:
    port = request.destination.port
    for hit, _ in hits:
        for rule in hit.deny:
            if (rule.ports is None or port in rule.ports) and rule.meets(request):
                return rule.denied
    return None


def _allowed(index: Index, hits: list[tuple[Pattern, int]], request: Request, *, body: bool) -> Verdict:
    """Return the verdict of the first allow rule that takes the request, else the reason that came closest."""
    port, secure = request.destination.port, request.scheme == _HTTPS
    closest = NO_HOST
    for hit, stem in hits:
        rules = (hit.secure if secure else hit.clear).get(port)
        if rules is None:
            refusal = NO_PORT if hit.allow else NO_HOST
        elif stem and index.long_label(request.destination.host.text, stem):
            refusal = LONG_LABEL
        else:
            verdict, refusal = _ask(rules, request, body=body)
            if verdict is not None:
                return verdict
        if refusal.rank > closest.rank:
            closest = refusal
    return closest.verdict


def _ask(rules: tuple[Allowing, ...], request: Request, *, body: bool) -> tuple[Verdict | None, Refusal]:
    """Return the verdict of the first rule that takes the request; else the refusal that came closest."""
    closest = NO_PORT
    for rule in rules:
        refusal = rule.refuses(request, body=body)
        if refusal is None:
            return rule.taken, closest
        if refusal.rank > closest.rank:
            closest = refusal
    return None, closest


def _decide_tunnel(index: Index, request: Request, hits: list[tuple[Pattern, int]]) -> Verdict:
    """Decide how deep a tunnel is looked into: the most specific pattern that knows the port says so."""
    name, port = request.destination.host.text, request.destination.port
    unseen: Verdict | None = None
    for hit, _ in hits:
        for denying in hit.deny:
            if denying.ports is None or port in denying.ports:
                if denying.whole:
                    return denying.denied
                unseen = denying.unseen
    closest = NO_HOST
    for hit, stem in hits:
        rules = hit.allow.get(port)
        if rules is None:
            refusal = NO_PORT if hit.allow else NO_HOST
        elif stem and index.long_label(name, stem):
            refusal = LONG_LABEL
        else:
            return _depth(index, rules, unseen)
        if refusal.rank > closest.rank:
            closest = refusal
    return _LEARN if index.learn and closest is not LONG_LABEL else closest.verdict


def _depth(index: Index, rules: tuple[Allowing, ...], unseen: Verdict | None) -> Verdict:
    """Return the verdict of one pattern's rules for a port; ``unseen`` is that of a deny rule that must see requests."""
    if index.live and unseen is None:
        for rule in rules:
            if rule.raw is not None:
                return rule.raw
        for rule in rules:
            if rule.opaque is not None:
                return rule.opaque
    for rule in rules:
        if rule.raw is None:
            if index.sight:
                return rule.inspected
            return rule.unseen if unseen is None else unseen
    # Only tcp rules are left: nobody can look into them, and nobody can replay them.
    return rules[0].not_replayable if unseen is None else unseen


def _decide_service(index: Index, request: Request, *, body: bool) -> Verdict:
    """Services speak HTTP in clear, so looking into a tunnel to one needs no authority; but CONNECT means TLS."""
    pattern = index.services.get(request.destination.host.text)
    if pattern is None:
        return NO_HOST.verdict
    rules = pattern.allow.get(request.destination.port)
    if rules is None or request.scheme == _HTTPS:
        return NO_PORT.verdict
    if request.method == _CONNECT:
        return rules[0].unseen if request.destination.way is _BY_CONNECT and not index.sight else rules[0].inspected
    verdict, refusal = _ask(rules, request, body=body)
    return refusal.verdict if verdict is None else verdict


def judge_name_by(index: Index, host: Host) -> Verdict:
    """Decide; see :func:`judge_name`."""
    if index.off:
        return _OFF
    if host.address is not None:
        return NO_HOST.verdict
    name = host.text
    if name in index.reserved or name.endswith(_RESERVED):
        if index.is_own(name):
            return _OWN
        pattern = index.services.get(name)
        return NO_HOST.verdict if pattern is None else next(iter(pattern.allow.values()))[0].taken
    hits = index.find(name)
    for hit, _ in hits:
        for denying in hit.deny:
            if denying.whole and denying.ports is None:
                return denying.denied
    closest = NO_HOST
    for hit, stem in hits:
        for rules in hit.allow.values():
            if not (stem and index.long_label(name, stem)):
                return rules[0].taken
            closest = LONG_LABEL
            break
    return _LEARN if index.learn and closest is NO_HOST else closest.verdict
