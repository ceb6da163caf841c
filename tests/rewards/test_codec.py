"""Values across the pipe: exact types in, the same out, and nothing else."""

from __future__ import annotations

import contextlib
import enum
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.rewards._guest import _codec as codec

_hashable = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=6,
)
_values = st.recursive(
    _hashable | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(_hashable, inner, max_size=4)
        | st.sets(_hashable, max_size=4)
        | st.tuples(inner)
    ),
    max_leaves=12,
)


def _decode(frame: bytes) -> object:
    assert int(frame[: codec.HEADER_BYTES], 16) == len(frame) - codec.HEADER_BYTES
    return codec.decode(frame[codec.HEADER_BYTES :])


def _types(value: object) -> object:
    if isinstance(value, list | tuple):
        return type(value), [_types(item) for item in value]
    if isinstance(value, dict):
        return dict, [(_types(key), _types(item)) for key, item in value.items()]
    if isinstance(value, set | frozenset):
        return type(value), sorted(str(_types(item)) for item in value)
    return type(value)


@given(_values)
def test_what_goes_in_comes_out(value):
    back = _decode(codec.encode(value))
    assert back == value
    assert _types(back) == _types(value)
    assert codec.encode(back) == codec.encode(value) or isinstance(value, set | frozenset) or "set(" in repr(value)


@pytest.mark.parametrize("value", [math.inf, -math.inf, -0.0, 5e-324, 1.7976931348623157e308, 0.1])
def test_floats_keep_every_bit(value):
    back = _decode(codec.encode(value))
    assert isinstance(back, float)
    assert back.hex() == value.hex()
    assert math.isnan(_decode(codec.encode(math.nan)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value",
    [
        True,
        False,
        1,
        0,
        1.0,
        "1",
        b"1",
        (1,),
        [1],
        {1},
        frozenset({1}),
        {1: 1},
        1 + 0j,
        None,
        "\ud800",
        "\0",
        "é\U0001f600",
    ],
    ids=repr,
)
def test_types_that_are_equal_stay_apart(value):
    back = _decode(codec.encode(value))
    assert type(back) is type(value)
    assert back == value


class _Int(int):
    pass


class _Str(str):
    __slots__ = ()


class _List(list):
    pass


class _Float(float):
    pass


class _Colour(enum.IntEnum):
    RED = 1


@pytest.mark.promise("S7.3")
@pytest.mark.parametrize(
    "value",
    [
        _Int(1),
        _Str("a"),
        _List(),
        _Float(1),
        _Colour.RED,
        object(),
        len,
        int,
        range(3),
        bytearray(b"a"),
        [_Int(1)],
        {_Str("a"): 1},
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_exact_types_travel(value):
    with pytest.raises(codec.WireError, match="not a plain literal"):
        codec.encode(value)


def test_caps_on_sending():
    deep: list[object] = []
    for _ in range(codec.MAX_DEPTH + 1):
        deep = [deep]
    itself: list[object] = []
    itself.append(itself)
    for value in (deep, itself, "x" * codec.MAX_FRAME_BYTES, 1 << (4 * codec.MAX_INT_DIGITS + 1)):
        with pytest.raises(codec.WireError):
            codec.encode(value)
    assert _decode(codec.encode(1 << (4 * codec.MAX_INT_DIGITS - 1))) == 1 << (4 * codec.MAX_INT_DIGITS - 1)


@pytest.mark.promise("S7.3")
@pytest.mark.parametrize(
    "payload",
    [
        b"", b"X", b"NN", b"i", b"i;", b"i1", b"i 1;", b"i+1;", b"i01;", b"i1_0;", b"i0x1;", b"iF;", b"i-0;", b"i--1;",
        b"f;", b"f1.0;", b"f0x1p0;", b"fNaN;", b"f infinity;", b"f0x1.0p+0\n;", b"finfinity;", b"f" + b"0" * 65 + b";",
        b"c0x1.0000000000000p+0;", b"s1:", b"s-1:", b"s01:a", b"s1:ab", b"s2:\xff\xff", b"b+1:a", b"b\xb2:ab", b"s:",
        b"l1:", b"l2:N", b"l9:N", b"l99999999:", b"l999999999:", b"t1:", b"S1:l0:", b"Z1:d0:", b"S2:i1;i1;", b"S2:i1;T",
        b"d1:N", b"d1:l0:N", b"d2:i1;Ni1;N", b"d2:i1;NTN", b"l" * 70, b"l1:" * 66 + b"N", b"i" + b"f" * 16385 + b";",
        b"cposix\nsystem\n(S'true'\ntR.", b"__import__('os')", b"\x80\x04N.", b'{"a":1}',
    ],
    ids=lambda payload: repr(payload[:24]),
)  # fmt: skip
def test_r34_anything_else_is_refused(payload):
    with pytest.raises(codec.WireError):
        codec.decode(payload)


@given(st.binary(max_size=60))
def test_random_bytes_decode_or_are_refused(payload):
    try:
        value = codec.decode(payload)
    except codec.WireError:
        return
    assert _decode(codec.encode(value)) == value or value != value  # noqa: PLR0124 (NaN)


@given(_values, st.integers(0, 200), st.integers(0, 255))
def test_a_changed_byte_never_escapes(value, place, byte):
    payload = bytearray(codec.encode(value)[codec.HEADER_BYTES :])
    payload[place % len(payload)] = byte
    with contextlib.suppress(codec.WireError):
        codec.decode(bytes(payload))


def _received(data: bytes) -> object:
    reads, writes = os.pipe()
    try:
        os.write(writes, data)
        os.close(writes)
        return codec.Channel(reads, -1).receive()
    finally:
        os.close(reads)


@pytest.mark.parametrize(
    "header", [b"0000001", b"0x000001", b" 0000001", b"+0000001", b"0000_001", b"0000000A", b"00100001", b"ffffffff"]
)
def test_a_frame_has_one_spelling_and_a_cap(header):
    with pytest.raises((codec.WireError, codec.Gone)):
        _received(header + b"N" * 10)


def test_the_end_of_the_pipe_is_not_an_answer():
    for data in (b"", b"0000", b"00000005NN"):
        with pytest.raises(codec.Gone):
            _received(data)
    assert _received(codec.encode((1, "value", None))) == (1, "value", None)


def test_writing_to_nobody_is_gone():
    reads, writes = os.pipe()
    os.close(reads)
    with pytest.raises(codec.Gone):
        codec.Channel(-1, writes).send(1)
    os.close(writes)
