"""A CopyPump relays between two streams of either kind: exact, bounded, and honest about ends."""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator

import pytest

from stockade.egress._copy import CopyPump
from stockade.egress._loop import READ, WRITE
from stockade.egress._splice import Flow
from stockade.egress._stream import HIGH_WATER_BYTES, READ_BYTES
from tests.egress.tls.harness import HOST, LoopThread, Owner, Run, wait

UNLIMITED = 1 << 40


class Relay:
    """Two owners, ``a`` and ``b``, and a pump from ``a`` to ``b``; ``flows`` is what its runs came to."""

    def __init__(self, looping: LoopThread, run: Run, *, tls: tuple[bool, bool], cap: int) -> None:
        self.looping = looping
        self.left = cap
        self.flows: list[Flow] = []
        self.a, self.b = Owner(looping, greedy=False), Owner(looping, greedy=False)
        for owner, inspected in zip((self.a, self.b), tls, strict=True):
            if inspected:
                owner.serve(run.mint.context(HOST))
                context = run.client()
                context.options &= ~ssl.OP_IGNORE_UNEXPECTED_EOF
                owner.peer = context.wrap_socket(owner.peer, server_hostname=HOST, suppress_ragged_eofs=False)
                assert owner.greeted() is None
        self.pump = CopyPump(self.a.stream, self.b.stream, left=lambda: self.left, count=self._count)

    def _count(self, size: int) -> None:
        assert 0 < size <= self.left
        self.left -= size

    def start(self) -> None:
        faults = self.looping.faults.append
        self.a.call("adopt", lambda events: self._event(events & READ), faults)
        self.b.call("adopt", lambda events: self._event(events & WRITE), faults)
        self.looping.call(self._event, READ)

    def _event(self, ready: int) -> None:
        if ready and (not self.flows or self.flows[-1] is Flow.OPEN):
            self.flows.append(self.pump.run())

    @property
    def last(self) -> Flow:
        return self.flows[-1]

    def close(self) -> None:
        self.pump.close()
        self.a.close()
        self.b.close()


@pytest.fixture
def relay(looping: LoopThread, run: Run) -> Iterator[Callable[..., Relay]]:
    made: list[Relay] = []

    def one(tls: tuple[bool, bool] = (True, True), cap: int = UNLIMITED, *, start: bool = True) -> Relay:
        made.append(Relay(looping, run, tls=tls, cap=cap))
        if start:
            made[-1].start()
        return made[-1]

    yield one
    for each in made:
        each.close()


def received(peer: socket.socket, size: int) -> bytes:
    got = bytearray()
    while len(got) < size and (piece := peer.recv(READ_BYTES)):
        got += piece
    return bytes(got)


@pytest.mark.parametrize("tls", [(True, True), (True, False), (False, True), (False, False)])
def test_bytes_arrive_as_they_were_and_so_does_the_end(tls, relay) -> None:
    moved = relay(tls)
    data = os.urandom(300_000)
    moved.a.peer.sendall(data)
    assert received(moved.b.peer, len(data)) == data
    assert moved.left == UNLIMITED - len(data)
    if tls[0]:
        moved.a.peer.settimeout(0.01)
        with pytest.raises((OSError, ssl.SSLError)):
            moved.a.peer.unwrap()  # says the end; ours does not come, for the other direction is open
    else:
        moved.a.peer.shutdown(socket.SHUT_WR)
    assert moved.b.peer.recv(1) == b""
    wait(lambda: moved.last is Flow.ENDED)
    assert moved.pump.ended
    assert moved.looping.call(moved.pump.run) is Flow.ENDED


@pytest.mark.parametrize("tls", [(True, True), (False, True)])
def test_egress_case_082_a_cap_holds_to_the_byte(tls, relay) -> None:
    moved = relay(tls, cap=100_000)
    data = os.urandom(100_001)
    moved.a.peer.sendall(data[:100_000])
    assert received(moved.b.peer, 100_000) == data[:100_000]
    assert moved.left == 0
    assert moved.last is Flow.OPEN  # used up exactly is no breach yet
    moved.a.peer.sendall(data[100_000:])
    wait(lambda: moved.last is Flow.EXHAUSTED)
    moved.b.call("close")
    assert moved.b.peer.recv(10) == b""


def test_the_end_may_come_at_the_cap(relay) -> None:
    moved = relay((False, True), cap=5)
    moved.a.peer.sendall(b"12345")
    moved.a.peer.shutdown(socket.SHUT_WR)
    assert received(moved.b.peer, 5) == b"12345"
    wait(lambda: moved.last is Flow.ENDED)


def test_a_slow_reader_holds_the_writer_up(relay) -> None:
    moved = relay()
    data, sent = os.urandom(1 << 16), bytearray()
    moved.a.peer.setblocking(False)
    while not (moved.b.stream.out and not moved.a.stream.reading):
        try:
            sent += data[: moved.a.peer.send(data)]
        except ssl.SSLWantWriteError:
            time.sleep(0.002)  # the relay is behind, or holds us up
    assert len(moved.b.stream.out) <= HIGH_WATER_BYTES
    assert received(moved.b.peer, len(sent)) == sent


def test_a_cut_off_source_is_lost_not_ended(relay) -> None:
    moved = relay()
    moved.a.peer.sendall(b"x")
    socket.socket(fileno=moved.a.peer.detach()).close()
    wait(lambda: moved.last is Flow.SOURCE_LOST)
    assert not moved.pump.ended
    assert moved.b.peer.recv(10) == b"x"


def test_a_target_that_is_gone_is_lost(relay) -> None:
    moved = relay(start=False)
    moved.b.call("close", abort=True)
    moved.a.peer.sendall(b"x")
    wait(lambda: moved.a.call("peek"))
    assert moved.looping.call(moved.pump.run) is Flow.TARGET_LOST
