"""Response heads and the proxy's own answers: a hostile origin meets the same grammar; case 104."""

from __future__ import annotations

import pytest

from stockade.egress.gate import (
    CONTINUE,
    ESTABLISHED,
    Framing,
    HeadLimits,
    Malformed,
    Reason,
    closes_after,
    error_response,
    find_response_head,
    parse_response_head,
    render_response_head,
    status_of,
)

LIMITS = HeadLimits()


def head(*fields, status=b"200 OK", version=b"1.1"):
    return b"\r\n".join([b"HTTP/%b %b" % (version, status), *fields, b"", b""])


def parse(*fields, method="GET", **line):
    return parse_response_head(head(*fields, **line), LIMITS, method=method)


@pytest.mark.parametrize(
    ("fields", "line", "method", "framing", "length"),
    [
        ([b"Content-Length: 5"], {}, "GET", Framing.LENGTH, 5),
        ([b"Content-Length: 0"], {}, "GET", Framing.LENGTH, 0),
        ([b"Transfer-Encoding: chunked"], {}, "GET", Framing.CHUNKED, 0),
        ([], {}, "GET", Framing.UNTIL_CLOSE, 0),
        ([], {"version": b"1.0"}, "GET", Framing.UNTIL_CLOSE, 0),
        ([b"Content-Length: 5"], {}, "HEAD", Framing.NONE, 0),
        ([b"Transfer-Encoding: chunked"], {}, "HEAD", Framing.NONE, 0),
        ([b"Content-Length: 5"], {"status": b"304 Not Modified"}, "GET", Framing.NONE, 0),
        ([b"Content-Length: 5"], {"status": b"204 No Content"}, "GET", Framing.NONE, 0),
        ([b"Content-Length: 5"], {"status": b"103 Early Hints"}, "GET", Framing.NONE, 0),
        ([], {"status": b"404"}, "GET", Framing.UNTIL_CLOSE, 0),
    ],
)
def test_framing(fields, line, method, framing, length):
    parsed = parse(*fields, method=method, **line)
    assert (parsed.framing, parsed.length) == (framing, length)
    assert parsed.interim == (parsed.status < 200)


MALFORMED = {
    "egress_case_050": head(b"Content-Length: 5", b"Transfer-Encoding: chunked"),
    "egress_case_051": head(b"Content-Length: 5", b"Content-Length: 5"),
    "egress_case_052_coding": head(b"Transfer-Encoding: gzip, chunked"),
    "egress_case_052_http_1_0": head(b"Transfer-Encoding: chunked", version=b"1.0"),
    "egress_case_053": head(b"Content-Length: +5"),
    "egress_case_057_fold": head(b"X: a", b" b"),
    "egress_case_057_bare_cr": head(b"X: a\rSet-Cookie: b"),
    "egress_case_057_nul": head(b"X: \0"),
    "egress_case_057_lf": b"HTTP/1.1 200 OK\nContent-Length: 0\n\n",
    "egress_case_058": head(b"Content-Length : 5"),
    "egress_case_060_switching": head(b"Upgrade: h2c", status=b"101 Switching Protocols"),
    "egress_case_082_websocket": head(b"Upgrade: websocket", status=b"101 Switching Protocols"),
    "egress_case_104_407": head(b"Proxy-Authenticate: Basic", status=b"407 Proxy Authentication Required"),
    "egress_case_072_lines": head(*[b"X: 1"] * 101),
    "egress_case_072_bytes": head(b"X: " + b"a" * 70000),
    "http_0_9": b"<html>\r\n\r\n",
    "http_2": head(version=b"2.0"),
    "status_600": head(status=b"600 X"),
    "status_099": head(status=b"099 X"),
    "status_sign": head(status=b"+20 X"),
    "phrase_control": head(status=b"200 a\x1bb"),
    "phrase_cr": head(status=b"200 a\rb"),
    "shoutcast": b"ICY 200 OK\r\n\r\n",
    "leading_crlf": b"\r\n" + head(),
}


