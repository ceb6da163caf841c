"""Listeners that a connection to *any* address reaches, in the holder's empty network namespace.

Programs that know no proxy connect to the address that a name resolved to, or to one they have by heart. For the ports
that the policy names, every such connection ends at a socket whose descriptor is held outside; the address it wanted is
that socket's own name (``getsockname``). Three parts:

* a routing table that calls every unicast address local (AnyIP, ``ip-route(8)``: ``local 0.0.0.0/0 dev lo``), and rules
  (``ip-rule(8)``) that send only TCP to the named ports, and DNS, to that table. Whatever else a program tries finds no
  route, so it fails at once (ENETUNREACH) instead of waiting for an answer. As the addresses are in a table of their own
  and not in ``local``, nobody inside can bind one of them either: no socket in there is anything but 127.0.0.0/8, ::1
  and the dummy below;
* one wildcard socket per port, for IPv4 and IPv6 together. ``IPV6_TRANSPARENT`` lets it answer from an address that is
  not local by the ``local`` table; it takes CAP_NET_ADMIN over the namespace, which only the holder has;
* 192.0.0.8 (RFC 7600, the dummy address of hosts without one) on ``lo``: without an address that is not a loopback one,
  ``getaddrinfo`` with AI_ADDRCONFIG finds no name in IPv4. It has none in IPv6, so that it asks for A records only.

A guest cannot listen on a port that is taken here, not on 127.0.0.1 either: Linux lets two sockets listen on one port,
one of them on the wildcard, only if both set SO_REUSEPORT, and then the guest could listen on the wildcard as well. It
gets EADDRINUSE, which a person understands.

Runs in the holder: standard library only. Layouts: linux/rtnetlink.h, fib_rules.h, if_addr.h, ipv6.h.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

DNS_PORT = 53
DUMMY = "192.0.0.8"
BACKLOG = 128
_TABLE = 100
_RULE_ORDER = 100  # after ``local`` (0), before ``main`` (32766)
_LO = 1  # LOOPBACK_IFINDEX: the first interface of every network namespace

_NEWADDR, _NEWROUTE, _NEWRULE, _ERROR = 20, 24, 32, 2
_REQUEST, _ACK, _CREATE, _EXCL = 0x001, 0x004, 0x400, 0x200
_RTN_LOCAL, _RTN_UNREACHABLE, _FR_ACT_TO_TBL = 2, 7, 1
_PROTO_STATIC = 4
_SCOPE_UNIVERSE, _SCOPE_HOST = 0, 254
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_RTA_DST, _RTA_OIF, _RTA_PREFSRC, _RTA_TABLE = 1, 4, 7, 15
_FRA_PRIORITY, _FRA_TABLE, _FRA_IP_PROTO, _FRA_DPORT_RANGE = 6, 15, 22, 24
_IP_TRANSPARENT, _IP_PKTINFO, _IPV6_TRANSPARENT = 19, 8, 75
_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr: length, type, flags, sequence, port

# Not for one connection: multicast, the reserved rest and 0/8 have no meaning as a destination, and a link-local address
# of IPv6 comes with an interface in its name.
_NOWHERE = {
    socket.AF_INET: (("0.0.0.0", 8), ("224.0.0.0", 3)),  # noqa: S104 - a network, nothing is bound
    socket.AF_INET6: (("ff00::", 8), ("fe80::", 10)),
}
_ANYWHERE = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}  # noqa: S104 - in an empty namespace
_SOURCE = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}


class _Message(NamedTuple):
    kind: int
    body: bytes
    what: str


def open_listeners(ports: Sequence[int], *, dns: bool) -> list[socket.socket]:
    """Make the routes and bind the sockets; ``lo`` must be up. Non-blocking, in this order: ``ports``, DNS UDP, DNS TCP.

    The sockets are AF_INET6 and serve IPv4 as ``::ffff:a.b.c.d``; AF_INET where the namespace has no IPv6. The UDP
    socket tells with each datagram which address it was sent to (IPV6_PKTINFO, mapped for IPv4; IP_PKTINFO if AF_INET).
    Raises OSError, ENOTSUP or EOPNOTSUPP if the kernel has no policy routing (CONFIG_IP_MULTIPLE_TABLES).
    """
    family = socket.AF_INET6 if _has_ipv6() else socket.AF_INET
    families = (socket.AF_INET,) if family is socket.AF_INET else (socket.AF_INET, socket.AF_INET6)
    _request([_dummy(), *itertools.chain.from_iterable(_routing(version, ports, dns=dns) for version in families)])
    kinds = [(port, socket.SOCK_STREAM) for port in ports]
    if dns:
        kinds += [(DNS_PORT, socket.SOCK_DGRAM), (DNS_PORT, socket.SOCK_STREAM)]
    return [_bind(family, port, kind) for port, kind in kinds]


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
            probe.bind(("::1", 0))
    except OSError:  # EAFNOSUPPORT: not in the kernel; EADDRNOTAVAIL: switched off
        return False
    return True


def _bind(family: socket.AddressFamily, port: int, kind: socket.SocketKind) -> socket.socket:
    with contextlib.ExitStack() as undo:
        sock = undo.enter_context(socket.socket(family, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK))
        if family is socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_TRANSPARENT, 1)
        else:
            sock.setsockopt(socket.IPPROTO_IP, _IP_TRANSPARENT, 1)
        if kind is socket.SOCK_DGRAM and family is socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
        elif kind is socket.SOCK_DGRAM:
            sock.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
        # Neither SO_REUSEADDR nor SO_REUSEPORT: with them set here, a guest could share the port.
        sock.bind((_ANYWHERE[family], port))
        if kind is socket.SOCK_STREAM:
            sock.listen(BACKLOG)
        undo.pop_all()
        return sock


def _routing(family: socket.AddressFamily, ports: Sequence[int], *, dns: bool) -> Iterable[_Message]:
    yield _route(family, _ANYWHERE[family], 0, _RTN_LOCAL)
    for network, bits in _NOWHERE[family]:
        yield _route(family, network, bits, _RTN_UNREACHABLE)
    for first, last in _runs({*ports, *((DNS_PORT,) if dns else ())}):
        yield _rule(family, socket.IPPROTO_TCP, first, last)
    if dns:
        yield _rule(family, socket.IPPROTO_UDP, DNS_PORT, DNS_PORT)


def _runs(ports: Iterable[int]) -> Iterable[tuple[int, int]]:
    """Return the ranges (first, last) that hold these ports and no other: each rule is one more for every look-up."""
    ordered = sorted(ports)
    for _, group in itertools.groupby(enumerate(ordered), lambda pair: pair[1] - pair[0]):
        run = [port for _, port in group]
        yield run[0], run[-1]


def _attribute(kind: int, data: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(data), kind) + data + b"\0" * (-len(data) % 4)


def _dummy() -> _Message:
    address = socket.inet_aton(DUMMY)
    body = struct.pack("=4BI", socket.AF_INET, 32, 0, _SCOPE_UNIVERSE, _LO)
    return _Message(_NEWADDR, body + _attribute(_IFA_LOCAL, address) + _attribute(_IFA_ADDRESS, address), DUMMY)


def _route(family: socket.AddressFamily, network: str, bits: int, kind: int) -> _Message:
    local = kind == _RTN_LOCAL
    scope = _SCOPE_HOST if local and family is socket.AF_INET else _SCOPE_UNIVERSE
    body = struct.pack("=8BI", family, bits, 0, 0, _TABLE, _PROTO_STATIC, scope, kind, 0)
    if bits:
        body += _attribute(_RTA_DST, socket.inet_pton(family, network))
    if local:
        # The source is named: by itself it would be the destination, which is no address of this namespace.
        body += _attribute(_RTA_PREFSRC, socket.inet_pton(family, _SOURCE[family]))
    if local or family is socket.AF_INET6:
        body += _attribute(_RTA_OIF, struct.pack("=I", _LO))
    return _Message(_NEWROUTE, body + _attribute(_RTA_TABLE, struct.pack("=I", _TABLE)), f"route {network}/{bits}")


def _rule(family: socket.AddressFamily, protocol: int, first: int, last: int) -> _Message:
    body = struct.pack("=8BI", family, 0, 0, 0, _TABLE, 0, 0, _FR_ACT_TO_TBL, 0)
    body += _attribute(_FRA_PRIORITY, struct.pack("=I", _RULE_ORDER))
    body += _attribute(_FRA_TABLE, struct.pack("=I", _TABLE))
    body += _attribute(_FRA_IP_PROTO, struct.pack("=B", protocol))
    body += _attribute(_FRA_DPORT_RANGE, struct.pack("=HH", first, last))
    return _Message(_NEWRULE, body, f"rule for ports {first}-{last}")


def _request(messages: Sequence[_Message]) -> None:
    """Send all at once and read the answers. The kernel answers each failure, and, asked to, the last success."""
    packet = b""
    for number, message in enumerate(messages):
        flags = _REQUEST | _CREATE | _EXCL | (_ACK if number == len(messages) - 1 else 0)
        packet += _HEADER.pack(_HEADER.size + len(message.body), message.kind, flags, number, 0) + message.body
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE) as link:
        link.send(packet)
        while True:
            answers = link.recv(1 << 16)
            while answers:
                length, kind, _, number, _ = _HEADER.unpack_from(answers)
                (result,) = struct.unpack_from("=i", answers, _HEADER.size)
                if kind == _ERROR and result:
                    raise OSError(-result, f"{messages[number].what}: {os.strerror(-result)}")
                if number == len(messages) - 1:
                    return
                answers = answers[(length + 3) & ~3 :]
