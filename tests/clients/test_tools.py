"""pip, uv, npm and apt against an index, a registry and an archive: they install, by every way, and carry nothing out."""

from __future__ import annotations

import ssl
from collections.abc import Iterator

import pytest
import trustme

from stockade.client import Episode
from tests.clients.conftest import DENIED, HOSTS
from tests.clients.lab import UNSET, WAYS, Circle, Lab, Way, ok, request, said, tunnel
from tests.clients.origins import Archive, Index, Registry
from tests.clients.tools import apt, bring_uv, needs, npm, pip, pip_files, uv, uv_install
from tests.egress.netlab import Origin

pytestmark = pytest.mark.anyio

PYPI, NPM, DEB = (f"{name}.example.org" for name in ("pypi", "npm", "deb"))
POLICIES = {
    "opaque": """
version: 1
egress:
  allow:
    - {host: pypi.example.org}
    - {host: npm.example.org}
    - {host: deb.example.org}
    - {host: deb.example.org, ports: [80], read_only: true, paths: ["/debian/**"]}
""",
    "inspected": """
version: 1
egress:
  allow:
    - {host: pypi.example.org, read_only: true, paths: ["/simple/**", "/packages/**"]}
    - {host: npm.example.org, read_only: true, paths: ["/**"], encoded_slash: true}
    - {host: deb.example.org, ports: [80, 443], read_only: true, paths: ["/debian/**"]}
""",
}


@pytest.fixture(scope="module", params=POLICIES)
def circle(
    request: pytest.FixtureRequest,
    lab: Lab,
    ca: trustme.CA,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Circle]:
    with Circle(lab, tmp_path_factory.mktemp("circle"), POLICIES[request.param], ca.cert_pem.bytes()) as circle:
        yield circle


@pytest.fixture
def inspected(request: pytest.FixtureRequest) -> bool:
    return "inspected" in request.node.callspec.params.values()


def assert_only(
    circle: Circle, rollout: Episode, host: str, *, inspected: bool, ports: tuple[int, ...] = (443,)
) -> None:
    """Every decision allowed something of ``host``; inside TLS each request has one of its own."""
    found = set(circle.decisions(rollout))
    assert found == {
        *([tunnel(host)] if 443 in ports else []),
        *(request(host, port=port) for port in ports if inspected or port == 80),
    }
    assert circle.ways(rollout) == {None, "transparent", *(["tls"] if inspected else [])}
    # apt looks for SRV records under names that are no host's, and goes on without.
    assert set(circle.names(rollout)) - {(None, "malformed_host")} == {(host, "allowed")}


# ------------------------------------------------------------------------------------------ pip and uv


@pytest.fixture(scope="module")
def index(lab: Lab, server_context: ssl.SSLContext, sites: dict[str, list[Origin]]) -> Index:
    index = Index()
    index.add("sample-answer", "1.2.3", "ANSWER = 6 * 7\n")
    index.add("sample-elsewhere", "1.0", "", base="https://denied.example.org")
    lab.trusting(server_context, HOSTS[PYPI], respond=index.respond)
    for site in sites[DENIED]:
        site.respond = index.respond  # the file is there: only the policy keeps pip from it
    return index


async def test_pip_installs_from_the_index_of_the_policy(circle: Circle, index: Index, inspected: bool) -> None:
    async with circle.rollout(files=pip_files()) as rollout:
        for way in WAYS:
            reply = await pip(rollout, way, f"https://{PYPI}", "install", "--target", way.name, "sample-answer")
            assert b"Successfully installed sample-answer-1.2.3" in ok(reply)
            code = "import sample_answer as s; print(s.ANSWER)"
            assert ok(await rollout.exec(["python3", "-c", code], env={"PYTHONPATH": way.name})) == b"42\n"
    assert_only(circle, rollout, PYPI, inspected=inspected)


async def test_uv_installs_from_the_index_of_the_policy(circle: Circle, index: Index, inspected: bool) -> None:
    async with circle.rollout() as rollout:
        await bring_uv(rollout)
        for way in WAYS:
            ok(await uv_install(rollout, way, f"https://{PYPI}", "sample-answer", way.name))
            assert await rollout.read_file(f"/workspace/{way.name}/sample_answer.py") == b"ANSWER = 6 * 7\n"
    assert_only(circle, rollout, PYPI, inspected=inspected)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
async def test_pip_gets_no_file_from_a_host_that_only_the_index_names(
    circle: Circle, index: Index, sites: dict[str, list[Origin]], way: Way
) -> None:
    before = sites[DENIED][1].connections
    async with circle.rollout(files=pip_files()) as rollout:
        reply = await pip(rollout, way, f"https://{PYPI}", "download", "--dest", "wheels", "sample-elsewhere")
        assert reply.return_code != 0
        assert ("403" if way.proxied else "Name or service not known") in said(reply)
    denied = tunnel("denied.example.org", "host_not_allowed")
    assert {one for one in circle.decisions(rollout) if one.verdict == "denied"} == ({denied} if way.proxied else set())
    assert (("denied.example.org", "host_not_allowed") in circle.names(rollout)) is not way.proxied
    assert sites[DENIED][1].connections == before