def find_and_parse(raw):
    find_response_head(raw, LIMITS)
    return parse_response_head(raw, LIMITS, method="GET")


@pytest.mark.parametrize("raw", MALFORMED.values(), ids=MALFORMED)
def test_malformed(raw):
    with pytest.raises(Malformed) as caught:
        find_and_parse(raw)
    assert (caught.value.status, caught.value.reason) == (502, Reason.UPSTREAM_MALFORMED)


def test_canonical_rendering():
    fields = [
        b"Server:  x ",
        b"Connection: X-Hop, keep-alive",
        b"X-Hop: 1",
        b"Keep-Alive: timeout=5",
        b"Proxy-Authenticate: Basic",
        b"Upgrade: h2c",
        b'Alt-Svc: h3=":443"',
        b"X-Stockade-Reason: forged",
        b"Trailer: X",
        b"Set-Cookie: a=\xe9",
        b"Content-Length: 3",
    ]
    parsed = parse(*fields)
    want = b"HTTP/1.1 200 OK\r\nServer: x\r\nSet-Cookie: a=\xe9\r\nContent-Length: 3\r\n"
    assert render_response_head(parsed) == want + b"\r\n"
    assert render_response_head(parsed, keep_alive=False) == want + b"Connection: close\r\n\r\n"
    assert parsed.keep_alive
    assert not parse(b"Connection: close", b"Content-Length: 3").keep_alive
    assert not parse(b"Content-Length: 3", version=b"1.0").keep_alive
    assert not parse().keep_alive, "nothing can follow a body that ends by close"


def test_chunks_for_both_versions_of_a_client():
    parsed = parse(b"Transfer-Encoding: chunked")
    assert render_response_head(parsed) == b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert render_response_head(parsed, version=10) == b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
    assert closes_after(parsed, version=10, keep_alive=True)
    assert not closes_after(parsed, version=11, keep_alive=True)
    assert render_response_head(parse()) == b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"


def test_length_without_body_is_told_once():
    assert render_response_head(parse(b"Content-Length: 5", method="HEAD")).count(b"Content-Length: 5\r\n") == 1
    not_modified = parse(b"Content-Length: 5", status=b"304 Not Modified")
    assert render_response_head(not_modified).count(b"Content-Length: 5\r\n") == 1
    assert b"Content-Length" not in render_response_head(parse(b"Content-Length: 5", status=b"204 No Content"))


def test_interim_heads():
    parsed = parse(b"Link: </x>", status=b"103 Early Hints")
    assert render_response_head(parsed, keep_alive=False) == b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
    with pytest.raises(ValueError, match="interim"):
        render_response_head(parsed, version=10)


@pytest.mark.parametrize(
    ("phrase", "kept"), [(b"OK", "OK"), (b"", ""), (b"caf\xe9", ""), (b"x" * 129, ""), (b"\t", "")]
)
def test_phrase(phrase, kept):
    assert parse(status=b"200 " + phrase).phrase == kept


def test_what_was_rendered_is_read_the_same():
    parsed = parse(b"A: 1", b"Content-Length: 7", status=b"418 I'm a teapot")
    again = parse_response_head(render_response_head(parsed), LIMITS, method="GET")
    assert (again.status, again.phrase, again.headers, again.framing, again.length) == (
        418, "I'm a teapot", ((b"A", b"1"),), Framing.LENGTH, 7,
    )  # fmt: skip


@pytest.mark.parametrize("reason", Reason)
def test_egress_case_104_answers(reason):
    status = status_of(reason)
    assert status != 407
    raw = error_response(status, reason, "x\r\nSet-Cookie: \x1b a\u202e")
    parsed = parse_response_head(raw[: raw.index(b"\r\n\r\n") + 4], LIMITS, method="GET")
    body = raw[parsed.size_bytes :]
    fields = raw[: parsed.size_bytes].split(b"\r\n")
    assert parsed.status == status
    assert parsed.length == len(body)
    assert b"X-Stockade-Reason: " + reason.value.encode() in fields
    assert b"Connection: close" in fields
    assert [line for line in fields if line.startswith(b"Set-Cookie")] == []
    assert reason.value.encode() in body
    assert body.endswith(b"\n")
    assert body.strip().decode("ascii").isprintable()
    assert any(line.startswith(b"Retry-After: ") for line in fields) == (status == 429)


