"""Record, then replay: the same bytes for the same questions, with no network at all, and what was not recorded is denied.

Two runs that share a store, each in a lab of its own: the second lab has no origin and no resolver.
"""

from __future__ import annotations

import ssl

import pytest
import trustme

from stockade.client import Episode
from tests.clients import origins
from tests.clients.conftest import FILES, HOSTS
from tests.clients.lab import PROXIED, UNSET, WAYS, Circle, Lab, Way, ok, said
from tests.clients.origins import DATA, Forge, Index
from tests.clients.tools import git, needs, pip, pip_files
from tests.egress.netlab import Origin, Received, response

pytestmark = pytest.mark.anyio

PYPI, GIT = "pypi.example.org", "git.example.org"
POLICY = """
version: 1
egress:
  mode: %s
  allow:
    - {host: pypi.example.org}
    - {host: files.example.org, ports: [80, 443], methods: [GET, POST], paths: ["/**"]}
    - {host: git.example.org}
    - {host: shell.example.org, tcp: true, ports: [22]}
"""
NOBODY = "11.0.0.99"
"""An address of the lab at which no resolver listens."""


@pytest.fixture
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The lines of the operator's file that both runs have."""
    return f"store: {{path: {tmp_path_factory.mktemp('store') / 'kept'}, max_bytes: 64 MiB}}"


@pytest.fixture
def network(lab: Lab, server_context: ssl.SSLContext, tmp_path_factory: pytest.TempPathFactory) -> list[Origin]:
    """An index, a forge and files."""
    needs("git")
    index = Index()
    index.add("sample-answer", "1.2.3", "ANSWER = 6 * 7\n")
    index.add("sample-late", "1.0", "")
    forge = Forge(tmp_path_factory.mktemp("forge"), "team/project.git")

    def echo(asked: Received) -> bytes:
        return response(b"heard " + asked.body) if asked.body else origins.files(asked)

    there = ((HOSTS[PYPI], index.respond), (HOSTS[GIT], forge.respond), (FILES, echo))
    return [site for ip, respond in there for site in lab.trusting(server_context, ip, respond=respond)]


async def work(rollout: Episode, way: Way) -> dict[str, bytes]:
    """Do what a task does; return what it got."""
    home = f"/workspace/{way.name}"
    ok(await rollout.exec(["mkdir", home]))
    ok(await pip(rollout, way, f"https://{PYPI}", "download", "--dest", home, "sample-answer"))
    ok(await git(rollout, way, "clone", "--quiet", f"https://{GIT}/team/project.git", cwd=home))
    curl = way.argv("curl", "-sSf", "--max-time", "20")
    return {
        "wheel": await rollout.read_file(f"{home}/sample_answer-1.2.3-py3-none-any.whl"),
        "clone": await rollout.read_file(f"{home}/project/answer.py"),
        "head": ok(await rollout.exec(["git", "-C", f"{home}/project", "rev-parse", "HEAD"])),
        "file": ok(await rollout.exec([*curl, "https://files.example.org/data.bin?part=1"], timeout_s=60)),
        "plain": ok(await rollout.exec([*curl, "http://files.example.org/data.bin"], timeout_s=60)),
        "posted": ok(await rollout.exec([*curl, "-d", "a question", "https://files.example.org/ask"], timeout_s=60)),
    }


async def miss(rollout: Episode, way: Way) -> None:
    """Ask for what nobody asked for while it was recorded."""
    reply = await pip(rollout, way, f"https://{PYPI}", "download", "--dest", way.name, "sample-late")
    assert "No matching distribution found" in said(reply)  # of an answer of 504, too
    for words in (["https://files.example.org/data.bin?part=2"], ["-d", "another", "https://files.example.org/ask"]):
        told = ok(await rollout.exec(way.argv("curl", "-sS", *words), timeout_s=60))
        assert told.startswith(b"stockade: not_recorded"), told


async def test_a_run_replays_what_another_recorded_with_nobody_there(
    lab: Lab, ca: trustme.CA, network: list[Origin], store: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, files = tmp_path_factory.mktemp("recorded"), pip_files()
    with Circle(lab, folder, POLICY % "record", ca.cert_pem.bytes(), operator=store) as circle:
        async with circle.rollout(files=files) as rollout:
            first = await work(rollout, PROXIED)
            asked = [len(site.received) for site in network]
            # Already kept: the second rollout of the recording is served from the store.
            async with circle.rollout(files=files) as other:
                assert await work(other, UNSET) == first
        assert [len(site.received) for site in network] == asked
        assert {one.verdict for one in circle.decisions(rollout)} == {"allowed"}
    assert first["file"] == first["plain"] == DATA
    assert first["posted"] == b"heard a question"
    folder = tmp_path_factory.mktemp("replayed")
    with (
        Lab() as empty,
        Circle(empty, folder, POLICY % "replay", ca.cert_pem.bytes(), operator=store, resolver=NOBODY) as circle,
    ):
        async with circle.rollout(files=files) as rollout:
            for way in WAYS:
                assert await work(rollout, way) == first
        assert {one.verdict for one in circle.decisions(rollout)} == {"allowed"}
        assert {event["source"] for event in circle.events(rollout, "net.request")} == {"store"}
        async with circle.rollout(files=files) as rollout:
            for way in WAYS:
                await miss(rollout, way)
            # What cannot be replayed at all: bytes that nobody reads.
            for way in WAYS:
                words = ["--proxytunnel", "http://shell.example.org:22/"]
                reply = await rollout.exec(way.argv("curl", "-sS", *words), timeout_s=60)
                assert reply.return_code != 0
        refused = [
            event for event in circle.events(rollout, "net.request", "net.connect") if event["verdict"] == "denied"
        ]
        assert {(event["server.address"], event.get("url.path"), event["reason"]) for event in refused} == {
            (PYPI, "/simple/sample-late/", "not_recorded"),
            ("files.example.org", "/data.bin", "not_recorded"),
            ("files.example.org", "/ask", "not_recorded"),
            ("shell.example.org", None, "not_replayable"),
        }
        assert empty.dns.queries == []
    assert [len(site.received) for site in network] == asked
