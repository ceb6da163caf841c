"""A shape that was seen before takes a shorter way: what is written and what is refused must not depend on that."""

from __future__ import annotations

import hashlib
import os
from enum import StrEnum
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from stockade.errors import RecordError
from stockade.events import KINDS, SCHEMA, ChainWriter, Context, Event, EventVerdict, Producer, Trust, _line, chain_name
from stockade.events._chain import _clean_fields
from stockade.events._line import GENESIS, canonical, canonical_of_sorted, to_line
from stockade.events._schema import ENUMS, MAX_INT
from stockade.events._shape import Shapes
from stockade.events._validate import field_problem
from tests.events.records import DIGEST, REQUEST, RUN_ID, START_NS, open_writer, rollout_id

ROLLOUT = rollout_id(1)
EGRESS = chain_name(ROLLOUT, Producer.EGRESS)
APPENDED = sorted(set(KINDS) - {"rollout.sealed", "run.sealed"})


class Word(StrEnum):
    GONE = "gone"
    ADDED = "added"


class Text(str):
    __slots__ = ()


TEXTS = st.sampled_from(
    ["", "x", "added", "removed", "é\x7f😀", "\ud800", "a\udc80b", Word.GONE, Word.ADDED, Text("t")]
)
VALUES = st.one_of(
    TEXTS,
    st.sampled_from([0, 1, -1, MAX_INT, -MAX_INT, MAX_INT + 1, -MAX_INT - 1, 2**80]),
    st.booleans(),
    st.none(),
    st.lists(TEXTS, max_size=3),
    st.tuples(TEXTS, TEXTS),
    st.sampled_from([1.5, b"x", [1], ["a", None], {"a": "b"}]),
)


def of(types: frozenset[type]) -> st.SearchStrategy[object]:
    return VALUES.filter(lambda value: type(value) in types)


@st.composite
def attempts(draw: st.DrawFn) -> tuple[str, dict[str, object]]:
    """A kind and fields that mostly fit it."""
    kind = draw(st.sampled_from(["file.changed", "net.end", "process.exit", *APPENDED]))
    schema = SCHEMA[kind]
    fields: dict[str, object] = {}
    for name, types in schema.required.items():
        fields[name] = draw(st.sampled_from(sorted(ENUMS[name])) if name in ENUMS else of(types))
    for name in draw(st.lists(st.sampled_from(sorted(schema.optional)), max_size=4)):
        fields[name] = draw(VALUES)
    if draw(st.integers(0, 5)) == 0:
        fields[draw(st.sampled_from(["seq", "hash", "nonsense", "change", "count"]))] = draw(VALUES)
    if draw(st.integers(0, 9)) == 0 and fields:
        del fields[draw(st.sampled_from(sorted(fields)))]
    return kind, fields


@given(st.lists(attempts(), min_size=1, max_size=4))
def test_what_is_written_and_what_is_refused_is_as_if_nothing_were_remembered(
    tmp_path_factory: pytest.TempPathFactory, made: list[tuple[str, dict[str, object]]]
) -> None:
    path = tmp_path_factory.mktemp("chain") / EGRESS
    prev, lines = GENESIS, b""
    with open_writer(path.parent, ROLLOUT, Producer.EGRESS, times=count(START_NS)) as writer:
        for kind, fields in [*made, *made, *made]:
            plain = _clean_fields(fields)  # type: ignore[arg-type]
            problem = field_problem(kind, plain)
            if problem is not None:
                with pytest.raises(RecordError) as raised:
                    writer.append(kind, fields)  # type: ignore[arg-type]
                assert raised.value.message == f"not recorded: {problem}"
                continue
            event = writer.append(kind, fields)  # type: ignore[arg-type]
            assert {name: event[name] for name in plain} == plain
            assert all(type(event[name]) is type(value) for name, value in plain.items())
            digest = str(event.pop("hash"))
            body = rfc8785.dumps(event)
            assert event["prev"] == prev
            assert digest == hashlib.sha256(prev.encode() + body).hexdigest()
            lines += to_line(body, digest)
            prev = digest
    assert path.read_bytes() == lines


NAMES = sorted({name for kind in SCHEMA.values() for name in (*kind.required, *kind.optional)} | {"v", "time", "prev"})


@given(st.dictionaries(st.sampled_from(NAMES), st.text(max_size=3) | st.integers(-MAX_INT, MAX_INT), max_size=20))
def test_with_sorted_keys_the_short_way_is_the_canonical_form(event: Event) -> None:
    ordered = {name: event[name] for name in sorted(event)}
    try:
        expected = canonical(event)
    except UnicodeEncodeError:
        with pytest.raises(UnicodeEncodeError):
            canonical_of_sorted(ordered)
        return
    assert canonical_of_sorted(ordered) == expected == rfc8785.dumps(event)


def test_the_bytes_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first release wrote them: a change here is a new version of the format."""
    monkeypatch.setattr(_line, "_CHANCE", SimpleNamespace(take=bytes(range(0xF0, 0xFA)).hex))
    context = Context(RUN_ID, ROLLOUT, DIGEST, task_id="t/é", train_step=3)
    fd = os.open(tmp_path / EGRESS, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        writer = ChainWriter(fd, context, Producer.EGRESS, clock_ns=lambda: START_NS)
        for _ in range(2):
            writer.append("net.request", REQUEST, verdict=EventVerdict.ALLOWED, trust=Trust.OBSERVED, severity=2)
    finally:
        os.close(fd)
    first, second = (tmp_path / EGRESS).read_bytes().splitlines()
    head, _, tail = first.rpartition(b',"hash":')
    assert head == (
        b'{"http.request.method":"GET","id":"019b76da-a800-70f1-b2f3-f4f5f6f7f8f9","kind":"net.request",'
        b'"observed":"1767225600000000000","policy_digest":"sha256:' + b"0" * 64 + b'",'
        b'"prev":"' + b"0" * 64 + b'","producer":"egress","reason":"allowed","rollout_id":"ep_0000000000000000000001",'
        b'"run_id":"run-20260101-000000-abcdef","seq":1,"server.address":"abc.test","server.port":80,"severity":2,'
        b'"task_id":"t/\\u00e9","time":"1767225600000000000","train_step":3,"trust":"observed","url.path":"/simple/six/",'
        b'"v":1,"verdict":"allowed"'
    )
    assert (
        tail
        == b'"' + hashlib.sha256(b"0" * 64 + head.replace(b"\\u00e9", "é".encode()) + b"}").hexdigest().encode() + b'"}'
    )
    assert second.startswith(
        head.replace(b'"prev":"' + b"0" * 64, b'"prev":' + tail[:-2]).replace(b'"seq":1', b'"seq":2')
    )


def test_shapes_are_shared_and_bounded(tmp_path: Path) -> None:
    shapes = Shapes.of({"v": 1, "run_id": "a"})
    assert Shapes.of({"v": 1, "run_id": "b"}) is shapes
    assert Shapes.of({"v": 1, "rollout_id": "b"}) is not shapes
    for number in range(5000):
        shapes.learn(("net.end", str(number)), {"reason": "x"}, {"reason": "x"})
    assert len(shapes._known) == 4096
