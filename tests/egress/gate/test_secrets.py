"""Known secrets on their way out: case 99 of the bypass table."""

from __future__ import annotations

import base64
import json
import urllib.parse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.egress.gate import SECRET_MIN, HeadLimits, Scanner, Secret, parse_head

VALUE = "sk-Tr0ub4dor/&+3 key=="
SECRET = Secret("api", VALUE)
SCANNER = Scanner([SECRET, Secret("other", "0123456789abcdef")])
RAW = VALUE.encode()


def found(data, scanner=SCANNER, size=None):
    scan = scanner.start()
    pieces = [data] if size is None else [data[at : at + size] for at in range(0, len(data), size)]
    return next(filter(None, map(scan.feed, pieces)), None)


def wrapped(text, width):
    return b"\r\n".join(text[at : at + width] for at in range(0, len(text), width))


FORMS = {
    "plain": RAW,
    "upper_case": RAW.upper(),
    "percent_encoded": urllib.parse.quote(RAW, safe="").encode(),
    "percent_encoded_lower": urllib.parse.quote(RAW, safe="").lower().encode(),
    "percent_encoded_everywhere": b"".join(b"%%%02X" % byte for byte in RAW),
    "form_encoded": urllib.parse.urlencode({"k": VALUE}).encode(),
    "hex": RAW.hex().encode(),
    "hex_upper": RAW.hex().upper().encode(),
    "json": json.dumps({"k": VALUE}).encode(),
    "json_with_escaped_slash": json.dumps({"k": VALUE}).replace("/", "\\/").encode(),
    "base64": base64.b64encode(RAW),
    "base64_url": base64.urlsafe_b64encode(RAW),
    "base64_without_padding": base64.b64encode(RAW).rstrip(b"="),
    "base64_in_lines": wrapped(base64.b64encode(b"x" * 50 + RAW + b"y" * 50), 76),
    "base64_percent_encoded": urllib.parse.quote(base64.b64encode(RAW), safe="").encode(),
    "basic_authorization": base64.b64encode(b"user:" + RAW),
}


@pytest.mark.promise("S3.16")
@pytest.mark.parametrize("size", [None, 1, 2, 3, 7])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_egress_case_099_found_in_every_form_and_across_pieces(form, size):
    assert found(b"before " + form + b" after", size=size) == "api"


@pytest.mark.parametrize("size", [None, 1, 5])
@pytest.mark.parametrize("before", range(7))
@pytest.mark.parametrize("after", range(4))
@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode])
def test_egress_case_099_base64_at_every_alignment(encode, before, after, size):
    assert found(encode(b"p" * before + RAW + b"s" * after), size=size) == "api"


def test_the_name_is_told_and_not_the_value():
    assert found(b"x 0123456789ABCDEF x") == "other"
    assert VALUE not in repr(SECRET)
    assert VALUE not in repr(SCANNER) + repr(SCANNER.start())


@pytest.mark.parametrize(
    "data",
    [b"", b"nothing of the kind", RAW[:-1], RAW[1:], RAW.hex()[:-2].encode(), base64.b64encode(RAW[2:-2]), b"%" * 50, b"%4" * 50,
     RAW[::-1], b"a" * 100_000],
)  # fmt: skip
def test_nothing_else_is_found(data):
    for size in (None, 1) if len(data) < 1000 else (None,):
        assert found(data, size=size) is None


def test_streams_are_apart():
    one, two = SCANNER.start(), SCANNER.start()
    assert one.feed(RAW[:10]) is None
    assert two.feed(RAW[10:]) is None
    assert one.feed(RAW[10:]) == "api"


def test_a_stream_goes_on_after_a_find():
    scan = SCANNER.start()
    assert scan.feed(RAW) == "api"
    for _ in range(10):
        scan.feed(b"x" * 100)
    assert scan.feed(b"x" * 100) is None
    assert scan.feed(b"0123456789abcdef") == "other"


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_kinds_of_buffers(kind):
    assert SCANNER.start().feed(kind(RAW)) == "api"


@pytest.mark.parametrize("value", ["", "short", "a" * (SECRET_MIN - 1), "a b c d e", "        ", "\\" * 20])
def test_a_secret_that_would_be_found_everywhere_is_refused(value):
    with pytest.raises(ValueError, match="fewer than") as caught:
        Scanner([Secret("s", value)])
    assert value.strip() == "" or value not in str(caught.value)


