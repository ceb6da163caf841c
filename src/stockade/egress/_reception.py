"""A gateway's own TLS: nobody speaks to it before a handshake by TLS 1.3 with a certificate that it knows.

Inside, the client speaks as on any other listener: HTTP with CONNECT or absolute targets, or SOCKS5.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stockade.egress import _counts
from stockade.egress._states import State
from stockade.egress._stream import Stream
from stockade.egress._tls_stream import TlsStream
from stockade.egress.gate import TLS_ACCESS_DENIED, Reason, safe_text

if TYPE_CHECKING:
    from stockade.egress._connection import Connection

_TLS_HANDSHAKE = 0x16
_NAME_CHARS = 64


def gateway_context(memory: Mapping[str, bytes]) -> ssl.SSLContext:
    """Return what clients of a gateway are greeted with. Raises ssl.SSLError for keys and certificates that are none.

    No tickets: a session that is taken up again is not checked again.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET
    context.load_verify_locations(cadata=memory["gateway_ca"].decode("ascii"))
    load_pair(context, memory["gateway_cert"], memory["gateway_key"])
    return context


def load_pair(context: ssl.SSLContext, cert: bytes, key: bytes) -> None:
    """Give a context its certificate and key: OpenSSL takes them by path only, so by one that leads to memory."""
    fd = os.memfd_create("stockade-pair", os.MFD_CLOEXEC)
    try:
        os.write(fd, cert + b"\n" + key)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def receive(connection: Connection) -> None:
    """Answer the first bytes of a client, which are in the connection's buffer."""
    context, client = connection.rollout.shell.gateway_context, connection.client
    if context is None or connection.buffer[0] != _TLS_HANDSHAKE or not isinstance(client, Stream):
        connection.opening.record_blank(Reason.NOT_TLS)
        connection.answer(Reason.NOT_TLS, refusal=TLS_ACCESS_DENIED)
        return
    hello = bytes(connection.buffer)
    connection.buffer.clear()
    connection.enter(State.HANDSHAKE)
    connection.client = TlsStream.server(
        client, context, hello, lambda why: connection.guard(lambda: _greeted(connection, why))
    )


def _greeted(connection: Connection, why: str | None) -> None:
    connection.rollout.shell.count(_counts.tls("gateway", done=why is None))
    if why is not None:
        connection.opening.record_blank(Reason.CLIENT_TLS, why)
        connection.close()  # no reset: it would overtake the alert that says what was wrong
        return
    connection.certified = _name_of(connection.client)
    connection.opening.received()
    connection.enter(State.HEAD)


def _name_of(client: Stream | TlsStream) -> str:
    """Return what a client's verified certificate calls it: a DNS name, else the common name."""
    tls = client._tls if isinstance(client, TlsStream) else None  # noqa: SLF001 - asked once, and only here
    certificate: Mapping[str, Any] = (None if tls is None else tls.getpeercert()) or {}
    names = [text for kind, text in certificate.get("subjectAltName", ()) if kind == "DNS"]
    names += [text for part in certificate.get("subject", ()) for kind, text in part if kind == "commonName"]
    return safe_text(names[0], limit=_NAME_CHARS) if names else "unnamed"
