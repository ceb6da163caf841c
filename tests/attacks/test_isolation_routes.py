"""Isolation cases about the network's own parts: routes, rules, addresses, ports, raw sockets, other namespaces.

The unguarded side runs as the holder does, with every capability over a network namespace of its own: what code in a
sandbox could do if its user namespace owned the network, as it does in a plain ``bwrap --unshare-net``.
"""

from __future__ import annotations

import itertools

import pytest

from stockade.sandbox import Listeners
from tests.live import plain
from tests.outside import GREETING, Outside
from tests.sandboxes import as_holder

CONNECT = """
def connect(address, port):
    with socket.create_connection((address, port), timeout=30) as sock:
        return sock.recv(100).decode()
"""
NETLINK = """
import struct
def attribute(kind, data):
    return struct.pack("=HH", 4 + len(data), kind) + data + bytes(-len(data) % 4)
def request(kind, flags, body):
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as link:
        link.settimeout(30)
        link.send(struct.pack("=IHHII", 16 + len(body), kind, 5 | flags, 1, 0) + body)
        number = -struct.unpack_from("=i", link.recv(4096), 16)[0]
        if number:
            raise OSError(number, "netlink")
def route(kind, flags, table, what, to="198.51.100.9", bits=32):
    # what: 2 local, 6 black hole. RTA_DST, RTA_OIF (lo), RTA_TABLE
    body = struct.pack("=8BI", socket.AF_INET, bits, 0, 0, table, 4, 254 if what == 2 else 0, what, 0)
    body += attribute(1, socket.inet_aton(to)) if bits else b""
    body += attribute(4, struct.pack("=I", 1)) if what == 2 else b""
    request(kind, flags, body + attribute(15, struct.pack("=I", table)))
def rule(kind, flags, order, table, port):
    # FRA_PRIORITY, FRA_TABLE, FRA_IP_PROTO (TCP), FRA_DPORT_RANGE
    body = struct.pack("=8BI", socket.AF_INET, 0, 0, 0, table, 0, 0, 1, 0) + attribute(6, struct.pack("=I", order))
    body += attribute(15, struct.pack("=I", table)) + attribute(22, bytes([6])) + attribute(24, struct.pack("=HH", port, port))
    request(kind, flags, body)
def address(kind, flags, text, bits=32):
    packed = socket.inet_aton(text)
    request(kind, flags, struct.pack("=4BI", socket.AF_INET, bits, 0, 0, 1) + attribute(2, packed) + attribute(1, packed))
def by_ioctl(number, text):
    import fcntl
    with socket.socket() as sock:
        fcntl.ioctl(sock, number, struct.pack("16sHH4s8x", b"lo:7", socket.AF_INET, 0, socket.inet_aton(text)))
def down():
    request(16, 0, struct.pack("=BxHiII", 0, 0, 1, 0, 1))  # RTM_NEWLINK: lo, flags 0, change IFF_UP
CREATE, REPLACE = 0x600, 0x500
TRIES = {
    "a rule of one's own": lambda: rule(32, CREATE, 1, 254, 443),
    "a way around the listeners": lambda: route(24, CREATE, 254, 2),
    "every address local": lambda: route(24, CREATE, 255, 2, "0.0.0.0", 0),
    "a route in the listeners' table": lambda: route(24, CREATE, 100, 6),
    "replace the listeners' route": lambda: route(24, REPLACE, 100, 6, "0.0.0.0", 0),
    "remove the listeners' route": lambda: route(25, 0, 100, 6, "0.0.0.0", 0),
    "remove the rule of a port": lambda: rule(33, 0, 100, 100, 80),
    "an address of the pool": lambda: address(20, CREATE, "198.18.0.10"),
    "an address, the old way": lambda: by_ioctl(0x8916, "169.254.169.254"),
    "remove an address": lambda: address(21, 0, "192.0.0.8"),
    "remove the loopback address": lambda: address(21, 0, "127.0.0.1", 8),
    "take lo down": down,
}
"""


@pytest.fixture(scope="module")
def network(owner):
    """A sandbox whose ports 80, 443 and 9000 come out, and what stands outside."""
    listeners = Listeners(transparent_ports=(80, 443, 9000), dns=True)
    sandbox = owner.create(listeners=listeners)
    with Outside(sandbox, listeners) as outside:
        yield lambda source, arguments=None: owner.inside(sandbox, CONNECT + source, arguments), outside
    owner.destroy(sandbox)


@pytest.mark.promise("S3.1")
def test_routes_rules_and_addresses_are_the_holders(network):
    source = NETLINK + "say({name: attempt(work) for name, work in TRIES.items()})"
    opened = "sockets = _anyip.open_listeners((80, 443, 9000), dns=True)\n"
    unguarded = as_holder(opened + source)
    assert set(unguarded.values()) == {"done"}, unguarded
    run, outside = network
    guarded = run(source)
    assert set(guarded) == set(unguarded)
    assert set(guarded.values()) == {"EPERM"}, guarded
    # And everything is as it was.
    before = len(outside.reached)
    pairs = [("198.51.100.9", 80), ("198.18.0.10", 443), ("198.51.100.9", 81), ("198.18.0.10", 9001)]
    assert run("say([attempt(connect, *pair) for pair in ARGS])", pairs) == [GREETING] * 2 + ["ENETUNREACH"] * 2
    assert outside.reached[before:] == ["tcp 198.51.100.9 80", "tcp 198.18.0.10 443"]


