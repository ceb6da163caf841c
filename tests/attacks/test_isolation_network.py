"""Isolation cases about the network: an empty namespace with listeners in it, whose descriptors are outside.

Whatever is connected to ends at one of them, if its port is one that comes out, or fails at once. What the proxy then
denies, and that it writes it down, is the business of the egress cases (tests/egress).
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.outside import GREETING

CONNECT = """
def connect(address, port):
    with socket.create_connection((address, port), timeout=5) as sock:
        return sock.recv(100).decode()
say([attempt(connect, *pair) for pair in ARGS])
"""
SHUT = {"ECONNREFUSED", "ENETUNREACH", "EADDRNOTAVAIL", "EHOSTUNREACH"}
LOOPBACK = ("127.0.0.1", "::1")


def addresses(node, *, loopback: bool) -> list:
    return [pair for pair in node.facts["addresses"] if (pair[0] in LOOPBACK) == loopback]


def nothing_is_reached(node, pairs: list) -> None:
    """Connections from the sandbox end at its own listeners, which learn where they were to go, or fail at once."""
    ours = [pair for pair in pairs if pair[1] in node.facts["transparent"]]
    before = Counter(node.reached())
    said = node.inside(CONNECT, pairs)
    for pair, word in zip(pairs, said, strict=True):
        assert word == GREETING if pair in ours else word in SHUT, pair
    assert Counter(node.reached()) - before == Counter(f"tcp {address} {port}" for address, port in ours)


@pytest.mark.promise("S3.1")
def test_a13_host_loopback_services(node):
    pairs = addresses(node, loopback=True)
    assert node.plain(CONNECT, pairs) == [node.token] * len(pairs)
    assert node.careless(CONNECT, pairs) == [node.token] * len(pairs)
    nothing_is_reached(node, pairs)


def test_a07_scheduler_ports(node):
    """srun's and PMIx' ports: nothing comes out of them, and nothing in the environment that would name them."""
    pairs = [pair for pair in node.facts["addresses"] if pair[1] == 6817]
    assert node.plain(CONNECT, pairs) == [node.token]
    nothing_is_reached(node, pairs)
    assert node.inside("say([name for name in os.environ if name.startswith(('SLURM', 'PMI'))])") == []


def test_a14_cloud_metadata(node):
    pairs = [pair for pair in node.facts["addresses"] if pair[0].startswith("169.254.")]
    assert node.plain(CONNECT, pairs) == [node.token]
    nothing_is_reached(node, pairs)


@pytest.mark.promise("S3.1")
def test_a15_other_hosts(node):
    pairs = addresses(node, loopback=False)
    assert node.plain(CONNECT, pairs) == [node.token] * len(pairs)
    assert node.careless(CONNECT, pairs) == [node.token] * len(pairs)
    nothing_is_reached(node, pairs)


ABSTRACT = """
def connect(name):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(5)
        sock.connect("\\0" + name)
        return sock.recv(100).decode()
say([attempt(connect, name) for name in ARGS])
"""


def test_a12_a11_abstract_sockets(node):
    """CVE-2020-15257: no path, so no mount table helps; the network namespace does."""
    names = node.facts["abstract"]
    assert node.plain(ABSTRACT, names) == [node.token] * len(names)
    assert node.careless(ABSTRACT, names) == [node.token] * len(names)
    assert node.inside(ABSTRACT, names) == ["ECONNREFUSED"] * len(names)


def test_a15_datagrams_and_multicast(node):
    source = """
def send(address, port):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.sendto(b"x", (address, port))
say([attempt(send, *pair) for pair in ARGS])
"""
    pairs = [["11.0.0.53", 53], ["10.1.2.3", 514], ["224.0.0.251", 5353], ["255.255.255.255", 9]]
    assert node.plain(source, pairs)[:2] == ["done", "done"]
    before = Counter(node.reached())
    question, *others = node.inside(source, pairs)
    assert question == "done"
    assert set(others) <= SHUT | {"EACCES", "EPERM"}
    node.inside("time.sleep(0.1)\nsay(0)")  # a datagram is not waited for
    assert Counter(node.reached()) - before == {"udp 11.0.0.53 53": 1}


def test_a16_names_are_not_resolved_inside(node):
    """No name leaves: every question, whatever server it is for and however it is put, ends at the sandbox's listener."""
    source = """
def resolve(name):
    try:
        return socket.getaddrinfo(name, 80)[0][4][0]
    except socket.gaierror as error:
        return "no name"
def ask(address):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((address, 53))
        sock.send(b"x" * 40)
        sock.settimeout(2)
        return str(sock.recv(100))
def ask_by_tcp(address):
    with socket.create_connection((address, 53), timeout=10) as sock:
        return sock.recv(100).decode()
say([resolve("secret-0123456789.example.org"), resolve("localhost")]
    + [attempt(ask, "127.0.0.1"), attempt(ask, "8.8.8.8"), attempt(ask_by_tcp, "11.0.0.53")])
"""
    before = Counter(node.reached())
    name, localhost, local, far, stream = node.inside(source)
    assert name == "no name"
    assert localhost in LOOPBACK
    assert local == far == str(b"x" * 40)  # the echo of tests/outside.py
    assert stream == GREETING
    reached = Counter(node.reached()) - before
    assert set(reached) == {"udp 127.0.0.1 53", "udp 8.8.8.8 53", "tcp 11.0.0.53 53"}
    assert reached["udp 127.0.0.1 53"] >= 2


