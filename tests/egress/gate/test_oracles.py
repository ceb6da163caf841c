"""What the gate takes, two independent parsers must take for the same; what they take too much of is listed.

h11 and httptools (llhttp) are oracles only. A head or body that passes here and means something else to either of
them would be a smuggling vector; that the gate refuses more is the point (section 5 of the egress notes).
"""

from __future__ import annotations

import h11
import httptools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stockade.egress.gate import (
    ChunkedReader,
    Framing,
    HeadLimits,
    Malformed,
    Origin,
    Way,
    parse_head,
    parse_host,
    parse_response_head,
    render_request_head,
    render_response_head,
)

LIMITS = HeadLimits()


class Llhttp:
    """Collects what llhttp says about one message."""

    def __init__(self, parser, raw):
        self.url, self.headers, self.body, self.whole = b"", [], b"", False
        self._parser = parser(self)
        self._parser.feed_data(raw)
        self.method = self._parser.get_method() if parser is httptools.HttpRequestParser else None
        self.status = self._parser.get_status_code() if parser is httptools.HttpResponseParser else None
        self.keep_alive = self._parser.should_keep_alive()

    def on_url(self, piece):
        self.url += piece

    def on_header(self, name, value):
        self.headers.append((name.lower(), value))

    def on_body(self, piece):
        self.body += piece

    def on_message_complete(self):
        self.whole = True


def by_h11(raw, role=h11.SERVER):
    connection = h11.Connection(role, max_incomplete_event_size=1 << 20)
    if role is h11.CLIENT:
        connection.send(h11.Request(method="GET", target="/", headers=[("host", "a.com")]))
        connection.send(h11.EndOfMessage())
    connection.receive_data(raw)
    head = connection.next_event()
    while role is h11.CLIENT and isinstance(head, h11.InformationalResponse):
        head = connection.next_event()
    body = b""
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Data):
            body += bytes(event.data)
        else:
            return head, body, isinstance(event, h11.EndOfMessage)


def fields(headers):
    return sorted((bytes(name).lower(), bytes(value)) for name, value in headers)


def mostly(usual, odd):
    """Odd things are rare, so that most heads pass and are compared."""
    return st.integers(0, 11).flatmap(lambda roll: odd if roll == 0 else usual)


NAMES = st.sampled_from(
    [b"Accept", b"X-One", b"x-two", b"Cookie", b"Authorization", b"X_three", b"Range", b"!#$%&'*+.^`|~"]
)
VALUES = st.sampled_from([b"", b"1", b"a, b;q=0.5", b"  padded\t", b'"x"', b"caf\xc3\xa9", b"a:b", b"\xff"])
ODD_LINES = st.sampled_from([
    b"Content-Length: 5", b"Content-Length: 05", b"Content-Length: +5", b"Content-Length: 5, 5", b"Content-Length: 0",
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding : chunked",
    b"Transfer-Encoding: xchunked", b"transfer-encoding:\tchunked", b"Transfer-Encoding:\x0bchunked", b"Host: a.com",
    b"Host: evil.com", b"Host : a.com", b"X: a\r b", b" folded: 1", b"X: a\n b", b"X\0: 1", b"X: \0", b"Connection: close",
    b"Connection: keep-alive, X-One", b"Expect: 100-continue", b"Upgrade: h2c", b"Proxy-Authorization: x", b"\xe9: 1", b": 1",
])  # fmt: skip
USUAL_LINES = st.tuples(NAMES, VALUES).map(lambda pair: b"%b: %b" % pair)
FRAMING_LINES = st.sampled_from([[], [b"Content-Length: 5"], [b"Content-Length: 0"], [b"Transfer-Encoding: chunked"]])
LINES = st.tuples(st.lists(mostly(USUAL_LINES, ODD_LINES), max_size=5), FRAMING_LINES).map(
    lambda pair: pair[0] + pair[1]
)
USUAL_TARGETS = st.sampled_from([
    b"http://a.com/", b"http://a.com", b"http://a.com?x", b"http://a.com:80/a%20b?c=d", b"http://a.com/a//b;c", b"HTTP://A.COM/~x",
])  # fmt: skip
ODD_TARGETS = st.sampled_from([
    b"/", b"*", b"http://a.com/../x", b"http://a.com/a b", b"http://a.com/\xff", b"https://a.com/", b"a.com:443",
])  # fmt: skip
STARTS = st.tuples(
    mostly(st.sampled_from([b"GET", b"POST", b"HEAD", b"DELETE", b"PROPFIND"]), st.sampled_from([b"get", b""])),
    mostly(st.just(b" "), st.sampled_from([b"  ", b"\t"])),
    mostly(USUAL_TARGETS, ODD_TARGETS),
    mostly(st.just(b" HTTP/1.1"), st.sampled_from([b" HTTP/1.0", b" HTTP/2.0", b" HTTP/1.1 ", b""])),
)
STATUS_LINES = st.sampled_from([
    b"HTTP/1.1 200 OK", b"HTTP/1.1 404 ", b"HTTP/1.1 204 No", b"HTTP/1.0 200 OK", b"HTTP/1.1 404", b"HTTP/1.1 2000 OK", b"HTTP/2 200 OK",
])  # fmt: skip
ENDINGS = mostly(st.just(b"\r\n"), st.sampled_from([b"\n", b"\r", b"\r\r\n"]))
BODIES = {Framing.NONE: b"", Framing.LENGTH: b"hello", Framing.CHUNKED: b"5\r\nhello\r\n0\r\n\r\n"}


