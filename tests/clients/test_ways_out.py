"""What a rollout can try besides the proxy, and what it can tell the proxy: none of it leads anywhere else."""

from __future__ import annotations

import asyncio
import json
import shutil

import pytest

from stockade.client import Peer
from stockade.errors import BrokerError
from tests.clients.conftest import DENIED, FILES, INTERNAL, METADATA, OWN
from tests.clients.lab import Circle, Decision, Lab, ok, request, said, tunnel
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

# Tries each address with a plain socket; says the name of the error, or "connected".
SOCKETS = """
import errno, json, socket, sys
said = {}
for kind, ip, port in json.loads(sys.argv[1]):
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, getattr(socket, kind)) as sock:
        sock.settimeout(5)
        try:
            sock.connect((ip, port))
            sock.send(b"x")
            said[f"{kind} {ip} {port}"] = "connected"
        except OSError as error:
            said[f"{kind} {ip} {port}"] = errno.errorcode.get(error.errno, type(error).__name__)
print(json.dumps(said))
"""

LOOK_UPS = """
import json, socket, subprocess, sys
found = []
for name in sys.argv[1:]:
    try:
        found.append(str(socket.getaddrinfo(name, 443)))
    except socket.gaierror:
        pass
    if subprocess.run(["getent", "ahosts", name], capture_output=True).returncode == 0:
        found.append(name)
print(json.dumps(found))
"""

# bash alone, without a program that knows what a proxy is.
BASH_DIRECT = 'exec 3<>/dev/tcp/"$1"/80 && echo connected >&2'
BASH_PROXY = 'exec 3<>/dev/tcp/127.0.0.1/3128; printf "GET http://$1/data.bin HTTP/1.1\\r\\nHost: $1\\r\\nConnection: close\\r\\n\\r\\n" >&3; cat <&3'


@pytest.fixture(scope="module")
def service(lab: Lab) -> Origin:
    return lab.http("127.0.0.1", 8099, lambda asked: response(b"model says " + asked.line))


async def test_no_address_can_be_connected_to(circle: Circle, lab: Lab, sites: dict[str, list[Origin]]) -> None:
    tried = [(FILES, 443), (DENIED, 80), (INTERNAL, 80), (OWN, 80), (METADATA, 80), ("2600:5::5", 80), ("fd00::5", 80)]
    attempts = [("SOCK_STREAM", ip, port) for ip, port in tried] + [("SOCK_DGRAM", RESOLVER, 53)]
    before = {ip: [site.connections for site in sites[ip]] for ip in sites}
    queries = len(lab.dns.queries)
    async with circle.rollout() as rollout:
        answers = json.loads(ok(await rollout.exec(["python3", "-c", SOCKETS, json.dumps(attempts)], timeout_s=60)))
    assert set(answers.values()) <= {"ENETUNREACH", "EAFNOSUPPORT", "EADDRNOTAVAIL"}, answers
    assert circle.decisions(rollout) == []
    assert {ip: [site.connections for site in sites[ip]] for ip in sites} == before
    assert len(lab.dns.queries) == queries
    # Without the sandbox, the same addresses answer.
    assert all(lab.reaches(ip) for ip in (FILES, DENIED, INTERNAL, OWN, METADATA))


