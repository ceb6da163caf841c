"""What goes in comes out, once and unchanged; what is half there is not there."""

from __future__ import annotations

import contextlib
import hashlib
import os

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.egress._store import Store, StoreFailed, StoreFull
from stockade.egress._store_entry import parse_entry, render_entry
from stockade.egress._store_files import Draft
from stockade.egress._store_tool import prepare_store, recount
from stockade.egress.gate import Framing, Malformed, Mode, Reason, parse_response_head, render_response_head
from tests.egress.store.kit import (
    LIMITS,
    MIB,
    answer,
    blob_path,
    entry_path,
    fetch,
    found,
    head_is_plain,
    keep,
    opened,
    record_key,
    size_of,
)

KEY = record_key()


def held():
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(params=[True, False], ids=["unnamed", "named"])
def either(request, store):
    """The store as it works with and without O_TMPFILE."""
    store._unnamed = request.param
    return store


@pytest.mark.parametrize("size", [0, 1, 4096, 3 * 65536 + 7])
@pytest.mark.parametrize("chunked", [True, False])
def test_what_goes_in_comes_out(either, place, size, chunked):
    body = os.urandom(size)
    assert either.lookup(KEY) is None
    assert keep(either, KEY, body, b"X-A: 1", b"Set-Cookie: a", b"set-cookie: b", chunked=chunked)
    stored = found(either, KEY)
    assert (stored.status, stored.size, stored.blob) == (200, size, hashlib.sha256(body).hexdigest())
    assert stored.headers == ((b"X-A", b"1"), (b"Set-Cookie", b"a"), (b"set-cookie", b"b"))
    assert head_is_plain(stored.head)
    assert stored.head.length == size
    assert fetch(either, KEY) == body
    assert either.space.used() == size_of(place)
    assert [one for one in place.rglob("*") if one.name.startswith("tmp-")] == []


def test_another_worker_and_the_next_run_see_it(place):
    with opened(place) as one:
        keep(one, KEY, b"body")
        with opened(place) as other:
            assert fetch(other, KEY) == b"body"
    with opened(place) as later:
        assert fetch(later, KEY) == b"body"


def test_recordings_are_apart_and_share_bodies(place):
    with opened(place, recording="one") as one, opened(place, recording="Two.x_1") as two:
        keep(one, KEY, b"x" * 10_000)
        assert two.lookup(KEY) is None
        keep(two, KEY, b"x" * 10_000)
        assert fetch(two, KEY) == fetch(one, KEY)
        assert len(list((place / "blobs").iterdir())) == 1
        assert one.space.used() == size_of(place) == 4096 * (3 + 1 + 1)


def test_equal_bodies_lie_there_once(either, place):
    body = os.urandom(50_000)
    for number in range(5):
        assert keep(either, record_key(f"/{number}"), body)
    assert [one.name for one in (place / "blobs").iterdir()] == [hashlib.sha256(body).hexdigest()]
    assert either.space.used() == size_of(place)
    assert either.space.used() + sum(either.space._row(16)) == size_of(place), "nothing stays reserved"


@pytest.mark.parametrize(("method", "status"), [("HEAD", 200), ("GET", 204), ("GET", 304), ("POST", 302), ("GET", 404)])
def test_answers_without_a_body(store, method, status):
    raw = b"HTTP/1.1 %d X\r\nETag: x\r\nLocation: /b\r\nContent-Length: 0\r\n\r\n" % status
    head = parse_response_head(raw, LIMITS, method=method)
    key = record_key(method=method)
    assert store.begin(key, head).commit()
    stored = found(store, key)
    assert (stored.head.status, stored.head.headers, stored.head.framing) == (status, head.headers, head.framing)
    assert stored.head.phrase == "X"
    with contextlib.closing(stored.open()) as serving:
        assert serving.verified
        assert serving.read() == b""
        assert serving.left == 0


def test_the_first_one_wins(either):
    slow = either.begin(KEY, answer(5))
    slow.write(b"first")
    assert keep(either, KEY, b"second")
    assert slow.commit() is False
    assert keep(either, KEY, b"third") is False
    assert fetch(either, KEY) == b"second"


