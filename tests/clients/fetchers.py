"""Programs that fetch, each as people use it: the same steps for all of them, and one form for what came of each step.

A step is a method and an address; ``POST`` and ``PUT`` send :data:`LOOT`. No program is told about a proxy or an
authority: it reads its environment, or nothing, as it does everywhere.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from stockade.client import Episode, ExecReply
from tests.clients.lab import PACKAGES, PROXY, Way, ok, packed, said
from tests.support import requires

LOOT = "stolen=everything"
Step = tuple[str, str]


class Answer(NamedTuple):
    """What a program was told: ``status`` is 0 where it got no answer, and ``said`` then says why."""

    status: int
    body: bytes = b""
    said: str = ""


@dataclass(frozen=True)
class Fetcher:
    """``ask`` performs steps in a rollout, by a way."""

    name: str
    ask: Callable[[Episode, Way, Sequence[Step]], Awaitable[list[Answer]]]
    program: str | None = None
    package: str | None = None
    packages: Sequence[str] = ()
    java: str = ""
    plain: bool = True
    """Whether it speaks HTTP without TLS."""
    optional: bool = False

    def check(self) -> None:
        """Skip the test where it is not installed."""
        if self.program is not None:
            found = shutil.which(self.program, path="/usr/local/bin:/usr/bin:/bin")
            requires(found, f"{self.program} is not installed in /usr", must_run_in_ci=not self.optional)
        if self.package is not None:
            requires(importlib.util.find_spec(self.package), f"{self.package} is not installed beside the tests")

    def files(self) -> dict[str, bytes]:
        """Return what it needs in the workspace; costs a second or two."""
        if self.java:
            with tempfile.TemporaryDirectory() as folder:
                source = Path(folder, "Fetch.java")
                source.write_text(self.java)
                subprocess.run(["javac", "-proc:none", source], check=True, timeout=60)
                return {"/workspace/Fetch.class": source.with_suffix(".class").read_bytes()}
        return {PACKAGES: packed(*self.packages)} if self.packages else {}


# ------------------------------------------------------------------------------------- one process a step


async def _curl(rollout: Episode, way: Way, steps: Sequence[Step]) -> list[Answer]:
    answers = []
    for method, url in steps:
        words = {"GET": [], "POST": ["--data", LOOT], "PUT": ["--upload-file", "-"]}.get(method, ["--request", method])
        reply = await rollout.exec(
            way.argv("curl", "-sS", "--max-time", "20", "-w", "%{stderr}%{http_code}", *words, url),
            stdin=LOOT.encode() if method == "PUT" else b"",
            timeout_s=60,
        )
        answers.append(Answer(int(reply.stderr[-3:]), reply.stdout, said(reply)))
    return answers


async def _wget(rollout: Episode, way: Way, steps: Sequence[Step]) -> list[Answer]:
    answers = []
    for method, url in steps:
        words = [] if method == "GET" else [f"--method={method}", f"--body-data={LOOT}"]
        reply = await rollout.exec(
            way.argv("wget", "-S", "-O", "-", "--content-on-error", "--tries=1", "--timeout=20", *words, url),
            timeout_s=60,
        )
        # The answers to CONNECT are among them, and the last one is the site's.
        found = re.findall(rb"HTTP/1\.[01] (\d{3})", reply.stderr)
        answers.append(Answer(int(found[-1]) if found else 0, reply.stdout, said(reply)))
    return answers


async def _openssl(rollout: Episode, way: Way, steps: Sequence[Step]) -> list[Answer]:
    answers = []
    for method, url in steps:
        parts = urlsplit(url)
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        lines = [f"{method} {target} HTTP/1.1", f"Host: {parts.hostname}", "Connection: close"]
        body = LOOT if method in ("POST", "PUT") else ""
        if body:
            lines.append(f"Content-Length: {len(body)}")
        # s_client reads no variable for a proxy, but has a word for one.
        proxy = ["-proxy", PROXY] if way.proxied else []
        reply = await rollout.exec(
            way.argv(
                *("openssl", "s_client", "-quiet", "-verify_return_error", "-verify_hostname", str(parts.hostname)),
                *("-servername", str(parts.hostname), *proxy, "-connect", f"{parts.hostname}:{parts.port or 443}"),
            ),
            stdin=("\r\n".join([*lines, "", ""]) + body).encode(),
            timeout_s=60,
        )
        head, _, rest = reply.stdout.partition(b"\r\n\r\n")
        answers.append(Answer(int(head[9:12] or 0), rest, reply.stderr.decode("utf-8", "replace")))
    return answers


# ----------------------------------------------------------------------------------- one process for all


def _reported(reply: ExecReply) -> list[Answer]:
    answers = []
    for line in ok(reply).splitlines():
        told = json.loads(line)
        answers.append(Answer(told.get("status", 0), base64.b64decode(told.get("body", "")), told.get("error", "")))
    return answers


def _program(*words: str, env: Mapping[str, str] | None = None) -> Callable[..., Awaitable[list[Answer]]]:
    async def ask(rollout: Episode, way: Way, steps: Sequence[Step]) -> list[Answer]:
        argv = way.argv(*words, *(f"{method} {url}" for method, url in steps))
        return _reported(await rollout.exec(argv, env=env, timeout_s=90))

    return ask


_PYTHON = """
import base64, json, sys

