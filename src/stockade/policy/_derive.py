"""What follows from a policy: its digest, its effective form, its rules as rows."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from stockade.policy._base import UNREAD
from stockade.policy._models import Egress, Policy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from stockade.policy._rules import DenyRule, HostRule


def effective(policy: Policy, *, network: bool) -> Policy:
    """Return the policy that holds for one sandbox; without network (grading) no host and no service is left."""
    if network:
        return policy
    return policy.model_copy(update={"egress": Egress(limits=policy.egress.limits), "services": ()})


def policy_digest(policy: Policy) -> str:
    """Return ``sha256:<hex>`` over the canonical JSON (RFC 8785) of the rules.

    Comments, layout and line numbers do not count; every value does, given or default, and so does the order.
    """
    data = _canonical(policy.model_dump(mode="json"))
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _canonical(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _canonical(one) for key, one in value.items() if key not in UNREAD}
    if isinstance(value, list):
        return [_canonical(one) for one in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)  # RFC 8785 §3.2.2.3 writes 600.0 as 600
    return value


class RowKind(StrEnum):
    """What an effective rule is."""

    ALLOW = "allow"
    DENY = "deny"
    SERVICE = "service"
    MOUNT = "mount"


@dataclass(frozen=True, slots=True)
class Row:
    """One effective rule in plain words; None means *any*.

    ``host`` is the target directory for a mount; ``tunnel`` tells whether opaque TLS may pass; ``line`` is 0 for
    rules made in code, and counts in the file of the preset that ``source`` names, if one does.
    """

    kind: RowKind
    host: str
    ports: tuple[int, ...] | None
    methods: tuple[str, ...] | None
    paths: tuple[str, ...] | None
    tunnel: bool
    line: int
    note: str = ""
    source: str = ""


def explain(policy: Policy) -> list[Row]:
    """Return the effective rules in the order in which they are judged: denials, allowances, services, mounts."""
    return [*_denied(policy), *_allowed(policy), *_services(policy), *_mounts(policy)]


def unsafe_options(policy: Policy) -> tuple[str, ...]:
    """Return a line for each dangerous option that the policy takes; every report shows them."""
    return tuple(
        f"unsafe_many_owners {rule.host}: " + (f"line {rule.source_line}" if rule.source_line else "a rule from code")
        for rule in policy.egress.allow
        if rule.unsafe_many_owners
    )


def _denied(policy: Policy) -> Iterator[Row]:
    for rule in policy.egress.deny:
        yield Row(
            *(RowKind.DENY, rule.host.text, rule.ports, rule.methods, _texts(rule), False, rule.source_line),
            note=_query(rule),
            source=rule.source_name,
        )


def _allowed(policy: Policy) -> Iterator[Row]:
    for rule in policy.egress.allow:
        methods = rule.accepted_methods
        yield Row(
            *(RowKind.ALLOW, rule.host.text, rule.ports, methods, _texts(rule), rule.tunnel, rule.source_line),
            note="; ".join(_notes(rule)),
            source=rule.source_name,
        )


def _notes(rule: HostRule) -> Iterator[str]:
    if rule.tcp:
        yield "raw bytes: neither TLS nor names are looked at"
    elif rule.tunnel:
        yield "TLS is not looked into: any method, any path"
    else:
        yield "inspected: each request is decided on its own"
    if rule.query:
        yield _query(rule)
    said = {
        "read_only": "no body may be sent",
        "websocket": "WebSocket may be used",
        "strip_credentials": "the client's own credentials are removed",
        "store": "answers are kept and served again",
        "encoded_slash": "%2F stays as it is written",
        "unsafe_many_owners": "UNSAFE: the host belongs to many owners",
    }
    yield from (text for name, text in said.items() if getattr(rule, name))
    if rule.credential is not None:
        yield f"the credential {rule.credential} is added outside the sandbox"
    if rule.ech is not None:
        yield f"encrypted server names: {rule.ech}"
    bounds = {} if rule.limits is None else rule.limits.model_dump(exclude_none=True)
    if rule.query_bytes is not None:
        bounds["query_bytes"] = rule.query_bytes
    yield from (f"{name} at most {value}" for name, value in bounds.items())


def _query(rule: HostRule | DenyRule) -> str:
    return "" if rule.query is None else "query " + "&".join(f"{name}={value}" for name, value in rule.query.items())


def _services(policy: Policy) -> Iterator[Row]:
    for one in policy.services:
        paths = tuple(glob.text for glob in one.paths)
        note = f"at {one.address}"
        yield Row(RowKind.SERVICE, one.host, (one.port,), one.methods, paths, False, one.source_line, note)


def _mounts(policy: Policy) -> Iterator[Row]:
    for mount in policy.mounts:
        yield Row(RowKind.MOUNT, mount.target, (), (), (), False, mount.source_line, f"read-only from {mount.source}")


def _texts(rule: HostRule | DenyRule) -> tuple[str, ...] | None:
    return None if rule.paths is None else tuple(glob.text for glob in rule.paths)
