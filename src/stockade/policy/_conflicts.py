"""Contradictions between rules that are each right alone.

A rule that never takes effect, or that a wider one makes meaningless, tells its reader something untrue about what
is open; so it is an error, not a warning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from stockade.policy._errors import BadValue, Loc
from stockade.policy._paths import within

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    from stockade.policy._models import DenyRule, HostRule, Mount, Service

    Rule: TypeAlias = HostRule | DenyRule


def check_rules(allow: Sequence[HostRule], deny: Sequence[DenyRule]) -> None:
    """Refuse rules given twice, allow rules without effect, and deny rules that a tunnel goes around."""
    _refuse_twice("allow", allow)
    _refuse_twice("deny", deny)
    for index, rule in enumerate(allow):
        loc = ("egress", "allow", index, "host")
        wider = None if rule.tunnel else next((one for one in allow if one.tunnel and _reaches(one, rule)), None)
        if wider is not None:
            _conflict(loc, f"the narrower rule for {rule.host} has no effect: tunnels to it are open", wider)
        denied = next((one for one in deny if _shadows(one, rule)), None)
        if denied is not None:
            _conflict(loc, f"the rule for {rule.host} never takes effect: it is denied", denied)
    for index, denied in enumerate(deny):
        around = next((one for one in allow if _goes_around(one, denied)), None)
        if around is not None:
            message = "methods and paths cannot be denied inside a tunnel that is allowed"
            todo = "deny the whole host, or give the allow rule methods or paths"
            _conflict(("egress", "deny", index, "host"), message, around, todo)


def _refuse_twice(kind: str, rules: Sequence[Rule]) -> None:
    for index, rule in enumerate(rules):
        for other in rules[:index]:
            if _same(rule, other):
                _conflict(("egress", kind, index, "host"), f"the rule for {rule.host} is given twice", other)


def check_services(services: Sequence[Service]) -> None:
    """Refuse two services of one name."""
    for index, service in enumerate(services):
        for other in services[:index]:
            if service.name == other.name:
                _conflict(("services", index, "name"), f"the service {service.name!r} is given twice", other)


def check_mounts(mounts: Sequence[Mount]) -> None:
    """Refuse mounts that hide each other."""
    for index, mount in enumerate(mounts):
        for other in mounts[:index]:
            if within(mount.target, other.target) or within(other.target, mount.target):
                message = f"the target {mount.target} overlaps {other.target}"
                _conflict(("mounts", index, "target"), message, other)


def _conflict(loc: Loc, message: str, other: Rule | Service | Mount, todo: str = "keep one of the two") -> NoReturn:
    line = other.source_line
    hint = f"see line {line}; {todo}" if line else todo
    raise BadValue(message, hint=hint, loc=loc)


def _same(one: Rule, other: Rule) -> bool:
    return one.host == other.host and all(
        _as_set(getattr(one, name)) == _as_set(getattr(other, name)) for name in ("methods", "paths", "ports")
    )


def _as_set(values: tuple[object, ...] | None) -> frozenset[object] | None:
    return None if values is None else frozenset(values)


def _reaches(tunnel: HostRule, rule: HostRule) -> bool:
    return tunnel.host.covers(rule.host) and bool(set(tunnel.ports) & set(rule.ports))


def _shadows(deny: DenyRule, allow: HostRule) -> bool:
    if not deny.host.covers(allow.host):
        return False
    if deny.ports is not None and not set(allow.ports) <= set(deny.ports):
        return False
    if deny.methods is not None and not (allow.methods and set(allow.methods) <= set(deny.methods)):
        return False
    if deny.paths is None:
        return True
    wanted = allow.paths or ()
    everything = any(glob.text == "/**" for glob in deny.paths)
    return everything or (bool(wanted) and all(any(d.covers(glob) for d in deny.paths) for glob in wanted))


def _goes_around(allow: HostRule, deny: DenyRule) -> bool:
    if (deny.methods is None and deny.paths is None) or not allow.tunnel or not allow.host.overlaps(deny.host):
        return False
    return deny.ports is None or bool(set(allow.ports) & set(deny.ports))
