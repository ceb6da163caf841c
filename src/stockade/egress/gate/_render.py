"""Request heads as the upstream gets them: from their parts, in one form.

``Via`` is not added: it would tell every upstream that the client is a sandbox.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stockade.egress.gate._destination import write_authority
from stockade.egress.gate._head import Framing, Headers, write_fields

if TYPE_CHECKING:
    from stockade.egress.gate._request import RequestHead

_LENGTH, _CHUNKED = Framing.LENGTH, Framing.CHUNKED  # a look-up on an enum's class is slow
_NO_NAMES: frozenset[str] = frozenset()
_WEBSOCKET = b"websocket"
_WEBSOCKET_PREFIX = b"sec-websocket-"


def render_request_head(
    head: RequestHead,
    *,
    close: bool = False,
    upgrade: bool = False,
    absolute: bool = False,
    drop: frozenset[str] = _NO_NAMES,
    add: Headers = (),
) -> bytes:
    """Return the head as the upstream gets it: origin-form, Host rebuilt, framing rebuilt.

    ``absolute`` writes the whole target, for a proxy (RFC 9112 section 3.2.2). ``close`` adds ``Connection: close``. ``upgrade`` asks for a WebSocket; without it the fields of one are left out.
    ``drop`` are names (lower case) that are left out, ``add`` fields that are written in place of the client's of the
    same name. Raises ValueError for a tunnel request, and for an upgrade that the client did not ask for.
    """
    request = head.request
    if request.method == "CONNECT":
        raise ValueError("CONNECT is answered, not forwarded")
    where = request.destination
    host = write_authority(where.host, where.port, request.scheme)
    target = request.path if request.query is None else f"{request.path}?{request.query}"
    if absolute:
        target = f"{request.scheme}://{host}{target}"
    headers = head.headers
    if drop or add or head.upgrade is not None:
        headers = _changed(head, drop, add, upgrade=upgrade)
    lines = [f"{request.method} {target} HTTP/1.1\r\nHost: {host}".encode("ascii"), *write_fields(headers)]
    if head.framing is _CHUNKED:
        lines.append(b"Transfer-Encoding: chunked")
    elif head.framing is _LENGTH:
        lines.append(b"Content-Length: %d" % head.length)
    if upgrade:
        if head.upgrade != _WEBSOCKET:
            raise ValueError("nobody asked for a WebSocket")
        lines.append(b"Connection: Upgrade\r\nUpgrade: websocket")
    elif close:
        lines.append(b"Connection: close")
    lines.append(b"\r\n")
    return b"\r\n".join(lines)


def _changed(head: RequestHead, drop: frozenset[str], add: Headers, *, upgrade: bool) -> Headers:
    """Return the fields without ``drop`` and without what ``add`` replaces, then ``add``."""
    gone = {name.encode("ascii") for name in drop} | {name.lower() for name, _ in add}
    kept = [field for field in head.headers if field[0].lower() not in gone]
    if not upgrade and head.upgrade == _WEBSOCKET:
        kept = [field for field in kept if not field[0].lower().startswith(_WEBSOCKET_PREFIX)]
    return (*kept, *add)
