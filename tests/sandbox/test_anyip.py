"""The network of a sandbox: every connection to a named port comes out, whatever its address; all else fails at once."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import struct

import pytest

from stockade.sandbox import Listeners
from stockade.sandbox._anyip import DUMMY, _runs
from tests.outside import GREETING, Outside
from tests.sandboxes import as_holder

PORTS = (80, 443, 8080)
FULL = Listeners(transparent_ports=PORTS, dns=True)
NAMES = {"files.example": "198.18.0.10"}
AT_ONCE_S = 5.0
"""Far below what a connection waits for an answer that never comes (two minutes), far above a busy machine's delays."""


@pytest.fixture(scope="module")
def network(owner):
    sandbox = owner.create(listeners=FULL)
    with Outside(sandbox, FULL, NAMES) as outside:
        yield Network(owner, sandbox, outside)
    owner.destroy(sandbox)


class Network:
    def __init__(self, owner, sandbox, outside):
        self.owner, self.sandbox, self.outside = owner, sandbox, outside

    def run(self, source, arguments=None):
        """Run a probe and return what it said and whom it reached."""
        before = len(self.outside.reached)
        said = self.owner.inside(self.sandbox, SOURCE + source, arguments)
        return said, self.outside.reached[before:]


SOURCE = """
def family(address):
    return socket.AF_INET6 if ":" in address else socket.AF_INET
def connect(address, port):
    with socket.create_connection((address, port), timeout=60) as sock:
        assert sock.getpeername()[:2] == (address, port), sock.getpeername()
        return sock.recv(100).decode()
def ask(address, port, connected, question="?"):
    with socket.socket(family(address), socket.SOCK_DGRAM) as sock:
        sock.settimeout(60)
        if connected:
            sock.connect((address, port))
            sock.send(question.encode())
        else:
            sock.sendto(question.encode(), (address, port))
        answer, sender = sock.recvfrom(100)
        return sender[0]
def timed(work, *arguments):
    started = time.monotonic()
    return [attempt(work, *arguments), time.monotonic() - started]
"""
LITERALS = ("198.51.100.7", "169.254.169.254", "10.1.2.3", "198.18.0.10", "127.0.0.1", "127.9.9.9", DUMMY)
LITERALS_6 = ("2600:5::5", "fd00:ec2::254", "64:ff9b::a9fe:a9fe", "::1")


def test_every_address_reaches_the_listener_of_its_port(network):
    pairs = list(itertools.product((*LITERALS, *LITERALS_6), PORTS))
    said, reached = network.run("say([attempt(connect, *pair) for pair in ARGS])", pairs)
    assert said == [GREETING] * len(pairs)
    assert reached == [f"tcp {address} {port}" for address, port in pairs]


def test_a_mapped_address_is_the_ipv4_address(network):
    said, reached = network.run("say(connect('::ffff:198.51.100.7', 443))")
    assert (said, reached) == (GREETING, ["tcp 198.51.100.7 443"])


def test_other_ports_have_no_route(network):
    pairs = [(address, port) for address in LITERALS[:4] + LITERALS_6[:3] for port in (81, 22, 3128, 8081, 65535)]
    said, reached = network.run("say([timed(connect, *pair) for pair in ARGS])", pairs)
    assert {result for result, _ in said} == {"ENETUNREACH"}
    assert max(seconds for _, seconds in said) < AT_ONCE_S
    assert reached == []


def test_what_is_no_destination_of_one_connection(network):
    addresses = ["0.1.2.3", "224.0.0.251", "240.0.0.1", "255.255.255.255", "ff02::fb", "fe80::1%lo"]
    said, reached = network.run("say([timed(connect, address, 80) for address in ARGS])", addresses)
    assert {result for result, _ in said} <= {"ENETUNREACH", "EHOSTUNREACH", "EINVAL", "EACCES"}
    assert max(seconds for _, seconds in said) < AT_ONCE_S
    assert reached == []


