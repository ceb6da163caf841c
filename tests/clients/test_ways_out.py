"""What a rollout can try besides the proxy, and what it can tell the proxy: whatever it is, the same gate answers."""

from __future__ import annotations

import asyncio
import json
import shutil

import pytest

from stockade.client import Episode, Peer
from stockade.errors import BrokerError
from tests.clients.conftest import DENIED, FILES, INTERNAL, METADATA, OWN
from tests.clients.lab import PROXY, UNSET, WAYS, Circle, Decision, Lab, Way, ok, request, said, tunnel
from tests.clients.origins import DATA
from tests.egress.netlab import RESOLVER, Origin, response
from tests.support import requires

pytestmark = pytest.mark.anyio

POLICY = """
version: 1
egress:
  allow:
    - {host: files.example.org, ports: [443]}
    - {host: files.example.org, ports: [80], methods: [GET], paths: ["/data.bin"]}
    - {host: inside.example.org, ports: [80, 443]}
    - {host: own.example.org, ports: [80, 443]}
    - {host: metadata.example.org, ports: [80, 443]}
services:
  - {name: model, address: 127.0.0.1, port: 8099, methods: [GET, POST], paths: ["/v1/**"]}
"""

# Asks at each address, with a plain socket: says the name of the error, or what it was told.
SOCKETS = """
import errno, json, socket, sys
QUESTION = bytes.fromhex("123401000001000000000000") + b"\\x06denied\\x07example\\x03org\\x00\\x00\\x01\\x00\\x01"
said = []
for kind, ip, port in json.loads(sys.argv[1]):
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    host = f"[{ip}]" if ":" in ip else ip
    with socket.socket(family, getattr(socket, kind)) as sock:
        sock.settimeout(20)
        try:
            sock.connect((ip, port))
            if kind == "SOCK_DGRAM":
                sock.send(QUESTION)
                said.append(f"code {sock.recv(512)[3] & 15}")
            else:
                sock.send(f"GET /data.bin HTTP/1.1\\r\\nHost: {host}\\r\\n\\r\\n".encode())
                said.append(sock.recv(4096).partition(b"\\r\\n\\r\\n")[2].decode("latin-1"))
        except OSError as error:
            said.append(errno.errorcode.get(error.errno, type(error).__name__))
print(json.dumps(said))
"""
REFUSED = {"ECONNREFUSED", "ENETUNREACH"}

LOOK_UPS = """
import json, socket, subprocess, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = sorted({entry[4][0] for entry in socket.getaddrinfo(name, 443)})
    except socket.gaierror:
        found[name] = []
    known = subprocess.run(["getent", "ahosts", name], capture_output=True).stdout.decode().split()
    assert sorted({word for word in known if word[0].isdigit()}) == found[name], known
print(json.dumps(found))
"""

# bash alone, without a program that knows what a proxy is.
_BASH_GET = '; printf "GET %s HTTP/1.1\\r\\nHost: $1\\r\\nConnection: close\\r\\n\\r\\n" "$url" >&3; cat <&3'
BASH_DIRECT = 'url=/data.bin; exec 3<>/dev/tcp/"$1"/80' + _BASH_GET
BASH_PROXY = 'url="http://$1/data.bin"; exec 3<>/dev/tcp/127.0.0.1/3128' + _BASH_GET


@pytest.fixture(scope="module")
def service(lab: Lab) -> Origin:
    return lab.http("127.0.0.1", 8099, lambda asked: response(b"model says " + asked.line))


async def ask_at(rollout: Episode, *addresses: tuple[str, str, int]) -> list[str]:
    """Return what a plain socket is told at each address."""
    told: list[str] = json.loads(
        ok(await rollout.exec(["python3", "-c", SOCKETS, json.dumps(addresses)], timeout_s=90))
    )
    return told


