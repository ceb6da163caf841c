"""What a socket that was made inside a sandbox is there for; the agent and the worker both speak of it."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """``proxy`` speaks HTTP and SOCKS5, ``gateway`` the same inside TLS 1.3 with certificates on both sides.

    On ``transparent`` the client means the address that it connected to.
    """

    PROXY = "proxy"
    GATEWAY = "gateway"
    TRANSPARENT = "transparent"
    DNS = "dns"
    DNS_TCP = "dns_tcp"
