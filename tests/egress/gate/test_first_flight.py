"""The TLS first flight: cases 74 to 77 of the bypass table, with ClientHellos that OpenSSL really sends."""

from __future__ import annotations

import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.egress.gate import HELLO_MAX, Hello, NeedMore, NotTls, Reason, client_hello, judge_hello, parse_host


def openssl_hello(name, *, maximum=ssl.TLSVersion.TLSv1_3):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = maximum
    context.set_alpn_protocols(["h2", "http/1.1"])
    outgoing = ssl.MemoryBIO()
    tls = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


REAL = openssl_hello("files.example.org")
BODY = REAL[9:]
HOST = parse_host(b"files.example.org")


def vector(data, size=2):
    return len(data).to_bytes(size, "big") + data


def extension(kind, data):
    return kind.to_bytes(2, "big") + vector(data)


def sni(*names, kind=0):
    return extension(0, vector(b"".join(bytes([kind]) + vector(name) for name in names)))


def body(*extensions, session=b"", ciphers=b"\x13\x01", compressions=b"\0", version=b"\x03\x03"):
    fixed = version + b"r" * 32 + vector(session, 1) + vector(ciphers) + vector(compressions, 1)
    return fixed + vector(b"".join(extensions))


def records(message, *sizes):
    """Cut a message into records: of the sizes given, then one for what is left."""
    out, at = b"", 0
    for size in [*sizes, len(message)]:
        piece = message[at : at + size]
        out += b"\x16\x03\x01" + vector(piece) if piece else b""
        at += size
    return out


def hello(*extensions, **fields):
    return records(b"\x01" + vector(body(*extensions, **fields), 3))


ECH = extension(0xFE0D, b"\x00\x00\x01\x00\x01\x07" + vector(b"k" * 32) + vector(b"p" * 100))


@pytest.mark.parametrize("maximum", [ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2])
def test_real_hello(maximum):
    found = client_hello(openssl_hello("files.example.org", maximum=maximum))
    assert found == Hello(("files.example.org",), ech=False)
    assert judge_hello(found, HOST, wildcard=True).allowed


def test_real_hello_without_name():
    found = client_hello(openssl_hello(None))
    assert found == Hello((), ech=False)
    assert judge_hello(found, HOST, wildcard=False).reason is Reason.SNI_MISSING


