"""A store that something happened to gives out nothing wrong: not a byte, not through a link, not from a device."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stockade.egress._store import Store, StoreFailed
from stockade.egress._store_entry import parse_entry, render_entry
from stockade.egress._store_space import SPACE_BYTES
from stockade.egress._store_tool import prepare_store
from tests.egress.store.kit import (
    MIB,
    answer,
    blob_path,
    cut,
    damage,
    entry_path,
    fetch,
    found,
    keep,
    opened,
    record_key,
    verified,
)
from tests.support import requires_root

KEY, OTHER = record_key(), record_key("/other")
BODY = bytes(range(256)) * 4096  # 1 MiB


def settle():
    """Let the clock of the file system go on: older kernels tell changes apart by ticks of up to 10 ms."""
    time.sleep(0.02)


@pytest.fixture
def filled(store):
    keep(store, KEY, BODY)
    keep(store, OTHER, b"other", b"X-Other: 1")
    settle()
    return store


def fresh(place):
    """Open the store as a worker that has verified nothing yet."""
    return opened(place)


# ---- the index


@pytest.mark.parametrize("size", [0, 1, 16, 80, 81, 100, 200, -1])
def test_a_truncated_entry_is_refused(filled, place, size):
    path = entry_path(place, KEY)
    cut(path, size % path.stat().st_size)
    with pytest.raises(StoreFailed):
        filled.lookup(KEY)
    assert keep(filled, KEY, b"again") is False, "and never overwritten"


def test_an_entry_with_something_added_is_refused(filled, place):
    path = entry_path(place, KEY)
    path.chmod(0o600)
    with path.open("ab") as file:
        file.write(b"x")
    with pytest.raises(StoreFailed):
        filled.lookup(KEY)


def test_any_flipped_byte_of_an_entry_is_found():
    raw = render_entry(KEY, answer(4, b"X-A: 1"), "0" * 64, 4)
    assert parse_entry(raw, KEY).size == 4
    for at in range(len(raw)):
        for bit in (1, 32, 128):
            broken = raw[:at] + bytes([raw[at] ^ bit]) + raw[at + 1 :]
            with pytest.raises(StoreFailed):
                parse_entry(broken, KEY)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=400), st.booleans())
def test_no_bytes_end_the_reader(raw, framed):
    with pytest.raises(StoreFailed):
        parse_entry(b"stockade-store 1 " + b"0" * 64 + b" " + raw if framed else raw)


def test_an_entry_under_another_name_is_refused(filled, place):
    """Swapped files look the same as two keys with one hash: the whole key is compared."""
    one, other = entry_path(place, KEY), entry_path(place, OTHER)
    one.rename(place / "aside")
    other.rename(one)
    (place / "aside").rename(other)
    for key in (KEY, OTHER):
        with pytest.raises(StoreFailed, match="not what its name says"):
            filled.lookup(key)


def test_an_entry_of_endless_size_is_not_read(filled, place):
    path = entry_path(place, KEY)
    cut(path, 1 << 40)
    with pytest.raises(StoreFailed):
        filled.lookup(KEY)


def test_an_empty_entry_is_refused(filled, place):
    cut(entry_path(place, KEY), 0)
    with pytest.raises(StoreFailed):
        filled.lookup(KEY)


# ---- bodies


@pytest.mark.promise("S3.17")
@pytest.mark.parametrize("at", [0, 256 * 1024, len(BODY) - 1])
def test_not_one_byte_of_a_damaged_body_is_served(filled, place, at):
    damage(blob_path(place, BODY), at)
    for store in (filled, None):
        with fresh(place) if store is None else contextlib.nullcontext(store) as one:
            serving = found(one, KEY).open()
            with contextlib.closing(serving):
                steps = 0
                with pytest.raises(StoreFailed, match="damaged"):  # noqa: PT012 - the last slice tells
                    while not serving.verify():
                        steps += 1
                        with pytest.raises(ValueError, match="not verified"):
                            serving.read()
                        with pytest.raises(ValueError, match="not verified"):
                            serving.send(1)
                assert steps == 3
                assert not serving.verified


@pytest.mark.parametrize("size", [0, 1, len(BODY) - 1, len(BODY) + 1])
def test_a_body_of_another_size_is_not_opened(filled, place, size):
    cut(blob_path(place, BODY), size)
    with pytest.raises(StoreFailed, match="damaged"):
        found(filled, KEY).open()
    with pytest.raises(StoreFailed, match="damaged"):
        keep(filled, record_key("/new"), BODY)
    assert filled.lookup(record_key("/new")) is None


def test_a_body_that_is_gone_is_a_fault_and_no_miss(filled, place):
    blob_path(place, BODY).unlink()
    with pytest.raises(StoreFailed, match="gone"):
        found(filled, KEY).open()


def test_a_body_that_was_swapped_for_another_of_its_size_is_not_served(filled, place):
    """What was verified is this inode as it was then; a new file under the old name is unknown."""
    assert fetch(filled, KEY) == BODY
    path = blob_path(place, BODY)
    aside = path.with_name("aside")
    shutil.copy2(path, aside)
    damage(aside)
    aside.rename(path)
    with pytest.raises(StoreFailed, match="damaged"):
        fetch(filled, KEY)


@pytest.mark.parametrize("way", ["read", "send"])
@pytest.mark.parametrize("harm", ["write", "truncate"])
def test_a_body_that_changes_on_its_way_stops_there(filled, place, way, harm):
    ours, theirs = socket.socketpair()
    with ours, theirs, contextlib.closing(verified(filled, KEY)) as serving:
        ours.setblocking(False)
        got = serving.read(1000) if way == "read" else theirs.recv(serving.send(ours.fileno(), 1000))
        assert got == BODY[:1000]
        if harm == "write":
            damage(blob_path(place, BODY), 5000)
        else:
            cut(blob_path(place, BODY), 900)
        with pytest.raises(StoreFailed, match=r"changed|cut off"):
            serving.read() if way == "read" else serving.send(ours.fileno())
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
    with pytest.raises(StoreFailed):
        fetch(filled, KEY)


def test_a_body_that_changes_while_it_is_verified_is_not_trusted(place, filled):
    with fresh(place) as other, contextlib.closing(found(other, KEY).open()) as serving:
        assert not serving.verify()
        path = blob_path(place, BODY)
        damage(path, 5)  # in a slice that was read already
        while serving._at < len(BODY) - 256 * 1024:
            serving.verify()
        with pytest.raises(StoreFailed, match="changed"):
            serving.verify()
        damage(path, 5)
    assert fetch(filled, KEY) == BODY


# ---- what is planted


def plant_link(path, target):
    path.symlink_to(target)


def plant_fifo(path, _target):
    os.mkfifo(path)


def plant_socket(path, _target):
    with socket.socket(socket.AF_UNIX) as listener, contextlib.chdir(path.parent):
        listener.bind(path.name)


def plant_directory(path, _target):
    path.mkdir()


def plant_device(path, _target):
    requires_root()
    os.mknod(path, 0o600 | 0o020000, os.makedev(1, 3))


PLANTS = [plant_link, plant_fifo, plant_socket, plant_directory, plant_device]


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("what", ["blob", "entry"])
def test_nothing_but_files_is_opened(filled, place, tmp_path, plant, what):
    path = blob_path(place, BODY) if what == "blob" else entry_path(place, KEY)
    genuine = tmp_path / "genuine"
    path.rename(genuine)
    plant(path, genuine)
    with pytest.raises(StoreFailed, match="no regular file"):
        fetch(filled, KEY)
    if what == "entry":
        assert keep(filled, KEY, BODY) is False
    else:
        with pytest.raises(StoreFailed):
            keep(filled, record_key("/new"), BODY)


@pytest.mark.parametrize("plant", PLANTS)
def test_the_space_file_is_a_file(place, tmp_path, plant):
    with opened(place):
        pass
    (place / "space").rename(tmp_path / "genuine")
    plant(place / "space", tmp_path / "genuine")
    with pytest.raises(StoreFailed, match="no regular file"):
        prepare_store(place, os.geteuid(), os.getegid())
    fd = os.open(place, os.O_RDONLY)
    try:
        with pytest.raises(StoreFailed, match="no regular file"):
            Store(fd, MIB)
    finally:
        os.close(fd)


@pytest.mark.parametrize("part", ["blobs", "index", "index/default"])
@pytest.mark.parametrize("plant", [plant_link, plant_fifo])
def test_the_directories_are_directories(place, tmp_path, part, plant):
    with opened(place) as store:
        keep(store, KEY, b"x")
    (place / part).rename(tmp_path / "genuine")
    plant(place / part, tmp_path / "genuine")
    fd = os.open(place, os.O_RDONLY)
    try:
        with pytest.raises(StoreFailed, match="is a link, or no directory"):  # noqa: SIM117 - raised by either
            with contextlib.closing(Store(fd, MIB)) as store:
                store.lookup(KEY)
        with pytest.raises(StoreFailed):
            os.close(prepare_store(place, os.geteuid(), os.getegid()))
    finally:
        os.close(fd)
    assert [one.name for one in (tmp_path / "genuine").iterdir()], "nothing was done through the link"


def test_a_file_of_another_user_is_not_used(filled, place):
    requires_root()
    os.chown(entry_path(place, OTHER), 12345, 12345)
    with pytest.raises(StoreFailed, match="belongs to uid 12345"):
        filled.lookup(OTHER)
    os.chown(blob_path(place, BODY), 12345, 12345)
    with pytest.raises(StoreFailed, match="belongs to uid 12345"):
        fetch(filled, KEY)


# ---- the space file


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * SPACE_BYTES, b"\x01" + b"\0" * (SPACE_BYTES - 2), b"\x01" + b"\0" * 7 + b"\xff" * (SPACE_BYTES - 8)],
)
def test_a_damaged_count_stops_all_writing(place, content):
    with opened(place) as store:
        keep(store, KEY, b"body")
        (place / "space").write_bytes(content)
        with pytest.raises(StoreFailed, match="damaged"):
            store.begin(OTHER, answer(0))
        assert fetch(store, KEY) == b"body", "reading needs no count"
        with pytest.raises(StoreFailed, match="damaged"):
            prepare_store(place, os.geteuid(), os.getegid())
    (place / "space").unlink()
    with opened(place) as store:
        assert store.space.used() == 8192
        keep(store, OTHER, b"x")


def test_an_unprepared_directory_is_no_store(tmp_path):
    tmp_path.chmod(0o700)
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(StoreFailed, match="not prepared"):
            Store(fd, MIB)
    finally:
        os.close(fd)
    assert list(tmp_path.iterdir()) == []
