"""The TLS first flight: which name does the tunnel really ask for? (cases 74-77)

Every proxy measured that tunnels CONNECT trusted the CONNECT name alone, so that a shared front
end served any other name. Here nothing leaves until a whole ClientHello (RFC 8446 section 4.1.2)
was read and its server name (RFC 6066 section 3) is the host that was allowed.

Known limit: after a HelloRetryRequest the client speaks again, inside what we then only count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stockade.egress.gate._reason import Reason
from stockade.egress.gate._verdict import Verdict

if TYPE_CHECKING:
    from stockade.egress.gate._host import Host

HELLO_MAX = 65536
"""Most bytes of a first flight."""

_RECORDS_MAX = 64  # real clients use one or two; this bounds the work per call
_RECORD_HEADER = 5
_MESSAGE_HEADER = 4
_RECORD_MAX = 1 << 14  # RFC 8446 section 5.1
_HANDSHAKE = 22
_CLIENT_HELLO = 1
_MINOR_MAX = 4
_SESSION_ID_MAX = 32
_SERVER_NAME = 0
_HOST_NAME = 0
_ECH = {0xFE0D, 0xFFCE}  # encrypted_client_hello, and its forerunner ESNI


class NeedMore(msgspec.Struct, frozen=True):
    """The bytes so far are a good beginning: read more."""


class NotTls(msgspec.Struct, frozen=True):
    """The bytes are no ClientHello; ``detail`` says why (safe text)."""

    detail: str


class Hello(msgspec.Struct, frozen=True):
    """A whole ClientHello: ``sni`` as sent (latin-1, unchecked), ``ech`` whether ECH was offered."""

    sni: tuple[str, ...]
    ech: bool


class _Bad(Exception):
    """The bytes are no ClientHello."""


_NEED_MORE = NeedMore()


def client_hello(buffer: bytes | bytearray | memoryview) -> NeedMore | NotTls | Hello:
    """Read the ClientHello at the start of ``buffer`` (all bytes so far). Never raises.

    It is put together over any number of records up to 64 and 64 KiB; a byte that cannot belong
    to one is reported at once. Records after it (early data) are left alone.
    """
    try:
        message = _reassemble(memoryview(buffer))
        return _NEED_MORE if message is None else _parse(message)
    except _Bad as bad:
        return NotTls(str(bad))


def _reassemble(view: memoryview) -> bytes | None:
    """Return the body of the handshake message, or None for "read more"."""
    parts: list[memoryview] = []
    position, have, need = 0, 0, 0
    for _ in range(_RECORDS_MAX):
        length = _record_length(view[position : position + _RECORD_HEADER])
        if length is None:
            break
        start = position + _RECORD_HEADER
        part = view[start : start + length]
        parts.append(part)
        have += len(part)
        need = need or _message_size(parts, have)
        if len(part) < length:
            break
        if need and have > need:  # RFC 8446 section 5.1: nothing may share its last record
            raise _Bad("more than a ClientHello in its records")
        if have == need:
            return b"".join(parts)[_MESSAGE_HEADER:]
        position = start + length
    else:
        raise _Bad("too many records")
    if len(view) >= HELLO_MAX:
        raise _Bad("ClientHello over 64 KiB")
    return None


def _record_length(header: memoryview) -> int | None:
    """Check as much of a record header as is there; return the length once it is whole."""
    if len(header) >= 1 and header[0] != _HANDSHAKE:
        raise _Bad("not a handshake record")
    if len(header) >= 2 and header[1] != 3:
        raise _Bad("not a TLS version")
    if len(header) >= 3 and header[2] > _MINOR_MAX:
        raise _Bad("not a TLS version")
    if len(header) < _RECORD_HEADER:
        return None
    length = header[3] << 8 | header[4]
    if not 0 < length <= _RECORD_MAX:
        raise _Bad("bad record length")
    return length


def _message_size(parts: list[memoryview], have: int) -> int:
    """Return the whole size of the message, or 0 while its header is not complete."""
    head = b"".join(part[:_MESSAGE_HEADER] for part in parts[:_MESSAGE_HEADER])[:_MESSAGE_HEADER]
    if head and head[0] != _CLIENT_HELLO:
        raise _Bad("not a ClientHello")
    if have < _MESSAGE_HEADER:
        return 0
    size = _MESSAGE_HEADER + int.from_bytes(head[1:], "big")
    if size > HELLO_MAX:
        raise _Bad("ClientHello over 64 KiB")
    return size


def _parse(body: bytes) -> Hello:
    """Read legacy_version, random, session ID, cipher suites, compression methods and extensions."""
    at = 2 + 32
    if body[:1] != b"\x03":
        raise _Bad("not a TLS version")
    session, at = _vector(body, at, 1)
    ciphers, at = _vector(body, at, 2)
    compressions, at = _vector(body, at, 1)
    if len(session) > _SESSION_ID_MAX or not ciphers or len(ciphers) % 2 or not compressions:
        raise _Bad("bad session ID, cipher or compression list")
    if at == len(body):  # no extensions: TLS 1.2 and before may do without
        return Hello((), ech=False)
    extensions, at = _vector(body, at, 2)
    if at != len(body):
        raise _Bad("bytes after the extensions")
    kinds, server_name = _walk(extensions)
    return Hello(() if server_name is None else _server_names(server_name), ech=not _ECH.isdisjoint(kinds))


def _vector(data: bytes, at: int, size: int) -> tuple[bytes, int]:
    """Return the vector at ``at`` with a length of ``size`` bytes, and where it ends."""
    start = at + size
    end = start + int.from_bytes(data[at:start], "big")
    if end > len(data) or start > len(data):
        raise _Bad("ClientHello cut short")
    return data[start:end], end


def _walk(extensions: bytes) -> tuple[set[int], bytes | None]:
    """Return the kinds of all extensions, and the data of server_name."""
    kinds: set[int] = set()
    server_name = None
    at, end = 0, len(extensions)
    while at < end:
        if at + 4 > end:
            raise _Bad("ClientHello cut short")
        kind = extensions[at] << 8 | extensions[at + 1]
        start = at + 4
        at = start + (extensions[at + 2] << 8 | extensions[at + 3])
        if at > end:
            raise _Bad("ClientHello cut short")
        if kind in kinds:  # RFC 8446 section 4.2; two server_name would let parsers disagree
            raise _Bad("an extension twice")
        kinds.add(kind)
        if kind == _SERVER_NAME:
            server_name = extensions[start:at]
    return kinds, server_name


def _server_names(data: bytes) -> tuple[str, ...]:
    names, end = _vector(data, 0, 2)
    if end != len(data) or not names:
        raise _Bad("bad server_name list")
    found: list[str] = []
    at = 0
    while at < len(names):
        if names[at] != _HOST_NAME:
            raise _Bad("unknown kind of server name")
        name, at = _vector(names, at + 1, 2)
        found.append(name.decode("latin-1"))
    return tuple(found)


_ALLOWED = Verdict(allowed=True, reason=Reason.ALLOWED)
_ECH_ACCEPTED = ("allow", "log")


def judge_hello(hello: Hello | NotTls, host: Host, *, wildcard: bool, ech: str = "") -> Verdict:
    """Say whether the tunnel to ``host`` may begin so (cases 74-77).

    The one server name must be the host, case and one trailing dot folded. A host that is an IP literal must come
    without any (RFC 6066 section 3 forbids literals in it). ECH hides the real name behind the outer one: ``ech`` is
    the rule's word for it (``allow``, ``log``, ``deny``; record ``hello.ech``), and without one a wildcard rule does
    not accept it while an exact host does (GREASE looks the same). ``wildcard`` and ``ech`` are those of the grant.
    Reasons: not_tls, sni_missing, sni_mismatch, ech_not_allowed.
    """
    if isinstance(hello, NotTls):
        return Verdict(allowed=False, reason=Reason.NOT_TLS)
    if host.address is not None:
        if hello.sni:
            return Verdict(allowed=False, reason=Reason.SNI_MISMATCH)
    elif not hello.sni:
        return Verdict(allowed=False, reason=Reason.SNI_MISSING)
    elif len(hello.sni) != 1 or hello.sni[0].lower().removesuffix(".") != host.text:
        return Verdict(allowed=False, reason=Reason.SNI_MISMATCH)
    if hello.ech and (ech not in _ECH_ACCEPTED if ech else wildcard):
        return Verdict(allowed=False, reason=Reason.ECH_NOT_ALLOWED)
    return _ALLOWED
