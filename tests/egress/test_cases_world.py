"""What a name leads to, and what is asked for, at the real worker: the cases of the bypass table that no other file sends.

Answers of name servers (30 to 39), framing and schemes (58, 59, 65), whoever else might lead out (90, 94).
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agents import open_run
from tests.egress.netlab import WORKER_OWN, NetLab, Origin, response
from tests.egress.proxy.harness import Attached
from tests.egress.proxy.sites import Sites, policy
from tests.support import requires

ORIGIN = "11.0.0.5"
POLICY = policy(
    "{host: plain.test, methods: [GET, POST], ports: [80]}",
    "{host: read.test, read_only: true}",
    more="deny_cidrs: [11.0.5.0/24, 2600:5::6/128]",
)


@pytest.fixture(scope="module")
def lab() -> Iterator[NetLab]:
    requires(NetLab.possible(), "no network namespace can be made here")
    with NetLab() as made:
        yield made


@pytest.fixture(scope="module")
def sites(lab: NetLab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    with Sites(lab, tmp_path_factory.mktemp("record")) as made:
        yield made


@pytest.fixture(scope="module")
def shared(lab: NetLab) -> Origin:
    return lab.http(ORIGIN, 80)


@pytest.fixture
def origin(lab: NetLab, shared: Origin) -> Origin:
    shared.received.clear()
    lab.add_host("plain.test", ORIGIN)
    return shared


@pytest.fixture
def rollout(sites: Sites) -> Iterator[Attached]:
    attached = sites.attach(POLICY)
    yield attached
    assert sites.worker.ask("detach", rollout_id=attached.rollout_id)["ok"]
    attached.close()


METADATA, INTERNAL, DENIED, OWN = "metadata_address", "internal_address", "denied_address", "own_address"
ANSWERS = {
    "030_mapped_dotted": ("::ffff:169.254.169.254", METADATA),
    "030_mapped_hex": ("::ffff:a00:5", INTERNAL),
    "031_nat64_metadata": ("64:ff9b::a9fe:a9fe", METADATA),
    "031_nat64_loopback": ("64:ff9b::7f00:1", INTERNAL),
    "031_nat64_of_a_site": ("64:ff9b:1::a00:5", INTERNAL),
    "032_6to4": ("2002:7f00:1::", INTERNAL),
    "032_6to4_of_a_public_address": ("2002:b00:5::1", INTERNAL),
    "032_teredo": ("2001:0:b00:5::f4ff:fffa", INTERNAL),
    "033_compatible": ("::127.0.0.1", INTERNAL),
    "033_siit": ("::ffff:0:7f00:1", INTERNAL),
    "034_shared": ("100.64.0.9", INTERNAL),
    "034_shared_metadata": ("100.100.100.200", METADATA),
    "035_called_global_by_the_standard_library": ("fec0::1", INTERNAL),
    "036_this_network": ("0.1.2.3", INTERNAL),
    "036_protocols": ("192.0.0.8", INTERNAL),
    "036_relays": ("192.88.99.1", INTERNAL),
    "036_benchmarks": ("198.18.0.1", INTERNAL),
    "036_reserved": ("240.0.0.1", INTERNAL),
    "036_broadcast": ("255.255.255.255", INTERNAL),
    "036_multicast": ("224.0.0.1", INTERNAL),
    "036_multicast_v6": ("ff02::1", INTERNAL),
    "036_discard": ("100::1", INTERNAL),
    "036_documentation": ("2001:db8::1", INTERNAL),
    "036_new_documentation": ("3fff::1", INTERNAL),
    "036_segments": ("5f00::1", INTERNAL),
    "036_unique_local": ("fd12::1", INTERNAL),
    "037_azure": ("168.63.129.16", METADATA),
    "037_oracle": ("192.0.0.192", METADATA),
    "037_aws_v6": ("fd00:ec2::254", METADATA),
    "037_google_v6": ("fd20:ce::254", METADATA),
    "038_own": (WORKER_OWN, OWN),
    "038_own_mapped": (f"::ffff:{WORKER_OWN}", OWN),
    "039_denied_range": ("11.0.5.9", DENIED),
    "039_denied_range_in_nat64": ("64:ff9b::b00:509", DENIED),
    "039_denied_v6": ("2600:5::6", DENIED),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_egress_case(case: str, rollout: Attached, origin: Origin, lab: NetLab) -> None:
    """The whole answer is refused, whatever else is in it, and nothing is dialled."""
    address, reason = ANSWERS[case]
    for answers in ((address,), (ORIGIN, address)):
        lab.add_host("plain.test", *answers)
        connections = origin.connections
        with rollout.connect() as client:
            reply = client.get("http://plain.test/x")
        # A and AAAA are one answer: with a public address beside it an internal one is told apart (case 27).
        told = "mixed_answer" if reason == INTERNAL and len(answers) > 1 else reason
        assert (reply.status, reply.reason) == (403, told), answers
        assert origin.connections == connections
    lab.add_host("plain.test", ORIGIN)
    assert [event["verdict"] for event in rollout.events("net.request")] == ["denied", "denied"]


def test_egress_case_031_a_public_address_in_nat64_is_public(rollout: Attached, origin: Origin, lab: NetLab) -> None:
    """It is judged by the address inside, and may be dialled, though nobody is there in the lab."""
    lab.add_host("plain.test", "64:ff9b::b00:5")
    with rollout.connect() as client:
        reply = client.get("http://plain.test/x")
    assert (reply.status, reply.reason) == (502, "upstream_failed")
    assert rollout.events("net.request")[0]["verdict"] == "allowed"


HEAD = b"POST http://plain.test/x HTTP/1.1\r\nHost: plain.test\r\n"
LINES = {
    "058_space_behind_a_name": (HEAD + b"X-A : 1\r\nContent-Length: 0\r\n\r\n", "malformed_request"),
    "058_tab_behind_a_name": (HEAD + b"Cookie\t: 1\r\nContent-Length: 0\r\n\r\n", "malformed_request"),
    "058_space_inside_a_name": (HEAD + b"X A: 1\r\nContent-Length: 0\r\n\r\n", "malformed_request"),
    "058_space_before_a_length": (HEAD + b"Content-Length : 5\r\n\r\nhello", "malformed_request"),
    "059_prior_knowledge": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", "malformed_request"),
    "065_ftp": (b"GET ftp://plain.test/x HTTP/1.1\r\nHost: plain.test\r\n\r\n", "unsupported_scheme"),
    "065_file": (b"GET file:///etc/passwd HTTP/1.1\r\nHost: plain.test\r\n\r\n", "unsupported_scheme"),
    "065_gopher": (b"GET gopher://plain.test/x HTTP/1.1\r\nHost: plain.test\r\n\r\n", "unsupported_scheme"),
    "065_urn": (b"GET urn:x:y HTTP/1.1\r\nHost: plain.test\r\n\r\n", "unsupported_scheme"),
    "065_ws": (b"GET ws://plain.test/x HTTP/1.1\r\nHost: plain.test\r\n\r\n", "unsupported_scheme"),
    "065_unix": (b"GET unix:/run/x.sock HTTP/1.1\r\nHost: plain.test\r\n\r\n", "unsupported_scheme"),
}


@pytest.mark.parametrize("case", LINES)
def test_egress_on_the_wire_case(case: str, rollout: Attached, origin: Origin, lab: NetLab) -> None:
    raw, reason = LINES[case]
    before = origin.connections, len(lab.dns.queries)
    with rollout.connect() as client:
        reply = client.send(raw).reply()
        assert client.rest() == b""
    assert (reply.status, reply.reason) == (400, reason)
    assert (origin.connections, len(lab.dns.queries)) == before
    assert rollout.last("net.request")["reason"] == reason


def test_egress_case_059_there_is_no_http_2_to_smuggle_from(sites: Sites, rollout: Attached, lab: NetLab) -> None:
    """A value with CR and LF in it needs HTTP/2: inside TLS only HTTP/1.1 is offered, and its preface is no request."""
    site = sites.site("read.test")
    context = sites.client_context()
    context.set_alpn_protocols(["h2"])
    with rollout.connect() as client:
        assert client.connect("read.test").status == 200
        try:
            inner = sites.tls(client.sock, "read.test", context)
        except OSError:
            return  # refused at the handshake is just as well
        with inner:
            assert isinstance(inner.sock, ssl.SSLSocket)
            assert inner.sock.selected_alpn_protocol() != "h2"
            reply = inner.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").reply()
    assert (reply.status, reply.reason) == (400, "malformed_request")
    assert site.received == []


def test_egress_case_059_a_response_with_a_broken_line_is_not_passed_on(rollout: Attached, origin: Origin) -> None:
    """The other direction: a field that an origin broke in two does not become two fields."""
    origin.respond = lambda _: b"HTTP/1.1 200 OK\r\nX-A: b\nSet-Cookie: evil\r\nContent-Length: 0\r\n\r\n"
    with rollout.connect() as client:
        reply = client.get("http://plain.test/x")
    origin.respond = lambda _: response(b"hello")
    assert (reply.status, reply.reason) == (502, "upstream_malformed")
    assert b"evil" not in reply.head


def test_egress_case_094_a_client_chooses_no_way_out(rollout: Attached, origin: Origin, lab: NetLab) -> None:
    """Neither a field nor a variable of the image leads anywhere else: only the operator's settings do."""
    other = lab.http("11.0.0.66", 8080)
    lab.add_host("evil.test", "11.0.0.66")
    queries = len(lab.dns.queries)
    with rollout.connect() as client:
        reply = client.get(
            "http://plain.test/x",
            "X-Upstream-Https-Proxy: http://evil.test:8080",
            "X-Forwarded-Host: evil.test",
            "Forwarded: host=evil.test",
            "Proxy-Connection: keep-alive",
        )
    assert reply.status == 200
    assert b"evil" not in origin.received[-1].head
    assert other.connections == 0
    assert {name for name, _ in lab.dns.queries[queries:]} == {"plain.test"}