async def test_the_proxy_leads_to_no_internal_address_whatever_it_is_called(
    circle: Circle, sites: dict[str, list[Origin]]
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
            reply = await rollout.exec(["curl", "-sS", "--noproxy", "", "-D", "-", url], timeout_s=60)
            assert f"X-Stockade-Reason: {reason}\r\n" in said(reply)
    assert circle.decisions(rollout) == [
        request(INTERNAL, "host_not_allowed"),
        request(METADATA, "host_not_allowed"),
        request("127.0.0.1", "host_not_allowed", port=8099),
        tunnel("inside.example.org", "internal_address"),
        tunnel("own.example.org", "own_address"),
        request("metadata.example.org", "metadata_address"),
    ]
    assert {ip: [site.connections for site in sites[ip]] for ip in (INTERNAL, OWN, METADATA)} == before


async def test_egress_case_042_names_resolve_nowhere_inside_and_denied_ones_are_never_asked_for(
    circle: Circle, lab: Lab
) -> None:
    secret = "gezdgnbvgy3tqojq.denied.example.org"  # what a program would carry out in the name itself
    lab.add_host(secret, DENIED)
    before = len(lab.dns.queries)
    async with circle.rollout() as rollout:
        names = ["files.example.org", "denied.example.org", secret]
        assert json.loads(ok(await rollout.exec(["python3", "-c", LOOK_UPS, *names], timeout_s=60))) == []
        for url in (f"https://{secret}/", f"http://{secret}/"):
            reply = await rollout.exec(["curl", "-sS", "-D", "-", url], timeout_s=60)
            assert "X-Stockade-Reason: host_not_allowed\r\n" in said(reply)
        assert lab.dns.queries[before:] == []
        # The counter counts: an allowed name is asked for, by the worker.
        ok(await rollout.exec(["curl", "-sSf", "-o", "/dev/null", "https://files.example.org/data.bin"], timeout_s=60))
        assert {name for name, _ in lab.dns.queries[before:]} == {"files.example.org"}
    assert circle.decisions(rollout) == [
        tunnel(secret, "host_not_allowed"),
        request(secret, "host_not_allowed"),
        tunnel("files.example.org"),
    ]


async def test_bash_alone_gets_as_far_as_any_other_program(circle: Circle) -> None:
    requires(shutil.which("bash", path="/usr/bin:/bin"), "bash is not installed in /usr")
    async with circle.rollout() as rollout:
        for ip in (FILES, INTERNAL, METADATA):
            reply = await rollout.exec(["bash", "-c", BASH_DIRECT, "bash", ip], timeout_s=60)
            assert reply.return_code != 0
            assert "Network is unreachable" in said(reply)
        reply = await rollout.exec(["bash", "-c", BASH_PROXY, "bash", "files.example.org"], timeout_s=60)
        assert ok(reply).endswith(b"\r\n\r\n" + DATA)
        reply = await rollout.exec(["bash", "-c", BASH_PROXY, "bash", "denied.example.org"], timeout_s=60)
        assert b"403 Forbidden" in ok(reply)
    assert circle.decisions(rollout) == [
        request("files.example.org"),
        request("denied.example.org", "host_not_allowed"),
    ]


async def test_a_service_answers_on_its_paths_only(circle: Circle, service: Origin) -> None:
    base = "http://model.stockade.internal:8099"
    async with circle.rollout() as rollout:
        assert ok(await rollout.exec(["curl", "-sS", f"{base}/v1/models"])) == b"model says GET /v1/models HTTP/1.1"
        posted = ok(await rollout.exec(["curl", "-sS", "-d", '{"prompt": "hello"}', f"{base}/v1/complete"]))
        assert posted == b"model says POST /v1/complete HTTP/1.1"
        for words in (
            [f"{base}/admin"],
            ["--path-as-is", f"{base}/v1/../admin"],
            ["-X", "DELETE", f"{base}/v1/models"],
            ["http://model.stockade.internal:22/v1/models"],
            ["http://other.stockade.internal:8099/v1/models"],
            ["https://model.stockade.internal:8099/v1/models"],
            # The service lies on the agent's loopback; the sandbox's own is another one.
            ["--noproxy", "*", "http://127.0.0.1:8099/v1/models"],
        ):
            reply = await rollout.exec(["curl", "-sSf", *words])
            assert reply.return_code != 0, said(reply)
    decisions = circle.decisions(rollout)
    model = "model.stockade.internal"
    assert decisions[:2] == [request(model, port=8099), request(model, port=8099)]
    assert [(decision.verdict, decision.reason) for decision in decisions[2:]] == [
        ("denied", "path_not_allowed"),
        ("denied", "malformed_path"),  # dot segments are nobody's to interpret
        ("denied", "method_not_allowed"),
        ("denied", "port_not_allowed"),
        ("denied", "host_not_allowed"),
        ("denied", "inspection_required"),
    ]
    assert [(one.line, one.body) for one in service.received] == [
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
            grading.exec(
                [
                    "python3",
                    "-c",
                    SOCKETS,
                    json.dumps([("SOCK_STREAM", "127.0.0.1", 3128), ("SOCK_STREAM", FILES, 80)]),
                ],
                timeout_s=60,
            ),
        )
        assert ok(allowed) == DATA
        assert "Could not resolve host" in said(unset)  # no variable names a proxy
        assert "Failed to connect to 127.0.0.1 port 3128" in said(refused)
        assert set(json.loads(ok(sockets)).values()) == {"ECONNREFUSED", "ENETUNREACH"}
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
