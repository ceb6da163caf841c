"""Looking into a tunnel: TLS ends here under the run's own authority, or plain requests are read as they come.

Nothing is resolved or dialled for the tunnel itself; each request inside is decided on its own, and the first that is
allowed opens the way out. The server name of the hello must be the host that was asked for, here as in an opaque
tunnel: a certificate for another name is never made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stockade.egress import _counts
from stockade.egress._flight import judge_flight
from stockade.egress._loop import GONE, READ
from stockade.egress._mint import MintBusy
from stockade.egress._opening import TLS_HANDSHAKE
from stockade.egress._states import State
from stockade.egress._stream import READ_BYTES
from stockade.egress._tls_stream import TlsStream
from stockade.egress.gate import Origin, Reason, Way

if TYPE_CHECKING:
    from stockade.egress._connection import Connection
    from stockade.egress._decision import Decision


class Inspection:
    """The beginning of one inspected tunnel, up to the end of the client's handshake."""

    __slots__ = ("_connection", "_decision", "_tls", "answered")

    def __init__(self, connection: Connection, decision: Decision) -> None:
        self._connection = connection
        self._decision = decision
        self._tls: TlsStream | None = None
        self.answered = True

    def start(self) -> None:
        """Look at what is there already."""
        if self._connection.buffer:
            self._look()

    def close(self) -> None:
        """Give up the handshake."""
        if self._tls is not None:
            self._tls.close(abort=True)

    def client_event(self, events: int) -> None:
        """The client's side is ready, before the handshake began."""
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
        self._look()

    def _look(self) -> None:
        connection, decision = self._connection, self._decision
        buffer, destination = connection.buffer, decision.head.request.destination
        if buffer[0] != TLS_HANDSHAKE:
            connection.passage.inspected()
            connection.inside(Origin(destination.way, "http", destination.host, destination.port), None)
            return
        verdict = judge_flight(decision, buffer)
        if verdict is None:
            return
        if not verdict.allowed:
            connection.end(verdict.reason)
            return
        mint, client = connection.rollout.shell.mint, connection.client
        if mint is None:
            connection.end(Reason.INSPECTION_REQUIRED)
            return
        try:
            context = mint.context(destination.host.text)
        except MintBusy:
            connection.end(Reason.RATE_LIMITED)
            return
        hello = bytes(buffer)
        buffer.clear()
        connection.enter(State.HANDSHAKE)
        self._tls = TlsStream.server(client, context, hello, lambda why: connection.guard(lambda: self._greeted(why)))

    def _greeted(self, why: str | None) -> None:
        connection, destination = self._connection, self._decision.head.request.destination
        tls, self._tls = self._tls, None
        connection.rollout.shell.count(_counts.tls("client", done=why is None))
        if why is not None or tls is None:
            self._decision.ended["detail"] = why or ""
            connection.conclude(Reason.CLIENT_TLS)
            connection.close()  # no reset: it would take the alert away that says what was wrong
            return
        connection.passage.inspected()
        connection.inside(Origin(Way.TLS, "https", destination.host, destination.port), tls)
