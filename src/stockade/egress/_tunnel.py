"""A tunnel: the first flight is read and judged, then bytes are relayed both ways, spliced where both sides are plain."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING

from stockade.egress._flight import judge_flight
from stockade.egress._loop import GONE, READ, WRITE
from stockade.egress._splice import Flow, Pump
from stockade.egress._states import State
from stockade.egress._stream import READ_BYTES, Stream
from stockade.egress._tls_stream import CopyPump
from stockade.egress.gate import Reason

if TYPE_CHECKING:
    from stockade.egress._connect import AnyStream
    from stockade.egress._connection import Connection
    from stockade.egress._decision import Decision
    from stockade.egress.gate import Meter

_ERROR = select.EPOLLERR


class Tunnel:
    """Both halves of one tunnel. Until the ClientHello is judged, no byte passes in either direction.

    A tcp rule (``raw``) and an upgrade that a rule allows have nothing to judge: bytes are counted and capped.
    """

    __slots__ = ("_connection", "_decision", "_down", "_first_end", "_meter", "_up", "_upstream", "answered")

    def __init__(self, connection: Connection, decision: Decision, meter: Meter, upstream: AnyStream) -> None:
        self._connection = connection
        self._decision = decision
        self._meter = meter
        self._upstream = upstream
        self._up: Pump | CopyPump | None = None
        self._down: Pump | CopyPump | None = None
        self._first_end: Reason | None = None
        self.answered = True

    def start(self, *, raw: bool) -> None:
        """Look at what the client sent ahead of the 200 (egress case 61)."""
        if raw:
            self._begin()
            return
        self._upstream.want(read=False)
        if self._connection.buffer:
            self._judge()

    def switch(self, early: bytes) -> None:
        """Go on after an upgrade; ``early`` came right behind the 101 and was counted."""
        if early:
            self._connection.client.send(early)
        self._begin()

    def client_event(self, events: int) -> None:
        """The client's side is ready."""
        if self._up is None:
            self._read_flight(events)
            return
        self._relay(self._connection.client, self._up, self._down, events)

    def upstream_event(self, events: int) -> None:
        """The upstream's side is ready."""
        if self._down is not None:
            self._relay(self._upstream, self._down, self._up, events)
        elif events & GONE:
            self._connection.conclude(Reason.UPSTREAM_CLOSED)
            self._connection.close(abort=True)

    def close(self) -> None:
        """Drop the pipes."""
        for pump in (self._up, self._down):
            if pump is not None:
                pump.close()

    def _read_flight(self, events: int) -> None:
        if not events & (READ | GONE):
            return
        piece = self._connection.client.receive(READ_BYTES)
        if piece is None:
            return
        if not piece:
            self._connection.conclude(Reason.CLIENT_CLOSED)
            self._connection.close()
            return
        self._connection.buffer += piece
        self._judge()

    def _judge(self) -> None:
        buffer = self._connection.buffer
        verdict = judge_flight(self._decision, buffer)
        if verdict is None:
            return
        if not verdict.allowed:
            self._connection.end(verdict.reason)
            return
        self._connection.enter(State.TUNNEL)
        self._begin()

    def _begin(self) -> None:
        """Pass on what was read so far, and relay from here on."""
        buffer, client, meter = self._connection.buffer, self._connection.client, self._meter
        if len(buffer) > meter.left_out:
            self._connection.end(Reason.BYTES_OUT_EXCEEDED)
            return
        flight = bytes(buffer)
        buffer.clear()
        self._up = self._pump(client, self._upstream, up=True)
        self._down = self._pump(self._upstream, client, up=False)
        if isinstance(self._up, Pump) and isinstance(self._down, Pump):
            self._up.other, self._down.other = self._down, self._up
        if flight:
            meter.out(len(flight))
            try:
                self._upstream.send(flight)
            except OSError:
                self._lost(Reason.UPSTREAM_CLOSED)
                return
        self._settle(self._up, self._up.run())
        if not self._connection.closed:
            self._upstream.want(read=True)

    def _pump(self, source: AnyStream, target: AnyStream, *, up: bool) -> Pump | CopyPump:
        meter = self._meter
        left = (lambda: meter.left_out) if up else (lambda: meter.left_in)
        count = meter.out if up else meter.into
        if isinstance(source, Stream) and isinstance(target, Stream):
            return Pump(source, target, self._connection.rollout.shell.pipes, left=left, count=count)
        return CopyPump(source, target, left=left, count=count)

    def _relay(self, side: AnyStream, reading: Pump | CopyPump, writing: Pump | CopyPump | None, events: int) -> None:
        """``reading`` moves bytes from ``side``, ``writing`` to it."""
        self._connection.touch()
        if events & WRITE and writing is not None:
            self._settle(writing, writing.run())
        if side.closed or not events & (READ | GONE):
            return
        if side.reading:
            self._settle(reading, reading.run())
        elif events & _ERROR:
            self._lost(Reason.CLIENT_CLOSED if side is self._connection.client else Reason.UPSTREAM_CLOSED)
        else:
            side.mute()  # closed both ways, but the other side has not taken all of its bytes yet

    def _settle(self, pump: Pump | CopyPump, flow: Flow) -> None:
        """Act on what one run of a pump came to."""
        if flow is Flow.OPEN or self._connection.closed:
            return
        up = pump is self._up
        source, target = (
            (Reason.CLIENT_CLOSED, Reason.UPSTREAM_CLOSED) if up else (Reason.UPSTREAM_CLOSED, Reason.CLIENT_CLOSED)
        )
        if flow is Flow.EXHAUSTED:
            self._connection.end(Reason.BYTES_OUT_EXCEEDED if up else Reason.BYTES_IN_EXCEEDED)
        elif flow is Flow.SOURCE_LOST:
            self._lost(source)
        elif flow is Flow.TARGET_LOST:
            self._lost(target)
        else:
            self._first_end = self._first_end or source
            if self._up is not None and self._up.ended and self._down is not None and self._down.ended:
                self._connection.conclude(self._first_end)
                self._connection.close()

    def _lost(self, reason: Reason) -> None:
        self._connection.conclude(self._first_end or reason)
        self._connection.close(abort=True)
