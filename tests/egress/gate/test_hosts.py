"""Names, ports and authorities: cases 1 to 24 of the bypass table, as bytes of a request target."""

from __future__ import annotations

import socket

import pytest

from stockade.egress.gate import Address, HeadLimits, Malformed, Reason, parse_authority, parse_head, parse_host

REFUSED = [
    pytest.param(b"127.1", id="egress_case_003_short"),
    pytest.param(b"2130706433", id="egress_case_003_decimal"),
    pytest.param(b"0x7f.1", id="egress_case_003_hex"),
    pytest.param(b"0x7f000001", id="egress_case_003_hex_whole"),
    pytest.param(b"0X7F000001.", id="egress_case_003_hex_dot"),
    pytest.param(b"0177.0.0.1", id="egress_case_003_octal"),
    pytest.param(b"017700000001", id="egress_case_003_octal_whole"),
    pytest.param(b"1.2.3.4.5", id="egress_case_003_five_octets"),
    pytest.param(b"1.2.3.256", id="egress_case_003_octet_over_255"),
    pytest.param(b"allowed.com.1", id="egress_case_003_numeric_last_label"),
    pytest.param(b"012.0.0.1", id="egress_case_004_leading_zero"),
    pytest.param(b"127.0.0.01", id="egress_case_004_leading_zero_last"),
    pytest.param(b"0", id="egress_case_005_zero"),
    pytest.param(b"allowed.com..", id="egress_case_006_two_dots"),
    pytest.param(b"127.0.0.1.", id="egress_case_006_dot_after_quad"),
    pytest.param(b".", id="egress_case_006_root"),
    pytest.param(b".allowed.com", id="egress_case_006_leading_dot"),
    pytest.param(b"a..allowed.com", id="egress_case_006_empty_label"),
    pytest.param(b"[evil.com]", id="egress_case_008_name_in_brackets"),
    pytest.param(b"[127.0.0.1]", id="egress_case_008_ipv4_in_brackets"),
    pytest.param(b"a]b", id="egress_case_008_bracket_inside"),
    pytest.param(b"prefix.[v1.example]", id="egress_case_008_prefix"),
    pytest.param(b"[::1].allowed.com", id="egress_case_008_suffix"),
    pytest.param(b"[::1", id="egress_case_008_unclosed"),
    pytest.param(b"[v1.fe]", id="egress_case_008_future"),
    pytest.param(b"::1", id="egress_case_002_no_brackets"),
    pytest.param(b"[::1::]", id="egress_case_002_two_gaps"),
    pytest.param(b"[1:2:3:4:5:6:7]", id="egress_case_002_seven_groups"),
    pytest.param(b"[1:2:3:4:5:6:7:8:9]", id="egress_case_002_nine_groups"),
    pytest.param(b"[1:2:3:4:5:6:7::8]", id="egress_case_002_gap_of_nothing"),
    pytest.param(b"[12345::]", id="egress_case_002_long_group"),
    pytest.param(b"[::1.2.3]", id="egress_case_002_short_quad"),
    pytest.param(b"[::01.2.3.4]", id="egress_case_002_zero_quad"),
    pytest.param(b"attacker.example\x00.allowed.com", id="egress_case_009_nul"),
    pytest.param(b"127.0.0.1\x00.allowed.com", id="egress_case_009_nul_after_quad"),
    pytest.param(b"evil.com%00.allowed.com", id="egress_case_010_percent_nul"),
    pytest.param(b"127%2e0%2e0%2e1", id="egress_case_010_percent_dots"),
    pytest.param(b"allowed.com%2f", id="egress_case_010_percent_slash"),
    pytest.param(b"[::1%25.allowed.com]", id="egress_case_011_zone_name"),
    pytest.param(b"[fe80::1%eth0]", id="egress_case_011_zone"),
    pytest.param(b"::ffff:1.2.3.4%x.allowed.com", id="egress_case_011_zone_mapped"),
    pytest.param(b"allowed.com@evil.com", id="egress_case_012_userinfo"),
    pytest.param(b"a@allowed.com@evil.com", id="egress_case_012_userinfo_twice"),
    pytest.param(b"1.1.1.1\\", id="egress_case_013_backslash"),
    pytest.param(b"allowed.com\t.evil.com", id="egress_case_014_tab"),
    pytest.param(b"allowed.com\n", id="egress_case_014_lf_at_end"),
    pytest.param(b"allowed.com\r\nX: y", id="egress_case_014_crlf"),
    pytest.param(b" allowed.com", id="egress_case_014_space"),
    pytest.param(b"allowed.com\x0b", id="egress_case_014_vertical_tab"),
    pytest.param(b"evil.com#", id="egress_case_015_fragment"),
    pytest.param("127。0。0。1".encode(), id="egress_case_016_ideographic_dots"),
    pytest.param("１２７.0.0.1".encode(), id="egress_case_016_full_width"),
    pytest.param("１２７.0.0.1".encode("utf-16-le"), id="egress_case_016_utf16"),
    pytest.param("bücher.example".encode(), id="egress_case_017_u_label"),
    pytest.param("bücher.example".encode("latin-1"), id="egress_case_017_latin1"),
    pytest.param(b"a" * 64 + b".com", id="egress_case_024_label_of_64"),
    pytest.param(b"a." * 125 + b"abcd", id="egress_case_024_name_of_254"),
    pytest.param(b"a" * 70000, id="egress_case_024_name_of_70000"),
    pytest.param(b"", id="egress_case_024_empty"),
    pytest.param(b"-a.com", id="hyphen_first"),
    pytest.param(b"a-.com", id="hyphen_last"),
    pytest.param(b"a_b.com", id="underscore"),
    pytest.param(b"*.com", id="star"),
]


