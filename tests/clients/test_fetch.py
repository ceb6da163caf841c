"""Clients as people install them fetch what the policy names, through the proxy, and nothing else by any way."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest

from stockade.client import Episode, ExecReply
from tests.clients.conftest import DENIED, FILES
from tests.clients.lab import CA, LIBRARIES, PACKAGES, Circle, Lab, ok, packed, request, said, tunnel
from tests.clients.origins import DATA
from tests.egress.netlab import Origin
from tests.support import requires

pytestmark = pytest.mark.anyio

POLICY = """
version: 1
egress:
  allow:
    - {host: files.example.org, ports: [443]}
    - {host: files.example.org, ports: [80], methods: [GET, HEAD], paths: ["/data.bin"]}
"""

_REPORT = """
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""

URLLIB = """
import sys, urllib.request
try:
    handlers = [urllib.request.ProxyHandler({})] if sys.argv[2:] else []
    with urllib.request.build_opener(*handlers).open(sys.argv[1], timeout=20) as answer:
        sys.stdout.buffer.write(answer.read())
""" + _REPORT.lstrip("\n")

REQUESTS = """
import sys, requests
try:
    session = requests.Session()
    if sys.argv[2:]:
        session.trust_env = False
    answer = session.get(sys.argv[1], timeout=20)
    answer.raise_for_status()
    sys.stdout.buffer.write(answer.content)
""" + _REPORT.lstrip("\n")

HTTPX = """
import sys, httpx
try:
    answer = httpx.get(sys.argv[1], timeout=20, trust_env=not sys.argv[2:])
    answer.raise_for_status()
    sys.stdout.buffer.write(answer.content)
""" + _REPORT.lstrip("\n")

# Node's fetch reads no proxy variables before Node 24, but takes a dispatcher: an Agent of the undici inside Node, whose
# ``connect`` hands over a socket. This one asks the proxy for a tunnel; with one to port 80, fetch would need nothing
# else, but the gate allows tunnels to TLS only, so plain HTTP goes by node:http in absolute form.
NODE = """
const http = require('node:http'), tls = require('node:tls');
const url = new URL(process.argv[1]), direct = process.argv.length > 2;
const proxy = new URL(process.env.https_proxy || 'http://127.0.0.1:3128');
function open(options, done) {
  const port = options.port || 443;
  const ask = http.request({host: proxy.hostname, port: proxy.port, method: 'CONNECT', path: `${options.hostname}:${port}`,
                            headers: {host: `${options.hostname}:${port}`}, agent: false});
  ask.on('error', done);
  ask.on('response', (answer) => done(new Error(`the proxy says ${answer.statusCode}`)));
  ask.on('connect', (answer, socket) => {
    if (answer.statusCode !== 200)
      return done(new Error(`the proxy says ${answer.statusCode} ${answer.headers['x-stockade-reason']}`));
    const secure = tls.connect({socket, servername: options.servername || options.hostname},
                               () => done(null, secure));
    secure.on('error', done);
  });
  ask.end();
}
function plain() {
  return new Promise((resolve, reject) => {
    http.get({host: proxy.hostname, port: proxy.port, path: url.href, headers: {host: url.host}, agent: false}, (answer) => {
      const pieces = [];
      answer.on('data', (piece) => pieces.push(piece));
      answer.on('end', () => answer.statusCode === 200 ? resolve(Buffer.concat(pieces))
                                                       : reject(new Error(`answered ${answer.statusCode}`)));
    }).on('error', reject);
  });
}
async function main() {
  if (!direct && url.protocol === 'http:') return plain();
  await fetch('data:,');  // loads undici
  const Agent = globalThis[Symbol.for('undici.globalDispatcher.1')].constructor;
  const answer = await fetch(url, direct ? {} : {dispatcher: new Agent({connect: open, pipelining: 0})});
  if (!answer.ok) throw new Error(`answered ${answer.status}`);
  return Buffer.from(await answer.arrayBuffer());
}
main().then((data) => process.stdout.write(data), (error) => {
  console.error(String(error), String(error.cause));
  process.exitCode = 1;
});
"""


@dataclass(frozen=True)
class Client:
    """A program: its words before the address, and what makes it leave the proxy aside."""

    words: Sequence[str]
    direct: Sequence[str]
    program: str | None = None
    package: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)

    async def fetch(self, rollout: Episode, url: str, *, direct: bool = False) -> ExecReply:
        """Fetch ``url`` to standard output."""
        argv = [*self.words, url, *(self.direct if direct else ())]
        return await rollout.exec(argv, env={"PYTHONPATH": PACKAGES} if self.package else {}, timeout_s=60)


