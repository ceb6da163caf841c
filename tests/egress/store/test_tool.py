"""The store as agent and operators see it."""

from __future__ import annotations

import contextlib
import os
import stat

import pytest

from stockade.egress._store import Store, StoreFailed
from stockade.egress._store_tool import check, discard, entries, prepare_store, recordings, recount
from stockade.egress.gate import Mode
from tests.egress.store.kit import (
    MIB,
    answer,
    blob_path,
    cut,
    damage,
    entry_path,
    fetch,
    keep,
    opened,
    record_key,
    size_of,
)
from tests.support import requires_root

KEY, OTHER = record_key(), record_key("/other")


@pytest.fixture
def fd(place):
    with opened(place) as store:
        keep(store, KEY, b"body")
        keep(store, OTHER, b"other")
    with opened(place, recording="second") as store:
        keep(store, KEY, b"body")
        keep(store, record_key("/live", mode=Mode.LIVE), b"unlike")
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


# ---- made


def prepared(path, uid=None):
    fd = prepare_store(path, os.geteuid() if uid is None else uid, os.getegid() if uid is None else uid)
    os.close(fd)


def test_preparing_twice_changes_nothing(place):
    prepared(place)
    before = {one: one.stat().st_ino for one in place.rglob("*")}
    prepared(place)
    prepared(f"{place}/")
    assert {one: one.stat().st_ino for one in place.rglob("*")} == before
    assert sorted(one.name for one in place.iterdir()) == ["blobs", "index", "space"]
    for one in (place, place / "blobs", place / "index"):
        assert stat.S_IMODE(one.stat().st_mode) == 0o700
    assert stat.S_IMODE((place / "space").stat().st_mode) == 0o600


def test_the_descriptor_is_closed_on_exec(place):
    fd = prepare_store(str(place), os.geteuid(), os.getegid())
    assert not os.get_inheritable(fd)
    os.close(fd)


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o777])
@pytest.mark.parametrize("part", [".", "blobs", "index"])
def test_a_store_that_is_open_to_others_is_refused(place, part, mode):
    prepared(place)
    (place / part).chmod(mode)
    with pytest.raises(StoreFailed, match="open to other users"):
        prepared(place)
    assert stat.S_IMODE((place / part).stat().st_mode) == mode, "it is not for us to say that it may be used"


@pytest.mark.parametrize("target", ["elsewhere", "nowhere"])
def test_a_link_is_not_followed(place, tmp_path, target):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    place.symlink_to(tmp_path / target)
    with pytest.raises(StoreFailed, match="is a link"):
        prepared(place)
    with pytest.raises(StoreFailed, match="is a link"):
        prepared(f"{place}/")
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("path", ["store", "./store", ""])
def test_a_relative_path_is_refused(path):
    with pytest.raises(StoreFailed, match="absolute"):
        prepared(path)


def test_a_missing_parent_is_not_made(tmp_path):
    with pytest.raises(StoreFailed, match="No such file"):
        prepared(tmp_path / "no" / "store")


def test_a_file_is_no_store(place):
    place.write_bytes(b"")
    with pytest.raises(StoreFailed, match="no directory"):
        prepared(place)


def test_root_makes_it_for_another_user(place):
    requires_root()
    prepared(place, 12345)
    assert {one.stat().st_uid for one in (place, *place.rglob("*"))} == {12345}
    prepared(place, 12345)
    with pytest.raises(StoreFailed, match="belongs to uid 12345, not to uid 12346"):
        prepared(place, 12346)
    with pytest.raises(StoreFailed, match="belongs to uid 12345, not to uid 0"):
        prepared(place, 0)


def test_root_gives_away_nothing_that_is_in_use(place):
    requires_root()
    place.mkdir(mode=0o700)
    (place / "precious").write_bytes(b"")
    with pytest.raises(StoreFailed, match="belongs to uid 0"):
        prepared(place, 12345)
    assert place.stat().st_uid == 0
    (place / "precious").unlink()
    prepared(place, 12345)
    assert place.stat().st_uid == 12345


def test_root_follows_nothing_that_the_worker_planted(place, tmp_path):
    requires_root()
    prepared(place, 12345)
    precious = tmp_path / "precious"
    precious.mkdir(mode=0o700)
    (place / "blobs").rmdir()
    (place / "blobs").symlink_to(precious)
    with pytest.raises(StoreFailed, match="is a link"):
        prepared(place, 12345)
    (place / "blobs").unlink()
    file = tmp_path / "file"
    file.write_bytes(b"precious")
    (place / "space").unlink()
    os.link(file, place / "space")
    with pytest.raises(StoreFailed, match="belongs to uid 0"):
        prepared(place, 12345)
    assert precious.stat().st_uid == file.stat().st_uid == 0
    assert file.read_bytes() == b"precious"


# ---- listed


def test_recordings_are_listed(fd, place):
    (place / "index" / "not a recording").mkdir()
    assert recordings(fd) == ["default", "second"]