async def test_whatever_address_is_connected_to_the_gate_answers(
    circle: Circle, lab: Lab, sites: dict[str, list[Origin]]
) -> None:
    tried = (FILES, DENIED, INTERNAL, OWN, METADATA, "2600:5::5", "fd00::5", "198.18.0.77", "127.0.0.1")
    before = {ip: [site.connections for site in sites[ip]] for ip in sites}
    queries = len(lab.dns.queries)
    async with circle.rollout() as rollout:
        told = await ask_at(rollout, *(("SOCK_STREAM", ip, 80) for ip in tried))
        assert told == ["stockade: host_not_allowed\n"] * len(tried)
        # A resolver of one's own choice is this one; it knows what the policy names.
        assert await ask_at(rollout, ("SOCK_DGRAM", RESOLVER, 53), ("SOCK_DGRAM", "2600:5::6", 53)) == ["code 3"] * 2
        # Nobody listens for anything else: neither on other ports nor for QUIC.
        closed = [("SOCK_STREAM", FILES, 22), ("SOCK_STREAM", "fd00::5", 8080), ("SOCK_DGRAM", FILES, 443)]
        assert set(await ask_at(rollout, *closed)) <= REFUSED
    assert circle.decisions(rollout) == [request(ip, "host_not_allowed") for ip in tried]
    assert circle.ways(rollout) == {"transparent"}
    assert set(circle.names(rollout)) == {("denied.example.org", "host_not_allowed")}
    assert {ip: [site.connections for site in sites[ip]] for ip in sites} == before
    assert len(lab.dns.queries) == queries
    # Without the sandbox, the same addresses answer.
    assert all(lab.reaches(ip) for ip in (FILES, DENIED, INTERNAL, OWN, METADATA))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
async def test_no_internal_address_is_reached_whatever_it_is_called(
    circle: Circle, sites: dict[str, list[Origin]], way: Way
) -> None:
    before = {ip: [site.connections for site in sites[ip]] for ip in (INTERNAL, OWN, METADATA)}
    async with circle.rollout() as rollout:
        for url, reason in (
            (f"http://{INTERNAL}/data.bin", "host_not_allowed"),
            (f"http://{METADATA}/data.bin", "host_not_allowed"),
            ("http://127.0.0.1:8099/v1/x", "host_not_allowed"),
            # The policy allows these names; what they resolve to is refused all the same.
            ("https://inside.example.org/data.bin", "internal_address"),
            ("https://own.example.org/data.bin", "own_address"),
            ("http://metadata.example.org/data.bin", "metadata_address"),
        ):
            # An empty --noproxy overrules the variable that exempts loopback.
            reply = await rollout.exec(way.argv("curl", "-sS", "--noproxy", "", "-D", "-", url), timeout_s=60)
            if way.proxied or url.startswith("http:"):
                assert f"X-Stockade-Reason: {reason}\r\n" in said(reply)
            else:
                assert "alert access denied" in said(reply)
    assert circle.decisions(rollout) == [
        request(INTERNAL, "host_not_allowed"),
        request(METADATA, "host_not_allowed"),
        request("127.0.0.1", "host_not_allowed", port=8099),
        tunnel("inside.example.org", "internal_address"),
        tunnel("own.example.org", "own_address"),
        request("metadata.example.org", "metadata_address"),
    ]
    assert {ip: [site.connections for site in sites[ip]] for ip in (INTERNAL, OWN, METADATA)} == before


async def test_egress_case_042_only_allowed_names_exist_inside_and_denied_ones_are_never_asked_for(
    circle: Circle, lab: Lab
) -> None:
    secret = "gezdgnbvgy3tqojq.denied.example.org"  # what a program would carry out in the name itself
    lab.add_host(secret, DENIED)
    before = len(lab.dns.queries)
    async with circle.rollout() as rollout:
        names = ["files.example.org", "denied.example.org", secret]
        found = json.loads(ok(await rollout.exec(["python3", "-c", LOOK_UPS, *names], timeout_s=60)))
        assert found == {"files.example.org": ["198.18.0.10"], "denied.example.org": [], secret: []}
        for url in (f"https://{secret}/", f"http://{secret}/"):
            reply = await rollout.exec(["curl", "-sS", "-D", "-", url], timeout_s=60)
            assert "X-Stockade-Reason: host_not_allowed\r\n" in said(reply)
            reply = await rollout.exec(UNSET.argv("curl", "-sS", url), timeout_s=60)
            assert "Could not resolve host" in said(reply)
        assert lab.dns.queries[before:] == []  # nor for the allowed one: its address inside is made up
        # The counter counts: an allowed name is asked for, by the worker, when it is wanted.
        ok(await rollout.exec(["curl", "-sSf", "-o", "/dev/null", "https://files.example.org/data.bin"], timeout_s=60))
        assert {name for name, _ in lab.dns.queries[before:]} == {"files.example.org"}
    assert circle.decisions(rollout) == [
        tunnel(secret, "host_not_allowed"),
        request(secret, "host_not_allowed"),
        tunnel("files.example.org"),
    ]
    assert set(circle.names(rollout)) == {
        ("files.example.org", "allowed"),
        ("denied.example.org", "host_not_allowed"),
        (secret, "host_not_allowed"),
    }


