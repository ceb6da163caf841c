from __future__ import annotations

import codecs
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.events import ARGS_LIMIT_BYTES, clip, clip_args
from stockade.events._text import to_bytes

ANY_TEXT = st.text(st.characters(), max_size=200)


@given(st.binary(max_size=300), st.integers(0, 300))
def test_clipped_text_is_printable_and_can_be_turned_back(data: bytes, limit: int) -> None:
    text, truncated, full_bytes = clip(data, limit)
    assert all(" " <= character <= "~" for character in text)
    assert len(text) <= 4 * limit
    assert codecs.escape_decode(text.encode())[0] == data[:limit]
    assert truncated == (len(data) > limit)
    assert full_bytes == len(data)


@given(ANY_TEXT)
def test_any_text_is_accepted_lone_surrogates_too(text: str) -> None:
    assert clip(text, 1 << 20).full_bytes == len(to_bytes(text))


@given(st.binary(max_size=200))
def test_a_file_name_is_shown_by_its_bytes(name: bytes) -> None:
    assert clip(os.fsdecode(name), 200) == clip(name, 200)


@pytest.mark.promise("S4.5")
@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("\x1b[2J", r"\x1b[2J"),
        ("a\nb\r\n", r"a\x0ab\x0d\x0a"),
        ("\u202egnp.exe", r"\xe2\x80\xaegnp.exe"),
        ("\x9b1A", r"\xc2\x9b1A"),
        ("\x7f\x00", r"\x7f\x00"),
        (r"\x41", r"\\x41"),
        ("\udcff", r"\xff"),
        ("\ud800", r"\xed\xa0\x80"),
        ("plain text ~", "plain text ~"),
    ],
)
def test_text_from_inside_can_do_nothing_to_a_terminal(hostile: str, shown: str) -> None:
    assert clip(hostile, 100).text == shown


@given(st.lists(st.binary(max_size=60), max_size=20), st.integers(1, 200))
def test_an_argument_vector_is_cut_at_its_limit(args: list[bytes], limit: int) -> None:
    kept, truncated, full_bytes = clip_args(args, limit)
    assert full_bytes == sum(len(arg) + 1 for arg in args)
    assert sum(len(arg) for arg in kept) <= 4 * limit
    assert len(kept) <= limit
    if not truncated:
        assert [clip(arg, 60).text for arg in args] == kept
    else:
        assert full_bytes > limit


def test_an_endless_argument_vector_stays_short() -> None:
    kept, truncated, full_bytes = clip_args(["x" * 100_000, *[""] * 100_000])
    assert (sum(map(len, kept)), truncated, full_bytes) == (ARGS_LIMIT_BYTES, True, 200_001)
