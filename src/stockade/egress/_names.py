"""Names inside the sandbox: each allowed one has a fake address, and connecting to it says which was meant.

A client that ignores proxy variables asks a resolver for an address and connects. Here the answer is an address of
198.18.0.0/15 (RFC 2544: never routed, and every address is local in the sandbox's network), taken from a table of this
rollout. Nothing was looked up outside for it: what the name really is at is asked when a request to it is allowed. A
name that no rule allows does not exist, and the question is on record (case 42); questions of types that would lead
around the table (HTTPS, SVCB: other ports and ECH keys) have empty answers.
"""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING

from stockade.egress._door import ACCEPT_PAUSE_S, EXHAUSTED
from stockade.egress._loop import GONE, READ, Timer, Watch
from stockade.egress._stream import HIGH_WATER_BYTES, Stream
from stockade.egress.gate import (
    CLASS_IN,
    DNS_NO_NAME,
    DNS_REFUSED,
    Address,
    Host,
    Malformed,
    Reason,
    answer,
    judge_name,
    parse_host,
    parse_query,
    refuse,
)

if TYPE_CHECKING:
    from stockade.egress._ledger import Ledger
    from stockade.egress._rollout import Rollout

FAKE_FIRST = Address.parse("198.18.0.10").value
"""The first fake address; the table's order gives the others."""
FAKE_COUNT = Address.parse("198.19.255.255").value - FAKE_FIRST
"""How many there are: what lies behind them is somebody's."""
_TTL_S = 60
_TYPE_A = 1
_DATAGRAM_BYTES = 4096
_DATAGRAMS_PER_EVENT = 16
_STREAM_S = 5.0
_STREAMS = 16
_PREFIX = struct.Struct("!H")
_ANCILLARY_BYTES = 256
_PKTINFO = getattr(socket, "IP_PKTINFO", 8)
_IN_PKTINFO = struct.Struct("=I4s4s")


class Names:
    """The names that one rollout was told or asked for under a wildcard, at most ``limit`` of them."""

    __slots__ = ("_known", "_ledger", "_limit", "_order")

    def __init__(self, ledger: Ledger | None, limit: int) -> None:
        """Go on with the names in ``ledger``; None keeps them in this process only."""
        self._ledger = ledger
        self._limit = min(limit, FAKE_COUNT)
        self._order: list[Host] = [] if ledger is None else ledger.names()
        self._known = {host.text: index for index, host in enumerate(self._order)}

    def admit(self, host: Host) -> bool:
        """Take ``host`` into the table; False if it is full (case 43)."""
        return host.address is not None or self._index(host) is not None

    def address(self, host: Host) -> Address | None:
        """Return the fake address of ``host``; None if the table is full."""
        index = self._index(host)
        return None if index is None else Address(4, FAKE_FIRST + index)

    def host(self, address: Address) -> Host | None:
        """Return whose fake address this is, None if it is nobody's."""
        index = address.value - FAKE_FIRST
        if address.version != 4 or not 0 <= index < len(self._order):
            return None
        return self._order[index]

    def _index(self, host: Host) -> int | None:
        index = self._known.get(host.text)
        if index is None and len(self._order) < self._limit:
            index = self._known[host.text] = len(self._order)
            self._order.append(host)
            if self._ledger is not None:
                self._ledger.put_name(index, host)
        return index


def reply_to(rollout: Rollout, packet: bytes) -> bytes | None:
    """Return the answer to one question of the sandbox, None for what deserves none."""
    try:
        query = parse_query(packet)
    except Malformed as fault:
        rollout.refuse_name(fault.reason, None, "", fault.detail)
        return None
    kind = str(query.qtype)
    if rollout.revoked or rollout.broken:
        return refuse(query, DNS_REFUSED)
    if not rollout.questions.take_request(rollout.shell.loop.now):
        rollout.refuse_name(Reason.RATE_LIMITED, None, kind)
        return refuse(query, DNS_REFUSED)
    try:
        host = parse_host((query.name or "").encode("ascii"))
    except Malformed as fault:
        rollout.refuse_name(fault.reason, None, kind, fault.detail)
        return refuse(query, DNS_NO_NAME)
    verdict = judge_name(host, rollout.rules)
    if not verdict.allowed or host.address is not None:
        rollout.refuse_name(verdict.reason, host, kind)
        return refuse(query, DNS_NO_NAME)
    if query.qtype != _TYPE_A or query.qclass != CLASS_IN:
        return answer(query, None, _TTL_S)
    address = rollout.names.address(host)
    if address is None:
        rollout.refuse_name(Reason.TOO_MANY_NAMES, host, kind)
        return refuse(query, DNS_REFUSED)
    if not rollout.tell_name(host, address, verdict.rule):
        return refuse(query, DNS_REFUSED)
    return answer(query, address, _TTL_S)