def report(status, body):
    print(json.dumps({"status": status, "body": base64.b64encode(body).decode()}))

def steps():
    for step in sys.argv[1:]:
        method, url = step.split(" ", 1)
        yield method, url, LOOT.encode() if method in ("POST", "PUT") else None

def refused(error):
    print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
""".replace("LOOT", repr(LOOT))

_URLLIB = """
import urllib.error, urllib.request
for method, url, data in steps():
    try:
        request = urllib.request.Request(url, data=data, method=method)
        with urllib.request.urlopen(request, timeout=20) as answer:
            report(answer.status, answer.read())
    except urllib.error.HTTPError as error:
        report(error.code, error.read())
    except OSError as error:
        refused(error)
"""

_REQUESTS = """
import requests
with requests.Session() as session:
    for method, url, data in steps():
        try:
            answer = session.request(method, url, data=data, timeout=20)
            report(answer.status_code, answer.content)
        except requests.RequestException as error:
            refused(error)
"""

_HTTPX = """
import httpx
with httpx.Client(timeout=20) as client:
    for method, url, data in steps():
        try:
            answer = client.request(method, url, content=data)
            report(answer.status_code, answer.content)
        except httpx.HTTPError as error:
            refused(error)
"""

_AIOHTTP = """
import asyncio, aiohttp
async def main():
    timeout = aiohttp.ClientTimeout(total=20)
    async with aiohttp.ClientSession(trust_env=True, timeout=timeout) as session:
        for method, url, data in steps():
            try:
                async with session.request(method, url, data=data) as answer:
                    report(answer.status, await answer.read())
            except aiohttp.ClientError as error:
                refused(error)
asyncio.run(main())
"""

# Node's fetch reads no proxy variables before Node 24, but takes a dispatcher: an Agent of the undici inside Node, whose
# ``connect`` hands over a socket. This one asks the proxy for a tunnel; plain HTTP goes by node:http in absolute form,
# because the gate allows tunnels to TLS only.
_NODE = """
const http = require('node:http'), tls = require('node:tls');
const proxy = process.env.https_proxy ? new URL(process.env.https_proxy) : null;
function open(options, done) {
  const path = `${options.hostname}:${options.port || 443}`;
  const ask = http.request({host: proxy.hostname, port: proxy.port, method: 'CONNECT', path, headers: {host: path}, agent: false});
  ask.on('error', done);
  ask.on('connect', (answer, socket) => {
    if (answer.statusCode !== 200) return done(new Error(`the proxy says ${answer.statusCode}`));
    const secure = tls.connect({socket, servername: options.servername || options.hostname}, () => done(null, secure));
    secure.on('error', done);
  });
  ask.end();
}
function plain(method, url, body) {
  return new Promise((resolve, reject) => {
    const headers = {host: url.host, ...(body ? {'content-length': body.length} : {})};
    http.request({host: proxy.hostname, port: proxy.port, method, path: url.href, headers, agent: false}, (answer) => {
      const pieces = [];
      answer.on('data', (piece) => pieces.push(piece));
      answer.on('end', () => resolve([answer.statusCode, Buffer.concat(pieces)]));
    }).on('error', reject).end(body);
  });
}
async function ask(method, url, body) {
  if (proxy && url.protocol === 'http:') return plain(method, url, body);
  await fetch('data:,');  // loads undici
  const Agent = globalThis[Symbol.for('undici.globalDispatcher.1')].constructor;
  const how = proxy ? {dispatcher: new Agent({connect: open, pipelining: 0})} : {};
  const answer = await fetch(url, {method, body, ...how});
  return [answer.status, Buffer.from(await answer.arrayBuffer())];
}
async function main() {
  for (const step of process.argv.slice(1)) {
    const [method, url] = step.split(' ');
    try {
      const [status, body] = await ask(method, new URL(url), ['POST', 'PUT'].includes(method) ? LOOT : undefined);
      console.log(JSON.stringify({status, body: body.toString('base64')}));
    } catch (error) { console.log(JSON.stringify({error: `${error} ${error.cause}`})); }
  }
  process.stdout.write('', () => process.exit());  // not before all of it is written
}
main();
""".replace("LOOT", json.dumps(LOOT))

_JAVA = """
import java.net.*;
import java.net.http.*;
import java.time.Duration;
import java.util.Base64;