PROBE = """
import json, os, socket
reached = {}
for host, port in (("11.0.0.5", 80), ("169.254.169.254", 80), ("10.0.0.1", 443), ("2600:5::5", 443)):
    try:
        with socket.create_connection((host, port), 5) as sock:
            sock.settimeout(5)
            name = f"[{host}]" if ":" in host else host
            sock.sendall(f"GET / HTTP/1.1\\r\\nHost: {name}:{port}\\r\\n\\r\\n".encode())
            reached[host] = sock.recv(200).decode("latin-1")
    except OSError as error:
        reached[host] = ""
print(json.dumps([os.environ.get("NO_PROXY"), os.environ.get("no_proxy"), reached]))
"""


@pytest.mark.anyio
@pytest.mark.parametrize("claimed", [None, "*", "169.254.0.0/16,11.0.0.5"])
async def test_egress_case_090_there_is_no_direct_path(claimed: str | None, tmp_path: Path) -> None:
    """The environment names loopback alone as reachable without the proxy; to say more opens nothing."""
    environment = {} if claimed is None else {"NO_PROXY": claimed, "no_proxy": claimed}
    async with open_run(tmp_path, POLICY) as run, run.rollout() as episode:
        done = await episode.exec(["python3", "-I", "-c", PROBE], env=environment, timeout_s=60)
    upper, lower, reached = json.loads(done.stdout)
    assert (upper, lower) == (("127.0.0.1,localhost",) * 2 if claimed is None else (claimed, claimed))
    # Where an address has a listener of ours, the gate answers; everywhere else is no route.
    assert all(text.startswith("HTTP/1.1 4") and "X-Stockade-Reason:" in text for text in reached.values() if text), (
        reached
    )
