"""Where a request goes and how it came in: the one canonical value that every later step reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from stockade.egress.gate._host import Host

PORTS = {"http": 80, "https": 443}
"""The port that goes without saying, by scheme."""


class Way(StrEnum):
    """How the request came in."""

    HTTP = "http"
    CONNECT = "connect"
    SOCKS5 = "socks5"
    TRANSPARENT = "transparent"
    TLS = "tls"


class Destination(msgspec.Struct, frozen=True):
    """The one canonical destination that rules, resolver, record, Host, SNI and certificate all read."""

    way: Way
    host: Host
    port: int


class Request(msgspec.Struct, frozen=True):
    """What is decided on. ``path`` is in normal form and ``query`` without ``?`` (None: no ``?``).

    A *tunnel request* (CONNECT, SOCKS5, a connection to a fake or literal address) has the method ``"CONNECT"``, and
    ``path`` and ``scheme`` are ``""``. ``scheme`` of all others is ``http`` or ``https``.
    """

    destination: Destination
    method: str
    path: str
    query: str | None = None
    scheme: str = "http"

    @property
    def tunnel(self) -> bool:
        """Whether this asks for a tunnel."""
        return self.method == "CONNECT"


@dataclass(frozen=True, slots=True)
class Origin:
    """What a connection is bound to already: each request on it goes there or nowhere (case 78).

    ``scheme`` is ``https`` inside inspected TLS, else ``http``; any other raises ValueError. ``destination`` is that
    of each request, ``authority`` what its Host says: both are made once for all of them.
    """

    way: Way
    scheme: str
    host: Host
    port: int
    destination: Destination = field(init=False, repr=False, compare=False)
    authority: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.scheme not in PORTS:
            raise ValueError(f"{self.scheme!r} is not a scheme of requests")
        object.__setattr__(self, "destination", Destination(self.way, self.host, self.port))
        object.__setattr__(self, "authority", write_authority(self.host, self.port, self.scheme).encode("ascii"))


def write_authority(host: Host, port: int, scheme: str) -> str:
    """Return host and port as a Host field has them: the port of the scheme goes without saying."""
    return host.wire if port == PORTS[scheme] else f"{host.wire}:{port}"


def tunnel_request(way: Way, host: Host, port: int) -> Request:
    """Return the request for a tunnel that came in by ``way``."""
    return Request(Destination(way, host, port), "CONNECT", "", None, "")
