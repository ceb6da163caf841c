"""One request on its way through the gate, and what the record says about it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from stockade.egress.gate import Address, Meter, RequestHead, Way, safe_text
from stockade.events import Value

_PATH_CHARS = 2048
_HOST_CHARS = 253
_CLAIM_CHARS = 200


@dataclass(slots=True)
class Decision:
    """From the parsed head to ``net.end``. ``request_id`` is set once the permission is on record."""

    head: RequestHead
    connection_id: int
    started_ns: int
    started_s: float
    rule: str | None = None
    wildcard: bool = False
    service: str | None = None
    addresses: tuple[Address, ...] = ()
    peer: Address | None = None
    meter: Meter | None = None
    request_id: str | None = None
    dns_ns: int | None = None
    connect_ns: int | None = None
    status: int | None = None
    ended: dict[str, Value] = field(default_factory=dict)

    @property
    def tunnel(self) -> bool:
        """Whether this is a CONNECT."""
        return self.head.request.destination.way is Way.CONNECT

    @property
    def kind(self) -> str:
        """The kind of the decision's event."""
        return "net.connect" if self.tunnel else "net.request"

    def fields(self) -> dict[str, Value]:
        """Return the own fields of the decision's event, without reason; text is ASCII and cut."""
        request = self.head.request
        fields: dict[str, Value] = {
            "server.address": safe_text(request.destination.host.text, limit=_HOST_CHARS),
            "server.port": request.destination.port,
            "connection_id": self.connection_id,
            "request_headers_bytes": self.head.size_bytes,
        }
        if not self.tunnel:
            fields["http.request.method"] = safe_text(request.method, limit=32)
            fields["url.scheme"] = "http"
            fields["url.path"] = safe_text(request.path, limit=_PATH_CHARS)
            if request.query is not None:
                query = request.query.encode("utf-8", "surrogateescape")
                fields["query_bytes"] = len(query)
                # Only a digest: queries carry tokens, and the record must not become a store of secrets.
                fields["query_sha256"] = hashlib.sha256(query).hexdigest()
        if self.rule is not None:
            fields["rule"] = self.rule
        if self.service is not None:
            fields["service"] = self.service
        if self.addresses:
            fields["network.peer.address"] = str(self.addresses[0])
        if self.dns_ns is not None:
            fields["dns_ns"] = self.dns_ns
        if self.head.claims:
            # What the client says it is; its identity is the listener that accepted it (case 89).
            fields["detail"] = safe_text("claims " + ", ".join(self.head.claims), limit=_CLAIM_CHARS)
        return fields

    def end_fields(self, now_ns: int) -> dict[str, Value]:
        """Return the own fields of ``net.end``, without reason."""
        destination = self.head.request.destination
        fields: dict[str, Value] = {
            "request_id": self.request_id or "",
            "connection_id": self.connection_id,
            "server.address": safe_text(destination.host.text, limit=_HOST_CHARS),
            "server.port": destination.port,
            "http.response.status_code": self.status,
            "bytes_out": self.meter.bytes_out if self.meter is not None else 0,
            "bytes_in": self.meter.bytes_in if self.meter is not None else 0,
            "duration_ns": max(0, now_ns - self.started_ns),
            **self.ended,
        }
        if self.peer is not None:
            fields["network.peer.address"] = str(self.peer)
        if self.connect_ns is not None:
            fields["connect_ns"] = self.connect_ns
        return fields