def test_nothing_is_seen_before_it_is_whole(either, place):
    recording = either.begin(KEY, answer(4))
    recording.write(b"bo")
    assert either.lookup(KEY) is None
    assert size_of(place) in (0, 4096)  # a named draft is there, under no name that anybody asks for
    recording.write(b"dy")
    assert either.lookup(KEY) is None
    assert recording.commit()
    assert fetch(either, KEY) == b"body"


def test_what_is_given_up_leaves_nothing(either, place):
    before = held()
    for _ in range(3):
        recording = either.begin(KEY, answer(None))
        recording.write(b"x" * 100_000)
        recording.abort()
        recording.abort()
        with pytest.raises(StoreFailed, match="over"):
            recording.write(b"x")
        with pytest.raises(StoreFailed, match="over"):
            recording.commit()
    assert either.lookup(KEY) is None
    assert size_of(place) == either.space.used() == sum(either.space._row(16)) == 0
    assert held() == before


@pytest.mark.parametrize("sent", [0, 1, 9])
def test_a_body_that_was_cut_off_is_not_kept(store, sent):
    recording = store.begin(KEY, answer(10))
    recording.write(b"x" * sent)
    with pytest.raises(StoreFailed, match="shorter"):
        recording.commit()
    assert store.lookup(KEY) is None
    assert store.space.used() == 0


def test_a_body_that_is_too_long_is_not_kept(store):
    recording = store.begin(KEY, answer(10))
    with pytest.raises(StoreFailed, match="longer"):
        recording.write(b"x" * 11)
    assert recording.over
    bodiless = store.begin(KEY, answer(0, status=304))
    with pytest.raises(StoreFailed, match="longer"):
        bodiless.write(b"x")


def test_descriptors_do_not_pile_up(store):
    keep(store, record_key("/0"), b"x")
    before = held()
    for number in range(1, 20):
        keep(store, record_key(f"/{number}"), b"%d" % number)
        fetch(store, record_key(f"/{number}"))
        assert store.lookup(record_key(f"/no/{number}")) is None
    assert held() == before


# ---- one rollout and another


@pytest.mark.promise("S3.17")
def test_what_was_fetched_cannot_be_changed_by_another(either, place):
    body = os.urandom(300_000)
    keep(either, KEY, body)
    with contextlib.closing(found(either, KEY).open()) as serving:
        while not serving.verify():
            pass
        piece = serving.read(1000)
        for other in (body[:-1], body + b"x", b"", os.urandom(300_000), body):
            assert keep(either, KEY, other) is False
            keep(either, record_key("/other"), other, b"Set-Cookie: mine")
        assert piece + b"".join(iter(serving.read, b"")) == body
    assert fetch(either, KEY) == body
    assert blob_path(place, body).stat().st_mode & 0o777 == 0o400
    assert entry_path(place, KEY).stat().st_mode & 0o777 == 0o400
    for directory in (place, place / "blobs", place / "index", place / "index" / "default"):
        assert directory.stat().st_mode & 0o777 == 0o700


# ---- heads

FIELD = st.tuples(
    st.sampled_from(
        [b"X-A", b"Set-Cookie", b"Content-Type", b"Content-Length", b"Connection", b"Alt-Svc", b"X A", b"a\r\nb"]
    ),
    st.sampled_from([b"", b"x", b"1", b" x", b"a\r\nX: y", b"a\nb", b"\0", b"\xe4\xf6", b"a\tb", b"x\r\n\r\n<script>"]),
)