def test_egress_case_104_statuses():
    assert status_of(Reason.HOST_NOT_ALLOWED) == status_of(Reason.METADATA_ADDRESS) == 403
    assert status_of(Reason.RATE_LIMITED) == status_of(Reason.TOO_MANY_CONNECTIONS) == 429
    assert status_of(Reason.HEADER_TIMEOUT) == 408
    assert status_of(Reason.HEADER_TOO_LARGE) == 431
    assert status_of(Reason.RESOLVE_FAILED) == 502
    assert status_of(Reason.TOTAL_TIMEOUT) == 504
    for status in (200, 401, 407, 999):
        with pytest.raises(ValueError, match="not a status"):
            error_response(status, Reason.HOST_NOT_ALLOWED)


def test_answer_variants():
    head_only = error_response(403, Reason.PATH_NOT_ALLOWED, body=False)
    assert head_only.endswith(b"\r\n\r\n")
    assert b"Connection: close" not in error_response(403, Reason.PATH_NOT_ALLOWED, close=False)
    assert b"Retry-After: 7\r\n" in error_response(429, Reason.RATE_LIMITED, retry_after_s=7)
    for fixed in (CONTINUE, ESTABLISHED):
        assert parse_response_head(fixed, LIMITS, method="HEAD").size_bytes == len(fixed)


SWITCH = (b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=")


def switch(*fields, upgrade=True, version=b"1.1"):
    raw = head(*fields, status=b"101 Switching Protocols", version=version)
    return parse_response_head(raw, LIMITS, method="GET", upgrade=upgrade)


def test_egress_case_082_switch_that_was_asked_for():
    parsed = switch(*SWITCH)
    assert (parsed.status, parsed.interim, parsed.framing, parsed.headers) == (
        101,
        False,
        Framing.NONE,
        ((b"Sec-WebSocket-Accept", b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="),),
    )
    assert render_response_head(parsed) == (
        b"HTTP/1.1 101 Switching Protocols\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n"
        b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    )
    assert switch(b"connection: keep-alive, UPGRADE", b"upgrade: WebSocket").status == 101


@pytest.mark.parametrize(
    "fields",
    [
        (),
        (b"Upgrade: websocket",),
        (b"Connection: Upgrade",),
        (b"Connection: close", b"Upgrade: websocket"),
        (b"Connection: Upgrade", b"Upgrade: h2c"),
        (b"Connection: Upgrade", b"Upgrade: websocket, h2c"),
        (b"Connection: Upgrade", b"Upgrade: websocket", b"Upgrade: websocket"),
        (*SWITCH, b"Content-Length: 0"),
        (*SWITCH, b"Transfer-Encoding: chunked"),
    ],
)
def test_egress_case_082_switch_to_something_else(fields):
    with pytest.raises(Malformed) as caught:
        switch(*fields)
    assert (caught.value.reason, caught.value.status) == (Reason.UPSTREAM_MALFORMED, 502)


def test_egress_case_060_switch_that_nobody_asked_for():
    for fields, more in ((SWITCH, {"upgrade": False}), (SWITCH, {"version": b"1.0"})):
        with pytest.raises(Malformed):
            switch(*fields, **more)


def test_an_answer_to_an_upgrade_may_be_an_ordinary_one():
    raw = head(b"Upgrade: websocket", b"Content-Length: 2", status=b"426 Upgrade Required")
    parsed = parse_response_head(raw, LIMITS, method="GET", upgrade=True)
    assert (parsed.status, parsed.length, parsed.dropped) == (426, 2, ("upgrade",))