def test_a_long_secret_is_known_by_its_middle():
    pem = (
        "-----BEGIN PRIVATE KEY-----\n"
        + "\n".join([f"MIIEvQIBADANBgkqhkiG9w0BAQ{n:04}" * 2 for n in range(30)])
        + "\n-----END-----\n"
    )
    scanner = Scanner([Secret("pem", pem)])
    raw = pem.encode()
    assert scanner.tail < 200
    for form in (raw, base64.b64encode(raw), base64.b64encode(b"x" + raw), raw.hex().encode(), raw[100:-100]):
        assert found(form, scanner) == "pem"
        assert found(form, scanner, size=64) == "pem"
    assert found(json.dumps({"key": pem}).encode(), scanner) == "pem"
    assert found(raw[: len(raw) // 2 - 40], scanner) is None


def test_without_secrets_nothing_is_kept():
    scan = Scanner([]).start()
    assert scan.feed(b"x" * 1000) is None
    assert scan._tail == b""


def test_a_secret_that_ends_in_a_percent_sign():
    scanner = Scanner([Secret("odd", "100%25ofit!!%")])
    assert found(b"=100%25ofit!!%", scanner) == "odd"
    assert found(urllib.parse.quote("100%25ofit!!%", safe="").encode(), scanner) == "odd"


def test_many_secrets_cost_no_more_per_byte_and_each_is_found():
    secrets = [Secret(f"s{n}", f"secret-{n:08d}-value") for n in range(300)]
    scanner = Scanner(secrets)
    for secret in secrets[::37]:
        assert found(b"." * 100 + secret.value.encode() + b"." * 100, scanner) == secret.name
        assert found(secret.value.encode().hex().encode(), scanner, size=3) == secret.name


HEADS = {
    "query": b"GET http://a.example/x?k=%b HTTP/1.1\r\nHost: a.example\r\n\r\n",
    "path": b"GET http://a.example/%b/x HTTP/1.1\r\nHost: a.example\r\n\r\n",
    "user_agent": b"GET http://a.example/ HTTP/1.1\r\nHost: a.example\r\nUser-Agent: %b\r\n\r\n",
    "cookie": b"GET http://a.example/ HTTP/1.1\r\nHost: a.example\r\nCookie: a=%b; b=c\r\n\r\n",
    "field_name": b"GET http://a.example/ HTTP/1.1\r\nHost: a.example\r\nX-%b: 1\r\n\r\n",
    "host": b"GET http://%b.a.example/ HTTP/1.1\r\nHost: %b.a.example\r\n\r\n",
}


@pytest.mark.promise("S3.16")
@pytest.mark.parametrize("where", HEADS)
@pytest.mark.parametrize(
    "encode", [bytes, lambda raw: raw.hex().encode(), lambda raw: base64.b64encode(raw).rstrip(b"=")]
)
def test_egress_case_099_in_a_head(where, encode):
    raw = b"Tr0ub4dor-3-key-for-all"
    scanner = Scanner([Secret("api", raw.decode())])
    template = HEADS[where]
    head = parse_head(template.replace(b"%b", encode(raw)), HeadLimits())
    assert scanner.scan(head) == "api"
    assert scanner.scan(parse_head(template.replace(b"%b", encode(b"Tr0ub4dor-4-key-for-all")), HeadLimits())) is None


@given(
    st.text(st.characters(codec="utf-8", exclude_characters="%\\+-_/ \t\r\n"), min_size=8, max_size=90),
    st.binary(max_size=50),
    st.binary(max_size=50),
    st.sampled_from([bytes, bytes.hex, base64.b64encode, base64.urlsafe_b64encode, urllib.parse.quote_from_bytes]),
    st.lists(st.integers(1, 40), min_size=1, max_size=30),
)
def test_any_secret_in_any_surroundings_and_pieces(value, before, after, encode, sizes):
    """An encoder is given the secret with its surroundings; hexadecimal and base64 of the whole keep its characters."""
    scanner = Scanner([Secret("s", value)])
    data = encode(before.replace(b"%", b"") + value.encode() + after)
    data = data.encode() if isinstance(data, str) else data
    scan, at, names = scanner.start(), 0, []
    for size in [*sizes, len(data)]:
        names.append(scan.feed(data[at : at + size]))
        at += size
    assert "s" in names


@given(st.binary(max_size=400), st.integers(1, 50))
def test_pieces_make_no_difference(data, size):
    scanner = Scanner([Secret("a", "aaaaaaaa"), Secret("zero", "0000000000")])
    assert (found(data, scanner) is None) == (found(data, scanner, size=size) is None)