@given(
    st.integers(100, 599) | st.sampled_from([101, 407, 204, 304]),
    st.sampled_from(["OK", "", "A\r\nX: y", "ä", "x" * 200]),
    st.lists(FIELD, max_size=3),
    st.sampled_from([Framing.LENGTH, Framing.NONE, Framing.CHUNKED]),
)
def test_no_header_is_kept_that_could_not_have_come_from_an_upstream(status, phrase, headers, framing):
    length = 3 if framing is Framing.LENGTH else 0
    head = msgspec.structs.replace(
        answer(3), status=status, phrase=phrase, headers=tuple(headers), framing=framing, length=length
    )
    try:
        raw = render_entry(KEY, head, "0" * 64, 0 if framing is Framing.NONE else 3)
    except StoreFailed:
        return
    read = parse_entry(raw, KEY).head
    assert (read.status, read.phrase, read.headers) == (status, phrase, tuple(headers))
    assert status >= 200
    written = render_response_head(read)
    assert (
        written.count(b"\r\n")
        == written.count(b"\n")
        == written.count(b"\r")
        == len(headers) + 2 + (read.framing is Framing.LENGTH)
    )


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nX: a\r\nContent-Length: 4\r\n\r\nHTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\nY: b\r\nContent-Length: 4\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 407 OK\r\nContent-Length: 4\r\n\r\n",
        b"HTTP/1.1 101 OK\r\nContent-Length: 4\r\n\r\n",
        b"",
    ],
)
def test_an_entry_with_a_forged_head_is_refused(store, place, head):
    keep(store, KEY, b"body")
    path = entry_path(place, KEY)
    forge(path, head)
    with pytest.raises(StoreFailed):
        store.lookup(KEY)


def forge(path, head, key=KEY):
    """Put another head into an entry, with all sums right."""
    digest = hashlib.sha256(b"body").hexdigest().encode()
    rest = b"%d %d 4 %b\n%b%b" % (len(key), len(head), digest, key, head)
    path.chmod(0o600)
    path.write_bytes(b"stockade-store 1 %b %b" % (hashlib.sha256(rest).hexdigest().encode(), rest))


def test_the_forger_of_these_tests_can_forge(store, place):
    keep(store, KEY, b"body")
    forge(entry_path(place, KEY), b"HTTP/1.1 203 Non\r\nX-Stockade-Reason: allowed\r\nContent-Length: 4\r\n\r\n")
    stored = found(store, KEY)
    assert (stored.status, stored.headers) == (203, ())


def test_what_only_the_connection_needed_is_not_kept(store):
    raw = b"HTTP/1.1 200 OK\r\nConnection: close, x-hop\r\nX-Hop: 1\r\nKeep-Alive: a\r\nContent-Length: 1\r\n\r\n"
    recording = store.begin(KEY, parse_response_head(raw, LIMITS, method="GET"))
    recording.write(b"x")
    recording.commit()
    assert found(store, KEY).headers == ()
    assert found(store, KEY).head.keep_alive


def test_the_largest_head_of_the_gate_is_kept(store):
    lines = [b"X-%03d: %b" % (number, b"\xff" * 640) for number in range(98)]
    assert keep(store, KEY, b"x", *lines)
    assert len(found(store, KEY).headers) == 98


def test_a_head_that_is_too_large_is_refused_at_once(store):
    head = msgspec.structs.replace(answer(1), headers=((b"X", b"x" * 300_000),))
    with pytest.raises(StoreFailed):
        store.begin(KEY, head)
    assert sum(store.space._row(16)) == 0


def test_only_a_key_names_an_entry(store):
    for name in (b"", b"x", b"../../etc/passwd", KEY[:-1]):
        assert store.lookup(name) is None
        with pytest.raises(StoreFailed):
            store.begin(name, answer(1))


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a\0b", "-a", "a.", "ä", "a" * 65, "tmp/..", "a\n"])
def test_a_recording_cannot_be_elsewhere(place, name):
    fd = prepare_store(place, os.geteuid(), os.getegid())
    try:
        before = held()
        with pytest.raises(ValueError, match="recording"):
            Store(fd, MIB, name)
        assert held() == before
    finally:
        os.close(fd)


# ---- room