CLIENTS = {
    "curl": Client(["curl", "-sSf", "--max-time", "20"], ["--noproxy", "*"], "curl"),
    "wget": Client(
        ["wget", "-nv", "-O", "-", "--tries=1", "--timeout=20", f"--ca-certificate={CA}"], ["--no-proxy"], "wget"
    ),
    "urllib": Client(["python3", "-c", URLLIB], ["direct"]),
    "requests": Client(["python3", "-c", REQUESTS], ["direct"], package="requests"),
    "httpx": Client(["python3", "-c", HTTPX], ["direct"], package="httpx"),
    "node": Client(["node", "-e", NODE], ["direct"], "node"),
}


@pytest.fixture(scope="module")
def libraries() -> bytes:
    return packed(*LIBRARIES)


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest, libraries: bytes) -> Client:
    found: Client = CLIENTS[request.param]
    requires(
        found.program is None or shutil.which(found.program, path="/usr/local/bin:/usr/bin:/bin"),
        f"{found.program} is not installed in /usr",
        must_run_in_ci=found.program != "node",
    )
    if found.package is None:
        return found
    requires(importlib.util.find_spec(found.package), f"{found.package} is not installed beside the tests")
    return replace(found, files={PACKAGES: libraries})


async def test_an_allowed_host_is_reached_through_the_proxy(circle: Circle, client: Client) -> None:
    async with circle.rollout(files=client.files) as rollout:
        assert ok(await client.fetch(rollout, "https://files.example.org/data.bin")) == DATA
        assert ok(await client.fetch(rollout, "http://files.example.org/data.bin")) == DATA
    assert circle.decisions(rollout) == [tunnel("files.example.org"), request("files.example.org")]
    for end in circle.ends(rollout):
        assert (end["verdict"], end["network.peer.address"]) == ("observed", FILES)
        assert end["bytes_in"] > len(DATA)
        assert end["bytes_out"] > 0


async def test_a_denied_host_is_refused_and_the_client_says_so(
    circle: Circle, client: Client, lab: Lab, sites: dict[str, list[Origin]]
) -> None:
    assert lab.reaches(DENIED)
    before = [site.connections for site in sites[DENIED]]
    async with circle.rollout(files=client.files) as rollout:
        for scheme in ("https", "http"):
            reply = await client.fetch(rollout, f"{scheme}://denied.example.org/data.bin")
            assert reply.return_code != 0
            assert re.search("403|Forbidden", said(reply)), said(reply)
    assert circle.decisions(rollout) == [
        tunnel("denied.example.org", "host_not_allowed"),
        request("denied.example.org", "host_not_allowed"),
    ]
    assert [site.connections for site in sites[DENIED]] == before


async def test_without_the_proxy_there_is_no_way_at_all(
    circle: Circle, client: Client, lab: Lab, sites: dict[str, list[Origin]]
) -> None:
    assert lab.reaches(FILES)  # who stands outside a sandbox needs no proxy
    before = [site.connections for site in sites[FILES]]
    async with circle.rollout(files=client.files) as rollout:
        for url in (f"http://{FILES}/data.bin", "https://files.example.org/data.bin"):
            reply = await client.fetch(rollout, url, direct=True)
            assert reply.return_code != 0
            assert reply.exit == "exited"
            assert "403" not in said(reply)  # it was no refusal: nobody was there to refuse
    assert circle.decisions(rollout) == []
    assert [site.connections for site in sites[FILES]] == before


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


async def test_curl_posts_nothing_where_the_rule_reads_only(circle: Circle, sites: dict[str, list[Origin]]) -> None:
    before = len(sites[FILES][0].received)
    async with circle.rollout() as rollout:
        reply = await rollout.exec(
            ["curl", "-sS", "-D", "-", "-d", "stolen=everything", "http://files.example.org/data.bin"], timeout_s=60
        )
        assert "X-Stockade-Reason: method_not_allowed\r\n" in said(reply)
    assert circle.decisions(rollout) == [request("files.example.org", "method_not_allowed")]
    assert len(sites[FILES][0].received) == before


async def test_one_curl_gets_one_decision_per_request_on_one_connection(circle: Circle) -> None:
    async with circle.rollout() as rollout:
        url = "http://files.example.org/data.bin"
        written = ok(await rollout.exec(["curl", "-sS", url, url, "http://files.example.org/else"], timeout_s=60))
        assert written == DATA + DATA + b"stockade: path_not_allowed\n"
    assert circle.decisions(rollout) == [
        request("files.example.org"),
        request("files.example.org"),
        request("files.example.org", "path_not_allowed"),
    ]
    assert len({event["connection_id"] for event in circle.events(rollout, "net.request")}) == 1
