"""One request on its way through the gate, and what the record says about it."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stockade.egress.gate import Address, Framing, Grant, Handling, Meter, Request, RequestHead, Way, safe_text
from stockade.events import Value

if TYPE_CHECKING:
    from stockade.egress._connection import Connection
    from stockade.egress._shelf import Tape

_INSPECT = Handling.INSPECT
_RAW = Handling.RAW
_PATH_CHARS = 2048
_HOST_CHARS = 253
_CLAIM_CHARS = 200
_USUAL_WAYS = frozenset({Way.HTTP, Way.CONNECT})


_text = functools.lru_cache(1024)(str)


def tunnel_head(request: Request, size_bytes: int) -> RequestHead:
    """Return the head of a tunnel that was asked for without HTTP: by SOCKS, or by connecting to its address."""
    return RequestHead(
        request=request,
        headers=(),
        framing=Framing.NONE,
        length=0,
        version=11,
        keep_alive=False,
        expect_continue=False,
        dropped=(),
        claims=(),
        size_bytes=size_bytes,
    )


@dataclass(slots=True)
class Decision:
    """From the parsed head to ``net.end``. ``request_id`` is set once the permission is on record."""

    head: RequestHead
    connection_id: int
    started_ns: int
    started_s: float
    rule: str | None = None
    grant: Grant | None = None
    handling: Handling = Handling.REQUEST
    service: str | None = None
    source: str | None = None
    addresses: tuple[Address, ...] = ()
    unchecked: str = ""
    """Why the address was not checked here, if it was not."""
    certified: str = ""
    """What the client's certificate calls it."""
    peer: Address | None = None
    meter: Meter | None = None
    limited: int = -1
    request_id: str | None = None
    dns_ns: int | None = None
    connect_ns: int | None = None
    status: int | None = None
    key: bytes | None = None
    body: bytes | None = None
    tape: Callable[[Connection, Decision], Tape] | None = None
    ended: dict[str, Value] = field(default_factory=dict)

    @property
    def tunnel(self) -> bool:
        """Whether this asks for a tunnel."""
        return self.head.request.tunnel

    @property
    def kind(self) -> str:
        """The kind of the decision's event."""
        return "net.connect" if self.head.request.tunnel else "net.request"

    def fields(self) -> dict[str, Value]:
        """Return the own fields of the decision's event, without reason; text is ASCII and cut."""
        head = self.head
        request = head.request
        destination = request.destination
        fields: dict[str, Value] = {
            "server.address": destination.host.text,  # the grammar of hosts: ASCII, at most 253
            "server.port": destination.port,
            "connection_id": self.connection_id,
            "request_headers_bytes": head.size_bytes,
        }
        if not request.tunnel:
            fields["http.request.method"] = request.method
            fields["url.scheme"] = request.scheme
            fields["url.path"] = safe_text(request.path, limit=_PATH_CHARS)
            if request.query is not None:
                query = request.query.encode("utf-8", "surrogateescape")
                fields["query_bytes"] = len(query)
                # Only a digest: queries carry tokens, and the record must not become a store of secrets.
                fields["query_sha256"] = hashlib.sha256(query).hexdigest()
        if destination.way not in _USUAL_WAYS:
            fields["way"] = destination.way.value
        if self.rule is not None:
            fields["rule"] = self.rule
        if self.service is not None:
            fields["service"] = self.service
        if self.source is not None:
            fields["source"] = self.source
        if self.addresses:
            fields["network.peer.address"] = _text(self.addresses[0])
        if self.dns_ns is not None:
            fields["dns_ns"] = self.dns_ns
        if self.handling is _INSPECT or self.handling is _RAW:
            fields["handling"] = self.handling.value
        if head.claims or self.unchecked or self.certified:
            fields["detail"] = self._detail()
        return fields

    def _detail(self) -> str:
        # What the client says it is; its identity is the listener that accepted it (case 89).
        claims = "claims " + ", ".join(self.head.claims) if self.head.claims else ""
        certified = f"certificate {self.certified}" if self.certified else ""
        return safe_text("; ".join(filter(None, (self.unchecked, certified, claims))), limit=_CLAIM_CHARS)

    def end_fields(self, now_ns: int) -> dict[str, Value]:
        """Return the own fields of ``net.end``, without reason."""
        destination, meter = self.head.request.destination, self.meter
        fields: dict[str, Value] = {
            "request_id": self.request_id or "",
            "connection_id": self.connection_id,
            "server.address": destination.host.text,
            "server.port": destination.port,
            "http.response.status_code": self.status,
            "bytes_out": 0 if meter is None else meter.bytes_out,
            "bytes_in": 0 if meter is None else meter.bytes_in,
            "duration_ns": max(0, now_ns - self.started_ns),
            **self.ended,
        }
        if self.peer is not None:
            fields["network.peer.address"] = _text(self.peer)
        if self.connect_ns is not None:
            fields["connect_ns"] = self.connect_ns
        return fields