async def test_bash_alone_gets_as_far_as_any_other_program(circle: Circle) -> None:
    requires(shutil.which("bash", path="/usr/bin:/bin"), "bash is not installed in /usr")

    async def bash(program: str, host: str) -> bytes:
        return ok(await rollout.exec(["bash", "-c", program, "bash", host], timeout_s=60))

    async with circle.rollout() as rollout:
        for ip in (FILES, INTERNAL, METADATA):
            assert b"403 Forbidden" in await bash(BASH_DIRECT, ip)
        for program in (BASH_DIRECT, BASH_PROXY):
            assert (await bash(program, "files.example.org")).endswith(b"\r\n\r\n" + DATA)
        assert b"403 Forbidden" in await bash(BASH_PROXY, "denied.example.org")
    assert circle.decisions(rollout) == [
        *(request(ip, "host_not_allowed") for ip in (FILES, INTERNAL, METADATA)),
        request("files.example.org"),
        request("files.example.org"),
        request("denied.example.org", "host_not_allowed"),
    ]


async def test_socks_leads_through_the_same_gate(circle: Circle, sites: dict[str, list[Origin]]) -> None:
    before = {ip: [site.connections for site in sites[ip]] for ip in (DENIED, INTERNAL)}
    curl = ["curl", "-sS", "--max-time", "20"]
    async with circle.rollout() as rollout:
        by_name = [*curl, "--socks5-hostname", PROXY]
        for scheme in ("https", "http"):
            assert ok(await rollout.exec([*by_name, f"{scheme}://files.example.org/data.bin"], timeout_s=60)) == DATA
        for host in ("denied.example.org", DENIED, "inside.example.org"):
            reply = await rollout.exec([*by_name, f"https://{host}/data.bin"], timeout_s=60)
            assert reply.return_code == 97, said(reply)
        # SOCKS4 has no names, and nobody needs it.
        reply = await rollout.exec([*curl, "--socks4a", PROXY, "https://files.example.org/data.bin"], timeout_s=60)
        assert reply.return_code == 97, said(reply)
    assert circle.decisions(rollout) == [
        tunnel("files.example.org"),
        tunnel("files.example.org", port=80),
        request("files.example.org"),
        tunnel("denied.example.org", "host_not_allowed"),
        tunnel(DENIED, "host_not_allowed"),
        tunnel("inside.example.org", "internal_address"),
        Decision("net.connect", "denied", None, None, "malformed_request"),
    ]
    assert circle.ways(rollout) == {"socks5", None}
    assert {ip: [site.connections for site in sites[ip]] for ip in before} == before


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
async def test_a_service_answers_on_its_paths_only(circle: Circle, service: Origin, way: Way) -> None:
    base, before = "http://model.stockade.internal:8099", len(service.received)
    curl = way.argv("curl", "-sS")
    async with circle.rollout() as rollout:
        assert ok(await rollout.exec([*curl, f"{base}/v1/models"])) == b"model says GET /v1/models HTTP/1.1"
        posted = ok(await rollout.exec([*curl, "-d", '{"prompt": "hello"}', f"{base}/v1/complete"]))
        assert posted == b"model says POST /v1/complete HTTP/1.1"
        for words in (
            [f"{base}/admin"],
            ["--path-as-is", f"{base}/v1/../admin"],
            ["-X", "DELETE", f"{base}/v1/models"],
            # It speaks no TLS: nobody vouches for its name, and who does not mind is told that there is no such port.
            ["https://model.stockade.internal:8099/v1/models"],
            ["--insecure", "https://model.stockade.internal:8099/v1/models"],
            # The service lies on the agent's loopback; the sandbox's own is another one, where the gate listens.
            ["--noproxy", "*", "http://127.0.0.1:8099/v1/models"],
            ["http://model.stockade.internal:22/v1/models"],
            ["http://other.stockade.internal:8099/v1/models"],
        ):
            reply = await rollout.exec([*curl, "-f", *words])
            assert reply.return_code != 0, said(reply)
    model = "model.stockade.internal"
    assert circle.decisions(rollout) == [
        request(model, port=8099),
        request(model, port=8099),
        request(model, "path_not_allowed", 8099),
        # Dot segments are nobody's to interpret; of a whole address that cannot be read, no host is known.
        request(*(None, "malformed_path", None) if way.proxied else (model, "malformed_path", 8099)),
        request(model, "method_not_allowed", 8099),
        tunnel(model, port=8099),
        tunnel(model, port=8099),
        request(model, "port_not_allowed", 8099),
        request("127.0.0.1", "host_not_allowed", 8099),
        # Without the proxy there is no such name, and nobody listens on that port.
        *([request(model, "port_not_allowed", 22)] if way.proxied else []),
        *([request("other.stockade.internal", "host_not_allowed", 8099)] if way.proxied else []),
    ]
    assert [end["reason"] for end in circle.ends(rollout)] == ["completed", "completed", "client_tls", "inspected"]
    assert [(one.line, one.body) for one in service.received[before:]] == [
        (b"GET /v1/models HTTP/1.1", b""),
        (b"POST /v1/complete HTTP/1.1", b'{"prompt": "hello"}'),
    ]


