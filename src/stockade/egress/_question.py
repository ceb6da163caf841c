"""One DNS question: what is asked of which server, and what of the answers is believed."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype

from stockade.egress._loop import READ, WRITE, Loop, Timer, Watch
from stockade.egress.gate import Address

_DNS_PORT = 53
_ATTEMPT_S = 1.5
_EDNS_PAYLOAD_BYTES = 1232
_TCP_ANSWER_BYTES = 32 * 1024
_TCP_PREFIX_BYTES = 2
_DATAGRAMS_PER_EVENT = 8


class Outcome(StrEnum):
    """How a look-up ended."""

    FOUND = "found"
    NO_NAME = "no_name"
    NO_ADDRESS = "no_address"
    SERVER_FAILED = "server_failed"
    TIMED_OUT = "timed_out"


@dataclass(frozen=True, slots=True)
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

    @property
    def sockaddr(self) -> tuple[str, int]:
        """What ``connect`` takes."""
        return str(self.address), self.port


class Question:
    """One type of one name, asked of one server after the other; ``settled()`` is called when ``outcome`` is set."""

    __slots__ = ("_attempt", "_loop", "_name", "_servers", "_settled", "_type", "addresses", "outcome", "tries")

    def __init__(
        self,
        loop: Loop,
        servers: Sequence[Server],
        name: dns.name.Name,
        rdtype: dns.rdatatype.RdataType,
        settled: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._servers = servers
        self._name = name
        self._type = rdtype
        self._settled = settled
        self._attempt: _Attempt | None = None
        self.tries = 0
        self.addresses: tuple[Address, ...] = ()
        self.outcome: Outcome | None = None

    def ask(self) -> None:
        """Ask the next server, round and round, until the look-up's time is over."""
        self.close()
        if not self._servers:
            self._settle(Outcome.SERVER_FAILED)
            return
        server = self._servers[self.tries % len(self._servers)]
        self.tries += 1
        query = dns.message.make_query(
            self._name, self._type, use_edns=0, payload=_EDNS_PAYLOAD_BYTES, id=secrets.randbelow(1 << 16)
        )
        try:
            self._attempt = _Attempt(self._loop, server, query, self)
        except OSError:
            self.failed()

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

    def answered(self, message: dns.message.Message) -> None:
        """Read an answer that is known to be one to this question."""
        code = message.rcode()
        if code == dns.rcode.NXDOMAIN:
            self._settle(Outcome.NO_NAME)
            return
        if code != dns.rcode.NOERROR or not isinstance(message, dns.message.QueryMessage):
            self.failed()
            return
        try:
            rrset = message.resolve_chaining().answer
        except dns.exception.DNSException:  # a loop, or a chain that is too long
            self.failed()
            return
        if rrset is not None and rrset.rdtype == self._type:
            self.addresses = tuple(Address.parse(str(rdata.address)) for rdata in rrset)
        self._settle(Outcome.FOUND if self.addresses else Outcome.NO_ADDRESS)

    def fault(self, _fault: Exception) -> None:
        """Whatever goes wrong in here is no answer."""
        self.addresses = ()
        self._settle(Outcome.SERVER_FAILED)

    def _settle(self, outcome: Outcome) -> None:
        self.close()
        self.outcome = outcome
        self._settled()


class _Attempt:
    """One query to one server: by UDP, then by TCP if the answer was truncated. The constructor may raise OSError."""

    __slots__ = ("_buffer", "_loop", "_query", "_question", "_server", "_sock", "_timer", "_watch")

    def __init__(self, loop: Loop, server: Server, query: dns.message.Message, question: Question) -> None:
        self._loop = loop
        self._server = server
        self._query = query
        self._question = question
        self._buffer = bytearray()
        self._sock = self._open(socket.SOCK_DGRAM)
        try:
            self._sock.connect(server.sockaddr)
            self._sock.send(query.to_wire())
        except OSError:
            self._sock.close()
            raise
        self._timer: Timer = loop.call_later(_ATTEMPT_S, question.ask, question.fault)
        self._watch: Watch = loop.watch(self._sock.fileno(), self._on_datagram, question.fault, READ)

    def close(self) -> None:
        """Close the socket."""
        self._timer.cancel()
        self._loop.unwatch(self._watch)
        self._sock.close()

    def _open(self, kind: socket.SocketKind) -> socket.socket:
        return socket.socket(self._server.family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)

    def _on_datagram(self, _events: int) -> None:
        for _ in range(_DATAGRAMS_PER_EVENT):
            try:
                wire = self._sock.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError:  # ECONNREFUSED: nobody listens there
                self._question.failed()
                return
            message = self._parse(wire)
            if message is None:
                continue  # a forgery must not end the wait for the true answer (RFC 5452)
            if message.flags & dns.flags.TC:
                self._ask_tcp()
            else:
                self._question.answered(message)
            return

    def _ask_tcp(self) -> None:
        self._loop.unwatch(self._watch)
        self._sock.close()
        try:
            self._sock = self._open(socket.SOCK_STREAM)
            self._sock.connect_ex(self._server.sockaddr)  # a refusal shows when the socket is written to
        except OSError:
            self._question.failed()
            return
        self._watch = self._loop.watch(self._sock.fileno(), self._on_stream, self._question.fault, WRITE)

    def _on_stream(self, events: int) -> None:
        try:
            if events & WRITE:
                wire = self._query.to_wire()
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
        message = self._parse(bytes(self._buffer[_TCP_PREFIX_BYTES:end]))
        if message is None or message.flags & dns.flags.TC:
            self._question.failed()
        else:
            self._question.answered(message)

    def _parse(self, wire: bytes) -> dns.message.Message | None:
        """Return the answer to our query in ``wire``, or None for anything else."""
        try:
            message = dns.message.from_wire(wire)
            return message if message.question and self._query.is_response(message) else None
        except (dns.exception.DNSException, ValueError, IndexError, KeyError):
            return None
