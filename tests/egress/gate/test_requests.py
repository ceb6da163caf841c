"""Request heads: cases 47 to 53, 57, 58, 60, 64 to 66, 69, 71, 72, 89 and 101 of the bypass table."""

from __future__ import annotations

import h11
import pytest

from stockade.egress.gate import (
    Framing,
    HeadLimits,
    Malformed,
    Reason,
    Way,
    find_head,
    parse_head,
    render_request_head,
    safe_text,
)

LIMITS = HeadLimits()


def head(target=b"http://a.com/", *fields, method=b"GET", version=b"1.1", host=b"a.com"):
    lines = [b"%b %b HTTP/%b" % (method, target, version)]
    if host is not None:
        lines.append(b"Host: " + host)
    return b"\r\n".join([*lines, *fields, b"", b""])


def find_and_parse(raw, limits):
    assert find_head(raw, limits) == len(raw)
    return parse_head(raw, limits)


def refused(raw, limits=LIMITS):
    """Both entrances refuse: the one that looks for the end may leave it to the parser."""
    with pytest.raises(Malformed) as caught:
        find_and_parse(raw, limits)
    detail = caught.value.detail
    assert detail.isascii()
    assert detail.isprintable()
    assert len(detail) <= 200
    return caught.value


MALFORMED = {
    "egress_case_047_host_differs": head(host=b"evil.com"),
    "egress_case_047_host_port_differs": head(host=b"a.com:81"),
    "egress_case_047_connect": head(b"a.com:443", method=b"CONNECT", host=b"evil.com:443"),
    "egress_case_047_connect_port": head(b"a.com:443", method=b"CONNECT", host=b"a.com:22"),
    "egress_case_048_two_hosts": head(b"http://a.com/", b"Host: a.com"),
    "egress_case_048_two_hosts_differ": head(b"http://a.com/", b"host: evil.com"),
    "egress_case_048_space_before_colon": head(b"http://a.com/", b"X : 1"),
    "egress_case_048_host_space_colon": head(b"http://a.com/", b"Host : a.com", host=None),
    "egress_case_048_no_host": head(host=None),
    "egress_case_048_empty_host": head(host=b""),
    "egress_case_048_host_with_userinfo": head(host=b"u@a.com"),
    "egress_case_048_host_list": head(host=b"a.com, a.com"),
    "egress_case_050_length_and_coding": head(b"http://a.com/", b"Content-Length: 5", b"Transfer-Encoding: chunked"),
    "egress_case_050_coding_and_length": head(b"http://a.com/", b"Transfer-Encoding: chunked", b"Content-Length: 0"),
    "egress_case_051_equal": head(b"http://a.com/", b"Content-Length: 5", b"Content-Length: 5"),
    "egress_case_051_different": head(b"http://a.com/", b"Content-Length: 5", b"content-length: 6"),
    "egress_case_051_list": head(b"http://a.com/", b"Content-Length: 2, 2"),
    "egress_case_052_twice": head(b"http://a.com/", b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"),
    "egress_case_052_http_1_0": head(b"http://a.com/", b"Transfer-Encoding: chunked", version=b"1.0"),
    "egress_case_053_plus": head(b"http://a.com/", b"Content-Length: +5"),
    "egress_case_053_minus": head(b"http://a.com/", b"Content-Length: -5"),
    "egress_case_053_hex": head(b"http://a.com/", b"Content-Length: 0x5"),
    "egress_case_053_spaces": head(b"http://a.com/", b"Content-Length: 5 5"),
    "egress_case_053_20_digits": head(b"http://a.com/", b"Content-Length: 18446744073709551616"),
    "egress_case_053_leading_zero": head(b"http://a.com/", b"Content-Length: 05"),
    "egress_case_053_underscore": head(b"http://a.com/", b"Content-Length: 1_0"),
    "egress_case_053_empty": head(b"http://a.com/", b"Content-Length:"),
    "egress_case_053_arabic_digits": head(b"http://a.com/", "Content-Length: ٥".encode()),
    "egress_case_057_fold": head(b"http://a.com/", b"X: a", b" b"),
    "egress_case_057_fold_tab": head(b"http://a.com/", b"X: a", b"\tb"),
    "egress_case_057_fold_first": b"GET http://a.com/ HTTP/1.1\r\n Host: a.com\r\n\r\n",
    "egress_case_057_bare_cr": head(b"http://a.com/", b"X: a\rY: b"),
    "egress_case_057_bare_lf": head(b"http://a.com/", b"X: a\nY: b"),
    "egress_case_057_bare_lf_everywhere": b"GET http://a.com/ HTTP/1.1\nHost: a.com\n\n",
    "egress_case_057_crcrlf": head(b"http://a.com/", b"X: a\r"),
    "egress_case_057_nul_in_value": head(b"http://a.com/", b"X: a\0b"),
    "egress_case_057_esc_in_value": head(b"http://a.com/", b"X: a\x1bb"),
    "egress_case_057_del_in_value": head(b"http://a.com/", b"X: a\x7fb"),
    "egress_case_057_vt_in_value": head(b"http://a.com/", b"X: a\x0bb"),
    "egress_case_058_space_after_name": head(b"http://a.com/", b"X-A : 1"),
    "egress_case_058_tab_after_name": head(b"http://a.com/", b"Cookie\t: 1"),
    "egress_case_058_space_in_name": head(b"http://a.com/", b"X A: 1"),
    "egress_case_058_nul_in_name": head(b"http://a.com/", b"X\0: 1"),
    "egress_case_058_no_name": head(b"http://a.com/", b": 1"),
    "egress_case_058_no_colon": head(b"http://a.com/", b"X"),
    "egress_case_058_latin1_name": head(b"http://a.com/", b"\xe9: 1"),
    "origin_form": head(b"/path"),
    "asterisk_form": head(b"*", method=b"OPTIONS"),
    "authority_form_for_get": head(b"a.com:80"),
    "connect_with_url": head(b"http://a.com:80/", method=b"CONNECT"),
    "connect_with_path": head(b"a.com:443/", method=b"CONNECT"),
    "connect_with_body": head(b"a.com:443", b"Content-Length: 3", method=b"CONNECT", host=b"a.com:443"),
    "connect_with_chunks": head(b"a.com:443", b"Transfer-Encoding: chunked", method=b"CONNECT", host=b"a.com:443"),
    "one_slash": head(b"http:/a.com/"),
    "no_slash": head(b"http:a.com/"),
    "empty_authority": head(b"http:///a.com/"),
    "http_2_preface": b"PRI * HTTP/2.0\r\n\r\n",
    "http_2_0": head(version=b"2.0"),
    "http_1_2": head(version=b"1.2"),
    "http_0_9": b"GET http://a.com/\r\n\r\n",
    "http_lower_case": b"GET http://a.com/ http/1.1\r\nHost: a.com\r\n\r\n",
    "two_spaces": b"GET  http://a.com/ HTTP/1.1\r\nHost: a.com\r\n\r\n",
    "space_at_end": b"GET http://a.com/ HTTP/1.1 \r\nHost: a.com\r\n\r\n",
    "tab_between": b"GET\thttp://a.com/ HTTP/1.1\r\nHost: a.com\r\n\r\n",
    "method_lower_case": head(method=b"get"),
    "method_too_long": head(method=b"G" * 33),
    "leading_crlf": b"\r\n" + head(),
    "leading_space": b" " + head(),
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 64,
    "socks5": b"\x05\x01\x00",
    "bad_connection_option": head(b"http://a.com/", b'Connection: close, "x"'),
    "two_expects": head(b"http://a.com/", b"Expect: 100-continue", b"Expect: 100-continue"),
}  # fmt: skip


@pytest.mark.promise("S3.5")
@pytest.mark.parametrize("raw", MALFORMED.values(), ids=MALFORMED)
def test_malformed(raw):
    error = refused(raw)
    assert error.status == 400
    assert error.reason in (Reason.MALFORMED_REQUEST, Reason.MALFORMED_HOST, Reason.UNSUPPORTED_SCHEME)


@pytest.mark.parametrize(
    "coding",
    [
        b"xchunked",
        b"chunked, identity",
        b"gzip, chunked",
        b"gzip",
        b"identity",
        b"chunked,",
        b"chu\x6eked\x0c;q=1",
        b"",
    ],
)
def test_egress_case_052_coding_that_is_not_chunked(coding):
    error = refused(head(b"http://a.com/", b"Transfer-Encoding: " + coding))
    assert (error.status, error.reason) in {
        (501, Reason.UNSUPPORTED_CODING),
        (400, Reason.MALFORMED_REQUEST),
    }


@pytest.mark.parametrize("url", [b"https://a.com/", b"HTTPS://a.com/"])
def test_egress_case_064_clear_text_to_https(url):
    assert refused(head(url)).reason is Reason.UNSUPPORTED_SCHEME


@pytest.mark.parametrize(
    "scheme", [b"ftp", b"file", b"gopher", b"urn", b"ws", b"wss", b"unix", b"httpx", b"javascript"]
)
def test_egress_case_065_other_schemes(scheme):
    for target in (scheme + b"://a.com/", scheme + b":a.com", scheme + b":/a"):
        error = refused(head(target))
        assert (error.status, error.reason) == (400, Reason.UNSUPPORTED_SCHEME)


@pytest.mark.parametrize(
    "path",
    [
        "/a/../b", "/a/..", "/..", "/../../x", "/.", "/./a", "/a/.", "/a/..;/b", "/..;x=1/a", "/.;/a",
        "/a/%2e%2e/b", "/a/%2E./b", "/a/.%2e", "/%2e", "/a%2f..%2fb", "/a%2F.", "/..%2fa", "/a%5cb", "/a\\..\\b", "/a\\b",
        "/%252e%252e/", "/%252f", "/%25%32%65", "/%%32%65", "/%c0%ae", "/%C1%9c", "/%e0%80%af", "/%f0%80%80%af",
        "/%00", "/%0a", "/%0d%0aX:y", "/%1f", "/%7f", "/%", "/%2", "/%zz", "/a%2", "/a|b", '/a"b', "/<a>", "/a^b",
    ],
)  # fmt: skip
def test_egress_case_066_path_without_one_meaning(path):
    error = refused(head(b"http://a.com" + path.encode()))
    assert (error.status, error.reason) == (400, Reason.MALFORMED_PATH)


@pytest.mark.parametrize("target", [b"http://a.com/#x", b"http://a.com/?q#x", b"http://a.com/?a\\b", b"http://a.com#b"])
def test_egress_case_066_and_015_fragment_and_backslash(target):
    assert refused(head(target)).reason is Reason.MALFORMED_PATH


@pytest.mark.parametrize(
    ("url", "path", "query"),
    [
        ("http://a.com", "/", None),
        ("http://a.com?x=1", "/", "x=1"),
        ("http://a.com/?", "/", ""),
        ("http://a.com/a/b.c/", "/a/b.c/", None),
        ("http://a.com/.well-known/x", "/.well-known/x", None),
        ("http://a.com/a/...", "/a/...", None),
        ("http://a.com/a//b", "/a//b", None),
        ("http://a.com/a;v=1/b", "/a;v=1/b", None),
        ("http://a.com/%7euser/%e4%c3%b6", "/~user/%E4%C3%B6", None),
        ("http://a.com/%41%2d%5F%20%3f%23", "/A-_%20%3F%23", None),
        ("http://a.com/100%25", "/100%25", None),
        ("http://a.com/@b%2fc", "/@b%2Fc", None),
        ("http://a.com/a:b@c!$&'()*+,=", "/a:b@c!$&'()*+,=", None),
        ('http://a.com/x?a=/../%2e%2f[]{}|^`<>"%', "/x", 'a=/../%2e%2f[]{}|^`<>"%'),
        ("HTTP://A.com:80/x", "/x", None),
    ],
)
def test_egress_case_066_one_normal_form_is_judged_and_forwarded(url, path, query):
    parsed = parse_head(head(url.encode()), LIMITS)
    assert (parsed.request.path, parsed.request.query) == (path, query)
    target = path + ("" if query is None else f"?{query}")
    assert render_request_head(parsed).startswith(f"GET {target} HTTP/1.1\r\nHost: a.com\r\n".encode())
    again = parse_head(head(b"http://a.com" + target.encode()), LIMITS)
    assert again.request == parsed.request, "a normal form is its own normal form"


@pytest.mark.promise("S3.5")
def test_canonical_rendering():
    raw = head(
        b"http://A.com:8080/x",
        b"X-One:   two  ",
        b"x-ONE:\tthree",
        b"Accept: caf\xe9",
        b"Content-Length: 3",
        host=b"a.com.:8080",
        method=b"POST",
    )
    parsed = parse_head(raw, LIMITS)
    want = b"POST /x HTTP/1.1\r\nHost: a.com:8080\r\nX-One: two\r\nx-ONE: three\r\nAccept: caf\xe9\r\nContent-Length: 3\r\n"
    assert render_request_head(parsed) == want + b"\r\n"
    assert render_request_head(parsed, close=True) == want + b"Connection: close\r\n\r\n"
    assert parsed.size_bytes == len(raw)
    chunked = parse_head(head(b"http://[2001:db8::1]/", b"Transfer-Encoding: Chunked", host=b"[2001:db8::1]"), LIMITS)
    assert chunked.framing is Framing.CHUNKED
    assert (
        render_request_head(chunked) == b"GET / HTTP/1.1\r\nHost: [2001:db8::1]\r\nTransfer-Encoding: chunked\r\n\r\n"
    )


def test_connect():
    parsed = parse_head(head(b"A.com.:443", method=b"CONNECT", host=b"a.com:443"), LIMITS)
    destination = parsed.request.destination
    assert (destination.way, destination.host.text, destination.port) == (Way.CONNECT, "a.com", 443)
    assert (parsed.request.method, parsed.request.path, parsed.request.query) == ("CONNECT", "", None)
    parse_head(head(b"a.com:443", method=b"CONNECT", host=b"a.com"), LIMITS)  # old clients leave the port out
    parse_head(head(b"a.com:443", method=b"CONNECT", host=None, version=b"1.0"), LIMITS)  # http.client before 3.12
    with pytest.raises(ValueError, match="CONNECT"):
        render_request_head(parsed)


@pytest.mark.parametrize(
    ("version", "fields", "keep_alive"),
    [
        (b"1.1", [], True),
        (b"1.1", [b"Connection: keep-alive"], True),
        (b"1.1", [b"Connection: Close"], False),
        (b"1.1", [b"Connection: x, CLOSE"], False),
        (b"1.1", [b"Connection: x", b"Connection: close"], False),
        (b"1.0", [], False),
        (b"1.0", [b"Connection: keep-alive"], False),
    ],
)
def test_keep_alive(version, fields, keep_alive):
    assert parse_head(head(b"http://a.com/", *fields, version=version), LIMITS).keep_alive is keep_alive


def test_egress_case_060_upgrade_is_not_forwarded():
    fields = [b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk", b"Accept: */*"]
    parsed = parse_head(head(b"http://a.com/", *fields), LIMITS)
    assert render_request_head(parsed) == b"GET / HTTP/1.1\r\nHost: a.com\r\nAccept: */*\r\n\r\n"
    assert parsed.dropped == ("connection", "http2-settings", "upgrade")


@pytest.mark.parametrize(
    "name",
    [
        b"X-HTTP-Method-Override", b"X-HTTP-Method", b"x-method-override", b"X_HTTP_Method_Override", b"X-Original-URL",
        b"X-Rewrite-Url", b"X-Forwarded-Host", b"X_Forwarded_Host", b"Forwarded", b"Content_Length",
        b"Transfer_Encoding", b"Proxy_Authorization", b"X-Upstream-Https-Proxy",
    ],
)  # fmt: skip
def test_egress_case_069_overrides_are_dropped(name):
    parsed = parse_head(head(b"http://a.com/", name + b": DELETE", b"X-Kept_one: 1"), LIMITS)
    assert parsed.headers == ((b"X-Kept_one", b"1"),)
    assert parsed.dropped == (name.lower().decode(),)
    assert b"DELETE" not in render_request_head(parsed)


def test_egress_case_071_hop_by_hop_and_proxy_fields_are_stripped():
    fields = [
        b"Proxy-Authorization: Basic c2VjcmV0",
        b"Proxy-Connection: keep-alive",
        b"Connection: X-Secret , TE,keep-alive,",
        b"X-Secret: 1",
        b"x-secret: 2",
        b"Keep-Alive: timeout=5",
        b"TE: trailers",
        b"Trailer: X",
        b"Authorization: kept",
    ]
    parsed = parse_head(head(b"http://a.com/", *fields), LIMITS)
    assert parsed.headers == ((b"Authorization", b"kept"),)
    assert parsed.claims == ("proxy-authorization",), "the credentials themselves are no text for a record"
    assert set(parsed.dropped) == {
        "connection", "keep-alive", "proxy-authorization", "proxy-connection", "te", "trailer", "x-secret",
    }  # fmt: skip


def test_egress_case_071_connection_cannot_name_what_is_rebuilt():
    fields = [b"Connection: Host, Content-Length, Transfer-Encoding", b"Content-Length: 2"]
    rendered = render_request_head(parse_head(head(b"http://a.com/", *fields), LIMITS))
    assert rendered == b"GET / HTTP/1.1\r\nHost: a.com\r\nContent-Length: 2\r\n\r\n"


def test_egress_case_072_big_and_many_headers():
    big = head(b"http://a.com/", b"X: " + b"a" * (256 << 10))
    for raw in (big, big[:-4]):
        with pytest.raises(Malformed) as caught:
            find_head(raw, LIMITS)
        assert (caught.value.status, caught.value.reason) == (431, Reason.HEADER_TOO_LARGE)
    with pytest.raises(Malformed) as caught:
        parse_head(big, LIMITS)
    assert caught.value.status == 431
    error = refused(head(b"http://a.com/", *[b"X: 1"] * 100))
    assert (error.status, error.reason) == (431, Reason.TOO_MANY_HEADERS)
    assert len(parse_head(head(b"http://a.com/", *[b"X: 1"] * 99), LIMITS).headers) == 99
    exact = HeadLimits(header_bytes=len(head()))
    assert find_head(head(), exact) == len(head())
    for limit in (len(head()) - 1, len(head()) - 4):
        with pytest.raises(Malformed, match="over"):
            find_head(head(), HeadLimits(header_bytes=limit))
    # h11 takes 200 KiB that come in one read.
    server = h11.Connection(h11.SERVER)
    server.receive_data(head(b"/", b"X: " + b"a" * (200 << 10)))
    assert isinstance(server.next_event(), h11.Request)


def test_egress_case_089_claims_are_told_and_not_believed():
    fields = [b"X-Rollout-Id: ep_other\xff", b"X-Stockade-Run: r", b"Proxy-Authorization: Basic b3RoZXI6eA=="]
    parsed = parse_head(head(b"http://a.com/", *fields), LIMITS)
    assert parsed.claims == ("x-rollout-id: ep_other\\xff", "x-stockade-run: r", "proxy-authorization")
    assert parsed.headers == ()


def test_egress_case_101_what_was_sent_cannot_forge_a_line():
    hostile = b'a\x1b[2J\r\n{"seq":1}"\'\\\x00\xff' + b"A" * 65536
    for raw in (head(b"http://" + hostile), head(host=hostile), hostile):
        with pytest.raises(Malformed) as caught:
            parse_head(raw, HeadLimits(header_bytes=1 << 20))
        assert caught.value.detail.isprintable()
        assert len(str(caught.value)) < 300
    assert safe_text("a\nb\x1b\u202e\\") == "a\\nb\\x1b\\u202e\\\\"
    assert safe_text(b"a" * 300) == "a" * 197 + "..."
    assert len(safe_text("\x00" * 300)) == 200
    assert safe_text("abc", limit=2) == ".."


def test_expect():
    assert parse_head(head(b"http://a.com/", b"Expect: 100-Continue"), LIMITS).expect_continue
    assert not parse_head(head(b"http://a.com/", b"Expect: 100-continue", version=b"1.0"), LIMITS).expect_continue
    assert refused(head(b"http://a.com/", b"Expect: 200-ok")).status == 417


def test_head_is_found_wherever_it_is_cut():
    raw = head(b"http://a.com/", b"X: 1")
    for cut in range(len(raw)):
        assert find_head(raw[:cut], LIMITS) is None
        assert find_head(bytearray(raw + b"rest\n"), LIMITS, scanned=cut) == len(raw)
    assert find_head(b"", LIMITS) is None


def test_bytes_after_the_blank_line_are_no_head():
    assert refused_after(head() + b"x") == "bytes after the blank line"
    assert refused_after(head() + head()) == "bytes after the blank line"


def refused_after(raw):
    with pytest.raises(Malformed) as caught:
        parse_head(raw, LIMITS)
    return caught.value.detail
