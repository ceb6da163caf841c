"""ClientHello: what may pass for a host, OpenSSL must read as a hello to the same host."""

from __future__ import annotations

import ssl
import sys

from stockade.egress.gate import HELLO_MAX, Hello, NeedMore, NotTls, client_hello, judge_hello, parse_host

HOSTS = tuple(map(parse_host, (b"tunnel.test", b"a.b.test", b"xn--bcher-kva.test", b"11.0.0.5")))
_SERVER = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
"""Has no certificate: the server name is looked at before one is needed."""
_SEEN: list[str | None] = []
_SERVER.sni_callback = lambda _tls, name, _context: _SEEN.append(name)
_PREFIX = b"\x03\x03" + b"r" * 32 + b"\x00" + b"\x00\x02\x13\x01" + b"\x01\x00"


def check(data: bytes) -> None:
    """Take the first byte for the form of the rest (see :func:`flight`)."""
    if len(data) < 2:
        return
    raw = flight(data)
    found = client_hello(raw)
    for cut in {1, 5, 9, len(raw) // 2, len(raw) - 1}:
        part = client_hello(raw[:cut])
        # What was said of the first bytes is never taken back.
        assert isinstance(part, NeedMore) or part == found or isinstance(found, NotTls), (cut, part, found)
        assert not isinstance(part, NotTls) or isinstance(found, NotTls), (cut, part, found)
    if isinstance(found, NeedMore):
        assert len(raw) < HELLO_MAX
        return
    if isinstance(found, NotTls):
        assert found.detail.isascii() and found.detail.isprintable()
        for host in HOSTS:
            assert not judge_hello(found, host, wildcard=False).allowed
        return
    seen = by_openssl(raw)
    for host in HOSTS:
        lax = judge_hello(found, host, wildcard=False, ech="allow").allowed
        strict = judge_hello(found, host, wildcard=True).allowed
        assert lax or not strict
        assert not (strict and found.ech)
        if lax and host.address is None:
            _named(found, host.text)
            assert seen is None or _folded(seen) == host.text, (seen, host)
        elif lax:
            assert seen in (None, ""), seen


def flight(data: bytes) -> bytes:
    """Return the bytes on the wire: as they are, or put into a message, its extensions, or its list of server names.

    Lengths that have to fit are what a mutation breaks first, so the three inner forms compute those around them.
    """
    form, rest = data[0] & 3, data[1:]
    size = (data[0] >> 2) * 8 + 1 if data[0] >> 2 else 1 << 14
    if form == 0:
        return rest
    if form == 3:
        names = b"".join(b"\x00" + len(name).to_bytes(2, "big") + name for name in rest.split(b"\n"))
        listed = len(names).to_bytes(2, "big") + names
        rest = b"\x00\x00" + len(listed).to_bytes(2, "big") + listed
    if form >= 2:
        rest = _PREFIX + len(rest).to_bytes(2, "big") + rest
    message = b"\x01" + (len(rest) & 0xFFFFFF).to_bytes(3, "big") + rest
    pieces = [message[at : at + size] for at in range(0, len(message), size)]
    return b"".join(b"\x16\x03\x01" + len(piece).to_bytes(2, "big") + piece for piece in pieces)


def by_openssl(raw: bytes) -> str | None:
    """Return the server name that a server of OpenSSL sees: ``""`` for none, None where it sees no hello."""
    _SEEN.clear()
    incoming = ssl.MemoryBIO()
    tls = _SERVER.wrap_bio(incoming, ssl.MemoryBIO(), server_side=True)
    incoming.write(raw)
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None  # a name that is no ASCII
    try:
        tls.do_handshake()
    except ssl.SSLError:
        pass
    finally:
        sys.unraisablehook = hook
    return None if not _SEEN else _SEEN[0] or ""


def _named(hello: Hello, host: str) -> None:
    assert len(hello.sni) == 1 and _folded(hello.sni[0]) == host


def _folded(name: str) -> str:
    return name.lower().removesuffix(".")
