"""Clients as people install them fetch what the policy names, with the proxy's variables and without, and nothing else.

Each runs as it is: what it needs to know of proxy and authority is in its environment. The same under opaque tunnels,
which only the host is judged for, and inspected, where each request is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import trustme

from tests.clients.conftest import DENIED, FILES
from tests.clients.fetchers import FETCHERS, LOOT, Fetcher, Step
from tests.clients.lab import UNSET, WAYS, Circle, Decision, Lab, Way, ok, request, said, tunnel
from tests.clients.origins import DATA
from tests.egress.netlab import Origin

pytestmark = pytest.mark.anyio

HOST, NAME = "files.example.org", "denied.example.org"
POLICIES = {
    "opaque": """
version: 1
egress:
  allow:
    - {host: files.example.org, ports: [443]}
    - {host: files.example.org, ports: [80], methods: [GET, HEAD], paths: ["/data.bin"]}
""",
    "inspected": """
version: 1
egress:
  allow:
    - {host: files.example.org, ports: [80, 443], read_only: true, paths: ["/data.bin"]}
""",
}
LONG = "a=" + "x" * 4096
"""A query that is longer than a policy allows unless it says so."""


@pytest.fixture(scope="module", params=POLICIES)
def circle(
    request: pytest.FixtureRequest,
    lab: Lab,
    sites: dict[str, list[Origin]],
    ca: trustme.CA,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Circle]:
    with Circle(lab, tmp_path_factory.mktemp("circle"), POLICIES[request.param], ca.cert_pem.bytes()) as circle:
        yield circle


@pytest.fixture
def inspected(request: pytest.FixtureRequest) -> bool:
    return "inspected" in request.node.callspec.params.values()


@pytest.fixture(scope="module")
def ready() -> dict[str, dict[str, bytes]]:
    """What fetchers need, by their names, made once."""
    return {}


@pytest.fixture(params=FETCHERS, ids=lambda one: one.name)
def fetcher(request: pytest.FixtureRequest) -> Fetcher:
    fetcher: Fetcher = request.param
    fetcher.check()
    return fetcher


@pytest.fixture
def files(fetcher: Fetcher, ready: dict[str, dict[str, bytes]]) -> dict[str, bytes]:
    if fetcher.name not in ready:
        ready[fetcher.name] = fetcher.files()
    return ready[fetcher.name]


@pytest.fixture(params=WAYS, ids=lambda way: way.name)
def way(request: pytest.FixtureRequest) -> Way:
    return request.param


class Expected(NamedTuple):
    """A step, what its program is to be told, and the decision about it; without a status there is no answer."""

    step: Step
    status: int | None
    body: bytes
    decision: Decision | None


def expected(*, plain: bool, inspected: bool, way: Way) -> Iterator[Expected]:
    """Yield what each program tries, in this order."""
    schemes = ["https", "http"] if plain else ["https"]
    for scheme in schemes:
        port = 443 if scheme == "https" else 80
        seen = inspected or scheme == "http"
        yield Expected(
            ("GET", f"{scheme}://{HOST}/data.bin"), 200, DATA, request(HOST, port=port) if seen else tunnel(HOST)
        )
    for scheme in schemes if inspected else schemes[1:]:
        port = 443 if scheme == "https" else 80
        for method, path, status, why in (
            ("POST", "/data.bin", 403, "method_not_allowed"),
            ("PUT", "/upload", 403, "method_not_allowed"),
            ("DELETE", "/data.bin", 403, "method_not_allowed"),
            ("GET", "/else", 403, "path_not_allowed"),
            ("GET", f"/data.bin?{LONG}", 414, "query_too_large"),
        ):
            body = f"stockade: {why}\n".encode()
            yield Expected((method, f"{scheme}://{HOST}{path}"), status, body, request(HOST, why, port))
    for host in (NAME, DENIED):
        for scheme in schemes:
            refused = (tunnel if scheme == "https" else request)(host, "host_not_allowed")
            # A name that no rule allows does not exist. At an address a handshake ends with an alert; of plain HTTP
            # the answer says why.
            met = way.proxied or host == DENIED
            told = scheme == "http" and met
            body = b"stockade: host_not_allowed\n" if told else b""
            yield Expected(
                ("GET", f"{scheme}://{host}/data.bin"), 403 if told else None, body, refused if met else None
            )


async def test_what_the_policy_names_is_fetched_and_nothing_else(
    circle: Circle,
    fetcher: Fetcher,
    files: dict[str, bytes],
    way: Way,
    inspected: bool,
    lab: Lab,
    sites: dict[str, list[Origin]],
) -> None:
    trials = list(expected(plain=fetcher.plain, inspected=inspected, way=way))
    before = {ip: [(site.connections, len(site.received)) for site in sites[ip]] for ip in (FILES, DENIED)}
    asked = len(lab.dns.queries)
    async with circle.rollout(files=files) as rollout:
        answers = await fetcher.ask(rollout, way, [trial.step for trial in trials])
    for trial, answer in zip(trials, answers, strict=True):
        if trial.status is not None:
            assert (answer.status, answer.body == trial.body) == (trial.status, True), (trial.step, answer)
        else:
            assert answer.status == 0 or (way.proxied and answer.status == 403), (trial.step, answer)
            assert not way.proxied or re.search("403|Forbidden", f"{answer.status} {answer.said}"), (trial.step, answer)
    decisions = circle.decisions(rollout)
    assert decisions.count(tunnel(HOST)) >= 1
    # How many handshakes an inspected host sees is the client's affair.
    found = [one for one in decisions if one != tunnel(HOST)] if inspected else decisions
    assert found == [trial.decision for trial in trials if trial.decision is not None]
    assert circle.ways(rollout) == {way.recorded, *(["tls"] if inspected else [])}
    named = {(HOST, "allowed"), (NAME, "host_not_allowed")}
    assert set(circle.names(rollout)) == (set() if way.proxied else named)
    for end in circle.ends(rollout):
        if end["reason"] != "inspected":
            assert end["network.peer.address"] == FILES
            assert end["bytes_in"] > len(DATA)
            assert end["bytes_out"] > 0
    # Nothing but the two fetches came out, and no question.
    assert [len(site.received) - had for site, (_, had) in zip(sites[FILES], before[FILES], strict=True)] == [
        int(fetcher.plain),
        1,
    ]
    assert [(site.connections, len(site.received)) for site in sites[DENIED]] == before[DENIED]
    assert {name for name, _ in lab.dns.queries[asked:]} == {HOST}


def test_who_stands_outside_a_sandbox_is_answered(lab: Lab, sites: dict[str, list[Origin]]) -> None:
    assert lab.reaches(DENIED)
    assert lab.reaches(FILES)


@pytest.mark.parametrize("circle", ["opaque"], indirect=True)
async def test_curl_shows_the_reason_of_a_refusal(circle: Circle) -> None:
    async with circle.rollout() as rollout:
        for url, reason, shown in (
            ("https://denied.example.org/", "host_not_allowed", "response 403"),
            ("http://denied.example.org/", "host_not_allowed", "stockade: host_not_allowed"),
            ("http://files.example.org/else", "path_not_allowed", "stockade: path_not_allowed"),
            ("https://files.example.org:8443/", "port_not_allowed", "response 403"),
        ):
            reply = await rollout.exec(["curl", "-sS", "-D", "-", url], timeout_s=60)
            assert f"X-Stockade-Reason: {reason}\r\n" in said(reply)
            assert shown in said(reply)
    assert [decision.reason for decision in circle.decisions(rollout)] == [
        *("host_not_allowed", "host_not_allowed", "path_not_allowed", "port_not_allowed")
    ]


async def test_a_port_that_no_rule_names_has_no_listener(circle: Circle) -> None:
    async with circle.rollout() as rollout:
        reply = await rollout.exec(UNSET.argv("curl", "-sS", f"http://{HOST}:8080/data.bin"), timeout_s=60)
        assert reply.return_code == 7, said(reply)  # connection refused
    assert circle.decisions(rollout) == []


@pytest.mark.parametrize("circle", ["inspected"], indirect=True)
async def test_what_is_said_inside_tls_is_read_as_strictly_as_in_clear(
    circle: Circle, sites: dict[str, list[Origin]], way: Way
) -> None:
    url, before = f"https://{HOST}/data.bin", len(sites[FILES][1].received)
    upgrade = ["Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AA=="]
    trials: list[tuple[list[str], str]] = [
        (["--http2", url], "200/1.1"),
        (["-I", url], "200/1.1"),
        (["-H", "X-HTTP-Method-Override: DELETE", url], "200/1.1"),
        (["--path-as-is", f"https://{HOST}/%64ata.bin"], "200/1.1"),
        (["-X", "GET", "-d", LOOT, url], "403/1.1"),
        (["-X", "GET", "-H", "Transfer-Encoding: chunked", "-d", LOOT, url], "403/1.1"),
        ([word for line in upgrade for word in ("-H", line)] + [url], "403/1.1"),
        (["--path-as-is", f"https://{HOST}/x/../data.bin"], "400/1.1"),
    ]
    async with circle.rollout() as rollout:
        for words, told in trials:
            argv = way.argv("curl", "-sS", "--max-time", "20", "-o", "/dev/null", "-w", "%{http_code}/%{http_version}")
            assert ok(await rollout.exec([*argv, *words], timeout_s=60)).decode() == told, words
    reasons = [event["reason"] for event in circle.events(rollout, "net.request")]
    assert reasons == ["allowed"] * 4 + ["body_not_allowed"] * 2 + ["upgrade_not_allowed", "malformed_path"]
    arrived = sites[FILES][1].received[before:]
    assert [one.line.split(b" ")[:2] for one in arrived] == [
        [method, b"/data.bin"] for method in (b"GET", b"HEAD", b"GET", b"GET")
    ]
    assert [one.header("X-HTTP-Method-Override") for one in arrived] == [[]] * 4


@pytest.mark.parametrize("circle", ["inspected"], indirect=True)
async def test_egress_case_078_a_name_inside_another_one_is_not_reached(circle: Circle) -> None:
    # The address says one host, the header or the handshake another.
    async with circle.rollout() as rollout:
        curl = UNSET.argv("curl", "-sS", "--max-time", "20")
        for scheme in ("http", "https"):
            reply = await rollout.exec([*curl, "-H", f"Host: {NAME}", f"{scheme}://{HOST}/data.bin"], timeout_s=60)
            assert "host_mismatch" in said(reply)
        reply = await rollout.exec([*curl, "--connect-to", f"{NAME}:443:{HOST}:443", f"https://{NAME}/"], timeout_s=60)
        assert reply.return_code in (35, 56), said(reply)  # the handshake is reset
    found = circle.events(rollout, "net.request", "net.end")
    assert [event["reason"] for event in found if event["verdict"] == "denied"] == [
        *("host_mismatch", "host_mismatch", "sni_mismatch")
    ]


async def test_one_curl_gets_one_decision_per_request_on_one_connection(circle: Circle) -> None:
    for way in WAYS:
        async with circle.rollout() as rollout:
            url = f"http://{HOST}/data.bin"
            written = ok(await rollout.exec(way.argv("curl", "-sS", url, url, f"http://{HOST}/else"), timeout_s=60))
            assert written == DATA + DATA + b"stockade: path_not_allowed\n"
        assert circle.decisions(rollout) == [request(HOST), request(HOST), request(HOST, "path_not_allowed")]
        assert len({event["connection_id"] for event in circle.events(rollout, "net.request")}) == 1