@pytest.mark.parametrize("connected", [False, True])
def test_a_resolver_answers_from_the_address_that_was_asked(network, connected):
    """A connected socket takes no datagram from anywhere else, and a client that is none compares the addresses itself."""
    servers = ["127.0.0.1", "8.8.8.8", "198.51.100.53", "::1", "2001:4860:4860::8888"]
    said, reached = network.run(f"say([ask(address, 53, {connected}) for address in ARGS])", servers)
    assert said == servers
    assert reached == [f"udp {address} 53" for address in servers]


def test_dns_over_tcp_comes_out_as_well(network):
    said, reached = network.run("say([connect('8.8.8.8', 53), connect('2001:4860:4860::8888', 53)])")
    assert said == [GREETING] * 2
    assert reached == ["tcp 8.8.8.8 53", "tcp 2001:4860:4860::8888 53"]


def test_other_datagrams_fail_at_once(network):
    """Without a rule for them they would be local, nobody would answer, and an unconnected socket waits for ever."""
    pairs = [
        ("8.8.8.8", 123),
        ("198.51.100.7", 443),
        ("2600:5::5", 443),
        ("224.0.0.251", 5353),
        ("255.255.255.255", 53),
    ]
    said, reached = network.run(
        "say([timed(ask, *pair, connected) for pair in ARGS for connected in (False, True)])", pairs
    )
    assert {result for result, _ in said} <= {"ENETUNREACH", "EHOSTUNREACH", "EACCES"}
    assert max(seconds for _, seconds in said) < AT_ONCE_S
    assert reached == []


def test_programs_find_names(network):
    """Also those that ask for addresses of the kind that this host has (AI_ADDRCONFIG), in IPv4 alone."""
    source = """
def resolve(name, family, flags):
    try:
        return sorted({entry[4][0] for entry in socket.getaddrinfo(name, 80, family, socket.SOCK_STREAM, 0, flags)})
    except socket.gaierror as error:
        return error.errno
say([resolve(name, family, flags) for name in ("files.example", "nobody.example", "localhost")
     for family in (0, socket.AF_INET) for flags in (0, socket.AI_ADDRCONFIG)])
"""
    said, reached = network.run(source)
    known, unknown, local = said[:4], said[4:8], said[8:]
    assert known == [["198.18.0.10"]] * 4
    assert set(unknown) <= {socket.EAI_NONAME, socket.EAI_NODATA}
    assert all("127.0.0.1" in addresses for addresses in local)
    assert set(reached) == {"udp 127.0.0.1 53"}


def test_files_of_the_resolver(owner, sandbox, network):
    assert network.run("say(open('/etc/nsswitch.conf').read())")[0].count("hosts: files dns\n") == 1
    assert network.run("say(open('/etc/resolv.conf').read())")[0] == "nameserver 127.0.0.1\n"
    # Without a resolver, names in files only: a look-up ends at once and not after a time-out.
    assert "hosts: files\n" in owner.inside(sandbox, "say(open('/etc/nsswitch.conf').read())")


def test_descriptors_come_in_the_promised_order(owner):
    listeners = Listeners((("127.0.0.1", 3128), ("127.0.0.1", 3129)), transparent_ports=(443, 80, 9000), dns=True)
    sandbox = owner.create(listeners=listeners)
    found = []
    for fd in sandbox.listener_fds:
        with socket.socket(fileno=os.dup(fd)) as sock:
            found.append((sock.type, *sock.getsockname()[:2]))
            assert not os.get_blocking(fd)
            assert not os.get_inheritable(fd)
    stream, datagram = socket.SOCK_STREAM, socket.SOCK_DGRAM
    assert found == [
        *((stream, "127.0.0.1", 3128), (stream, "127.0.0.1", 3129)),
        *((stream, "::", 443), (stream, "::", 80), (stream, "::", 9000)),
        *((datagram, "::", 53), (stream, "::", 53)),
    ]
    owner.destroy(sandbox)