@pytest.mark.parametrize("circle", ["inspected"], indirect=True)
async def test_uv_publishes_nothing_where_the_rule_reads_only(circle: Circle, index: Index) -> None:
    async with circle.rollout(files=pip_files()) as rollout:
        await bring_uv(rollout)
        ok(await pip(rollout, UNSET, f"https://{PYPI}", "download", "--dest", "dist", "sample-answer"))
        for way in WAYS:
            words = ("--publish-url", f"https://{PYPI}/legacy/", "--token", "none", "--trusted-publishing", "never")
            reply = await uv(rollout, way, "publish", *words, "dist/sample_answer-1.2.3-py3-none-any.whl")
            assert reply.return_code != 0
            assert "403" in said(reply)
    denied = [one for one in circle.decisions(rollout) if one.verdict == "denied"]
    assert set(denied) == {request(PYPI, "method_not_allowed", 443)}


# ---------------------------------------------------------------------------------------------- npm


@pytest.fixture(scope="module")
def registry(lab: Lab, server_context: ssl.SSLContext) -> list[Origin]:
    needs("node", "npm")
    registry = Registry(f"https://{NPM}")
    registry.add("sample-answer", "1.2.3", "module.exports = 6 * 7;\n")
    registry.add("@sample/scoped", "1.0.0", "module.exports = 'scoped';\n")
    return lab.trusting(server_context, HOSTS[NPM], respond=registry.respond)


async def test_npm_installs_from_the_registry_of_the_policy_only(
    circle: Circle, registry: list[Origin], inspected: bool
) -> None:
    async with circle.rollout() as rollout:
        for way in WAYS:
            folder = f"/workspace/{way.name}"
            ok(await rollout.exec(["mkdir", folder]))
            ok(await npm(rollout, way, f"https://{NPM}", "install", "sample-answer", "@sample/scoped", cwd=folder))
            code = "console.log(require('sample-answer'), require('@sample/scoped'))"
            assert ok(await rollout.exec(["node", "-e", code], cwd=folder)) == b"42 scoped\n"
    assert_only(circle, rollout, NPM, inspected=inspected)
    async with circle.rollout() as rollout:
        for way, shown in zip(WAYS, ("403", "ENOTFOUND"), strict=True):
            reply = await npm(rollout, way, "https://denied.example.org", "view", "sample-answer")
            assert reply.return_code != 0
            assert shown in said(reply)
    assert set(circle.decisions(rollout)) == {tunnel("denied.example.org", "host_not_allowed")}


@pytest.mark.parametrize("circle", ["inspected"], indirect=True)
async def test_npm_publishes_nothing_where_the_rule_reads_only(circle: Circle, registry: list[Origin]) -> None:
    before = sum(len(site.received) for site in registry)
    package = {"/workspace/loot/package.json": b'{"name": "loot", "version": "1.0.0"}'}
    token = f"--//{NPM}/:_authToken=none"
    async with circle.rollout(files=package) as rollout:
        for way in WAYS:
            reply = await npm(rollout, way, f"https://{NPM}", "publish", token, cwd="/workspace/loot")
            assert reply.return_code != 0
            assert "403" in said(reply)
    denied = [one for one in circle.decisions(rollout) if one.verdict == "denied"]
    assert set(denied) == {request(NPM, "method_not_allowed", 443)}
    assert all(one.line.startswith(b"GET ") for one in registry[1].received[before:])


# ---------------------------------------------------------------------------------------------- apt


@pytest.fixture(scope="module")
def archive(lab: Lab, server_context: ssl.SSLContext) -> list[Origin]:
    needs("apt-get")
    archive = Archive("/debian/")
    archive.add("sample-answer", "1.2.3")
    return lab.trusting(server_context, HOSTS[DEB], respond=archive.respond)


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_apt_updates_and_downloads_from_the_archive_of_the_policy(
    circle: Circle, archive: list[Origin], scheme: str, inspected: bool
) -> None:
    async with circle.rollout() as rollout:
        for way in WAYS:
            reply = await apt(rollout, way, f"{scheme}://{DEB}/debian", "sample-answer")
            assert ok(reply) == b"sample-answer_1.2.3_all.deb\n"
    if scheme == "https":
        assert_only(circle, rollout, DEB, inspected=inspected)
    else:
        assert set(circle.decisions(rollout)) == {request(DEB)}
        assert circle.ways(rollout) == {None, "transparent"}


async def test_apt_gets_nothing_from_another_archive_or_path(circle: Circle, archive: list[Origin]) -> None:
    async with circle.rollout() as rollout:
        for way in WAYS:
            reply = await apt(rollout, way, "http://denied.example.org/debian", "sample-answer")
            assert reply.return_code != 0
            reply = await apt(rollout, way, f"http://{DEB}/other", "sample-answer")
            assert reply.return_code != 0
            assert "403" in said(reply)
    assert {one.reason for one in circle.decisions(rollout)} == {"host_not_allowed", "path_not_allowed"}
