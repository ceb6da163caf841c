"""Chunked bodies: cases 54 to 56 of the bypass table."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.egress.gate import LAST_CHUNK, ChunkedReader, Malformed, Reason, render_chunk


def read(raw, reader=None):
    reader = reader or ChunkedReader()
    return b"".join(reader.feed(raw)), reader


def feed_bytewise(reader, raw):
    for byte in raw:
        reader.feed(bytes([byte]))


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"0x3\r\nabc\r\n", id="egress_case_054_hex_prefix"),
        pytest.param(b"0_0\r\n\r\n", id="egress_case_054_underscore"),
        pytest.param(b"3 \r\nabc\r\n", id="egress_case_054_space_after"),
        pytest.param(b" 3\r\nabc\r\n", id="egress_case_054_space_before"),
        pytest.param(b"+3\r\nabc\r\n", id="egress_case_054_plus"),
        pytest.param(b"-1\r\n", id="egress_case_054_minus"),
        pytest.param(b"0000000000000003\r\nabc\r\n", id="egress_case_054_16_digits"),
        pytest.param(b"10000000000000003\r\nabc\r\n", id="egress_case_054_17_digits"),
        pytest.param(b"\r\n", id="egress_case_054_no_size"),
        pytest.param(b"g\r\n", id="egress_case_054_no_hex"),
        pytest.param("３\r\nabc\r\n".encode(), id="egress_case_054_full_width"),
        pytest.param(b"3\nabc\r\n", id="egress_case_055_bare_lf"),
        pytest.param(b"3;a=b\nabc\r\n", id="egress_case_055_lf_in_extension"),
        pytest.param(b'3;a="x\r\n"\r\nabc\r\n', id="egress_case_055_crlf_in_quotes"),
        pytest.param(b'3;a="x\r\nabc\r\n', id="egress_case_055_open_quote"),
        pytest.param(b"3;\r\nabc\r\n", id="egress_case_055_empty_extension"),
        pytest.param(b"3 ;a\r\nabc\r\n", id="egress_case_055_space_before_extension"),
        pytest.param(b"3\rabc\r\n\r\n", id="egress_case_055_bare_cr"),
        pytest.param(b"3;a\0\r\nabc\r\n", id="egress_case_055_nul"),
        pytest.param(b"3;" + b"a" * 2048, id="egress_case_055_long_without_end"),
        pytest.param(b"3;" + b"a" * 2048 + b"\r\nabc\r\n", id="egress_case_055_long"),
        pytest.param((b"1;" + b"a" * 1000 + b"\r\nx\r\n") * 20, id="egress_case_055_many"),
        pytest.param(b"2\r\nabXX0\r\n\r\n", id="egress_case_056_data_ends_wrongly"),
        pytest.param(b"2\r\nab\n0\r\n\r\n", id="egress_case_056_lf_after_data"),
        pytest.param(b"2\r\nab\rX", id="egress_case_056_cr_after_data"),
        pytest.param(b"2\r\nabc\r\n", id="egress_case_056_too_long"),
        pytest.param(b"2\r\nabX", id="egress_case_056_told_at_the_first_byte"),
        pytest.param(b"0\r\nX : 1\r\n\r\n", id="trailer_space"),
        pytest.param(b"0\r\nX\r\n\r\n", id="trailer_no_colon"),
        pytest.param(b"0\r\n folded\r\n\r\n", id="trailer_fold"),
        pytest.param(b"0\r\nX: a\0\r\n\r\n", id="trailer_nul"),
        pytest.param(b"0\r\n\n", id="trailer_bare_lf"),
        pytest.param(b"0\r\n" + b"X: aaaaaaaa\r\n" * 1000, id="trailer_many"),
        pytest.param(b"0\r\nX: " + b"a" * 9000, id="trailer_long"),
    ],
)
def test_malformed(raw):
    for upstream, reason, status in ((False, Reason.MALFORMED_BODY, 400), (True, Reason.UPSTREAM_MALFORMED, 502)):
        reader = ChunkedReader(upstream=upstream)
        with pytest.raises(Malformed) as caught:
            reader.feed(raw)
        assert (caught.value.reason, caught.value.status) == (reason, status)
        assert not reader.done
        with pytest.raises(Malformed, match="broken"):
            reader.feed(b"0\r\n\r\n")
        bytewise = ChunkedReader(upstream=upstream)
        with pytest.raises(Malformed):
            feed_bytewise(bytewise, raw)


@pytest.mark.parametrize(
    ("raw", "data", "rest"),
    [
        (b"0\r\n\r\n", b"", b""),
        (b"3\r\nabc\r\n0\r\n\r\n", b"abc", b""),
        (b"A\r\n0123456789\r\n000\r\n\r\nGET /", b"0123456789", b"GET /"),
        (b'1;a;b=c;d="q\\"; \t\xe9"\r\nx\r\n0;last\r\n\r\n', b"x", b""),
        (b"000000000000001\r\nx\r\n0\r\nX: 1\r\nY:\r\n\r\n\r\n", b"x", b"\r\n"),
        (b"2\r\n\r\n\r\n0\r\n\r\n", b"\r\n", b""),
    ],
)
def test_body(raw, data, rest):
    found, reader = read(raw)
    assert (found, reader.done, reader.rest) == (data, True, rest)
    assert reader.size_bytes == len(data)
    assert reader.wire_bytes == len(raw) - len(rest)
    with pytest.raises(ValueError, match="ended"):
        reader.feed(b"")


def test_body_that_is_not_whole_is_not_done():
    whole = b"3;x\r\nabc\r\n0\r\nX: 1\r\n\r\n"
    for cut in range(len(whole)):
        assert not read(whole[:cut])[1].done


@given(
    st.lists(st.binary(min_size=1, max_size=300), max_size=8),
    st.lists(st.integers(0, 3000), max_size=12),
    st.binary(max_size=9),
)
def test_split_anywhere_gives_the_same(pieces, cuts, rest):
    raw = b"".join(map(render_chunk, pieces)) + LAST_CHUNK + rest
    reader, found = ChunkedReader(), []
    edges = sorted({0, len(raw) - len(rest), *(cut for cut in cuts if cut < len(raw) - len(rest))})
    for start, end in pairwise(edges):
        assert not reader.done
        found += reader.feed(memoryview(raw)[start:end])
    assert reader.done
    assert reader.rest == b""
    assert b"".join(found) == b"".join(pieces)
    whole, at_once = read(raw)
    assert (whole, at_once.rest) == (b"".join(pieces), rest)


@given(
    st.binary(max_size=200)
    | st.from_regex(rb"([0-9a-f]{1,2}(;[a-z]=[a-z])?\r\n[a-z\r\n]{0,9}\r\n){0,3}0\r\n\r\n", fullmatch=True)
)
def test_any_bytes_are_malformed_or_give_the_same_bytewise(raw):
    def outcome(pieces):
        reader, found = ChunkedReader(), list[bytes]()
        for piece in pieces:
            if reader.done:
                return b"".join(found), reader.done
            try:
                found += reader.feed(piece)
            except Malformed:
                return "malformed"
        return b"".join(found), reader.done

    assert outcome([raw]) == outcome([raw[i : i + 1] for i in range(len(raw))])


def test_nothing_of_the_senders_framing_is_written_again():
    data, _ = read(b"00003;secret=1\r\nabc\r\n0\r\nX-Trailer: 1\r\n\r\n")
    assert render_chunk(data) + LAST_CHUNK == b"3\r\nabc\r\n0\r\n\r\n"
    assert render_chunk(b"") == b"", "an empty chunk would end the body"
    assert render_chunk(b"x" * 255).startswith(b"ff\r\n")