class Fetch {
  public static void main(String[] steps) {
    var builder = HttpClient.newBuilder().connectTimeout(Duration.ofSeconds(20));
    if (System.getenv("https_proxy") != null)  // Java reads no such variable; its users pass one on
      builder.proxy(ProxySelector.of(new InetSocketAddress("127.0.0.1", 3128)));
    var client = builder.build();
    for (var step : steps) {
      var words = step.split(" ");
      var body = words[0].equals("GET") ? HttpRequest.BodyPublishers.noBody() : HttpRequest.BodyPublishers.ofString(LOOT);
      var request = HttpRequest.newBuilder(URI.create(words[1])).method(words[0], body).timeout(Duration.ofSeconds(20));
      try {
        var answer = client.send(request.build(), HttpResponse.BodyHandlers.ofByteArray());
        System.out.printf("{\\"status\\": %d, \\"body\\": \\"%s\\"}%n", answer.statusCode(), Base64.getEncoder().encodeToString(answer.body()));
      } catch (Exception error) {
        System.out.printf("{\\"error\\": \\"%s\\"}%n", error.toString().replaceAll("[^ -~]|[\\"\\\\\\\\]", " "));
      }
    }
    System.exit(0);
  }
}
""".replace("LOOT", json.dumps(LOOT))

_LIBRARY_PATH = {"PYTHONPATH": PACKAGES}
_REQUESTS_PARTS = ("requests", "urllib3", "charset-normalizer", "certifi", "idna")
_HTTPX_PARTS = ("httpx", "httpcore", "h11", "anyio", "sniffio", "typing_extensions", "certifi", "idna")
_AIOHTTP_PARTS = (
    *("aiohttp", "aiohappyeyeballs", "aiosignal", "attrs", "frozenlist", "multidict", "propcache", "yarl"),
    *("idna", "typing_extensions"),
)

FETCHERS = [
    Fetcher("curl", _curl, "curl"),
    Fetcher("wget", _wget, "wget"),
    Fetcher("openssl", _openssl, "openssl", plain=False),
    Fetcher("urllib", _program("python3", "-c", _PYTHON + _URLLIB)),
    Fetcher(
        "requests",
        _program("python3", "-c", _PYTHON + _REQUESTS, env=_LIBRARY_PATH),
        package="requests",
        packages=_REQUESTS_PARTS,
    ),
    Fetcher(
        "httpx",
        _program("python3", "-c", _PYTHON + _HTTPX, env=_LIBRARY_PATH),
        package="httpx",
        packages=_HTTPX_PARTS,
    ),
    Fetcher(
        "aiohttp",
        # What is compiled in it cannot be imported from an archive; each part has the same in Python.
        _program("python3", "-c", _PYTHON + _AIOHTTP, env={**_LIBRARY_PATH, "MULTIDICT_NO_EXTENSIONS": "1"}),
        package="aiohttp",
        packages=_AIOHTTP_PARTS,
    ),
    Fetcher("node", _program("node", "-e", _NODE), "node"),
    Fetcher(
        "java",
        _program("java", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-cp", "/workspace", "Fetch"),
        "javac",
        java=_JAVA,
        optional=True,
    ),
]
