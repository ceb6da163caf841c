"""SOCKS5: cases 1, 2, 3, 9, 22, 23, 24, 62 and 84 of the bypass table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.egress.gate import (
    SOCKS_METHOD_REFUSED,
    SOCKS_METHOD_REPLY,
    Address,
    Destination,
    HeadLimits,
    Malformed,
    Reason,
    Request,
    Rule,
    Rules,
    Way,
    decide,
    parse_head,
    parse_host,
    socks_greeting,
    socks_reply,
    socks_request,
)


def named(name, port=443, command=1):
    return bytes((5, command, 0, 3, len(name))) + name + port.to_bytes(2, "big")


def literal(text, port=443):
    packed = Address.parse(text).packed
    return bytes((5, 1, 0, 1 if len(packed) == 4 else 4)) + packed + port.to_bytes(2, "big")


def refused(raw, read=socks_request):
    with pytest.raises(Malformed) as caught:
        read(raw)
    assert caught.value.detail.isascii()
    return caught.value.reason


def whole(raw) -> tuple[Request, int]:
    found = socks_request(raw)
    assert found is not None
    return found


def attempt(read, raw):
    try:
        return read(raw)
    except Malformed as error:
        return error


def test_replies_are_those_of_the_standard():
    assert SOCKS_METHOD_REPLY == b"\x05\x00"
    assert SOCKS_METHOD_REFUSED == b"\x05\xff"
    assert socks_reply(Reason.ALLOWED) == b"\x05\x00\x00\x01\x00\x00\x00\x00\x00\x00"


@pytest.mark.parametrize(
    "greeting", [b"\x05\x01\x00", b"\x05\x02\x00\x02", b"\x05\x03\x01\x02\x00", b"\x05\x20" + b"\x00" * 32]
)
def test_greeting(greeting):
    for cut in range(len(greeting)):
        assert socks_greeting(greeting[:cut]) is None
    assert socks_greeting(greeting + b"more") == len(greeting)
    assert socks_greeting(bytearray(greeting)) == len(greeting)


@pytest.mark.parametrize(
    "greeting",
    {
        "egress_case_084_socks4": b"\x04\x01\x01\xbb\x8c\x52\x72\x04\x00",
        "egress_case_084_socks4a": b"\x04\x01\x01\xbb\x00\x00\x00\x01\x00evil.example\x00",
        "socks6": b"\x06",
        "http": b"GET / HTTP/1.1\r\n",
        "tls": b"\x16\x03\x01",
        "nul": b"\x00",
        "no_methods": b"\x05\x00",
        "too_many_methods": b"\x05\x21",
        "password_only": b"\x05\x01\x02",
        "gssapi_and_password": b"\x05\x02\x01\x02",
        "no_acceptable": b"\x05\x01\xff",
    }.items(),
    ids=lambda pair: pair[0],
)
def test_greeting_that_is_refused(greeting):
    assert refused(greeting[1], socks_greeting) is Reason.MALFORMED_REQUEST


def test_egress_case_084_a_wrong_version_is_told_at_the_first_byte():
    for read in (socks_greeting, socks_request):
        assert read(b"") is None
        for byte in range(256):
            if byte != 5:
                refused(bytes((byte,)), read)


@pytest.mark.parametrize(
    ("raw", "host", "port"),
    [
        (named(b"files.example"), "files.example", 443),
        (named(b"Files.EXAMPLE."), "files.example", 443),
        (named(b"a", 65535), "a", 65535),
        (named(b".".join([b"a" * 62] * 4) + b"."), ".".join(["a" * 62] * 4), 443),
        (literal("140.82.114.4", 22), "140.82.114.4", 22),
        (literal("2001:db8::1"), "2001:db8::1", 443),
        (literal("::ffff:1.2.3.4"), "::ffff:102:304", 443),
        (named(b"140.82.114.4"), "140.82.114.4", 443),
        (named(b"2001:DB8:0::1"), "2001:db8::1", 443),
        (named(b"[2001:db8::1]"), "2001:db8::1", 443),
        (named(b"::1"), "::1", 443),
    ],
)
def test_egress_case_084_what_is_asked_for(raw, host, port):
    for cut in range(len(raw)):
        assert socks_request(raw[:cut]) is None
    request, size = whole(bytearray(raw + b"early data"))
    assert size == len(raw)
    assert request == Request(Destination(Way.SOCKS5, request.destination.host, port), "CONNECT", "", None, "")
    assert request.tunnel
    assert request.destination.host.text == host
    assert (request.destination.host.address is not None) == (host[0].isdigit() or ":" in host), "a literal is one"


@pytest.mark.parametrize(
    "name",
    {
        "egress_case_009_nul": b"attacker.example\0.allowed.example",
        "egress_case_009_nul_first": b"\0",
        "egress_case_084_empty": b"",
        "egress_case_084_255_bytes": b"a" * 255,
        "egress_case_024_254_bytes": b".".join([b"a" * 62] * 4) + b".bb",
        "egress_case_024_label_of_64": b"a" * 64 + b".example",
        "egress_case_003_short": b"127.1",
        "egress_case_003_decimal": b"2130706433",
        "egress_case_003_hex": b"0x7f.1",
        "egress_case_004_octal": b"012.0.0.1",
        "egress_case_006_two_dots": b"a.example..",
        "egress_case_008_brackets": b"[evil.example]",
        "egress_case_008_bracketed_v4": b"[1.2.3.4]",
        "egress_case_010_percent": b"evil.example%00.allowed.example",
        "egress_case_011_zone": b"fe80::1%eth0",
        "egress_case_011_zone_as_suffix": b"::1%25.allowed.example",
        "egress_case_012_userinfo": b"allowed.example@evil.example",
        "egress_case_014_blank": b"allowed.example .evil.example",
        "egress_case_014_newline": b"allowed.example\n",
        "egress_case_016_unicode_dots": "127。0。0。1".encode(),
        "port_in_the_name": b"allowed.example:443",
        "one_colon": b":",
        "many_colons": b":" * 20,
    }.items(),
    ids=lambda pair: pair[0],
)
def test_name_that_is_none(name):
    assert refused(named(name[1])) is Reason.MALFORMED_HOST


def test_egress_case_023_port_0():
    assert refused(named(b"a.example", 0)) is Reason.MALFORMED_HOST
    assert refused(literal("1.2.3.4", 0)) is Reason.MALFORMED_HOST


@pytest.mark.parametrize("command", [0, 2, 3, 4, 0xF0, 255])
def test_egress_case_084_commands_other_than_connect(command):
    assert refused(named(b"a.example", command=command)) is Reason.UNSUPPORTED_COMMAND
    assert refused(bytes((5, command, 0, 1))) is Reason.UNSUPPORTED_COMMAND, "told before its address came"
    assert socks_reply(Reason.UNSUPPORTED_COMMAND)[1] == 7


@pytest.mark.parametrize(
    "raw", [b"\x05\x01\x01\x01", b"\x05\x01\x00\x00", b"\x05\x01\x00\x02", b"\x05\x01\x00\x05", b"\x04\x01\x00\x01"]
)
def test_other_bytes_of_the_header(raw):
    assert refused(raw + b"\0" * 20) is Reason.MALFORMED_REQUEST


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (Reason.ALLOWED, 0),
        (Reason.COMPLETED, 0),
        (Reason.HOST_NOT_ALLOWED, 2),
        (Reason.PORT_NOT_ALLOWED, 2),
        (Reason.DENIED_BY_RULE, 2),
        (Reason.INTERNAL_ADDRESS, 2),
        (Reason.METADATA_ADDRESS, 2),
        (Reason.LABEL_TOO_LONG, 2),
        (Reason.TOO_MANY_NAMES, 2),
        (Reason.EGRESS_OFF, 2),
        (Reason.NOT_RECORDED, 2),
        (Reason.NOT_REPLAYABLE, 2),
        (Reason.RATE_LIMITED, 2),
        (Reason.TOO_MANY_CONNECTIONS, 2),
        (Reason.REVOKED, 2),
        (Reason.RESOLVE_FAILED, 4),
        (Reason.UPSTREAM_FAILED, 5),
        (Reason.UNSUPPORTED_COMMAND, 7),
        (Reason.MALFORMED_HOST, 1),
        (Reason.RECORD_FAILED, 1),
        (Reason.STORE_FAILED, 1),
        (Reason.INTERNAL_ERROR, 1),
    ],
)
def test_reply_tells_the_reason(reason, code):
    assert socks_reply(reason) == bytes((5, code, 0, 1, 0, 0, 0, 0, 0, 0))


def test_only_two_reasons_mean_success():
    assert [reason for reason in Reason if socks_reply(reason)[1] == 0] == [Reason.ALLOWED, Reason.COMPLETED]


RULES = Rules(
    allow=(Rule("tunnel.example", None, None, (443,), 1), Rule("*.wild.example", None, None, (443,), 2),
           Rule("140.82.114.4", None, None, (443,), 3))
)  # fmt: skip


@pytest.mark.parametrize("port", [443, 22])
@pytest.mark.parametrize(
    "name", [b"tunnel.example", b"a.wild.example", b"wild.example", b"140.82.114.4", b"::1", b"localhost"]
)
def test_egress_case_062_the_same_function_decides_as_for_connect(name, port):
    request, _ = whole(named(name, port))
    wire = parse_host(b"[%b]" % name if b":" in name else name).wire.encode()
    line = b"CONNECT %b:%d HTTP/1.0\r\n\r\n" % (wire, port)
    assert decide(request, RULES) == decide(parse_head(line, HeadLimits()).request, RULES)


def test_egress_case_084_literal_text_is_judged_as_the_literal():
    for raw in (literal("140.82.114.4"), named(b"140.82.114.4")):
        assert decide(whole(raw)[0], RULES).rule == "allow 140.82.114.4 line 3"
    for raw in (literal("140.82.114.5"), named(b"140.82.114.5"), literal("127.0.0.1"), named(b"::ffff:140.82.114.4")):
        assert decide(whole(raw)[0], RULES).reason is Reason.HOST_NOT_ALLOWED


@given(st.binary(max_size=300) | st.binary(max_size=60).map(lambda tail: b"\x05\x01\x00" + tail))
def test_any_bytes_have_an_answer(raw):
    for read in (socks_greeting, socks_request):
        found = attempt(read, raw)
        if isinstance(found, Malformed):
            assert found.reason in (Reason.MALFORMED_REQUEST, Reason.MALFORMED_HOST, Reason.UNSUPPORTED_COMMAND)
        elif isinstance(found, tuple):
            request, size = found
            assert socks_request(raw[:size]) == found
            assert parse_host(request.destination.host.wire.encode()) == request.destination.host
            assert 0 < request.destination.port < 65536


@given(st.ip_addresses(), st.integers(1, 65535))
def test_every_literal_is_read_as_itself(address, port):
    request, _ = whole(literal(str(address), port))
    assert request.destination.host.address == Address.from_packed(address.packed)
    by_name, _ = whole(named(str(address).encode(), port))
    assert by_name == request
