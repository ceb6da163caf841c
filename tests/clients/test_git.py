"""git against a forge that takes pushes: clones work by every way, and a push ends where the policy says."""

from __future__ import annotations

import ssl
from collections.abc import Iterator

import pytest
import trustme

from stockade.client import Episode
from tests.clients.conftest import HOSTS
from tests.clients.lab import UNSET, WAYS, Circle, Lab, Way, ok, request, said, tunnel
from tests.clients.origins import Forge
from tests.clients.tools import commit, git, needs

pytestmark = pytest.mark.anyio

HOST = "git.example.org"
URL = f"https://{HOST}/team/project.git"
CAP_OUT = 96 << 10
POLICIES = {
    "opaque": """
version: 1
egress:
  allow:
    - {host: git.example.org}
    # Over plain HTTP the rule can tell a fetch from a push.
    - host: git.example.org
      ports: [80]
      methods: [GET, POST]
      paths: ["/team/project.git/info/refs", "/team/project.git/git-upload-pack"]
  limits: {bytes_out: 96 KiB}
""",
    # The rules by which the shipped preset for a forge lets git read, at another host.
    "inspected": """
version: 1
egress:
  allow:
    - {host: git.example.org, read_only: true, paths: ["/*/*/info/refs"], query: {service: git-upload-pack}}
    - {host: git.example.org, methods: [POST], paths: ["/*/*/git-upload-pack"]}
""",
}


@pytest.fixture(scope="module", params=POLICIES)
def circle(
    request: pytest.FixtureRequest, lab: Lab, ca: trustme.CA, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Circle]:
    with Circle(lab, tmp_path_factory.mktemp("circle"), POLICIES[request.param], ca.cert_pem.bytes()) as circle:
        yield circle


opaque, inspected = (pytest.mark.parametrize("circle", [name], indirect=True) for name in POLICIES)
both_ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)


@pytest.fixture(scope="module")
def forge(lab: Lab, server_context: ssl.SSLContext, tmp_path_factory: pytest.TempPathFactory) -> Forge:
    needs("git")
    forge = Forge(tmp_path_factory.mktemp("forge"), "team/project.git")
    lab.trusting(server_context, HOSTS[HOST], respond=forge.respond)
    return forge


async def clone(rollout: Episode, way: Way, url: str = URL) -> None:
    """Clone, and look whether all of it arrived."""
    ok(await git(rollout, way, "clone", "--quiet", url))
    assert await rollout.read_file("/workspace/project/answer.py") == b"ANSWER = 42\n"


async def push(rollout: Episode, way: Way, branch: str) -> tuple[int, str]:
    """Push a branch of the clone; return git's exit code and what it said."""
    reply = await git(rollout, way, "push", "--quiet", "origin", branch, cwd="/workspace/project")
    return reply.return_code, said(reply)


@opaque
@both_ways
async def test_a_push_through_a_tunnel_ends_at_the_byte_cap(circle: Circle, forge: Forge, way: Way) -> None:
    before = forge.branches()
    async with circle.rollout() as rollout:
        await clone(rollout, way)
        # A tunnel cannot be told to fetch only: what fits into the cap gets out. That is what the cap is for.
        await commit(rollout, f"small-{way.name}", 1 << 10)
        assert await push(rollout, way, f"small-{way.name}") == (0, "")
        await commit(rollout, f"large-{way.name}", 512 << 10)
        code, text = await push(rollout, way, f"large-{way.name}")
        assert code != 0, text
    assert forge.branches() == [*before, f"small-{way.name}"]
    assert set(circle.decisions(rollout)) == {tunnel(HOST)}
    assert circle.ways(rollout) == {way.recorded}
    ends = circle.ends(rollout)
    assert (ends[-1]["verdict"], ends[-1]["reason"]) == ("denied", "bytes_out_exceeded")
    assert sum(end["bytes_out"] for end in ends) == CAP_OUT


@opaque
@both_ways
async def test_over_http_a_rule_tells_a_clone_from_a_push(circle: Circle, forge: Forge, way: Way) -> None:
    before = forge.branches()
    async with circle.rollout() as rollout:
        await clone(rollout, way, URL.replace("https", "http"))
        await commit(rollout, "by-rule", 1 << 10)
        code, text = await push(rollout, way, "by-rule")
        assert code != 0
        assert "403" in text
    assert forge.branches() == before
    decisions = circle.decisions(rollout)
    assert decisions[-1] == request(HOST, "path_not_allowed")
    assert set(decisions[:-1]) == {request(HOST)}
    refused = circle.events(rollout, "net.request")[-1]
    assert (refused["http.request.method"], refused["url.path"]) == ("POST", "/team/project.git/git-receive-pack")


@inspected
@both_ways
async def test_inside_tls_git_reads_and_no_push_gets_out(circle: Circle, forge: Forge, way: Way) -> None:
    before = forge.branches()
    async with circle.rollout() as rollout:
        await clone(rollout, way)
        ok(await git(rollout, way, "fetch", "--quiet", "--all", cwd="/workspace/project"))
        ok(await git(rollout, way, "clone", "--quiet", "--depth=1", URL, "shallow"))
        listed = ok(await git(rollout, way, "ls-remote", "--heads", URL, "main"))
        assert listed.endswith(b"\trefs/heads/main\n")
        await commit(rollout, "inside", 1 << 10)
        code, text = await push(rollout, way, "inside")
        assert code != 0
        assert "403" in text
        # Who leaves out the question whether it may push gets no further with the pack itself.
        pack = way.argv("curl", "-sS", "-X", "POST", "--data-binary", "@project/loot", f"{URL}/git-receive-pack")
        assert "path_not_allowed" in said(await rollout.exec(pack, timeout_s=60))
    assert forge.branches() == before
    assert {one for one in circle.decisions(rollout) if one.verdict == "allowed"} == {
        tunnel(HOST),
        request(HOST, port=443),
    }
    refused = [event for event in circle.events(rollout, "net.request") if event["verdict"] == "denied"]
    assert [(event["http.request.method"], event["url.path"]) for event in refused] == [
        ("GET", "/team/project.git/info/refs"),
        ("POST", "/team/project.git/git-receive-pack"),
    ]


async def test_git_reaches_no_forge_but_that_of_the_policy(circle: Circle, forge: Forge) -> None:
    async with circle.rollout() as rollout:
        for way, shown in zip(WAYS, ("403", "Could not resolve host"), strict=True):
            reply = await git(rollout, way, "clone", "https://denied.example.org/team/project.git")
            assert reply.return_code != 0
            assert shown in said(reply)
        # Neither git's own protocol nor ssh has a way; git asks no proxy for them, and nobody listens on their ports.
        for url in (f"git://{HOST}/team/project.git", f"ssh://git@{HOSTS[HOST]}/team/project.git"):
            reply = await git(rollout, UNSET, "clone", url)
            assert reply.return_code != 0
    assert circle.decisions(rollout) == [tunnel("denied.example.org", "host_not_allowed")]