def test_a_body_that_is_announced_too_large_is_refused_before_it_comes(place):
    with opened(place, MIB) as store:
        with pytest.raises(StoreFull) as error:
            store.begin(KEY, answer(MIB))
        assert error.value.reason is Reason.STORE_FULL
        assert keep(store, KEY, b"x" * (MIB - 4096))
        assert store.space.used() == MIB
        with pytest.raises(StoreFull):
            store.begin(record_key("/b"), answer(0))


def test_a_body_of_unknown_length_stops_at_the_limit(place):
    with opened(place, MIB) as store:
        recording = store.begin(KEY, answer(None))
        for _ in range(15):
            recording.write(b"x" * 65536)
        with pytest.raises(StoreFull):
            recording.write(b"x" * 65536)
        assert recording.over
        assert recording.size <= MIB - 4096
        assert store.lookup(KEY) is None
        assert keep(store, KEY, b"x" * (MIB - 4096), chunked=True), "all of it is free again, to the last block"


def test_small_answers_fill_a_store_too(place):
    with opened(place, 40 * 4096) as store:
        for number in range(20):
            keep(store, record_key(f"/{number}"), b"%d" % number)
        with pytest.raises(StoreFull):
            keep(store, record_key("/20"), b"20")
        assert size_of(place) == store.space.used() == 40 * 4096


def test_room_that_was_given_up_is_room_again(place):
    with opened(place, MIB) as store:
        for _ in range(5):
            recording = store.begin(KEY, answer(MIB - 4096))
            with pytest.raises(StoreFull):
                store.begin(record_key("/b"), answer(0))
            recording.abort()


def test_who_only_replays_writes_nothing(place):
    with opened(place) as store:
        keep(store, KEY, b"body")
    before = {one: one.stat().st_mtime_ns for one in place.rglob("*")}
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.closing(Store(fd, 0)) as store:
            assert fetch(store, KEY) == b"body"
            assert store.lookup(record_key("/no")) is None
        with contextlib.closing(Store(fd, 0, "other")) as store:
            assert store.lookup(KEY) is None
    finally:
        os.close(fd)
    assert {one: one.stat().st_mtime_ns for one in place.rglob("*")} == before


def test_a_full_disk_is_a_full_store(store, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    recording = store.begin(KEY, answer(1))
    monkeypatch.setattr(Draft, "write", full)
    with pytest.raises(StoreFull):
        recording.write(b"x")
    assert recording.over
    recording = store.begin(KEY, answer(0))
    with pytest.raises(StoreFull):
        recording.commit()
    assert recording.over
    assert store.space.used() == sum(store.space._row(16)) == 0


def test_a_store_that_was_closed_takes_nothing(place):
    with opened(place) as store:
        recording = store.begin(KEY, answer(1))
        recording.write(b"x")
    recording.abort()
    assert size_of(place) == 0


def test_more_writers_than_places(place):
    fd = prepare_store(place, os.geteuid(), os.getegid())
    stores = [Store(fd, MIB * 64) for _ in range(129)]
    try:
        for number, store in enumerate(stores[:-1]):
            keep(store, record_key(f"/{number}"), b"x")
        with pytest.raises(StoreFailed, match="128"):
            stores[-1].begin(KEY, answer(0))
        assert fetch(stores[-1], record_key("/0")) == b"x"
        stores.pop(5).close()
        assert keep(stores[-1], KEY, b"x")
    finally:
        for store in stores:
            store.close()
        os.close(fd)


def test_every_fault_has_a_reason_of_the_gate():
    assert StoreFailed("x").reason is Reason.STORE_FAILED
    assert StoreFull("x").reason is Reason.STORE_FULL


def test_an_answer_that_the_gate_refuses_cannot_be_made():
    with pytest.raises(Malformed):
        answer(1, b"X: a\nb")
    assert record_key(mode=Mode.LIVE) != KEY


def test_counting_again_finds_what_was_there(place, store):
    keep(store, KEY, os.urandom(10_000))
    used = store.space.used()
    (place / "space").write_bytes((place / "space").read_bytes()[:8] + b"\0" * (16 + 2 * 128 * 8 - 8))
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert recount(fd) == used == size_of(place)
    finally:
        os.close(fd)
