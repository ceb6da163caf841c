"""pip, npm and git against an index, a registry and a forge: they install and clone, and carry nothing out."""

from __future__ import annotations

import importlib.metadata
import shutil
import ssl

import pytest

from stockade.client import Episode
from tests.clients.conftest import DENIED, HOSTS
from tests.clients.lab import CA, PACKAGES, Circle, Lab, ok, packed, request, said, tunnel
from tests.clients.origins import NOT_FOUND, Forge, Index, path_of, registry
from tests.egress.netlab import Origin, Received
from tests.support import requires

pytestmark = pytest.mark.anyio

POLICY = """
version: 1
egress:
  allow:
    - {host: pypi.example.org}
    - {host: npm.example.org}
    - {host: git.example.org}
    # Over plain HTTP the rule can tell a fetch from a push.
    - host: git.example.org
      ports: [80]
      methods: [GET, POST]
      paths: ["/project.git/info/refs", "/project.git/git-upload-pack"]
  limits: {bytes_out: 96 KiB}
"""
INSIDE = "/usr/local/bin:/usr/bin:/bin"
AUTHOR = {
    **{f"GIT_{who}_NAME": "rollout" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_EMAIL": "rollout@example.org" for who in ("AUTHOR", "COMMITTER")},
    "GIT_TERMINAL_PROMPT": "0",
}

# ---------------------------------------------------------------------------------------------- pip


@pytest.fixture(scope="module")
def index(lab: Lab, server_context: ssl.SSLContext, sites: dict[str, list[Origin]]) -> Index:
    index = Index()
    index.add("sample-answer", "1.2.3", "ANSWER = 6 * 7\n")
    index.add("sample-elsewhere", "1.0", "", elsewhere="https://denied.example.org")
    lab.trusting(server_context, HOSTS["pypi.example.org"], respond=index.respond)
    for site in sites[DENIED]:
        site.respond = index.respond  # the file is there: only the policy keeps pip from it
    return index


@pytest.fixture(scope="module")
def pip() -> bytes:
    try:
        importlib.metadata.distribution("pip")
    except importlib.metadata.PackageNotFoundError:
        requires(False, "pip is not installed beside the tests")
    return packed("pip")


async def run_pip(rollout: Episode, *words: str) -> tuple[int, str]:
    common = ("--disable-pip-version-check", "--no-cache-dir", "--retries", "0", "--timeout", "20")
    reply = await rollout.exec(
        ["python3", "-m", "pip", *words, *common, "--index-url", "https://pypi.example.org/simple/"],
        env={"PYTHONPATH": PACKAGES},
        timeout_s=90,
    )
    return reply.return_code, said(reply)


async def test_pip_installs_from_the_index_of_the_policy(circle: Circle, index: Index, pip: bytes) -> None:
    async with circle.rollout(files={PACKAGES: pip}) as rollout:
        code, text = await run_pip(rollout, "install", "--target", "lib", "sample-answer")
        assert code == 0, text
        assert "Successfully installed sample-answer-1.2.3" in text
        used = await rollout.exec(
            ["python3", "-c", "import sample_answer as s; print(s.ANSWER)"], env={"PYTHONPATH": "lib"}
        )
        assert ok(used) == b"42\n"
    assert set(circle.decisions(rollout)) == {tunnel("pypi.example.org")}


async def test_pip_gets_no_file_from_a_host_that_only_the_index_names(
    circle: Circle, index: Index, pip: bytes, sites: dict[str, list[Origin]]
) -> None:
    before = sites[DENIED][1].connections
    async with circle.rollout(files={PACKAGES: pip}) as rollout:
        code, text = await run_pip(rollout, "download", "--dest", "wheels", "sample-elsewhere")
        assert code != 0
        assert "403" in text
    assert set(circle.decisions(rollout)) == {
        tunnel("pypi.example.org"),
        tunnel("denied.example.org", "host_not_allowed"),
    }
    assert sites[DENIED][1].connections == before


# ---------------------------------------------------------------------------------------------- npm


async def test_npm_installs_from_the_registry_of_the_policy_only(
    circle: Circle, lab: Lab, server_context: ssl.SSLContext
) -> None:
    requires(
        shutil.which("node", path=INSIDE) and shutil.which("npm", path=INSIDE),
        "node and npm are not installed in /usr",
        must_run_in_ci=False,
    )
    answers = registry("npm.example.org")

    def respond(asked: Received) -> bytes:
        return answers.get(path_of(asked)[1], NOT_FOUND)

    lab.trusting(server_context, HOSTS["npm.example.org"], respond=respond)
    words = ["--cafile", CA, "--no-audit", "--no-fund", "--no-update-notifier", "--fetch-retries=0", "sample-answer"]
    async with circle.rollout() as rollout:
        ok(await rollout.exec(["npm", "install", "--registry=https://npm.example.org/", *words], timeout_s=90))
        used = await rollout.exec(["node", "-p", "require('sample-answer')"])
        assert ok(used) == b"42\n"
        reply = await rollout.exec(["npm", "view", "--registry=https://denied.example.org/", *words], timeout_s=90)
        assert reply.return_code != 0
        assert "403" in said(reply)
    decisions = circle.decisions(rollout)
    assert set(decisions) == {tunnel("npm.example.org"), tunnel("denied.example.org", "host_not_allowed")}


# ---------------------------------------------------------------------------------------------- git


@pytest.fixture(scope="module")
def forge(lab: Lab, server_context: ssl.SSLContext, tmp_path_factory: pytest.TempPathFactory) -> Forge:
    requires(shutil.which("git", path=INSIDE), "git is not installed in /usr")
    forge = Forge(tmp_path_factory.mktemp("forge"))
    lab.trusting(server_context, HOSTS["git.example.org"], respond=forge.respond)
    return forge


async def commit(rollout: Episode, branch: str, size_bytes: int) -> None:
    """Commit ``size_bytes`` of what does not compress to a branch of the clone."""
    script = (
        f'git checkout --quiet -b {branch} && head -c {size_bytes} /dev/urandom > "loot" && git add loot'
        " && git commit --quiet -m loot"
    )
    ok(await rollout.exec(["sh", "-c", script], cwd="/workspace/project", env=AUTHOR, timeout_s=60))


async def push(rollout: Episode, branch: str) -> tuple[int, str]:
    reply = await rollout.exec(
        ["git", "push", "--quiet", "origin", branch], cwd="/workspace/project", env=AUTHOR, timeout_s=60
    )
    return reply.return_code, said(reply)


async def test_git_clones_over_https_and_a_push_ends_at_the_byte_cap(circle: Circle, forge: Forge) -> None:
    async with circle.rollout() as rollout:
        ok(await rollout.exec(["git", "clone", "--quiet", "https://git.example.org/project.git"], timeout_s=60))
        assert await rollout.read_file("/workspace/project/answer.py") == b"ANSWER = 42\n"
        # A tunnel cannot be told to fetch only: what fits into the cap gets out. That is what the cap is for.
        await commit(rollout, "small", 1 << 10)
        assert await push(rollout, "small") == (0, "")
        await commit(rollout, "large", 512 << 10)
        code, text = await push(rollout, "large")
        assert code != 0, text
    assert forge.branches() == ["main", "small"]
    assert set(circle.decisions(rollout)) == {tunnel("git.example.org")}
    ends = circle.ends(rollout)
    assert (ends[-1]["verdict"], ends[-1]["reason"]) == ("denied", "bytes_out_exceeded")
    assert sum(end["bytes_out"] for end in ends) == 96 << 10


async def test_git_clones_over_http_and_may_not_push_by_rule(circle: Circle, forge: Forge) -> None:
    before = forge.branches()
    async with circle.rollout() as rollout:
        ok(await rollout.exec(["git", "clone", "--quiet", "http://git.example.org/project.git"], timeout_s=60))
        await commit(rollout, "by-rule", 1 << 10)
        code, text = await push(rollout, "by-rule")
        assert code != 0
        assert "403" in text
    assert forge.branches() == before
    decisions = circle.decisions(rollout)
    assert decisions[-1] == request("git.example.org", "path_not_allowed")
    assert set(decisions[:-1]) == {request("git.example.org")}
    refused = circle.events(rollout, "net.request")[-1]
    assert (refused["http.request.method"], refused["url.path"]) == ("POST", "/project.git/git-receive-pack")


async def test_git_reaches_no_forge_but_that_of_the_policy(circle: Circle, forge: Forge) -> None:
    async with circle.rollout() as rollout:
        reply = await rollout.exec(["git", "clone", "https://denied.example.org/project.git"], env=AUTHOR, timeout_s=60)
        assert reply.return_code != 0
        assert "403" in said(reply)
        # Neither git's own protocol nor ssh has a way; git asks no proxy for them.
        for url in ("git://11.0.0.14/project.git", "ssh://git@11.0.0.14/project.git"):
            reply = await rollout.exec(["git", "clone", url], env=AUTHOR, timeout_s=60)
            assert reply.return_code != 0
    assert circle.decisions(rollout) == [tunnel("denied.example.org", "host_not_allowed")]
