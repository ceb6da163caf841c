"""Two requests share a key only if they ask the same; what answers may be kept, and for whom."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.egress._keys import EMPTY_SHA256, NEUTRAL, key, missing, parse_key, shareable, storable
from stockade.egress.gate import Destination, Host, Mode, Request, Way, parse_response_head
from tests.egress.store.kit import LIMITS, answer, ask

# Few values, chosen to look like each other once they stand side by side: only then do pairs meet.
NAMES = st.sampled_from([b"Accept", b"accept", b"Accept-Encoding", b"Range", b"X-A", b"x-a", b"X-B", b"Cookie"])
VALUES = st.sampled_from([b"", b"=", b"a", b"b", b"a:=b", b"#", b"a\tb", b"\xff", b"a" * 300, b"-", b"x-a:=a"])
QUIET = st.sampled_from([b"User-Agent", b"traceparent", b"Cache-Control", b"X-Stainless-Lang", b"sec-fetch-mode"])
HEADERS = st.lists(st.tuples(NAMES, VALUES), max_size=4)
REQUESTS = st.builds(
    Request,
    st.builds(
        Destination,
        st.sampled_from([Way.HTTP, Way.TLS]),
        st.sampled_from([Host("a.test"), Host("b.test"), Host("a.test.b")]),
        st.sampled_from([80, 443, 4430]),
    ),
    st.sampled_from(["GET", "HEAD", "POST", "G"]),
    st.sampled_from(["/", "/a", "/a/", "//", "/-", "/a?", "*"]),
    st.sampled_from([None, "", "a", "-", "a=/", "?"]),
    st.sampled_from(["http", "https"]),
)
BODIES = st.sampled_from([None, b"", b"a", b"b"])
CREDENTIALS = st.sampled_from([None, "-", "a", "ab"])
MODES = st.sampled_from([Mode.LIVE, Mode.RECORD, Mode.REPLAY])
TUNNEL = Request(Destination(Way.CONNECT, Host("a.test"), 443), "CONNECT", "", None, "")
ASKED = st.tuples(REQUESTS, HEADERS, BODIES, CREDENTIALS, MODES)


def made(asked):
    request, headers, body, credential, mode = asked
    digest = None if body is None else hashlib.sha256(body).digest()
    return key(request, tuple(headers), digest, mode=mode, credential=credential)


def meaning(asked):
    """Say what is asked, without any of the code under test."""
    request, headers, body, credential, mode = asked
    where = request.destination
    fields: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        fields.setdefault(name.lower(), []).append(value)
    parts = (request.method, request.scheme, where.host, where.port, request.path, request.query)
    return parts, fields, body or b"", credential, mode is Mode.LIVE


@given(ASKED, ASKED, st.lists(st.integers(0, 4), max_size=4))
def test_a_key_is_shared_by_what_asks_the_same_and_by_nothing_else(one, other, borrowed):
    # Pairs that differ in a part or two are the ones that could be mixed up.
    other = tuple(one[index] if index in borrowed else part for index, part in enumerate(other))
    assert (made(one) == made(other)) == (meaning(one) == meaning(other))


@given(ASKED, st.randoms(use_true_random=False))
def test_order_and_case_of_header_names_do_not_matter(asked, random):
    request, headers, body, credential, mode = asked
    shuffled: list[tuple[bytes, bytes]] = []
    queues = {name: [pair for pair in headers if pair[0].lower() == name] for name in {n.lower() for n, _ in headers}}
    while queues:
        name = random.choice(sorted(queues))
        found, value = queues[name].pop(0)
        shuffled.append((random.choice([found.upper(), found.lower(), found.title()]), value))
        if not queues[name]:
            del queues[name]
    assert made((request, shuffled, body, credential, mode)) == made(asked)


@given(ASKED, st.lists(st.tuples(QUIET, VALUES), max_size=3))
def test_what_changes_from_run_to_run_is_in_a_live_key_alone(asked, quiet):
    request, headers, body, credential, mode = asked
    asked = (request, [*headers, (b"User-Agent", b"pip/1")], body, credential, mode)
    noisy = (
        request,
        [*headers, *((n, v) for n, v in quiet if n != b"User-Agent"), (b"User-Agent", b"PIP/2 {x}")],
        body,
    )
    assert (made(asked) == made((*noisy, credential, mode))) == (mode is not Mode.LIVE)


def test_a_recording_tells_a_browser_from_curl():
    agents = [b"curl/8.5", b"Mozilla/5.0 (X11)", b"Wget/1.21", b"", b"curly/8.5"]
    keys = {key(ask(), ((b"User-Agent", agent),), mode=Mode.RECORD) for agent in agents}
    assert len(keys) == len(agents)


@given(ASKED)
def test_a_key_says_all_that_was_asked(asked):
    request, headers, body, credential, mode = asked
    found = parse_key(made(asked))
    where = request.destination
    assert (found.method, found.scheme, found.host, found.port) == (
        request.method,
        request.scheme,
        where.host.text,
        where.port,
    )
    assert (found.path, found.query, found.credential) == (request.path, request.query, credential)
    assert found.body == hashlib.sha256(body or b"").hexdigest()
    assert [name for name, _ in found.headers] == sorted(name.lower().decode() for name, _ in headers)
    assert (found.mode is Mode.LIVE) == (mode is Mode.LIVE)


@given(st.binary(max_size=300) | ASKED.map(made).flatmap(lambda raw: st.integers(0, len(raw)).map(lambda at: raw[:at])))
def test_what_is_no_key_is_refused(raw):
    try:
        parse_key(raw)
    except ValueError:
        return
    assert raw.startswith(b"stockade-key 1 ")
    assert raw.endswith(b"\n")


def test_credentials_are_in_a_key_as_digests_only():
    headers = ((b"Authorization", b"Bearer abcdef"), (b"Cookie", b"s=abcdef"), (b"X-Thing", b"abcdef"))
    raw = key(ask(), headers, mode=Mode.RECORD)
    assert b"abcdef" not in raw
    assert raw != key(ask(), ((b"Authorization", b"Bearer abcdeg"), *headers[1:]), mode=Mode.RECORD)


@pytest.mark.parametrize(
    ("request_", "headers", "digest"),
    [
        (TUNNEL, (), None),
        (ask("/a\nb"), (), None),
        (ask("/a b"), (), None),
        (ask(query="a\r\nb"), (), None),
        (ask(method="get"), (), None),
        (ask(), ((b"X A", b""),), None),
        (ask(), ((b"X\nA", b""),), None),
        (ask(), ((b"", b""),), None),
        (ask(), (), b"short"),
        (ask(), (), b""),
    ],
)
def test_what_the_gate_never_lets_through_has_no_key(request_, headers, digest):
    with pytest.raises(ValueError, match=r"key|request|header|digest"):
        key(request_, headers, digest, mode=Mode.RECORD)


def test_a_value_cannot_forge_a_line():
    forged = key(ask(), ((b"Accept", b"x\naccept:=y"),), mode=Mode.RECORD)
    assert forged.count(b"\n") == key(ask(), ((b"Accept", b"x"),), mode=Mode.RECORD).count(b"\n")


def test_what_is_missing_is_named():
    headers = ((b"Range", b"bytes=0-1"), (b"Authorization", b"Bearer abcdef"), (b"Accept", b""))
    text = missing(key(ask("/x", method="POST", query="q=1"), headers, hashlib.sha256(b"b").digest(), mode=Mode.REPLAY))
    assert text == (
        "POST https://files.example/x?q=1 (body sha256:3e23e8160039, accept, authorization, range=bytes=0-1)"
    )
    assert missing(key(ask(), mode=Mode.REPLAY, headers=())) == "GET https://files.example/a"


@given(ASKED)
def test_what_is_missing_is_named_in_safe_text(asked):
    text = missing(made(asked))
    assert text.isascii()
    assert text.isprintable()
    assert len(text) <= 200


# ---- which answers


SAFE = (
    (b"Accept", b"*/*"),
    (b"Accept-Encoding", b"identity"),
    (b"User-Agent", b"pip/24"),
    (b"Cache-Control", b"max-age=0"),
)


def test_a_plain_fetch_is_shared_in_live_mode():
    assert shareable(ask(), SAFE)
    assert storable(ask(), SAFE, answer(3, b"Cache-Control: public, max-age=365000000, immutable"), Mode.LIVE)
    assert storable(ask(), SAFE, answer(None, b"Vary: Accept-Encoding"), Mode.LIVE)


@pytest.mark.parametrize(
    "field",
    [
        (b"Authorization", b"Basic eDp5"),
        (b"COOKIE", b"a=b"),
        (b"X-Api-Key", b"k"),
        (b"Private-Token", b"k"),
        (b"Range", b"bytes=0-1"),
        (b"If-None-Match", b'"x"'),
        (b"If-Range", b'"x"'),
        (b"Cache-Control", b"max-age=0, No-Cache"),
        (b"Cache-Control", b"no-store"),
        (b"Pragma", b"no-cache"),
    ],
)
def test_what_is_meant_for_one_is_not_shared(field):
    assert not shareable(ask(), (*SAFE, field))
    assert not storable(ask(), (*SAFE, field), answer(3), Mode.LIVE)
    assert storable(ask(), (*SAFE, field), answer(3), Mode.RECORD)


def test_other_methods_and_added_credentials_are_not_shared():
    assert not shareable(ask(method="POST"), SAFE)
    assert not shareable(ask(method="HEAD"), SAFE)
    assert not shareable(ask(), SAFE, "token")
    assert not storable(ask(), SAFE, answer(3), Mode.LIVE, "token")


@pytest.mark.parametrize(
    "line",
    [
        b"Set-Cookie: a=b",
        b"Content-Range: bytes 0-1/2",
        b"Vary: *",
        b"Cache-Control: no-store",
        b"Cache-Control: Private=x",
    ],
)
def test_answers_for_one_client_are_not_shared(line):
    assert not storable(ask(), SAFE, answer(3, line), Mode.LIVE)
    assert storable(ask(), SAFE, answer(3, line), Mode.RECORD)


def test_an_answer_that_may_have_been_cut_off_is_not_shared():
    raw = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
    assert not storable(ask(), SAFE, parse_response_head(raw, LIMITS, method="GET"), Mode.LIVE)


@pytest.mark.parametrize("status", [201, 204, 206, 301, 304, 404, 500])
def test_only_200_is_shared(status):
    assert not storable(ask(), SAFE, answer(0, status=status), Mode.LIVE)


def test_a_recording_keeps_answers_and_no_passing_failures():
    kept = [200, 201, 204, 206, 301, 302, 304, 400, 401, 403, 404, 409, 410, 416, 501, 505]
    passing = [408, 425, 429, 500, 502, 503, 504]
    assert all(storable(ask(), (), answer(0, status=status), Mode.RECORD) for status in kept)
    assert not any(storable(ask(), (), answer(0, status=status), Mode.RECORD) for status in passing)
    assert not storable(ask(), (), answer(0, status=103), Mode.RECORD)
    assert not storable(TUNNEL, (), answer(0), Mode.RECORD)


@pytest.mark.parametrize("mode", [Mode.REPLAY, Mode.OFF])
def test_nothing_is_kept_where_nothing_is_fetched(mode):
    assert not storable(ask(), SAFE, answer(3), mode)


def test_the_neutral_fields_hold_no_credential_and_no_condition():
    assert not any(name.startswith(b"if-") or b"auth" in name or b"key" in name for name in NEUTRAL)
    assert hashlib.sha256().digest() == EMPTY_SHA256
