"""Checking events against the table of :mod:`stockade.events._schema`, cheaply enough to do it on every line."""

from __future__ import annotations

from collections.abc import Mapping

from stockade.events._schema import CONTEXT, ENUMS, ENVELOPE, MAX_INT, MAX_SEVERITY, SCHEMA, VERSION

_TIME_DIGITS = 20
_IDENTITY = frozenset({"run_id", "rollout_id", "policy_digest"})
_WHOLE: dict[str, dict[str, frozenset[type]]] = {
    name: {**ENVELOPE, **CONTEXT, **kind.required, **kind.optional} for name, kind in SCHEMA.items()
}
_NEEDED: dict[str, frozenset[str]] = {
    name: frozenset(ENVELOPE) | frozenset(kind.required) for name, kind in SCHEMA.items()
}


def field_problem(kind: str, fields: Mapping[str, object]) -> str | None:
    """Return what is wrong with the *own* fields of an event of ``kind`` (no envelope), or ``None``."""
    schema = SCHEMA.get(kind)
    if schema is None:
        return f"unknown kind {kind!r}"
    for name, value in fields.items():
        types = schema.required.get(name) or schema.optional.get(name)
        if types is None:
            return f"{kind} has no field {name!a}"
        if type(value) not in types or not _in_range(name, value):
            return f"{kind}: {name} cannot be {_shown(value)}"
    missing = schema.required.keys() - fields.keys()
    return f"{kind} lacks {', '.join(sorted(missing))}" if missing else None


def context_problem(fields: Mapping[str, object]) -> str | None:
    """Return what is wrong with the fields that a chain's context puts on every line, or ``None``."""
    for name, value in fields.items():
        types = CONTEXT.get(name) or ENVELOPE.get(name)
        if types is None or type(value) not in types or not _in_range(name, value):
            return f"{name} cannot be {_shown(value)}"
    missing = _IDENTITY - fields.keys()
    return f"no {', '.join(sorted(missing))}" if missing else None


def event_problem(event: Mapping[str, object]) -> str | None:
    """Return what is wrong with a whole event, envelope and all (but not its place in a chain), or ``None``."""
    kind = event.get("kind")
    shape = (kind, *event, *map(type, event.values()))
    bounded = _GOOD_SHAPES.get(shape)
    if bounded is None:
        problem = _shape_problem(kind, event)
        if problem is not None:
            return problem
        bounded = tuple(name for name, value in event.items() if type(value) in _BOUNDED or name in ENUMS)
        if len(_GOOD_SHAPES) < _MAX_SHAPES:
            _GOOD_SHAPES[shape] = bounded
    for name in bounded:
        if not _in_range(name, event[name]):
            return f"{kind}: {name} cannot be {_shown(event[name])}"
    return _envelope_problem(event)


# The few shapes (kind, names, types) that events really have, with the names of those fields whose values are bounded
# beside their type. Looking the whole shape up costs a fifth of looking at each field, and that was most of the price
# of verifying.
_BOUNDED = frozenset({int, list})
_GOOD_SHAPES: dict[tuple[object, ...], tuple[str, ...]] = {}
_MAX_SHAPES = 4096


def _shape_problem(kind: object, event: Mapping[str, object]) -> str | None:
    types = _WHOLE.get(kind) if isinstance(kind, str) else None
    if types is None:
        return f"unknown kind {_shown(kind)}"
    for name, value in event.items():
        allowed = types.get(name)
        if allowed is None:
            return f"{kind} has no field {_shown(name)}"
        if type(value) not in allowed:
            return f"{kind}: {name} cannot be {_shown(value)}"
    missing = _NEEDED[str(kind)] - event.keys()
    return f"{kind} lacks {', '.join(sorted(missing))}" if missing else None


def _envelope_problem(event: Mapping[str, object]) -> str | None:
    if event["v"] != VERSION:
        return f"version {event['v']} is not {VERSION}"
    if not 0 <= int(str(event["severity"])) <= MAX_SEVERITY:
        return f"severity {event['severity']} is not one of 0 to {MAX_SEVERITY}"
    for name in ("time", "observed"):
        if not str(event[name]).isdecimal() or len(str(event[name])) > _TIME_DIGITS:
            return f"{name} is not a number of nanoseconds: {_shown(event[name])}"
    return None


def _in_range(name: str, value: object) -> bool:
    kind = type(value)
    if kind is str:
        closed = ENUMS.get(name)
        return closed is None or value in closed
    if kind is int:
        return -MAX_INT <= value <= MAX_INT  # type: ignore[operator]
    if kind is list:
        return all(type(item) is str for item in value)  # type: ignore[attr-defined]
    return True


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
