"""One rule, compiled: what it says to a request, and the verdicts it gives, made once (cases 62, 63, 66, 67, 69, 82)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from stockade.egress.gate._glob import compile_glob
from stockade.egress.gate._path import ambiguous, encodes_slash
from stockade.egress.gate._query import holds, may_hold, overrides_method
from stockade.egress.gate._reason import Reason
from stockade.egress.gate._rule import Rule
from stockade.egress.gate._verdict import Grant, Handling, Verdict

if TYPE_CHECKING:
    from stockade.egress.gate._destination import Request
    from stockade.egress.gate._rule import ServiceRule


class Refusal(NamedTuple):
    """Why an allow rule does not take a request; the highest ``rank`` came closest and is told."""

    rank: int
    verdict: Verdict


def _refusal(rank: int, reason: Reason) -> Refusal:
    return Refusal(rank, Verdict(allowed=False, reason=reason))


NO_HOST = _refusal(0, Reason.HOST_NOT_ALLOWED)
NO_PORT = _refusal(1, Reason.PORT_NOT_ALLOWED)
LONG_LABEL = _refusal(2, Reason.LABEL_TOO_LONG)
_METHOD = _refusal(3, Reason.METHOD_NOT_ALLOWED)
_PATH = _refusal(4, Reason.PATH_NOT_ALLOWED)
_QUERY = _refusal(5, Reason.QUERY_NOT_ALLOWED)
_LONG_QUERY = _refusal(6, Reason.QUERY_TOO_LARGE)
_BODY = _refusal(7, Reason.BODY_NOT_ALLOWED)

_READS = ("GET", "HEAD")
_BODILESS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "TRACK"})
"""Methods whose body no server needs: with one they only carry data out (RFC 9110 section 9.3)."""
_NEVER_IMPLIED = frozenset(
    {"TRACE", "TRACK", "PRI", "CONNECT", "CONNECT-UDP", "CONNECT-IP", "CONNECT_UDP", "CONNECT_IP"}
)
"""Methods that echo what was sent or ask for a tunnel: a rule that means them names them."""
_CLEAR_PORT = 80
_TLS_PORT = 443
_ECHS = ("", "allow", "log", "deny")
_TLS = ("auto", "opaque", "inspect")
_METHOD_TOKEN = re.compile(r"[A-Z][A-Z0-9_-]{0,31}", re.ASCII)


class Allowing:
    """An allow rule or a service, ready to be asked."""

    __slots__ = (
        "_encoded_slash",
        "_methods",
        "_no_body",
        "_paths",
        "_query",
        "_query_bytes",
        "clear_ports",
        "grant",
        "inspected",
        "not_replayable",
        "opaque",
        "raw",
        "taken",
        "unseen",
    )

    def __init__(self, grant: Grant, rule: Rule, query_bytes: int) -> None:
        self.grant = grant
        methods = _READS if rule.methods is None and rule.read_only else rule.methods
        self._methods = None if methods is None else frozenset(methods)
        self._paths = _globs(rule.paths, fold=False)
        self._query = rule.query
        self._query_bytes = query_bytes if rule.query_bytes is None else min(rule.query_bytes, query_bytes)
        self._encoded_slash = rule.encoded_slash
        self._no_body = rule.read_only
        self.clear_ports = _clear_ports(rule)
        opaque = not rule.tcp and rule.tls != "inspect" and not needs_sight(rule)
        self.taken = self._verdict(Handling.REQUEST)
        self.inspected = self._verdict(Handling.INSPECT)
        self.opaque = self._verdict(Handling.OPAQUE) if opaque else None
        self.raw = self._verdict(Handling.RAW) if rule.tcp else None
        self.unseen = Verdict(allowed=False, reason=Reason.INSPECTION_REQUIRED, rule=grant.rule)
        self.not_replayable = Verdict(allowed=False, reason=Reason.NOT_REPLAYABLE, rule=grant.rule)

    def _verdict(self, handling: Handling) -> Verdict:
        grant = self.grant
        return Verdict(True, Reason.ALLOWED, grant.rule, grant.wildcard, grant.pinned, handling, grant)

    def refuses(self, request: Request, *, body: bool) -> Refusal | None:
        """Return why this rule does not take a request to one of its ports, None if it does."""
        methods, method, query = self._methods, request.method, request.query
        if methods is not None:
            if method not in methods or (query and overrides_method(query)):
                return _METHOD
        elif method in _NEVER_IMPLIED:
            return _METHOD
        path = request.path
        if "%" in path and encodes_slash(path) and not self._encoded_slash:
            return _PATH
        if self._paths is not None:
            if ambiguous(path):
                return _PATH
            for glob in self._paths:
                if glob.fullmatch(path):
                    break
            else:
                return _PATH
        if self._query is not None and not holds(query, self._query):
            return _QUERY
        if query and len(query) > self._query_bytes:
            return _LONG_QUERY
        if body and (self._no_body or (methods is not None and method in _BODILESS)):
            return _BODY
        return None


class Denying:
    """A deny rule, ready to be asked."""

    __slots__ = ("_methods", "_paths", "_query", "denied", "ports", "unseen", "whole")

    def __init__(self, label: str, rule: Rule) -> None:
        self._methods = None if rule.methods is None else frozenset(rule.methods)
        # Case is folded: a server that does not tell /Secret from /secret must not open a way around.
        self._paths = _globs(rule.paths, fold=True)
        self._query = rule.query
        self.ports = None if rule.ports is None else frozenset(rule.ports)
        self.whole = rule.methods is None and rule.paths is None and rule.query is None
        self.denied = Verdict(allowed=False, reason=Reason.DENIED_BY_RULE, rule=label)
        self.unseen = Verdict(allowed=False, reason=Reason.INSPECTION_REQUIRED, rule=label)

    def meets(self, request: Request) -> bool:
        """Say whether the rule meets a request to one of its ports; what is doubtful is met."""
        query = request.query
        other = self._methods is not None and request.method not in self._methods
        if other and not (query and overrides_method(query)):
            return False
        if self._query is not None and not may_hold(query, self._query):
            return False
        path = request.path
        if self._paths is None or ambiguous(path):
            return True
        spellings = (path, path.replace("%2F", "/")) if encodes_slash(path) else (path,)
        return any(glob.fullmatch(spelling) for glob in self._paths for spelling in spellings)


def needs_sight(rule: Rule) -> bool:
    """Say whether a rule says something that can be held to only by looking at each request (case 63)."""
    given = (rule.methods, rule.paths, rule.query, rule.credential, rule.query_bytes)
    flags = rule.read_only or rule.websocket or rule.strip_credentials or rule.store or rule.encoded_slash
    return flags or any(value is not None for value in given)


def check(rule: Rule) -> None:
    """Raise ValueError for an allow rule that cannot be meant so; the policy has refused it before."""
    where = f"the allow rule for {rule.host}"
    if not rule.ports:
        raise ValueError(f"{where} has no ports")
    if not all(0 < port < 1 << 16 for port in rule.ports):
        raise ValueError(f"{where} has a port that is none")
    if rule.tls not in _TLS or rule.ech not in _ECHS:
        raise ValueError(f"{where} has an unknown word for tls or ech")
    if (rule.tcp or rule.tls == "opaque") and needs_sight(rule):
        raise ValueError(f"{where} is not looked into, so it cannot hold requests to anything")
    if rule.tcp and rule.tls != "auto":
        raise ValueError(f"{where} is tcp and speaks of TLS")
    if rule.read_only and rule.websocket:
        raise ValueError(f"{where} is read-only and opens WebSockets")
    if not all(map(_METHOD_TOKEN.fullmatch, rule.methods or ())):
        raise ValueError(f"{where} has a method that is none")
    if rule.query_bytes is not None and rule.query_bytes < 0:
        raise ValueError(f"{where} has a negative size")


def label_of(kind: str, rule: Rule) -> str:
    """Return the name by which records and people know a rule."""
    parts = (kind, rule.host, rule.source, f"line {rule.line}" if rule.line else "")
    return " ".join(filter(None, parts))


def _clear_ports(rule: Rule) -> frozenset[int]:
    """Return the ports to which requests may go in clear text.

    Never 443, and never with a credential of the operator's; a rule that speaks of TLS means it everywhere but on 80.
    """
    if rule.credential is not None:
        return frozenset()
    ports = frozenset(rule.ports or ())
    return ports - {_TLS_PORT} if rule.tls == "auto" else ports & {_CLEAR_PORT}


def _globs(paths: tuple[str, ...] | None, *, fold: bool) -> tuple[re.Pattern[str], ...] | None:
    return None if paths is None else tuple(compile_glob(glob, fold=fold) for glob in paths)


def of_service(service: ServiceRule, query_bytes: int) -> Allowing:
    """Return a service as a rule: HTTP in clear, to one address and port."""
    label = f"service {service.name} line {service.line}" if service.line else f"service {service.name}"
    rule = Rule(service.name, service.methods, service.paths, (service.port,), service.line)
    return Allowing(Grant(label, pinned=service.address), rule, query_bytes)