def test_the_rules_in_proc_are_the_holders(network):
    """Settings of the network namespace are files of whoever owns it, and read-only where a sandbox sees them."""
    names = [
        "ip_forward",
        "ip_nonlocal_bind",
        "ip_unprivileged_port_start",
        "conf/lo/route_localnet",
    ]
    source = """
def write(name):
    with open(f"/proc/sys/net/ipv4/{name}", "r+") as file:
        file.write(file.read())
say([attempt(write, name) for name in ARGS])
"""
    assert as_holder(source, names) == ["done"] * len(names)
    assert set(network[0](source, names)) <= {"EROFS", "EACCES", "EPERM", "ENOENT"}


BIND = """
OPTIONS = {"reuse": (1, 2, 1), "share": (1, 15, 1), "free": (0, 15, 1), "lo": (1, 25, b"lo")}
def bind(address, port, words, kind=socket.SOCK_STREAM):
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, kind) as sock:
        for word in words.split():
            sock.setsockopt(*OPTIONS[word])
        sock.bind((address, port))
        if kind == socket.SOCK_STREAM:
            sock.listen()
"""
WAYS = tuple(
    " ".join(words) for count in range(5) for words in itertools.combinations(("reuse", "share", "free", "lo"), count)
)


def test_no_listener_can_be_shared_or_taken_over(network):
    """Every address that a program can name, with every option that lets two sockets have one port.

    SO_REUSEPORT on both, under one uid, is what would let it; the holder's sockets do not set it.
    """
    theft = """
first = socket.socket(socket.AF_INET6)
first.setsockopt(1, 15, 1)
first.bind(("::", 9000))
first.listen()
thief = socket.socket()
thief.setsockopt(1, 15, 1)
thief.bind(("127.0.0.1", 9000))
thief.listen()
client = socket.create_connection(("127.0.0.1", 9000), timeout=30)
thief.settimeout(30)
say(attempt(thief.accept))
"""
    assert as_holder(theft) == "done"
    addresses = ["127.0.0.1", "0.0.0.0", "192.0.0.8", "198.18.0.10", "::", "::1", "::ffff:127.0.0.1"]
    tries = [(address, 9000, words) for address in addresses for words in WAYS]
    run, outside = network
    found = run(BIND + "say([attempt(bind, *words) for words in ARGS])", tries)
    for (address, _, words), word in zip(tries, found, strict=True):
        assert word == ("EADDRNOTAVAIL" if address == "198.18.0.10" and "free" not in words else "EADDRINUSE")
    before = len(outside.reached)
    assert run("say([connect('127.0.0.1', 9000), connect('198.18.0.10', 9000)])") == [GREETING] * 2
    assert outside.reached[before:] == ["tcp 127.0.0.1 9000", "tcp 198.18.0.10 9000"]


def test_the_dns_port_cannot_be_taken(network):
    """Two walls: ports below 1024 take a capability, and no socket of the holder shares its port with anybody."""
    theft = """
first, thief = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
for sock in (first, thief):
    sock.setsockopt(1, 2, 1)
    sock.bind(("127.0.0.1", 53))
client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
client.sendto(b"question", ("127.0.0.1", 53))
thief.settimeout(30)
say(thief.recv(100).decode())
"""
    assert as_holder(theft) == "question"
    tries = [
        (address, 53, words, kind) for address in ("127.0.0.1", "0.0.0.0", "::") for words in WAYS for kind in (1, 2)
    ]
    source = BIND + "say([attempt(bind, *words) for words in ARGS])"
    second_wall = as_holder("sockets = _anyip.open_listeners((80,), dns=True)\n" + source, tries)
    assert set(second_wall) == {"EADDRINUSE"}
    assert set(network[0](source, tries)) == {"EACCES"}


SERVER = """
import threading
def serve(address, free):
    sock = socket.socket()
    if free:
        sock.setsockopt(0, 15, 1)
    sock.bind((address, 9999))
    sock.listen()
    def run():
        while True:
            peer, _ = sock.accept()
            peer.sendall(b"one's own server")
            peer.close()
    threading.Thread(target=run, daemon=True).start()
"""


@pytest.mark.parametrize(("address", "free"), [("0.0.0.0", False), ("198.18.0.10", True)])
def test_a_server_inside_gets_nothing_that_was_meant_for_another(network, address, free):
    """It may listen on ports that do not come out. Were every address local, it would be every host on them."""
    source = (
        CONNECT + SERVER + "serve(*ARGS)\nsay([attempt(connect, name, 9999) for name in ('198.18.0.10', '127.0.0.1')])"
    )
    everything_local = NETLINK + "route(24, 0x600, 255, 2, '0.0.0.0', 0)\n"
    fooled, local = as_holder(everything_local + source, [address, free])
    assert fooled == "one's own server"
    run, outside = network
    before = len(outside.reached)
    theirs, own = run(source, [address, free])
    assert theirs == "ENETUNREACH"
    assert own == local == ("ECONNREFUSED" if free else "one's own server")
    assert outside.reached[before:] == []


