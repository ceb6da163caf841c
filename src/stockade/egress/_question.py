"""One DNS question: which server is asked, and whose answer is believed."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from stockade.egress._loop import READ, WRITE, Loop, Timer, Watch
from stockade.egress._message import NOERROR, NXDOMAIN, Query, Reply, make_query, read_reply
from stockade.egress.gate import Address

_DNS_PORT = 53
_ATTEMPT_S = 1.5
_LEAST_S = 0.01
"""With less time left than this nobody is asked any more."""
_DATAGRAM_BYTES = 4096
"""More than we say that we take; what is longer is cut off, and then cannot be read."""
_TCP_ANSWER_BYTES = 32 * 1024
_TCP_PREFIX_BYTES = 2
_DATAGRAMS_PER_EVENT = 8
_SOCKET_FLAGS = socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC


class Outcome(StrEnum):
    """How a look-up ended."""

    FOUND = "found"
    NO_NAME = "no_name"
    NO_ADDRESS = "no_address"
    SERVER_FAILED = "server_failed"
    TIMED_OUT = "timed_out"


@dataclass(frozen=True)
class Server:
    """One recursive resolver."""

    address: Address
    port: int = _DNS_PORT

    @classmethod
    def parse(cls, text: str) -> Server:
        """Return the server written ``ip``, ``ip:port`` or ``[ip]:port``, or raise ``ValueError``."""
        host, port = text, str(_DNS_PORT)
        if text.startswith("["):
            host, _, rest = text[1:].partition("]")
            if rest:
                _, _, port = rest.partition(":")
        elif text.count(":") == 1:
            host, _, port = text.partition(":")
        if not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
            raise ValueError(f"{text!r} is not the address of a resolver")
        try:
            return cls(Address.parse(host), int(port))
        except ValueError:
            raise ValueError(f"{text!r} is not the address of a resolver") from None

    @property
    def family(self) -> socket.AddressFamily:
        """The socket family to reach it by."""
        return socket.AF_INET if self.address.version == 4 else socket.AF_INET6

    @cached_property
    def sockaddr(self) -> tuple[str, int]:
        """What ``connect`` takes."""
        return str(self.address), self.port


class Question:
    """One type of one name, asked of one server after the other; ``settled()`` is called when ``outcome`` is set.

    ``name`` is in wire form, ``plain`` holds the servers that do not keep the case of a question; this adds to it.
    ``deadline_s`` is when the last server's time is over. ``ttl_s`` is for how long ``addresses`` hold.
    """

    __slots__ = (
        "_attempt",
        "_deadline_s",
        "_loop",
        "_name",
        "_plain",
        "_servers",
        "_settled",
        "_type",
        "addresses",
        "outcome",
        "tries",
        "ttl_s",
    )

    def __init__(
        self,
        loop: Loop,
        servers: Sequence[Server],
        plain: set[Server],
        name: bytes,
        rrtype: int,
        deadline_s: float,
        settled: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._servers = servers
        self._plain = plain
        self._name = name
        self._type = rrtype
        self._deadline_s = deadline_s
        self._settled = settled
        self._attempt: _Attempt | None = None
        self.tries = 0
        self.addresses: tuple[Address, ...] = ()
        self.ttl_s = 0
        self.outcome: Outcome | None = None

    def ask(self) -> None:
        """Ask the next server, round and round, until the time is over."""
        self.close()
        left_s = self._deadline_s - self._loop.now
        if not self._servers:
            self._settle(Outcome.SERVER_FAILED)
        elif left_s < _LEAST_S:
            self._settle(Outcome.TIMED_OUT)
        else:
            self.tries += 1
            self._try(self._servers[(self.tries - 1) % len(self._servers)], min(left_s, _ATTEMPT_S))

    def hurry(self, deadline_s: float) -> None:
        """Take no longer than until ``deadline_s``."""
        self._deadline_s = min(self._deadline_s, deadline_s)
        if self._attempt is not None:
            self._attempt.hurry(self._deadline_s)

    def close(self) -> None:
        """Drop the attempt that is under way."""
        if self._attempt is not None:
            self._attempt.close()
            self._attempt = None

    def failed(self) -> None:
        """This server gave no usable answer: go to the next; after the last one the question has failed."""
        if self.tries < len(self._servers):
            self.ask()
        else:
            self._settle(Outcome.SERVER_FAILED)

    def respelt(self, server: Server) -> None:
        """Ask ``server`` again, in small letters: it does not keep the case of a question.

        Who could forge the answer that led here had guessed id and port, and has to do so once more.
        """
        self.close()
        self._plain.add(server)
        left_s = self._deadline_s - self._loop.now
        if left_s < _LEAST_S:
            self._settle(Outcome.TIMED_OUT)
        else:
            self._try(server, min(left_s, _ATTEMPT_S))

    def answered(self, reply: Reply) -> None:
        """Take an answer that is known to be one to this question."""
        if reply.code == NXDOMAIN:
            self._settle(Outcome.NO_NAME)
        elif reply.code != NOERROR:
            self.failed()
        else:
            self.addresses, self.ttl_s = reply.addresses, reply.ttl_s
            self._settle(Outcome.FOUND if self.addresses else Outcome.NO_ADDRESS)

    def fault(self, _fault: Exception) -> None:
        """Whatever goes wrong in here is no answer."""
        self.addresses = ()
        self._settle(Outcome.SERVER_FAILED)

    def _try(self, server: Server, time_s: float) -> None:
        query = make_query(self._name, self._type, mixed=server not in self._plain)
        try:
            self._attempt = _Attempt(self._loop, server, query, time_s, self)
        except OSError:
            self.failed()

    def _settle(self, outcome: Outcome) -> None:
        self.close()
        self.outcome = outcome
        self._settled()


class _Attempt:
    """One query to one server: by UDP, then by TCP if the answer was truncated. The constructor may raise OSError."""

    __slots__ = ("_buffer", "_loop", "_query", "_question", "_server", "_sock", "_timer", "_watch")

    def __init__(self, loop: Loop, server: Server, query: Query, time_s: float, question: Question) -> None:
        self._loop = loop
        self._server = server
        self._query = query
        self._question = question
        self._buffer = b""
        self._sock = socket.socket(server.family, socket.SOCK_DGRAM | _SOCKET_FLAGS)
        try:
            self._sock.connect(server.sockaddr)
            self._sock.send(query.wire)
            self._watch: Watch = loop.watch(self._sock.fileno(), self._on_datagram, question.fault, READ)
        except OSError:
            self._sock.close()
            raise
        self._timer: Timer = loop.call_later(time_s, question.ask, question.fault)

    def hurry(self, deadline_s: float) -> None:
        """End no later than at ``deadline_s``."""
        if self._timer.when_s > deadline_s:
            self._timer.cancel()
            self._timer = self._loop.call_later(
                max(0.0, deadline_s - self._loop.now), self._question.ask, self._question.fault
            )

    def close(self) -> None:
        """Close the socket."""
        self._timer.cancel()
        self._loop.unwatch(self._watch)
        self._sock.close()

    def _on_datagram(self, _events: int) -> None:
        for _ in range(_DATAGRAMS_PER_EVENT):
            try:
                wire = self._sock.recv(_DATAGRAM_BYTES)
            except BlockingIOError:
                return
            except OSError:  # ECONNREFUSED: nobody listens there
                self._question.failed()
                return
            reply = read_reply(wire, self._query)
            if reply is None:
                continue  # a forgery must not end the wait for the true answer (RFC 5452)
            if reply.truncated:
                self._ask_tcp()
            else:
                self._believe(reply)
            return

    def _believe(self, reply: Reply) -> None:
        if reply.respelt:
            self._question.respelt(self._server)
        else:
            self._question.answered(reply)

    def _ask_tcp(self) -> None:
        self._loop.unwatch(self._watch)
        self._sock.close()
        try:
            self._sock = socket.socket(self._server.family, socket.SOCK_STREAM | _SOCKET_FLAGS)
            self._sock.connect_ex(self._server.sockaddr)  # a refusal shows when the socket is written to
            self._watch = self._loop.watch(self._sock.fileno(), self._on_stream, self._question.fault, WRITE)
        except OSError:
            self._question.failed()

    def _on_stream(self, events: int) -> None:
        try:
            if events & WRITE:
                wire = self._query.wire
                self._sock.send(len(wire).to_bytes(_TCP_PREFIX_BYTES, "big") + wire)
                self._loop.interest(self._watch, READ)
                return
            piece = self._sock.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            self._question.failed()
            return
        self._buffer += piece
        known = len(self._buffer) >= _TCP_PREFIX_BYTES
        size = int.from_bytes(self._buffer[:_TCP_PREFIX_BYTES], "big") if known else _TCP_ANSWER_BYTES
        end = _TCP_PREFIX_BYTES + size
        if len(self._buffer) < end and piece and size <= _TCP_ANSWER_BYTES:
            return
        reply = read_reply(self._buffer[_TCP_PREFIX_BYTES:end], self._query)
        if reply is None or reply.truncated:
            self._question.failed()
        else:
            self._believe(reply)