@pytest.mark.parametrize(
    ("case", "names", "reason"),
    [
        ("egress_case_074_other_name", [b"evil.example"], Reason.SNI_MISMATCH),
        ("egress_case_074_subdomain", [b"a.files.example.org"], Reason.SNI_MISMATCH),
        ("egress_case_074_parent", [b"example.org"], Reason.SNI_MISMATCH),
        ("egress_case_075_ip", [b"93.184.216.34"], Reason.SNI_MISMATCH),
        ("egress_case_075_two_names", [b"files.example.org", b"evil.example"], Reason.SNI_MISMATCH),
        ("egress_case_075_same_twice", [b"files.example.org", b"files.example.org"], Reason.SNI_MISMATCH),
        ("egress_case_075_upper_case", [b"FILES.Example.ORG"], Reason.ALLOWED),
        ("egress_case_075_trailing_dot", [b"files.example.org."], Reason.ALLOWED),
        ("egress_case_075_two_dots", [b"files.example.org.."], Reason.SNI_MISMATCH),
        ("egress_case_075_empty", [b""], Reason.SNI_MISMATCH),
        ("egress_case_075_nul", [b"files.example.org\0"], Reason.SNI_MISMATCH),
        ("egress_case_075_space", [b" files.example.org"], Reason.SNI_MISMATCH),
        ("egress_case_075_kelvin_sign", ["files.example.or\u212a".encode()], Reason.SNI_MISMATCH),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("egress") else "",
)
def test_name(case, names, reason):
    found = client_hello(hello(sni(*names)))
    assert isinstance(found, Hello)
    assert len(found.sni) == len(names)
    for wildcard in (False, True):
        verdict = judge_hello(found, HOST, wildcard=wildcard)
        assert verdict.reason is reason
        assert verdict.allowed == (reason is Reason.ALLOWED)


def test_egress_case_075_literal_hosts_come_without_a_name():
    for raw in (b"140.82.114.4", b"[2a04:4e42::223]"):
        host = parse_host(raw)
        assert judge_hello(Hello((), ech=False), host, wildcard=False).allowed
        for name in (host.text, "files.example.org"):
            assert judge_hello(Hello((name,), ech=False), host, wildcard=False).reason is Reason.SNI_MISMATCH


def test_egress_case_076_ech():
    found = client_hello(hello(sni(b"files.example.org"), ECH))
    assert found == Hello(("files.example.org",), ech=True)
    assert judge_hello(found, HOST, wildcard=False).allowed, "GREASE looks the same"
    assert judge_hello(found, HOST, wildcard=True).reason is Reason.ECH_NOT_ALLOWED
    other = client_hello(hello(ECH, sni(b"evil.example")))
    assert isinstance(other, Hello)
    assert judge_hello(other, HOST, wildcard=False).reason is Reason.SNI_MISMATCH
    assert client_hello(hello(extension(0xFFCE, b""))) == Hello((), ech=True), "ESNI, its forerunner"


NOT_TLS = {
    "ssh": b"SSH-2.0-OpenSSH_9.2\r\n",
    "http": b"GET / HTTP/1.1\r\nHost: files.example.org\r\n\r\n",
    "alert": b"\x15\x03\x01\x00\x02\x02\x28",
    "application_data": b"\x17\x03\x03\x00\x05hello",
    "change_cipher_spec_first": b"\x14\x03\x03\x00\x01\x01" + REAL,
    "ssl2": b"\x80\x2e\x01\x00\x02\x00\x15\x00\x00\x00\x10",
    "dtls": b"\x16\xfe\xfd\x00\x00",
    "tls_3_5": b"\x16\x03\x05\x00\x05",
    "empty_record": b"\x16\x03\x01\x00\x00" + REAL,
    "record_too_long": b"\x16\x03\x01\x40\x01",
    "server_hello": records(b"\x02" + vector(BODY, 3)),
    "hello_over_64_kib": b"\x16\x03\x01\x00\x04\x01\x01\x00\x00",
    "record_goes_on_after_it": records(REAL[5:] + b"\x01"),
    "second_message_in_the_record": records(REAL[5:] + b"\x0b\0\0\0"),
    "alert_in_between": records(REAL[5:], 10)[:15] + b"\x15\x03\x01\x00\x02\x02\x28",
    "empty_hello": records(b"\x01\0\0\0"),
    "version_2": hello(version=b"\x02\x00"),
    "session_too_long": hello(session=b"s" * 33),
    "no_ciphers": hello(ciphers=b""),
    "odd_ciphers": hello(ciphers=b"\x13\x01\x13"),
    "no_compressions": hello(compressions=b""),
    "cut_in_random": records(b"\x01" + vector(body()[:20], 3)),
    "cut_in_ciphers": records(b"\x01" + vector(body()[:36], 3)),
    "cut_in_extensions": records(b"\x01" + vector(body(sni(b"a.b"))[:-1], 3)),
    "bytes_after_extensions": records(b"\x01" + vector(body() + b"x", 3)),
    "extension_header_cut": hello(b"\x00\x00\x00"),
    "extension_too_long": hello(b"\x00\x05\x00\x09x"),
    "extension_twice": hello(extension(5, b""), extension(5, b"")),
    "egress_case_075_two_server_name_extensions": hello(sni(b"files.example.org"), sni(b"evil.example")),
    "egress_case_075_empty_list": hello(extension(0, vector(b""))),
    "egress_case_075_no_list": hello(extension(0, b"")),
    "egress_case_075_unknown_kind": hello(sni(b"files.example.org", kind=1)),
    "egress_case_075_list_too_long": hello(extension(0, b"\x00\x09\x00\x00\x01a")),
    "egress_case_075_bytes_after_list": hello(extension(0, vector(b"\0" + vector(b"a")) + b"x")),
    "egress_case_075_name_cut": hello(extension(0, vector(b"\0\x00\x05a"))),
    "too_many_records": records(REAL[5:], *[1] * 70),
}


@pytest.mark.promise("S3.7")
@pytest.mark.parametrize("raw", NOT_TLS.values(), ids=[f"egress_case_077_{name}" for name in NOT_TLS])
def test_not_tls(raw):
    found = client_hello(raw)
    assert isinstance(found, NotTls)
    assert found.detail.isascii()
    assert judge_hello(found, HOST, wildcard=False).reason is Reason.NOT_TLS


@pytest.mark.parametrize("name", ["ssh", "http", "alert", "application_data", "ssl2"])
def test_egress_case_077_one_byte_is_enough_to_tell(name):
    assert isinstance(client_hello(NOT_TLS[name][:1]), NotTls)


def test_more_is_needed_until_the_last_byte():
    for cut in range(len(REAL)):
        assert client_hello(REAL[:cut]) == NeedMore()
    for kind in (bytearray, memoryview):
        assert client_hello(kind(REAL)) == client_hello(REAL)


def test_early_data_after_it_is_left_alone():
    for more in (b"\x14\x03\x03\x00\x01\x01", b"\x17\x03\x03\x00\x05hello", b"anything"):
        assert client_hello(REAL + more) == client_hello(REAL)


@given(st.lists(st.integers(1, 200), max_size=40), st.data())
def test_any_records_and_any_reads_give_the_same(sizes, data):
    raw = records(REAL[5:], *sizes)
    assert client_hello(raw) == Hello(("files.example.org",), ech=False)
    cut = data.draw(st.integers(0, len(raw) - 1))
    assert client_hello(raw[:cut]) == NeedMore()


def test_big_hello_is_read_and_endless_one_is_not():
    padding = extension(21, b"\0" * 60000)
    message = b"\x01" + vector(body(sni(b"files.example.org"), padding), 3)
    raw = records(message, *[1 << 14] * 3)
    assert client_hello(raw) == Hello(("files.example.org",), ech=False)
    assert client_hello(raw[:-1]) == NeedMore()
    assert len(raw) < HELLO_MAX
    wasteful = records(b"\x01\x00\xff\xf0" + b"x" * 65000, *[1 << 14] * 3)
    assert len(wasteful) < HELLO_MAX
    assert isinstance(client_hello(wasteful + b"\x16\x03\x01\x40\x00" + b"x" * (HELLO_MAX - len(wasteful))), NotTls)


@given(st.binary(max_size=600) | st.binary(max_size=60).map(lambda tail: REAL[: len(REAL) - len(tail)] + tail))
def test_any_bytes_have_an_answer(raw):
    found = client_hello(raw)
    assert isinstance(found, NeedMore | NotTls | Hello)
    if isinstance(found, Hello):
        judge_hello(found, HOST, wildcard=True)


@pytest.mark.promise("S3.7")
@given(st.integers(0, len(REAL) - 1), st.integers(0, 255))
def test_one_changed_byte_never_passes_another_name(at, value):
    found = client_hello(REAL[:at] + bytes([value]) + REAL[at + 1 :])
    if isinstance(found, Hello) and judge_hello(found, HOST, wildcard=False).allowed:
        assert [name.lower().rstrip(".") for name in found.sni] == ["files.example.org"]
