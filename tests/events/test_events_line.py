from __future__ import annotations

import hashlib
import json
import os
import time
import uuid

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from stockade.events import SCHEMA, Event, Value
from stockade.events._line import GENESIS, canonical, chain_hash, decode, to_line, uuid7

FIELDS = sorted({name for kind in SCHEMA.values() for name in (*kind.required, *kind.optional)} | {"v", "time", "prev"})
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
VALUES: st.SearchStrategy[Value] = st.one_of(
    TEXT,
    st.integers(-(2**53) + 1, 2**53 - 1),
    st.booleans(),
    st.none(),
    st.lists(TEXT, max_size=4),
)
EVENTS = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=12)


@given(EVENTS)
def test_the_canonical_form_is_rfc_8785(event: Event) -> None:
    assert canonical(event) == rfc8785.dumps(event)


def test_the_canonical_form_is_rfc_8785_for_every_character_of_the_first_planes() -> None:
    for first in range(0, 0x20000, 0x400):
        text = "".join(chr(point) for point in range(first, first + 0x400) if not 0xD800 <= point < 0xE000)
        assert canonical({"detail": text}) == rfc8785.dumps({"detail": text})


@pytest.mark.promise("S4.5")
@given(EVENTS)
def test_a_line_is_printable_ascii_and_says_the_same(event: Event) -> None:
    line = to_line(canonical(event), "f" * 64) if event else b"\n"
    assert line.endswith(b"\n")
    assert all(0x20 <= byte < 0x7F for byte in line[:-1])
    if event:
        assert decode(line) == {**event, "hash": "f" * 64} == json.loads(line)


def test_the_hash_can_be_recomputed_with_public_tools_alone() -> None:
    event: Event = {"v": 1, "prev": GENESIS, "url.path": "/é\x7f😀", "seq": 1}
    digest = chain_hash(GENESIS, canonical(event))
    read = json.loads(to_line(canonical(event), digest))
    assert read.pop("hash") == hashlib.sha256(GENESIS.encode() + rfc8785.dumps(read)).hexdigest()


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b"{",
        b'{"a":1.5}',
        b'{"a":1e400}',
        b'{"a":{"b":1}}',
        b'{"a":[1]}',
        b'{"a":"\xff"}',
        b'{"a":1} x',
        b"[" * 1_000_000,
        b'{"a":' * 200_000,
    ],
)
def test_what_is_no_flat_object_is_refused_without_harm(line: bytes) -> None:
    with pytest.raises(ValueError):
        decode(line)


@given(st.integers(0, 2**48 - 1))
def test_event_ids_are_uuid_version_7_of_their_time(milliseconds: int) -> None:
    text = uuid7(milliseconds * 1_000_000)
    parsed = uuid.UUID(text)
    assert str(parsed) == text
    assert (parsed.version, parsed.variant) == (7, uuid.RFC_4122)
    assert parsed.int >> 80 == milliseconds


def test_event_ids_of_one_moment_differ() -> None:
    assert len({uuid7(0) for _ in range(1000)}) == 1000


def test_a_child_does_not_repeat_the_ids_of_its_parent():
    uuid7(time.time_ns())  # the parent has some chance left over
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, uuid7(time.time_ns())[-16:].encode())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = os.read(reader, 64).decode()
    os.close(reader)
    os.close(writer)
    assert theirs != uuid7(time.time_ns())[-16:]