def requests():
    return st.builds(
        lambda start, lines, host, ending: ending.join([b"".join(start), *host, *lines, b"", b""]),
        STARTS, LINES, mostly(st.just([b"Host: a.com"]), st.just([])), ENDINGS,
    )  # fmt: skip


@pytest.mark.promise("S3.5")
@settings(max_examples=400)
@given(requests())
def test_request_that_passes_means_the_same_to_both(raw):
    try:
        head = parse_head(raw, LIMITS)
    except Malformed:
        return
    body = BODIES[head.framing][: head.length] if head.framing is Framing.LENGTH else BODIES[head.framing]
    data = body if head.framing is Framing.LENGTH else b"".join(ChunkedReader().feed(body)) if body else b""
    target = head.request.path + ("" if head.request.query is None else f"?{head.request.query}")
    # The head as it was sent: whoever reads it reads the same framing and the same fields.
    for sent, want_target in ((raw, None), (render_request_head(head), target.encode())):
        event, h11_body, whole = by_h11(sent + body)
        assert isinstance(event, h11.Request)
        assert event.method == head.request.method.encode()
        assert (h11_body, whole) == (data, True)
        other = Llhttp(httptools.HttpRequestParser, sent + body)
        assert (other.method, other.body, other.whole) == (event.method, data, True)
        assert other.url == event.target
        # llhttp keeps blanks behind a value, which RFC 9110 section 5.5 takes off.
        assert fields((name, value.strip(b" \t")) for name, value in other.headers) == fields(event.headers)
        if want_target is not None:
            assert event.target == want_target
            assert {name for name, _ in fields(event.headers)} >= {b"host"}
            kept = [
                (n, v) for n, v in fields(event.headers) if n not in (b"host", b"content-length", b"transfer-encoding")
            ]
            assert kept == fields(head.headers)
    assert other.keep_alive


ORIGIN = Origin(Way.TLS, "https", parse_host(b"a.com"), 443)
BOUND_TARGETS = mostly(
    st.sampled_from([b"/", b"/?x", b"/a%20b?c=d", b"/a//b;c", b"//a.com/x", b"/~x", b"https://a.com/y"]),
    st.sampled_from([b"*", b"a.com:443", b"/../x", b"/a b", b"/\xff", b"http://a.com/", b"https://evil.com/"]),
)


@settings(max_examples=400)
@given(
    st.builds(
        lambda method, target, version, host, lines, ending: ending.join(
            [b"%b %b HTTP/%b" % (method, target, version), *host, *lines, b"", b""]
        ),
        st.sampled_from([b"GET", b"POST", b"HEAD", b"CONNECT"]),
        BOUND_TARGETS,
        mostly(st.just(b"1.1"), st.sampled_from([b"1.0", b"2.0"])),
        mostly(st.sampled_from([[b"Host: a.com"], [b"host: A.COM:443"]]), st.sampled_from([[], [b"Host: evil.com"]])),
        LINES,
        ENDINGS,
    )
)
def test_request_inside_a_tunnel_that_passes_means_the_same_to_both(raw):
    """What is written towards the origin of an inspected connection (case 78)."""
    try:
        head = parse_head(raw, LIMITS, ORIGIN)
    except Malformed:
        return
    body = BODIES[head.framing][: head.length] if head.framing is Framing.LENGTH else BODIES[head.framing]
    data = body if head.framing is Framing.LENGTH else b"".join(ChunkedReader().feed(body)) if body else b""
    sent = render_request_head(head)
    event, h11_body, whole = by_h11(sent + body)
    other = Llhttp(httptools.HttpRequestParser, sent + body)
    target = head.request.path + ("" if head.request.query is None else f"?{head.request.query}")
    assert isinstance(event, h11.Request)
    assert (event.method, event.target) == (head.request.method.encode(), target.encode())
    assert (other.method, other.url) == (event.method, event.target)
    assert (h11_body, whole, other.body, other.whole) == (data, True, data, True)
    assert dict(event.headers)[b"host"] == b"a.com"
    assert fields(other.headers) == fields(event.headers)
    if other.url.startswith(b"//"):
        return  # httptools takes it for an authority; the origin's own Host is what counts
    assert httptools.parse_url(other.url).host is None


