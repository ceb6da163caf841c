"""Serving in turns: verify a slice, send a piece, never more than asked, never before it is known to be good."""

from __future__ import annotations

import contextlib
import os
import socket

import pytest

from stockade.egress._store import PIECE_BYTES
from stockade.egress._store_serving import Verified
from tests.egress.store.kit import found, keep, opened, record_key, verified

KEY = record_key()
BODY = os.urandom(3 * PIECE_BYTES + 12345)


@pytest.fixture
def filled(store):
    keep(store, KEY, BODY)
    return store


def test_a_worker_verifies_a_body_once(place, filled):
    with opened(place) as other:
        for turns in (4, 0, 0):
            with contextlib.closing(found(other, KEY).open()) as serving:
                assert serving.verified is (turns == 0)
                taken = 0
                while not serving.verified:
                    assert serving.left == len(BODY)
                    serving.verify()
                    taken += 1
                assert taken == turns
                assert serving.verify()


def test_who_recorded_a_body_knows_it(filled):
    with contextlib.closing(found(filled, KEY).open()) as serving:
        assert serving.verified


def test_equal_bodies_are_verified_once(place, filled):
    keep(filled, record_key("/b"), BODY)
    with opened(place) as other:
        verified(other, KEY).close()
        with contextlib.closing(found(other, record_key("/b")).open()) as serving:
            assert serving.verified


@pytest.mark.parametrize("size", [1, 1000, PIECE_BYTES, 10 * PIECE_BYTES])
def test_pieces_are_bounded(filled, size):
    with contextlib.closing(verified(filled, KEY)) as serving:
        if size > 1:
            pieces = list(iter(lambda: serving.read(size), b""))
            assert max(map(len, pieces)) <= min(size, PIECE_BYTES)
            assert b"".join(pieces) == BODY
        else:
            assert serving.read(1) == BODY[:1]
            assert serving.left == len(BODY) - 1


def test_sendfile_stops_where_the_client_stops(filled):
    ours, theirs = socket.socketpair()
    with ours, theirs, contextlib.closing(verified(filled, KEY)) as serving:
        ours.setblocking(False)
        got = bytearray()
        waits = 0
        while serving.left:
            try:
                sent = serving.send(ours.fileno())
            except BlockingIOError:
                waits += 1
                got += theirs.recv(100_000)
                continue
            assert 0 < sent <= PIECE_BYTES
        ours.shutdown(socket.SHUT_WR)
        while piece := theirs.recv(1 << 20):
            got += piece
        assert bytes(got) == BODY
        assert waits
        assert serving.send(ours.fileno()) == 0


def test_a_client_that_is_gone_is_no_fault_of_the_store(filled):
    ours, theirs = socket.socketpair()
    with ours, contextlib.closing(verified(filled, KEY)) as serving:
        theirs.close()
        with pytest.raises(BrokenPipeError):
            serving.send(ours.fileno())


def test_two_clients_get_the_same_at_their_own_pace(filled):
    with contextlib.closing(verified(filled, KEY)) as one, contextlib.closing(verified(filled, KEY)) as other:
        first = one.read(10)
        assert b"".join(iter(other.read, b"")) == BODY
        assert first + b"".join(iter(one.read, b"")) == BODY


def test_pieces_and_sendfile_mix(filled):
    ours, theirs = socket.socketpair()
    with ours, theirs, contextlib.closing(verified(filled, KEY)) as serving:
        assert serving.read(7) == BODY[:7]
        assert serving.send(ours.fileno(), 5) == 5
        assert theirs.recv(99) == BODY[7:12]
        assert serving.read(3) == BODY[12:15]


def test_what_is_remembered_is_bounded():
    known = Verified()
    for number in range(5000):
        known.add((1, number, 1, 1), "d")
    assert not known.knows((1, 0, 1, 1), "d")
    assert known.knows((1, 4999, 1, 1), "d")
    assert not known.knows((1, 4999, 1, 1), "e")
    assert not known.knows((1, 4999, 2, 1), "d")
    assert len(known._known) == 4096


def test_a_served_answer_is_closed_once(filled):
    serving = verified(filled, KEY)
    serving.close()
    serving.close()