@pytest.mark.parametrize("raw", REFUSED)
def test_host_is_refused(raw):
    with pytest.raises(Malformed) as caught:
        parse_host(raw)
    assert caught.value.reason is Reason.MALFORMED_HOST
    assert caught.value.status == 400
    assert caught.value.detail.isascii()
    assert caught.value.detail.isprintable()
    assert len(caught.value.detail) <= 200


@pytest.mark.parametrize("raw", REFUSED)
@pytest.mark.parametrize(
    "shape", [b"CONNECT %b:443 HTTP/1.1\r\n", b"GET http://%b/ HTTP/1.1\r\n"], ids=["connect", "get"]
)
def test_target_with_that_host_is_refused(raw, shape):
    head = shape % raw + b"Host: allowed.com\r\n\r\n"
    with pytest.raises(Malformed) as caught:
        parse_head(head, HeadLimits(header_bytes=1 << 20))
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        pytest.param(b"140.82.114.4", "140.82.114.4", id="egress_case_001_ipv4"),
        pytest.param(b"[::1]", "::1", id="egress_case_002_loopback"),
        pytest.param(b"[2001:DB8:0:0:1:0:0:1]", "2001:db8::1:0:0:1", id="egress_case_002_first_run_is_shortened"),
        pytest.param(b"[::]", "::", id="egress_case_005_unspecified"),
        pytest.param(b"[1:2:3:4:5:6:7::]", "1:2:3:4:5:6:7:0", id="egress_case_002_single_zero_stays"),
        pytest.param(b"[::ffff:169.254.169.254]", "::ffff:a9fe:a9fe", id="egress_case_030_mapped_dotted"),
        pytest.param(b"api.allowed.com.", "api.allowed.com", id="egress_case_006_one_dot"),
        pytest.param(b"API.Allowed.COM", "api.allowed.com", id="egress_case_007_case"),
        pytest.param(b"XN--BCHER-KVA.example", "xn--bcher-kva.example", id="egress_case_017_a_label"),
        pytest.param(b"169.254.169.254.nip.io", "169.254.169.254.nip.io", id="egress_case_021_address_in_a_name"),
        pytest.param(b"a." * 124 + b"abcde", "a." * 124 + "abcde", id="egress_case_024_name_of_253"),
        pytest.param(b"a." * 124 + b"abcde.", "a." * 124 + "abcde", id="egress_case_024_name_of_253_dot"),
        pytest.param(b"a" * 63 + b".com", "a" * 63 + ".com", id="egress_case_024_label_of_63"),
        pytest.param(b"localhost", "localhost", id="single_label"),
        pytest.param(b"3com.com", "3com.com", id="digit_first"),
        pytest.param(b"0xg.example", "0xg.example", id="hex_like_label_not_last"),
    ],
)
def test_host_is_canonical(raw, text):
    host = parse_host(raw)
    assert host.text == text
    assert host.wire == (f"[{text}]" if ":" in text else text)
    assert (host.address is not None) == (":" in text or text == "140.82.114.4")
    assert parse_host(host.wire.encode()) == host