class Datagrams:
    """The DNS socket of one sandbox. It is bound to every address; an answer leaves from the one that was asked."""

    __slots__ = ("_rollout", "_sock", "_watch")

    def __init__(self, rollout: Rollout, sock: socket.socket) -> None:
        self._rollout = rollout
        self._sock = sock
        sock.setblocking(False)
        loop = rollout.shell.loop
        self._watch: Watch = loop.watch(sock.fileno(), self._ready, rollout.fault, READ)

    def close(self) -> None:
        """Answer no more."""
        self._rollout.shell.loop.unwatch(self._watch)
        self._sock.close()

    def _ready(self, _events: int) -> None:
        for _ in range(_DATAGRAMS_PER_EVENT):
            try:
                packet, ancillary, _, peer = self._sock.recvmsg(_DATAGRAM_BYTES, _ANCILLARY_BYTES)
                reply = reply_to(self._rollout, packet)
                if reply is not None:
                    self._sock.sendmsg([reply], _from_where(ancillary), 0, peer)
            except BlockingIOError:
                return
            except OSError:
                continue  # that client is gone (ICMP said so), or its buffer is full: it will ask again


def _from_where(ancillary: list[tuple[int, int, bytes]]) -> list[tuple[int, int, bytes]]:
    """Return the ancillary data that makes the answer leave from the address that was asked (ip(7), ipv6(7))."""
    for level, kind, data in ancillary:
        if (level, kind) == (socket.IPPROTO_IP, _PKTINFO):
            _, _, asked = _IN_PKTINFO.unpack(data[: _IN_PKTINFO.size])
            return [(level, kind, _IN_PKTINFO.pack(0, asked, bytes(4)))]
        if (level, kind) == (socket.IPPROTO_IPV6, socket.IPV6_PKTINFO):
            return [(level, kind, data[:16] + bytes(4))]
    return []


class Streams:
    """DNS over TCP (RFC 7766): for clients that insist; a few at a time, each for a few seconds."""

    __slots__ = ("_listener", "_live", "_rollout", "_watch")

    def __init__(self, rollout: Rollout, listener: socket.socket) -> None:
        self._rollout = rollout
        self._listener = listener
        self._live: set[_Asker] = set()
        listener.setblocking(False)
        self._watch: Watch = rollout.shell.loop.watch(listener.fileno(), self._ready, rollout.fault, READ)

    def close(self) -> None:
        """End all of them."""
        self._rollout.shell.loop.unwatch(self._watch)
        self._listener.close()
        for asker in list(self._live):
            asker.close()

    def _ready(self, _events: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in EXHAUSTED:  # or a level-triggered listener would spin until a descriptor is free
                loop = self._rollout.shell.loop
                loop.mute(self._watch)
                loop.call_later(ACCEPT_PAUSE_S, self._resume, self._rollout.fault)
            return
        sock.setblocking(False)
        if len(self._live) >= _STREAMS:
            sock.close()
            return
        self._live.add(_Asker(self._rollout, sock, self._live))

    def _resume(self) -> None:
        if self._watch.live:
            self._rollout.shell.loop.interest(self._watch, READ)


class _Asker:
    """One client of :class:`Streams`."""

    __slots__ = ("_buffer", "_live", "_rollout", "_stream", "_timer")

    def __init__(self, rollout: Rollout, sock: socket.socket, live: set[_Asker]) -> None:
        self._rollout = rollout
        self._live = live
        self._buffer = bytearray()
        self._stream = Stream(rollout.shell.loop, sock, self._ready, self._fault)
        self._timer: Timer = rollout.shell.loop.call_later(_STREAM_S, self.close, self._fault)
        self._stream.want(read=True)

    def close(self) -> None:
        """End it."""
        self._timer.cancel()
        self._stream.close()
        self._live.discard(self)

    def _fault(self, _fault: Exception) -> None:
        self.close()

    def _ready(self, events: int) -> None:
        try:
            self._stream.flush()
            piece = self._stream.receive(_DATAGRAM_BYTES) if events & (READ | GONE) else None
        except OSError:
            piece = b""
        if piece is None:
            return
        self._buffer += piece
        if not piece or len(self._buffer) > _DATAGRAM_BYTES:
            self.close()
            return
        while len(self._buffer) >= _PREFIX.size:
            (size,) = _PREFIX.unpack_from(self._buffer)
            end = _PREFIX.size + size
            if len(self._buffer) < end:
                return
            reply = reply_to(self._rollout, bytes(self._buffer[_PREFIX.size : end]))
            del self._buffer[:end]
            # Who takes no answers gets no more of them: they would have to be kept here.
            if reply is None or len(self._stream.out) > HIGH_WATER_BYTES:
                self.close()
                return
            self._stream.send(_PREFIX.pack(len(reply)) + reply)
