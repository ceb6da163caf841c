"""Requests on a connection that is bound to an origin: cases 2, 47 to 49, 64, 65 and 78 of the bypass table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.egress.gate import (
    Destination,
    HeadLimits,
    Malformed,
    Origin,
    Reason,
    Rule,
    Rules,
    Way,
    decide,
    find_head,
    parse_head,
    parse_host,
    render_request_head,
)

LIMITS = HeadLimits()


def origin(host=b"a.example", port=443, scheme="https", way=Way.TLS):
    return Origin(way, scheme, parse_host(host), port)


TLS = origin()
CLEAR = origin(port=80, scheme="http", way=Way.TRANSPARENT)


def raw(target=b"/", host=b"a.example", *fields, method=b"GET", version=b"1.1"):
    lines = [b"%b %b HTTP/%b" % (method, target, version), *([] if host is None else [b"Host: " + host]), *fields]
    return b"\r\n".join([*lines, b"", b""])


def attempt(data, bound):
    try:
        end = find_head(data, LIMITS)
        return parse_head(data if end is None else data[:end], LIMITS, bound)
    except Malformed as error:
        return error


def parse(*args, bound=TLS, **more):
    return parse_head(raw(*args, **more), LIMITS, bound)


def refused(*args, bound=TLS, **more):
    with pytest.raises(Malformed) as caught:
        parse(*args, bound=bound, **more)
    assert caught.value.detail.isascii()
    return caught.value


@pytest.mark.parametrize("way", list(Way))
@pytest.mark.parametrize(("scheme", "port"), [("https", 443), ("https", 8443), ("http", 80), ("http", 8080)])
def test_the_destination_is_the_connections(way, scheme, port):
    bound = origin(port=port, scheme=scheme, way=way)
    host = b"a.example:%d" % port
    head = parse(b"/p%7e?q", host, bound=bound)
    assert head.request.destination == Destination(way, parse_host(b"a.example"), port)
    assert (head.request.path, head.request.query, head.request.scheme) == ("/p~", "q", scheme)
    assert not head.request.tunnel
    wire = b"a.example" if port in (80, 443) else host
    assert render_request_head(head) == b"GET /p~?q HTTP/1.1\r\nHost: " + wire + b"\r\n\r\n"


SAME = [b"a.example", b"A.Example", b"a.example.", b"a.example:443", b"A.EXAMPLE.:443"]


@pytest.mark.parametrize("host", SAME)
def test_egress_case_078_host_that_says_the_same(host):
    assert parse(b"/", host).request.destination.host.text == "a.example"
    assert parse(b"https://%b/x" % host, host).request.path == "/x"
    assert parse(b"HTTPS://%b" % host, b"a.example").request.path == "/"


OTHERS = [b"evil.example", b"a.example:80", b"a.example:8443", b"b.a.example", b"example", b"1.2.3.4", b"[::1]"]


@pytest.mark.parametrize("host", OTHERS)
def test_egress_case_078_fronting(host):
    for error in (
        refused(b"/", host),
        refused(b"https://%b/" % host, b"a.example"),
        refused(b"https://a.example/", host),
    ):
        assert (error.reason, error.status) == (Reason.HOST_MISMATCH, 421)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_egress_case_078_host_must_be_there(version):
    error = refused(b"/", None, version=version)
    assert (error.reason, error.status) == (Reason.HOST_MISMATCH, 421)
    assert refused(b"https://a.example/", None, version=version).reason is Reason.HOST_MISMATCH


def test_egress_case_078_a_host_without_a_port_means_the_scheme_s():
    assert refused(b"/", b"a.example", bound=origin(port=8443)).reason is Reason.HOST_MISMATCH
    assert refused(b"/", b"a.example:443", bound=origin(port=80, scheme="http")).reason is Reason.HOST_MISMATCH
    assert parse(b"/", b"a.example:8443", bound=origin(port=8443)).request.destination.port == 8443


@pytest.mark.parametrize(
    "host",
    [b"", b"a.example, a.example", b"u@a.example", b"a.example:0443", b"a.example:", b"a..example", b"a.example\\"],
)
def test_egress_case_078_host_that_is_none(host):
    error = refused(b"/", host)
    assert (error.reason, error.status) == (Reason.MALFORMED_HOST, 400)


def test_egress_case_048_two_hosts():
    error = refused(b"/", b"a.example", b"Host: a.example")
    assert (error.reason, error.status) == (Reason.MALFORMED_REQUEST, 400)


@pytest.mark.parametrize("target", [b"http://a.example/", b"http://a.example:443/"])
def test_egress_case_064_another_scheme_than_the_connections(target):
    assert refused(target).reason is Reason.HOST_MISMATCH
    assert refused(b"https://a.example/", bound=CLEAR).reason is Reason.HOST_MISMATCH
    assert parse(b"http://a.example/", bound=CLEAR).request.scheme == "http"


@pytest.mark.parametrize("scheme", [b"ftp", b"ws", b"wss", b"file", b"unix"])
def test_egress_case_065_other_schemes(scheme):
    assert refused(scheme + b"://a.example/").reason is Reason.UNSUPPORTED_SCHEME


@pytest.mark.parametrize(
    ("method", "target"),
    [
        (b"OPTIONS", b"*"), (b"GET", b"a.example"), (b"GET", b"a.example:443"), (b"GET", b"?q"), (b"GET", b"x/y"),
        (b"CONNECT", b"a.example:443"), (b"CONNECT", b"/"), (b"CONNECT", b"https://a.example/"), (b"GET", b"https:/a.example/"),
    ],
)  # fmt: skip
def test_targets_that_have_no_place_inside(method, target):
    error = refused(target, method=method)
    assert error.status == 400
    assert error.reason in (Reason.MALFORMED_REQUEST, Reason.UNSUPPORTED_SCHEME)


@pytest.mark.parametrize(
    "target", [b"/a/../b", b"/%2e%2e/", b"/a\\b", b"/#x", b"/?a#b", b"/%00", b"https://a.example/../x"]
)
def test_egress_case_066_paths_are_as_strict_as_elsewhere(target):
    assert refused(target).reason is Reason.MALFORMED_PATH


def test_a_target_that_looks_like_an_authority_is_a_path():
    head = parse(b"//evil.example/x")
    assert (head.request.destination.host.text, head.request.path) == ("a.example", "//evil.example/x")
    assert render_request_head(head).startswith(b"GET //evil.example/x HTTP/1.1\r\nHost: a.example\r\n")
    made = Rules(allow=(Rule("a.example", None, ("/**",), (443,), 1),))
    assert decide(head.request, made).reason is Reason.PATH_NOT_ALLOWED


def test_egress_case_002_literals():
    bound = origin(b"[2001:db8::1]")
    assert parse(b"/", b"[2001:DB8:0::1]", bound=bound).request.destination.host.text == "2001:db8::1"
    assert refused(b"/", b"[2001:db8::2]", bound=bound).reason is Reason.HOST_MISMATCH
    assert render_request_head(parse(b"/", b"[2001:db8::1]:443", bound=bound)).count(b"Host: [2001:db8::1]\r\n") == 1


def test_egress_case_049_and_070_each_request_is_judged_on_its_own():
    """The second request of a connection goes to the same host, and by the same rules."""
    made = Rules(allow=(Rule("a.example", ("GET",), ("/ok/**",), (443,), 1),))
    assert decide(parse(b"/ok/1").request, made).allowed
    assert decide(parse(b"/ok/1", method=b"POST").request, made).reason is Reason.METHOD_NOT_ALLOWED
    assert decide(parse(b"/other").request, made).reason is Reason.PATH_NOT_ALLOWED
    assert refused(b"/ok/1", b"b.example").reason is Reason.HOST_MISMATCH


def test_egress_case_072_targets_cost_no_more_than_their_length():
    """A pattern that tries a long target twice would take minutes here."""
    for target in (b"http://" + b"a" * 60_000, b"/" + b"a" * 60_000, b"http://" + b"/" * 60_000 + b"?" * 60_000):
        for line in (b"GET %b HTTP/9.9\r\n" % target, b"GET %b" % target, b"GET %b\x01 HTTP/1.1\r\n" % target):
            for bound in (None, TLS):
                with pytest.raises(Malformed):
                    parse_head(line + b"Host: a.example\r\n\r\n", HeadLimits(header_bytes=1 << 20), bound)


PIECES = st.sampled_from([b"/", b"a", b"%2e", b"..", b"//", b"?", b"#", b"@", b":", b"https://", b"a.example", b"evil.example",
                          b"*", b"\\", b"http://", b":443", b"%2F", b";", b" ", b"\t", b"\xff", b"HTTP/1.1"])  # fmt: skip


@given(
    st.lists(PIECES, max_size=5).map(b"".join),
    st.sampled_from([*SAME, *OTHERS, b"", b"a.example\0"]) | st.binary(max_size=20),
    st.sampled_from([b"GET", b"POST", b"CONNECT", b"get"]),
    st.sampled_from([TLS, CLEAR, origin(port=8443), origin(b"1.2.3.4")]),
)
def test_whatever_passes_goes_to_the_origin(target, host, method, bound):
    head = attempt(raw(target, host, method=method), bound)
    if isinstance(head, Malformed):
        assert head.status in (400, 421)
        return
    assert head.request.destination == Destination(bound.way, bound.host, bound.port)
    assert head.request.scheme == bound.scheme
    written = render_request_head(head)
    again = parse_head(written, LIMITS, bound)
    assert again.request == head.request
    assert render_request_head(again) == written