def test_entries_say_what_was_asked(fd):
    found = {one.asked.url: one for one in entries(fd, "default") if one.asked}
    assert sorted(found) == ["https://files.example/a", "https://files.example/other"]
    one = found["https://files.example/a"]
    assert one.asked
    assert (one.asked.method, one.asked.mode, one.status, one.size, one.problem) == ("GET", Mode.RECORD, 200, 4, "")
    assert one.kept_ns > 1_600_000_000 * 10**9
    assert {one.asked.mode for one in entries(fd, "second") if one.asked} == {Mode.LIVE, Mode.RECORD}
    assert list(entries(fd, "none")) == []
    with pytest.raises(ValueError, match="recording"):
        list(entries(fd, "../blobs"))


def test_entries_show_what_is_wrong(fd, place):
    cut(entry_path(place, OTHER), 20)
    blob_path(place, b"body").unlink()
    (place / "index" / "default" / "junk").write_bytes(b"junk")
    os.mkfifo(place / "index" / "default" / "pipe")
    problems = sorted(one.problem for one in entries(fd, "default"))
    assert len(problems) == 4
    assert [text.partition(" ")[0] for text in problems] == ["store:"] * 4
    assert any("gone" in text for text in problems)
    assert any("no regular file" in text for text in problems)


def test_a_listing_can_be_given_up(fd):
    before = len(os.listdir("/proc/self/fd"))
    listing = entries(fd, "second")
    next(listing)
    listing.close()
    assert len(os.listdir("/proc/self/fd")) == before


# ---- checked


def test_a_sound_store_has_no_damage(fd):
    assert list(check(fd)) == []


def test_damage_is_found_and_removed_and_kept_anew(fd, place):
    damage(blob_path(place, b"body"))
    cut(entry_path(place, OTHER), 20)
    (place / "blobs" / "junk").write_bytes(b"x")
    found = [one.path for one in check(fd)]
    assert found == [
        f"blobs/{blob_path(place, b'body').name}",
        "blobs/junk",
        f"index/default/{entry_path(place, OTHER).name}",
    ]
    assert [one.path for one in check(fd, remove=True)] == [
        *found[:2],
        # Those whose body was just removed are found too.
        *sorted(f"index/default/{entry_path(place, key).name}" for key in (KEY, OTHER)),
        f"index/second/{entry_path(place, KEY).name}",
    ]
    assert list(check(fd)) == []
    assert recount(fd) == size_of(place)
    with opened(place) as store:
        assert store.lookup(KEY) is None
        assert keep(store, KEY, b"body")
        assert fetch(store, KEY) == b"body"


# ---- cleared


def test_a_recording_is_discarded_with_what_only_it_needed(fd, place):
    used = discard(fd, "default")
    assert used == size_of(place) == 4 * 4096
    assert list(entries(fd, "default")) == []
    assert blob_path(place, b"body").exists()
    assert not blob_path(place, b"other").exists()
    with opened(place, recording="second") as store:
        assert fetch(store, KEY) == b"body"
        assert store.space.used() == used
    assert discard(fd, "second") == size_of(place) == 0
    assert discard(fd, "second") == discard(fd, "never") == 0


def test_nothing_is_discarded_under_a_worker_that_writes(fd, place):
    with opened(place) as store:
        assert fetch(store, KEY) == b"body"
        keep(store, record_key("/new"), b"body")
        with pytest.raises(StoreFailed, match="workers are using it"):
            discard(fd, "default")
    with opened(place) as store:
        assert fetch(store, record_key("/new")) == b"body"
        discard(fd, "default")
        assert store.lookup(KEY) is None
        assert keep(store, KEY, b"new"), "a worker that had the recording open goes on"
        assert fetch(store, KEY) == b"new"


# ---- counted


def test_a_recount_leaves_alone_what_is_being_written(place):
    fd = prepare_store(place, os.geteuid(), os.getegid())
    try:
        with contextlib.closing(Store(fd, MIB)) as store:
            store._unnamed = False
            recording = store.begin(KEY, answer(None))
            recording.write(b"x" * 100_000)
            assert recount(fd) >= 100_000
            assert len(list((place / "blobs").iterdir())) == 1
            recording.write(b"y")
            assert recording.commit()
            assert recount(fd) == store.space.used() == size_of(place)
            assert fetch(store, KEY) == b"x" * 100_000 + b"y"
    finally:
        os.close(fd)


def test_a_recount_removes_what_the_dead_left(place):
    prepared(place)
    (place / "blobs" / "tmp-7-1").write_bytes(b"x" * 10_000)
    (place / "blobs" / "tmp-999-1").write_bytes(b"x")
    fd = os.open(place, os.O_RDONLY)
    try:
        assert recount(fd) == 4096
    finally:
        os.close(fd)
    assert [one.name for one in (place / "blobs").iterdir()] == ["tmp-999-1"], "no place of ours"


def test_a_recount_corrects_both_ways(place):
    fd = prepare_store(place, os.geteuid(), os.getegid())
    try:
        with contextlib.closing(Store(fd, MIB)) as store:
            keep(store, KEY, b"x" * 50_000)
            blob_path(place, b"x" * 50_000).unlink()
            assert store.space.used() > size_of(place)
            assert recount(fd) == store.space.used() == size_of(place) == 4096
            (place / "blobs" / ("0" * 64)).write_bytes(b"x" * 9000)
            assert recount(fd) == store.space.used() == 4 * 4096
            keep(store, OTHER, b"y")
            assert store.space.used() == size_of(place)
    finally:
        os.close(fd)
