from __future__ import annotations

import re

import pytest

from stockade.events import KINDS, SCHEMA, EventVerdict, Producer, Trust
from stockade.events._schema import _FIELDS, CONTEXT, ENUMS, ENVELOPE, MAX_INT
from stockade.events._validate import event_problem, field_problem

SAMPLES = {int: 7, str: "text", bool: True, list: ["one", "two"], type(None): None}


def _sample(name: str, types: frozenset[type]) -> object:
    closed = ENUMS.get(name)
    return min(closed) if closed else SAMPLES[next(iter(types - {type(None)}))]


def _full(kind: str) -> dict[str, object]:
    return {name: _sample(name, types) for name, types in SCHEMA[kind].required.items()}


def _event(kind: str) -> dict[str, object]:
    envelope = {name: _sample(name, types) for name, types in ENVELOPE.items()}
    return {**envelope, "v": 1, "time": "1", "observed": "1", "severity": 0, "kind": kind, **_full(kind)}


def test_the_kinds_of_this_version() -> None:
    assert sorted(KINDS) == sorted(
        [
            "run.start",
            "run.end",
            "run.sealed",
            "rollout.start",
            "rollout.end",
            "rollout.sealed",
            "process.exec",
            "process.exit",
            "file.read",
            "file.write",
            "file.changed",
            "net.request",
            "net.connect",
            "net.dns",
            "net.end",
            "sandbox.violation",
            "sandbox.crash",
            "control.stop",
            "control.freeze",
            "control.kill",
            "stage.waiver",
            "monitor.gap",
            "operator.exemption",
        ]
    )


def test_no_field_of_a_kind_hides_one_of_the_envelope() -> None:
    assert not set(_FIELDS) & (set(ENVELOPE) | set(CONTEXT))


def test_every_field_is_used_by_some_kind() -> None:
    used = {name for kind in SCHEMA.values() for name in (*kind.required, *kind.optional)}
    assert used == set(_FIELDS)


def test_names_are_plain_ascii() -> None:
    names = [*_FIELDS, *ENVELOPE, *CONTEXT, *KINDS]
    assert [name for name in names if not re.fullmatch(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*", name)] == []


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_kind_takes_its_fields_and_no_others(kind: str) -> None:
    full = _full(kind)
    optional = {name: _sample(name, types) for name, types in SCHEMA[kind].optional.items()}
    assert field_problem(kind, {**full, **optional}) is None
    assert event_problem({**_event(kind), **optional}) is None
    for name in full:
        rest = {key: value for key, value in full.items() if key != name}
        assert name in str(field_problem(kind, rest))
    assert "invented" in str(field_problem(kind, {**full, "invented": 1}))
    assert "invented" in str(event_problem({**_event(kind), "invented": 1}))


@pytest.mark.parametrize("name", sorted(ENVELOPE))
def test_the_envelope_is_complete(name: str) -> None:
    event = _event("run.end")
    del event[name]
    assert event_problem(event) is not None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("count", True),
        ("count", 1.0),
        ("count", "1"),
        ("count", None),
        ("count", MAX_INT + 1),
        ("count", -MAX_INT - 1),
        ("heads", ("a",)),
        ("heads", ["a", 1]),
        ("heads", [["a"]]),
        ("heads", {}),
        ("detail", b"bytes"),
        ("truncated", 1),
    ],
)
def test_a_value_of_another_type_is_refused(name: str, value: object) -> None:
    fields = {"count": 1, name: value}
    assert name in str(field_problem("run.sealed", fields))
    assert name in str(event_problem({**_event("run.sealed"), **fields}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("v", 2),
        ("severity", 7),
        ("severity", -1),
        ("time", "soon"),
        ("time", "-1"),
        ("observed", "1.5"),
        ("observed", "9" * 21),
        ("producer", "agent"),
        ("trust", "hearsay"),
        ("verdict", "maybe"),
        ("kind", "run.party"),
        ("kind", None),
    ],
)
def test_an_envelope_out_of_its_bounds_is_refused(name: str, value: object) -> None:
    assert event_problem({**_event("run.end"), name: value}) is not None


def test_enumerations_are_closed() -> None:
    assert set(Producer) == {"broker", "egress", "sandbox", "fsdiff", "control"}
    assert set(Trust) == {"observed", "reported"}
    assert set(EventVerdict) == {"allowed", "denied", "observed"}
    assert field_problem("file.changed", {"file.path": "a", "change": "renamed"}) is not None


def test_a_problem_shows_a_hostile_value_short_and_in_ascii() -> None:
    shown = field_problem("run.end", {"reason": ["\x1b[2J\u202e" * 100]})
    assert shown is not None
    assert shown.isascii()
    assert "\x1b" not in shown
    assert len(shown) < 150