def test_name_of_254_bytes_without_dot_is_no_way_around():
    """254 bytes are taken by the grammar because of the dot; without one they are too many (case 24)."""
    assert len(b"a." * 124 + b"abcdef") == 254
    with pytest.raises(Malformed, match="over 253"):
        parse_host(b"a." * 124 + b"abcdef")


@pytest.mark.parametrize(
    "port",
    [
        pytest.param(port, id=f"egress_case_023_{name}")
        for name, port in {
            "83616": b"83616",
            "65536": b"65536",
            "99999": b"99999",
            "plus": b"+443",
            "minus": b"-443",
            "space": b" 443",
            "space_after": b"443 ",
            "leading_zero": b"0443",
            "zero": b"0",
            "empty": b"",
            "full_width": "４４３".encode(),
            "hex": b"0x1bb",
            "underscore": b"4_43",
            "twice": b"443:443",
            "long": b"9" * 5000,
            "lf": b"443\n",
            "userinfo": b"6666\\@1.1.1.1",
        }.items()
    ],
)
def test_port_is_refused(port):
    for host in (b"allowed.com", b"[2001:db8::1]"):
        with pytest.raises(Malformed) as caught:
            parse_authority(host + b":" + port, default_port=80)
        assert caught.value.reason is Reason.MALFORMED_HOST


def test_egress_case_023_connect_without_port_and_024_without_host():
    with pytest.raises(Malformed, match="no port"):
        parse_authority(b"allowed.com", default_port=None)
    with pytest.raises(Malformed, match="empty host"):
        parse_authority(b":443", default_port=None)
    with pytest.raises(Malformed):
        parse_authority(b"[::1]443", default_port=None)


@pytest.mark.parametrize("port", [1, 80, 443, 65535])
def test_port_is_read(port):
    assert parse_authority(b"a.com:%d" % port, default_port=None).port == port
    assert parse_authority(b"[::1]:%d" % port, default_port=None).port == port
    assert parse_authority(b"a.com", default_port=port).port == port


def test_egress_case_003_and_009_would_work_without_the_gate():
    """What the C library and CPython make of these names: the reason why no resolver may see them."""
    for name in ("127.1", "0x7f.1", "0177.0.0.1", "2130706433", "127.0.0.1\0.allowed.com"):
        try:
            found = socket.getaddrinfo(name, 443, socket.AF_INET, socket.SOCK_STREAM)
        except (ValueError, UnicodeError):  # a Python that has learnt to refuse NUL
            assert "\0" in name
        else:
            assert found[0][4][0] == "127.0.0.1"
        with pytest.raises(Malformed):
            parse_host(name.encode())


@pytest.mark.parametrize("text", ["1.2.3", "1.2.3.4 ", "", "1.2.3.4/8", "fe80::1%lo", "::g", ":::", "1:2"])
def test_address_text_is_refused(text):
    with pytest.raises(ValueError, match="address"):
        Address.parse(text)
    with pytest.raises(ValueError, match="4 or 16"):
        Address.from_packed(text.encode()[:3])