async def test_grading_has_no_network_while_a_rollout_beside_it_has(circle: Circle, lab: Lab) -> None:
    fetch = ["curl", "-sS", "http://files.example.org/data.bin"]
    proxy = {"http_proxy": "http://127.0.0.1:3128"}
    async with circle.rollout() as rollout, circle.rollout(role="grading") as grading:
        allowed, unset, refused, sockets = await asyncio.gather(
            rollout.exec(fetch, timeout_s=60),
            grading.exec(fetch, timeout_s=60),
            grading.exec(fetch, env=proxy, timeout_s=60),
            ask_at(grading, ("SOCK_STREAM", "127.0.0.1", 3128), *(("SOCK_STREAM", ip, 80) for ip in (FILES, DENIED))),
        )
        assert ok(allowed) == DATA
        assert "Could not resolve host" in said(unset)  # no variable names a proxy
        assert "Failed to connect to 127.0.0.1 port 3128" in said(refused)
        assert set(sockets) <= REFUSED  # nothing listens there, and no address is met
        with pytest.raises(BrokerError):  # the two share nothing either
            await rollout.exec(["true"], peer=Peer(grading, ["true"]))
    assert circle.decisions(rollout) == [request("files.example.org")]
    assert not list((circle.directory / "events").rglob(f"{grading.id}.egress.jsonl"))


async def test_egress_case_089_a_claimed_rollout_id_changes_nothing(
    circle: Circle, sites: dict[str, list[Origin]]
) -> None:
    site = sites[FILES][0]
    before = len(site.received)
    async with circle.rollout() as honest, circle.rollout() as liar:
        claims = ["-H", f"X-Rollout-Id: {honest.id}", "--proxy-user", f"{honest.id}:x"]
        ok(
            await liar.exec(
                ["curl", "-sSf", *claims, "-o", "/dev/null", "http://files.example.org/data.bin"], timeout_s=60
            )
        )
        reply = await liar.exec(["curl", "-sS", *claims, "http://denied.example.org/"], timeout_s=60)
        assert "host_not_allowed" in said(reply)
        ok(
            await liar.exec(
                [
                    "curl",
                    "-sSf",
                    *claims[2:],
                    "--proxy-header",
                    claims[1],
                    "-o",
                    "/dev/null",
                    "https://files.example.org/data.bin",
                ],
                timeout_s=60,
            )
        )
    assert circle.decisions(honest) == []
    assert circle.decisions(liar) == [
        request("files.example.org"),
        request("denied.example.org", "host_not_allowed"),
        tunnel("files.example.org"),
    ]
    for event in circle.events(liar, "net.request", "net.connect"):
        assert event["detail"].startswith("claims ")
        assert honest.id in event["detail"]
    # What is for the proxy stays with it.
    assert [one.header("Proxy-Authorization") for one in site.received[before:]] == [[]]


async def test_two_rollouts_at_once_have_a_record_each(circle: Circle) -> None:
    script = (
        "for n in 1 2 3 4 5; do curl -sS -o /dev/null http://files.example.org/data.bin http://$1.example.org/; done"
    )
    async with circle.rollout() as one, circle.rollout() as two:
        await asyncio.gather(
            one.exec(["sh", "-c", script, "sh", "one"], timeout_s=60),
            two.exec(["sh", "-c", script, "sh", "two"], timeout_s=60),
        )
    for rollout, name in ((one, "one"), (two, "two")):
        expected: list[Decision] = [
            request("files.example.org"),
            request(f"{name}.example.org", "host_not_allowed"),
        ] * 5
        assert circle.decisions(rollout) == expected