def test_sixty_four_ports(owner):
    ports = tuple(range(7001, 7129, 2))
    listeners = Listeners(transparent_ports=ports, dns=True)
    sandbox = owner.create(listeners=listeners)
    assert len(sandbox.listener_fds) == 67
    with Outside(sandbox, listeners) as outside:
        pairs = [(f"198.51.100.{number}", port) for number, port in enumerate(ports)]
        said = owner.inside(sandbox, SOURCE + "say([attempt(connect, *pair) for pair in ARGS])", pairs)
        assert said == [GREETING] * len(ports)
        assert outside.reached == [f"tcp {address} {port}" for address, port in pairs]
        between = owner.inside(
            sandbox, SOURCE + "say([attempt(connect, '198.51.100.1', port + 1) for port in ARGS])", ports
        )
        assert set(between) == {"ENETUNREACH"}
    owner.destroy(sandbox)


def test_transparent_ports_without_dns_and_dns_alone(owner):
    source = (
        SOURCE
        + "say([attempt(connect, '198.51.100.7', 80), attempt(connect, '8.8.8.8', 53), attempt(ask, '8.8.8.8', 53, False)])"
    )
    for listeners, expected in (
        (Listeners((), transparent_ports=(80,)), [GREETING, "ENETUNREACH", "ENETUNREACH"]),
        (Listeners((), dns=True), ["ENETUNREACH", GREETING, "8.8.8.8"]),
        (Listeners(), ["ENETUNREACH"] * 3),
    ):
        sandbox = owner.create(listeners=listeners)
        with Outside(sandbox, listeners):
            assert owner.inside(sandbox, source) == expected
        owner.destroy(sandbox)


@pytest.mark.parametrize(
    "wrong",
    [
        {"transparent_ports": (0,)},
        {"transparent_ports": (65536,)},
        {"transparent_ports": (80, 80)},
        {"transparent_ports": (3128,)},
        {"transparent_ports": (53,), "dns": True},
        {"transparent_ports": tuple(range(1, 66))},
        {"addresses": (("127.0.0.1", 53),), "dns": True},
    ],
)
def test_what_cannot_be_bound_together_is_refused_beforehand(wrong):
    with pytest.raises(ValueError, match="port"):
        Listeners(**wrong)


def test_ports_become_as_few_rules_as_possible():
    assert list(_runs({80, 443, 53, 8081, 8080, 8082, 65535})) == [
        *((53, 53), (80, 80), (443, 443), (8080, 8082), (65535, 65535)),
    ]


def test_both_ends_of_a_connection_learn_how_it_ended(owner):
    """The kernel sends a reset from an address that is not local only for a socket that may (IPV6_TRANSPARENT)."""
    listeners = Listeners((), transparent_ports=(443,))
    sandbox = owner.create(listeners=listeners)
    listener = socket.socket(fileno=os.dup(sandbox.listener_fds[0]))
    listener.settimeout(30)

    async def pair(source):
        task = asyncio.ensure_future(sandbox.exec(owner.probe(SOURCE + source)))
        peer, _ = await asyncio.to_thread(listener.accept)
        peer.settimeout(30)
        return task, peer

    async def reset_from_outside():
        task, peer = await pair(
            "sock = socket.create_connection(('198.51.100.7', 443), timeout=60)\nsock.send(b'x')\nsay(timed(sock.recv, 1))"
        )
        assert peer.recv(1) == b"x"  # a reset that comes sooner ends the connect itself
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()
        return json.loads((await task).stdout)

    async def data_after_the_end():
        task, peer = await pair(
            "sock = socket.create_connection(('198.51.100.7', 443), timeout=60)\nassert sock.recv(1) == b''\n"
            "sock.send(b'x')\ntime.sleep(0.1)\nsay(attempt(sock.send, b'x'))"
        )
        peer.close()
        return json.loads((await task).stdout)

    async def killed_inside():
        task, peer = await pair("sock = socket.create_connection(('198.51.100.7', 443))\nos.kill(os.getpid(), 9)")
        await task
        ended = peer.recv(1)
        peer.close()
        return ended

    result, seconds = owner.run(reset_from_outside())
    assert result == "ECONNRESET"
    assert seconds < 30
    assert owner.run(data_after_the_end()) in ("EPIPE", "ECONNRESET")
    assert owner.run(killed_inside()) == b""
    listener.close()
    owner.destroy(sandbox)


