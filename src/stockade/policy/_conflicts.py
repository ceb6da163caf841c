"""Contradictions between rules that are each right alone.

A rule that never takes effect, or that a wider one makes meaningless, tells its reader something untrue about what
is open; so it is an error, not a warning. Rules of presets are measured more leniently: a policy may take away from a
preset, whose file its author cannot edit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from stockade.policy._errors import BadValue, Loc
from stockade.policy._paths import within

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    from stockade.policy._models import Mount, Service
    from stockade.policy._rules import DenyRule, HostRule

    Rule: TypeAlias = HostRule | DenyRule


def check_rules(allow: Sequence[HostRule], deny: Sequence[DenyRule]) -> None:
    """Refuse rules given twice, allow rules without effect, and deny rules that a tunnel goes around."""
    _refuse_twice("allow", allow)
    _refuse_twice("deny", deny)
    for rule in allow:
        _refuse_pointless(rule, allow, deny)
    for denied in deny:
        around = next((one for one in allow if _goes_around(one, denied)), None)
        if around is not None:
            message = "methods and paths cannot be denied inside a tunnel that is allowed"
            todo = "deny the whole host, or give the allow rule methods or paths"
            if around.tcp:
                message = "methods and paths cannot be denied on a port whose bytes are not looked into"
                todo = "deny the whole host, or remove the tcp rule"
            _conflict(denied, _loc("deny", denied, deny), message, around, todo, _loc("allow", around, allow))


def _refuse_twice(kind: str, rules: Sequence[Rule]) -> None:
    for index, rule in enumerate(rules):
        for other in rules[:index]:
            if _same(rule, other):
                message = f"the rule for {rule.host} is given twice"
                _conflict(rule, _loc(kind, rule, rules), message, other)


def _refuse_pointless(rule: HostRule, allow: Sequence[HostRule], deny: Sequence[DenyRule]) -> None:
    loc = _loc("allow", rule, allow)
    raw = None if rule.tcp else next((one for one in allow if one.tcp and _reaches(one, rule)), None)
    if raw is not None:
        message = f"the rule for {rule.host} has no effect: bytes to it go through as they are"
        _conflict(rule, loc, message, raw, there=_loc("allow", raw, allow))
    narrower = rule.inspected and not rule.tcp
    wider = next((one for one in allow if narrower and one.tunnel and _reaches(one, rule)), None)
    if wider is not None:
        message = f"the narrower rule for {rule.host} has no effect: tunnels to it are open"
        _conflict(rule, loc, message, wider, there=_loc("allow", wider, allow))
    if rule.source_name:
        return
    denied = next((one for one in deny if _shadows(one, rule)), None)
    if denied is not None:
        _conflict(rule, loc, f"the rule for {rule.host} never takes effect: it is denied", denied)


def check_services(services: Sequence[Service]) -> None:
    """Refuse two services of one name."""
    for index, service in enumerate(services):
        for other in services[:index]:
            if service.name == other.name:
                message = f"the service {service.name!r} is given twice"
                raise BadValue(message, hint=_see(other), loc=("services", index, "name"))


def check_mounts(mounts: Sequence[Mount]) -> None:
    """Refuse mounts that hide each other."""
    for index, mount in enumerate(mounts):
        for other in mounts[:index]:
            if within(mount.target, other.target) or within(other.target, mount.target):
                message = f"the target {mount.target} overlaps {other.target}"
                raise BadValue(message, hint=_see(other), loc=("mounts", index, "target"))


def _loc(kind: str, rule: Rule, rules: Sequence[Rule]) -> Loc:
    """Return where a rule stands in the file: presets bring theirs, which the file does not hold."""
    if rule.source_name:
        return ("egress", "presets")
    own = [one for one in rules if not one.source_name]
    return ("egress", kind, next(index for index, one in enumerate(own) if one is rule), "host")


def _conflict(
    rule: Rule, loc: Loc, message: str, other: Rule, todo: str = "keep one of the two", there: Loc | None = None
) -> NoReturn:
    """Blame the file's own rule where one of the two is a preset's; ``there`` is the place of ``other``."""
    if rule.source_name and not other.source_name and there is not None:
        raise BadValue(message, hint=_see(rule, todo), loc=there)
    raise BadValue(message, hint=_see(other, todo), loc=loc)


def _see(other: Rule | Service | Mount, todo: str = "keep one of the two") -> str:
    source = getattr(other, "source_name", "")
    line = f"line {other.source_line}" if other.source_line else ""
    where = " ".join(filter(None, (source, line)))
    return f"see {where}; {todo}" if where else todo


def _same(one: Rule, other: Rule) -> bool:
    return (
        (one.host, one.query) == (other.host, other.query)
        and _as_set(_methods(one)) == _as_set(_methods(other))
        and _as_set(one.paths) == _as_set(other.paths)
        and _as_set(one.ports) == _as_set(other.ports)
    )


def _as_set(values: tuple[object, ...] | None) -> frozenset[object] | None:
    return None if values is None else frozenset(values)


def _methods(rule: Rule) -> tuple[str, ...] | None:
    return getattr(rule, "accepted_methods", rule.methods)


def _reaches(wide: HostRule, rule: HostRule) -> bool:
    return wide.host.covers(rule.host) and bool(set(wide.ports) & set(rule.ports))


def _shadows(deny: DenyRule, allow: HostRule) -> bool:
    if not deny.host.covers(allow.host):
        return False
    if deny.ports is not None and not set(allow.ports) <= set(deny.ports):
        return False
    methods = allow.accepted_methods
    if deny.methods is not None and not (methods and set(methods) <= set(deny.methods)):
        return False
    if deny.query is not None and not deny.query.items() <= (allow.query or {}).items():
        return False
    if deny.paths is None:
        return True
    wanted = allow.paths or ()
    everything = any(glob.text == "/**" for glob in deny.paths)
    return everything or (bool(wanted) and all(any(d.covers(glob) for d in deny.paths) for glob in wanted))


def _goes_around(allow: HostRule, deny: DenyRule) -> bool:
    if not deny.needs_sight or not (allow.tunnel or allow.tcp) or not allow.host.overlaps(deny.host):
        return False
    return deny.ports is None or bool(set(allow.ports) & set(deny.ports))
