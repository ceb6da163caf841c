"""ClientHello messages: real ones from OpenSSL, and made ones for what OpenSSL would not say."""

from __future__ import annotations

import ssl
import struct

ECH = 0xFE0D


def real(name: str) -> bytes:
    """Return the first flight that OpenSSL sends for ``name``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname=name)
    try:
        tls.do_handshake()
    except ssl.SSLWantReadError:
        return outgoing.read()
    raise AssertionError("a handshake cannot end without an answer")


def made(*names: bytes, extensions: tuple[tuple[int, bytes], ...] = (), record_bytes: int = 16384) -> bytes:
    """Return a ClientHello with ``names`` in one server_name extension (none: no such extension), in small records."""
    entries = b"".join(b"\x00" + struct.pack(">H", len(name)) + name for name in names)
    items = list(extensions)
    if names:
        items.append((0, struct.pack(">H", len(entries)) + entries))
    block = b"".join(struct.pack(">HH", kind, len(data)) + data for kind, data in items)
    body = b"\x03\x03" + b"r" * 32 + b"\x00" + b"\x00\x02\x13\x01" + b"\x01\x00" + struct.pack(">H", len(block)) + block
    message = b"\x01" + len(body).to_bytes(3, "big") + body
    pieces = [message[start : start + record_bytes] for start in range(0, len(message), record_bytes)]
    return b"".join(b"\x16\x03\x01" + struct.pack(">H", len(piece)) + piece for piece in pieces)
