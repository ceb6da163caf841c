"""Any bytes are either Malformed or a value that is written and read again as itself; nothing else ever comes out."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stockade.egress.gate import (
    Framing,
    HeadLimits,
    Malformed,
    Way,
    find_head,
    find_response_head,
    parse_authority,
    parse_head,
    parse_host,
    parse_response_head,
    render_request_head,
    render_response_head,
    safe_text,
)
from stockade.egress.gate._fields import KINDS
from stockade.egress.gate._fields import kind_of as request_kind
from stockade.egress.gate._head import split_fields
from stockade.egress.gate._response import KINDS as RESPONSE_KINDS
from stockade.egress.gate._response import kind_of as response_kind

LIMITS = HeadLimits()
GOOD = (
    b"POST http://user.a-b.com:8080/p/%7e?q=1 HTTP/1.1\r\nHost: user.a-b.com:8080\r\nX-A: b\r\nContent-Length: 3\r\n"
    b"Connection: keep-alive, X-A\r\nProxy-Authorization: z\r\nExpect: 100-continue\r\n\r\n"
)
CONNECT = b"CONNECT [2001:db8::1]:443 HTTP/1.1\r\nHost: [2001:db8::1]:443\r\nUser-Agent: x\r\n\r\n"
RESPONSE = (
    b"HTTP/1.1 200 OK\r\nServer: x\r\nTransfer-Encoding: chunked\r\nConnection: X\r\nX: 1\r\nSet-Cookie: a\r\n\r\n"
)
BYTES = st.sampled_from([b"", b"\0", b"\r", b"\n", b"\r\n", b" ", b"\t", b":", b"@", b"/", b"\\", b"%", b"#", b"?", b"[", b"]", b",",
                         b";", b"..", b".", b"/../", b"%2e", b"%2f", b"%25", b"\xff", b"\x7f", b"0", b"Host: evil.com\r\n",
                         b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"\r\n\r\n", b"X_A: 1\r\n"])  # fmt: skip


@st.composite
def mutated(draw, seed):
    raw = seed
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 4]))):
        at = draw(st.integers(0, len(raw)))  # often inside a name or value, where little breaks
        raw = (
            raw[:at]
            + draw(BYTES | st.binary(max_size=3) | st.from_regex(rb"[a-z0-9.-]{0,4}", fullmatch=True))
            + raw[at + draw(st.integers(0, 6)) :]
        )
    return raw


def attempt(function, *args, **kwargs):
    """Return what the function returns, or the Malformed that it raises; anything else is a failure."""
    try:
        return function(*args, **kwargs)
    except Malformed as error:
        return error


def find_and_parse(raw):
    end = find_head(raw, LIMITS)
    return parse_head(raw if end is None else raw[:end], LIMITS)


def find_and_parse_response(raw, method):
    end = find_response_head(raw, LIMITS)
    return parse_response_head(raw if end is None else raw[:end], LIMITS, method=method)


@given(st.binary(max_size=300) | mutated(GOOD) | mutated(CONNECT))
def test_request_head(raw):
    head = attempt(find_and_parse, raw)
    if isinstance(head, Malformed):
        assert head.status in {400, 417, 431, 501}
        assert head.detail.isascii()
        assert head.detail.isprintable()
        assert len(head.detail) <= 200
        return
    request, where = head.request, head.request.destination
    assert parse_authority(f"{where.host.wire}:{where.port}".encode(), default_port=None).host == where.host
    if where.way is Way.CONNECT:
        with pytest.raises(ValueError, match="CONNECT"):
            render_request_head(head)
        return
    written = render_request_head(head)
    assert b"\0" not in written
    assert written.count(b"\r\n") == written.count(b"\n") == written.count(b"\r")
    assert written.index(b"\r\n\r\n") == len(written) - 4
    start = f"{request.method} http://{where.host.wire}:{where.port}/"
    again = parse_head(written.replace(f"{request.method} /".encode(), start.encode(), 1), LIMITS)
    assert again.request == request
    assert again.headers == head.headers
    assert (again.framing, again.length) == (head.framing, head.length)
    assert again.dropped == ()
    assert render_request_head(again) == written


@given(st.binary(max_size=300) | mutated(RESPONSE), st.sampled_from(["GET", "HEAD", "POST"]))
def test_response_head(raw, method):
    head = attempt(find_and_parse_response, raw, method)
    if isinstance(head, Malformed):
        assert head.status == 502
        return
    written = render_response_head(head)
    again = parse_response_head(written, LIMITS, method=method)
    assert (again.status, again.phrase, again.headers) == (head.status, head.phrase, head.headers)
    assert (again.framing, again.length, again.interim) == (head.framing, head.length, head.interim)
    if head.framing is not Framing.UNTIL_CLOSE:
        assert render_response_head(again) == written


# The grammar of RFC 9112 section 5 as one pattern: the parser cuts at line ends instead, and must mean the same.
FIELD_LINES = re.compile(rb"(?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\x00-\x08\x0a-\x1f\x7f]*\r\n)*\r\n")
LINE_PIECES = st.sampled_from([b"Accept", b"X-A", b":", b": ", b"b", b"\r\n", b"\r\n\r\n", b"\r", b"\n", b" ", b"\t", b"\0", b"\x1f", b"\x7f",
                               b"\xe9", b"(", b"Host", b"Accept: */*\r\n", b"X_B: 1\r\n", b"\x0b", b"\x85"])  # fmt: skip


def kind(key):
    """Tell, keep and tell, or keep, by the first letter."""
    return {b"x": 1, b"h": -1}.get(key[:1], 0)


@settings(max_examples=500)
@given(st.lists(LINE_PIECES, max_size=10).map(b"".join), st.booleans())
def test_header_lines_are_those_of_the_grammar(block, ended):
    block += b"\r\n\r\n" if ended else b""
    for upstream in (False, True):
        found = attempt(split_fields, b"start\r\n" + block, 7, LIMITS, {b"Accept": 0}, kind, upstream=upstream)
        if FIELD_LINES.fullmatch(block):
            assert not isinstance(found, Malformed)
            lines = [line.partition(b":") for line in block.split(b"\r\n")[:-2]]
            fields = [(kind(name.lower()), name, value.strip(b" \t")) for name, _, value in lines]
            assert found[0] == [(name, value) for one, name, value in fields if one <= 0]
            assert found[1] == [(one, name.lower(), value) for one, name, value in fields if one]
        else:
            assert isinstance(found, Malformed)
            assert found.status == (502 if upstream else 400)


@given(st.binary(max_size=30) | st.from_regex(rb"[A-Za-z_-]{1,30}", fullmatch=True))
def test_names_known_by_their_spelling_are_no_others(name):
    """The table of usual names is a shortcut, never another answer."""
    for table, of in ((KINDS, request_kind), (RESPONSE_KINDS, response_kind)):
        for spelling in (name, name.title(), name.lower()):
            assert table.get(spelling, of(spelling.lower())) == of(spelling.lower())
        assert all(found == of(spelling.lower()) for spelling, found in table.items())


HOSTILE = st.sampled_from([b".", b"..", b"-", b"_", b"[", b"]", b"::", b":", b"0", b"1", b"255", b"0x7f", b"a", b"B", b"xn--", b"\0",
                           b"%", b"@", b"\\", b"/", b" ", b"\t", b"\n", b"\xef\xbc\x91", b"\xe3\x80\x82", b"com", b"f" * 63])  # fmt: skip


@given(st.binary(max_size=40) | st.lists(HOSTILE, max_size=12).map(b"".join))
def test_host(raw):
    host = attempt(parse_host, raw)
    if isinstance(host, Malformed):
        assert host.status == 400
        return
    assert host.text.isascii()
    assert host.text == host.text.lower()
    assert set(host.text) <= set("abcdefghijklmnopqrstuvwxyz0123456789-.:")
    assert not host.text.endswith(".")
    assert 0 < len(host.text) <= 253
    assert parse_host(host.wire.encode()) == host
    if host.address is None:
        assert not host.text.rsplit(".", 1)[-1].isdigit()
        assert all(0 < len(label) <= 63 for label in host.text.split("."))
    else:
        assert str(host.address) == host.text


@given(st.binary() | st.text(), st.integers(0, 40))
def test_safe_text(raw, limit):
    text = safe_text(raw, limit=limit)
    assert text.isascii()
    assert text.isprintable()
    assert len(text) <= limit