def test_the_source_of_a_connection_cannot_be_another_host(network):
    """What the peer address says is nobody's identity; that it is always a loopback address is one thing less to lie with."""
    source = """
def come_from(address, option):
    with socket.socket() as sock:
        sock.settimeout(30)
        if option:
            sock.setsockopt(0, option, 1)
        sock.bind((address, 0))
        sock.connect(("198.51.100.7", 80))
        return sock.getsockname()[0]
say([attempt(come_from, "10.9.9.9", option) for option in (0, 15, 19)])
"""
    # Were every address local, any could be taken; with a routing table of their own even the holder cannot.
    everything_local = (
        NETLINK + "route(24, 0x600, 255, 2, '0.0.0.0', 0)\nserver = socket.create_server(('0.0.0.0', 80))\n"
    )
    assert as_holder(everything_local + source)[0] == "10.9.9.9"
    run, outside = network
    before = len(outside.reached)
    plainly, freely, transparently = run(source)
    assert (plainly, transparently) == ("EADDRNOTAVAIL", "EPERM")
    assert freely in ("EINVAL", "ENETUNREACH")
    assert outside.reached[before:] == []


def test_raw_sockets_and_ping(network):
    source = """
def ping(family, kind, protocol, address):
    with socket.socket(family, kind, protocol) as sock:
        sock.sendto(bytes([8 if family == socket.AF_INET else 128]) + bytes(7), (address, 0))
tries = [(socket.AF_INET, kind, 1, "127.0.0.1") for kind in (socket.SOCK_RAW, socket.SOCK_DGRAM)]
tries += [(socket.AF_INET6, kind, 58, "::1") for kind in (socket.SOCK_RAW, socket.SOCK_DGRAM)]
tries += [(socket.AF_INET, socket.SOCK_RAW, 255, "127.0.0.1")]
say([attempt(ping, *words) for words in tries])
"""
    unguarded = as_holder(source)
    assert [unguarded[index] for index in (0, 2)] == ["done"] * 2
    assert set(network[0](source)) <= {"EPERM", "EACCES", "EPROTONOSUPPORT"}


def test_no_other_network_namespace_can_be_joined_or_made(network):
    source = """
def in_child(work):
    # A process of its own: what it joins, it cannot leave.
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writing, attempt(work).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    return os.read(reading, 100).decode()
def make():
    libc("unshare", 0x50000000)
def join():
    for name, kind in (("user", 0x10000000), ("net", 0x40000000)):
        fd = os.open(f"/proc/{other}/ns/{name}", os.O_RDONLY)
        libc("setns", fd, kind)
other = 1
if ARGS:
    ready, told = os.pipe()
    other = os.fork()
    if other == 0:
        make()
        os.write(told, b"x")
        time.sleep(60)
        os._exit(0)
    os.read(ready, 1)
say([in_child(make), in_child(join)])
if ARGS:
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)
"""
    assert plain(source, arguments=True) == ["done", "done"]
    made, joined = network[0](source)
    assert made == "EPERM"
    assert joined in ("EACCES", "EPERM")


def test_each_sandbox_has_listeners_of_its_own(owner):
    """Same ports, same addresses, two sandboxes: what one sends comes out of its own sockets, and no server is shared.

    The careless way, one network namespace for all, is what test_a13_host_loopback_services shows.
    """
    listeners = Listeners(transparent_ports=(80, 9000), dns=True)
    first, second = owner.create(listeners=listeners), owner.create(listeners=listeners)
    serve = (
        SERVER
        + """
if os.fork() == 0:
    os.close(1), os.close(2)
    serve("0.0.0.0", False)
    open("/tmp/ready", "w").close()
    time.sleep(600)
while not os.path.exists("/tmp/ready"):
    time.sleep(0.01)
say("ready")
"""
    )
    connect = CONNECT + "say([attempt(connect, *pair) for pair in ARGS])"
    local = [("127.0.0.1", 9999), ("192.0.0.8", 9999)]
    away = [("198.51.100.7", 80), ("127.0.0.1", 9000)]
    with Outside(first, listeners) as first_outside, Outside(second, listeners) as second_outside:
        assert owner.inside(first, serve) == "ready"
        assert owner.inside(first, connect, local) == ["one's own server"] * 2
        assert owner.inside(second, connect, local) == ["ECONNREFUSED"] * 2
        assert owner.inside(second, connect, away) == [GREETING] * 2
        assert first_outside.reached == []
        assert second_outside.reached == ["tcp 198.51.100.7 80", "tcp 127.0.0.1 9000"]
    owner.destroy(first)
    owner.destroy(second)