def test_the_only_interface_is_lo_and_cannot_be_changed(node):
    source = """
import fcntl, struct
def flags(name, value):
    with socket.socket() as sock:
        fcntl.ioctl(sock, 0x8914, struct.pack("16sH14x", name, value))
def address(text):
    with socket.socket() as sock:
        fcntl.ioctl(sock, 0x8916, struct.pack("16sHH4s8x", b"lo:7", socket.AF_INET, 0, socket.inet_aton(text)))
def route():
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as sock:
        sock.send(struct.pack("=IHHII", 28, 24, 0x605, 1, 0) + struct.pack("=8BI", 2, 0, 0, 0, 254, 3, 0, 1, 0))
        return errno.errorcode[-struct.unpack_from("=i", sock.recv(4096), 16)[0]]
names = [name for _, name in socket.if_nameindex()]
say([names, attempt(flags, b"lo", 0), attempt(address, "169.254.169.254"), attempt(route)])
"""
    names, down, added, routed = node.inside(source)
    assert names == ["lo"]
    assert {down, added, routed} == {"EPERM"}


@pytest.mark.promise("S3.1")
def test_the_only_way_out_is_the_listener(node):
    """What is sent to the proxy's port arrives at whoever holds the descriptor, in another network namespace."""
    source = """
def ask(line):
    with socket.create_connection(("127.0.0.1", 3128), timeout=10) as sock:
        sock.sendall(line.encode() + b"\\r\\n\\r\\n")
        return sock.recv(4096).decode().split("\\r\\n")[0]
say([attempt(ask, line) for line in ARGS])
"""
    lines = ["GET http://169.254.169.254/latest/ HTTP/1.1", "CONNECT 10.1.2.3:443 HTTP/1.1"]
    assert node.inside(source, lines) == ["HTTP/1.1 403 Forbidden"] * 2
    reached = node.reached()
    assert all(reached[f"proxy: {line}"] == 1 for line in lines)
    assert set(node.plain(CONNECT, [["127.0.0.1", 3128]])) <= SHUT  # the port exists in that namespace alone


def test_the_proxys_port_cannot_be_stolen(node):
    source = """
def bind(address, port, *options):
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
        for option in options:
            sock.setsockopt(socket.SOL_SOCKET, option, 1)
        sock.bind((address, port))
        sock.listen()
say([attempt(bind, "127.0.0.1", 3128, *options) for options in ((), (2,), (15,), (2, 15))]
    + [attempt(bind, "0.0.0.0", 3128), attempt(bind, "0.0.0.0", 3128, 2, 15), attempt(bind, "127.0.0.1", 80)]
    + [attempt(bind, "127.0.0.1", 8080)])
"""
    *stolen, low, own = node.inside(source)
    assert set(stolen) == {"EADDRINUSE"}
    assert low == "EACCES"
    assert own == "done"


def test_sandboxes_do_not_reach_each_other(owner):
    """The careless way, one network namespace for all, is what test_a13_host_loopback_services shows."""
    first, second = owner.create(), owner.create()
    serve = """
for family, address in ((socket.AF_INET, ("0.0.0.0", 8080)), (socket.AF_UNIX, "\\0peer"), (socket.AF_UNIX, "/tmp/peer")):
    sock = socket.socket(family)
    sock.bind(address)
    sock.listen()
    os.set_inheritable(sock.fileno(), True)
    sock.detach()
if os.fork() == 0:
    os.close(1), os.close(2)
    time.sleep(600)
say("ready")
"""
    connect = """
def connect(family, address):
    with socket.socket(family) as sock:
        sock.connect(address)
say([attempt(connect, socket.AF_INET, ("127.0.0.1", 8080)), attempt(connect, socket.AF_UNIX, "\\0peer"), attempt(connect, socket.AF_UNIX, "/tmp/peer")])
"""
    assert owner.inside(first, serve) == "ready"
    assert owner.inside(first, connect) == ["done"] * 3
    assert owner.inside(second, connect) == ["ECONNREFUSED", "ECONNREFUSED", "ENOENT"]
    owner.destroy(first)
    owner.destroy(second)
