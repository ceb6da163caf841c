"""SOCKS5 (RFC 1928): the greeting and the one command that is answered (cases 9, 84).

Names go through the same grammar as everywhere, so a NUL or a literal in disguise is caught here.
"""

from __future__ import annotations

from typing import Final

from stockade.egress.gate._address import Address
from stockade.egress.gate._answer import status_of
from stockade.egress.gate._destination import Request, Way, tunnel_request
from stockade.egress.gate._host import Host, parse_host
from stockade.egress.gate._reason import Malformed, Reason

SOCKS_METHOD_REPLY: Final = b"\x05\x00"
"""The method that was chosen: no authentication. Who the client is, its listener says."""
SOCKS_METHOD_REFUSED: Final = b"\x05\xff"
"""None of the methods offered is taken (or the greeting was none)."""

_VERSION = 5
_METHODS_MAX = 32
_NO_AUTHENTICATION = 0
_CONNECT = 1
_V4, _NAME, _V6 = 1, 3, 4
_SIZES = {_V4: 4, _V6: 16}
_HEADER = 4
_PORT = 2

_CODES: Final = {
    Reason.ALLOWED: 0,
    Reason.COMPLETED: 0,
    Reason.RESOLVE_FAILED: 4,
    Reason.UPSTREAM_FAILED: 5,
    Reason.UPSTREAM_CLOSED: 5,
    Reason.UNSUPPORTED_COMMAND: 7,
    Reason.NOT_RECORDED: 2,
}
_NOT_ALLOWED = 2
_FAILURE = 1
_REFUSALS = (403, 429)


def socks_greeting(buffer: bytes | bytearray) -> int | None:
    """Return the size of the greeting at the start of ``buffer``, or None for "read more".

    Raises Malformed for another version (SOCKS4 and 4a among them), for more than 32 methods and for a client that
    insists on authentication: answer SOCKS_METHOD_REFUSED and close.
    """
    if buffer and buffer[0] != _VERSION:
        raise _malformed(f"SOCKS version {buffer[0]}")
    if len(buffer) < 2:
        return None
    count = buffer[1]
    if not 0 < count <= _METHODS_MAX:
        raise _malformed(f"{count} SOCKS methods")
    if len(buffer) < 2 + count:
        return None
    if _NO_AUTHENTICATION not in buffer[2 : 2 + count]:
        raise _malformed("the client insists on SOCKS authentication")
    return 2 + count


def socks_request(buffer: bytes | bytearray) -> tuple[Request, int] | None:
    """Return the tunnel request at the start of ``buffer`` and its size, or None for "read more".

    Raises Malformed: unsupported_command for anything but CONNECT, malformed_host for a host or port that is none.
    An address that is written as a name is that address.
    """
    if len(buffer) < _HEADER:
        if buffer and buffer[0] != _VERSION:
            raise _malformed(f"SOCKS version {buffer[0]}")
        return None
    version, command, reserved, kind = buffer[:_HEADER]
    if version != _VERSION or reserved != 0:
        raise _malformed("not a SOCKS5 request")
    if command != _CONNECT:
        raise Malformed(Reason.UNSUPPORTED_COMMAND, f"SOCKS command {command}")
    start = _HEADER
    if kind == _NAME:
        if len(buffer) < _HEADER + 1:
            return None
        size, start = buffer[_HEADER], _HEADER + 1
    elif kind in _SIZES:
        size = _SIZES[kind]
    else:
        raise _malformed(f"SOCKS address type {kind}")
    end = start + size
    if len(buffer) < end + _PORT:
        return None
    raw = bytes(buffer[start:end])
    host = _named(raw) if kind == _NAME else _literal(raw)
    port = int.from_bytes(buffer[end : end + _PORT], "big")
    if port == 0:
        raise Malformed(Reason.MALFORMED_HOST, "not a port: 0")
    return tunnel_request(Way.SOCKS5, host, port), end + _PORT


def socks_reply(reason: Reason) -> bytes:
    """Return the reply that tells a client ``reason``, with an empty bound address.

    0 succeeded, 2 not allowed by rule, 4 no address, 5 not reached, 7 command not supported, 1 anything else.
    """
    code = _CODES.get(reason)
    if code is None:
        code = _NOT_ALLOWED if status_of(reason) in _REFUSALS else _FAILURE
    return bytes((_VERSION, code, 0, _V4, 0, 0, 0, 0, 0, 0))


def _named(raw: bytes) -> Host:
    # IPv6 text comes without brackets here; whatever else has a colon is no name.
    return parse_host(b"[%b]" % raw if b":" in raw and raw[:1] != b"[" else raw)


def _literal(raw: bytes) -> Host:
    address = Address.from_packed(raw)
    return Host(str(address), address)


def _malformed(what: str) -> Malformed:
    return Malformed(Reason.MALFORMED_REQUEST, what)