@given(
    st.builds(
        lambda start, lines, ending: ending.join([start, *lines, b"", b""]),
        STATUS_LINES,
        LINES,
        ENDINGS,
    )
)  # fmt: skip
def test_response_that_passes_means_the_same_to_both(raw):
    try:
        head = parse_response_head(raw, LIMITS, method="GET")
    except Malformed:
        return
    if head.framing is Framing.UNTIL_CLOSE:
        return
    body = BODIES[head.framing][: head.length] if head.framing is Framing.LENGTH else BODIES[head.framing]
    data = b"hello" if body else b""
    sent = render_response_head(head) + body
    event, h11_body, whole = by_h11(sent, h11.CLIENT)
    other = Llhttp(httptools.HttpResponseParser, sent)
    assert event.status_code == other.status == head.status
    assert h11_body == other.body == data[: len(h11_body)]
    assert (whole, other.whole) == (True, True)
    assert fields((name, value.strip(b" \t")) for name, value in other.headers) == fields(event.headers)


START = b"POST http://a.com/ HTTP/1.1\r\n"
HOST = b"Host: a.com\r\n"
LAX = {
    # what the gate refuses and an oracle takes: name -> (bytes, h11 takes it, httptools takes it)
    "length_and_coding": (START + HOST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", True, False),
    "two_equal_lengths": (START + HOST + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\n", True, False),
    "list_of_lengths": (START + HOST + b"Content-Length: 5, 5\r\n\r\n", True, False),
    "coding_in_1_0": (b"POST http://a.com/ HTTP/1.0\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n", True, True),
    "folded": (START + HOST + b"X: a\r\n b\r\n\r\n", True, False),
    "bare_lf": (START.replace(b"\r", b"") + b"Host: a.com\n\n", True, False),
    "control_in_value": (START + HOST + b"X: a\x1bb\r\n\r\n", True, False),
    "http_2_0": (b"POST http://a.com/ HTTP/2.0\r\n" + HOST + b"\r\n", True, None),
    "two_hosts": (START + HOST + HOST + b"\r\n", False, True),
    "no_host": (START + b"\r\n", False, True),
    "gzip_chunked": (START + HOST + b"Transfer-Encoding: gzip, chunked\r\n\r\n", False, True),
    "leading_crlf": (b"\r\n" + START + HOST + b"\r\n", None, True),
    "host_differs": (START + b"Host: evil.com\r\n\r\n", True, True),
    "leading_zero_in_length": (START + HOST + b"Content-Length: 05\r\n\r\n", True, True),
}  # fmt: skip


@pytest.mark.parametrize(("raw", "h11_takes", "llhttp_takes"), LAX.values(), ids=LAX)
def test_neither_parser_alone_is_strict_enough(raw, h11_takes, llhttp_takes):
    with pytest.raises(Malformed):
        parse_head(raw, LIMITS)
    if h11_takes is not None:
        connection = h11.Connection(h11.SERVER)
        connection.receive_data(raw)
        try:
            taken = isinstance(connection.next_event(), h11.Request)
        except h11.RemoteProtocolError:
            taken = False
        assert taken is h11_takes
    if llhttp_takes is not None:
        try:
            taken = bool(Llhttp(httptools.HttpRequestParser, raw).headers) or b"Host" not in raw
        except httptools.HttpParserError:
            taken = False
        assert taken is llhttp_takes


@given(
    st.binary(max_size=120)
    | st.from_regex(
        rb"([0-9a-fA-F]{1,2}(;[a-z]{1,3}(=[a-z\" ]{0,3})?)?\r\n[a-z]{0,9}\r\n){0,3}0\r\n(X: 1\r\n)?\r\n", fullmatch=True
    )
)
def test_chunked_body_that_passes_means_the_same_to_both(raw):
    reader = ChunkedReader()
    try:
        data = b"".join(reader.feed(raw))
    except Malformed:
        return
    if not reader.done:
        return
    sent = START + HOST + b"Transfer-Encoding: chunked\r\n\r\n" + raw[: len(raw) - len(reader.rest)]
    _, body, whole = by_h11(sent.replace(b"http://a.com", b""))
    other = Llhttp(httptools.HttpRequestParser, sent)
    assert body == other.body == data
    assert whole
    assert other.whole