def test_much_data_in_both_directions(owner):
    listeners = Listeners((), transparent_ports=(443,))
    sandbox = owner.create(listeners=listeners)
    size = 32 << 20
    with socket.socket(fileno=os.dup(sandbox.listener_fds[0])) as listener:
        listener.settimeout(30)
        source = f"""
with socket.create_connection(('2600:5::5', 443), timeout=60) as sock:
    sock.sendall(bytes({size}))
    sock.shutdown(socket.SHUT_WR)
    got = 0
    while piece := sock.recv(1 << 20):
        got += len(piece)
say(got)
"""

        def serve():
            peer, _ = listener.accept()
            with peer:
                peer.settimeout(60)
                got = 0
                while piece := peer.recv(1 << 20):
                    got += len(piece)
                peer.sendall(bytes(size))
            return got

        async def both():
            result, got = await asyncio.gather(sandbox.exec(owner.probe(source)), asyncio.to_thread(serve))
            return json.loads(result.stdout), got

        assert owner.run(both()) == (size, size)
    owner.destroy(sandbox)


USED = """
sockets = _anyip.open_listeners((80,), dns=True)
client = socket.create_connection(("198.51.100.7", 80), timeout=30)
peer, _ = sockets[0].accept()
asker = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
asker.settimeout(30)
asker.connect(("8.8.8.8", 53))
asker.send(b"?")
packet, ancillary, _, sender = sockets[1].recvmsg(100, 100)
((level, kind, data),) = ancillary
sockets[1].sendmsg([b"!"], [(level, kind, bytes(4) + data[8:12] + bytes(4))], 0, sender)
say({
    "sockets": [[sock.family.name, *sock.getsockname()] for sock in sockets],
    "transparent": [peer.getsockname(), peer.getpeername()[0]],
    "datagram": [level == socket.IPPROTO_IP, kind, socket.inet_ntoa(data[8:12]), asker.recv(1).decode()],
    "ipv6": attempt(socket.create_connection, ("2600:5::5", 80), 30),
})
"""
OFF = """
for name in ("all", "default", "lo"):
    with open(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6", "w") as file:
        file.write("1")
"""


@pytest.mark.usefixtures("owner")  # shows that namespaces can be made here at all
def test_without_ipv6_there_is_ipv4():
    found = as_holder(USED, first=OFF)
    assert found["sockets"] == [["AF_INET", "0.0.0.0", port] for port in (80, 53, 53)]
    assert found["transparent"] == [["198.51.100.7", 80], "127.0.0.1"]
    assert found["datagram"] == [True, 8, "8.8.8.8", "!"]  # IP_PKTINFO
    assert found["ipv6"] in ("EADDRNOTAVAIL", "ENETUNREACH", "EACCES")


@pytest.mark.usefixtures("owner")
def test_a_kernel_that_refuses_is_named():
    """Twice the same is what can be had of a refusal here; one for lack of a feature arrives the same way."""
    source = """
_anyip.open_listeners((80,), dns=False)
try:
    _anyip.open_listeners((443,), dns=False)
except OSError as error:
    say([errno.errorcode[error.errno], str(error)])
"""
    number, text = as_holder(source)
    assert number == "EEXIST"
    assert DUMMY in text
