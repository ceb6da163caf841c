"""git through read-only rules: clones and fetches work, pushes and every other way to write do not (cases 67, 68)."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.egress.netlab import NetLab, Origin, Received, response
from tests.egress.proxy.guestnet import GuestNet
from tests.egress.proxy.harness import Attached
from tests.egress.proxy.sites import LIMITS, Sites, ask, policy
from tests.egress.proxy.test_dns_inside import addresses, question
from tests.egress.proxy.test_dns_inside import ask as ask_name

HOST = "git.test"
POLICY = policy(
    '{host: git.test, read_only: true, paths: ["/*/*/info/refs"], query: {service: git-upload-pack}}',
    '{host: git.test, methods: [POST], paths: ["/*/*/git-upload-pack"]}',
    '{host: git.test, read_only: true, paths: ["/*/*/archive/**"]}',
    '{host: api.test, read_only: true, paths: ["/repos/*/*", "/repos/*/*/**"]}',
    deny=(
        '{host: git.test, paths: ["/**/info/refs"], query: {service: git-receive-pack}}',
        '{host: git.test, paths: ["/**/git-receive-pack"]}',
    ),
    limits=LIMITS,
)


def git(*argv: str, cwd: Path | None = None, prefix: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run git as nobody in particular: no settings of this machine, no questions."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_TERMINAL_PROMPT": "0"}
    for role in ("AUTHOR", "COMMITTER"):
        environment |= {f"GIT_{role}_NAME": "t", f"GIT_{role}_EMAIL": "t@t.test"}
    return subprocess.run(
        [*(prefix or []), "git", *argv], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


class Forge:
    """A server that would take every push: git's own, behind TLS."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "forge"
        self.repository = self.root / "o" / "r.git"
        self.repository.mkdir(parents=True)
        git("init", "--bare", "-b", "main", ".", cwd=self.repository)
        git("config", "http.receivepack", "true", cwd=self.repository)
        work = folder / "work"
        git("clone", str(self.repository), str(work))
        (work / "file").write_bytes(os.urandom(300_000))
        git("add", "file", cwd=work)
        git("commit", "-m", "one", cwd=work)
        git("push", "origin", "HEAD:main", cwd=work)
        assert self.head

    @property
    def head(self) -> str:
        """The commit that the branch is at."""
        return git("rev-parse", "main", cwd=self.repository).stdout.strip()

    def answer(self, request: Received) -> bytes:
        method, target = request.line.decode().split(" ")[:2]
        path, _, query = target.partition("?")
        body = request.body
        if request.header("transfer-encoding"):
            body = _unchunked(body)
        environment = {
            "PATH": os.environ["PATH"],
            "GIT_PROJECT_ROOT": str(self.root),
            "GIT_HTTP_EXPORT_ALL": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "safe.directory",
            "GIT_CONFIG_VALUE_0": "*",
            "REQUEST_METHOD": method,
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "CONTENT_LENGTH": str(len(body)),
        }
        for name in ("content-type", "content-encoding", "git-protocol"):
            for value in request.header(name):
                prefix = "" if name == "content-type" else "HTTP_"
                environment[prefix + name.upper().replace("-", "_")] = value.decode()
        done = subprocess.run(["git", "http-backend"], input=body, env=environment, capture_output=True, check=False)
        head, _, data = done.stdout.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        status = next((line[8:] for line in lines if line.startswith("Status: ")), "200 OK")
        return response(data, status, *(line for line in lines if line and not line.startswith("Status: ")))


def _unchunked(raw: bytes) -> bytes:
    body = b""
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        body += raw[: int(size, 16)]
        raw = raw[int(size, 16) + 2 :]
    return body


@pytest.fixture(scope="module")
def sites(lab: NetLab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    with Sites(lab, tmp_path_factory.mktemp("record")) as made:
        yield made


@pytest.fixture(scope="module")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Forge:
    return Forge(tmp_path_factory.mktemp("git"))


@pytest.fixture(scope="module")
def shared(sites: Sites, forge: Forge) -> Origin:
    site = sites.site(HOST, "api.test")
    site.respond = forge.answer
    return site


@pytest.fixture
def site(shared: Origin) -> Origin:
    shared.received.clear()
    return shared


@pytest.fixture
def rollout(sites: Sites) -> Attached:
    return sites.attach(POLICY)


def settings(sites: Sites, folder: Path, *more: str) -> list[str]:
    ca = folder / "ca.pem"
    ca.write_bytes(sites.authority.cert_pem)
    return [item for one in (f"http.sslCAInfo={ca}", *more) for item in ("-c", one)]


@pytest.mark.parametrize("version", ["0", "2"])
def test_egress_case_067_clone_and_fetch_work_and_push_is_refused(
    version: str, sites: Sites, rollout: Attached, site: Origin, forge: Forge, tmp_path: Path
) -> None:
    host, port = rollout.address
    with_proxy = settings(sites, tmp_path, f"http.proxy=http://{host}:{port}", f"protocol.version={version}")
    clone = tmp_path / "clone"
    done = git(*with_proxy, "clone", f"https://{HOST}/o/r.git", str(clone))
    assert done.returncode == 0, done.stderr
    assert git("rev-parse", "HEAD", cwd=clone).stdout.strip() == forge.head
    (clone / "stolen").write_text("data")
    git("add", "stolen", cwd=clone)
    git("commit", "-m", "two", cwd=clone)
    site.received.clear()
    done = git(*with_proxy, "push", "origin", "HEAD:main", cwd=clone)
    assert done.returncode != 0
    assert "403" in done.stderr
    assert forge.head != git("rev-parse", "HEAD", cwd=clone).stdout.strip()
    assert site.received == []
    event = rollout.events("net.request")[-1]
    assert (event["verdict"], event["reason"]) == ("denied", "denied_by_rule")
    assert event["url.path"] == "/o/r.git/info/refs"
    done = git(*with_proxy, "fetch", "origin", cwd=clone)
    assert done.returncode == 0, done.stderr


def test_egress_case_067_by_a_client_that_knows_no_proxy(
    sites: Sites, site: Origin, forge: Forge, tmp_path: Path
) -> None:
    with GuestNet() as guest:
        rollout = sites.attach(POLICY, sockets=guest.sockets)
        address = addresses(ask_name(guest, question(HOST)))[0]
        direct = settings(sites, tmp_path, f"http.curloptResolve={HOST}:443:{address}")
        done = git(*direct, "clone", f"https://{HOST}/o/r.git", str(tmp_path / "c"), prefix=guest.command([]))
        assert done.returncode == 0, done.stderr
        sites.worker.ask("detach", rollout_id=rollout.rollout_id)
    assert rollout.events("net.connect")[0]["way"] == "transparent"


PUSHES = [
    ("GET", "/o/r.git/info/refs?service=git-receive-pack", b""),
    ("GET", "/o/r.git/info/refs?service=git-upload-pack&service=git-receive-pack", b""),
    ("GET", "/o/r.git/info/refs?service=git%2Dreceive-pack", b""),
    ("GET", "/o/r.git/info/refs?service=git-receive-pack&x=1", b""),
    ("GET", "/o/r.git/info/refs?SERVICE=git-receive-pack", b""),
    ("GET", "/o/r.git/info/refs", b""),
    ("GET", "/o/r.git/info/refs?service[]=git-receive-pack", b""),
    ("POST", "/o/r.git/git-receive-pack", b"0000"),
    ("POST", "/o/r.git/git%2Dreceive-pack", b"0000"),
    ("POST", "/o/r.git/git-upload-pack/../git-receive-pack", b"0000"),
    ("POST", "/o/r.git/git-upload-pack;/../git-receive-pack", b"0000"),
    ("POST", "/o/r.git//git-receive-pack", b"0000"),
    ("POST", "/o/r.git/git-upload-pack%2f..%2fgit-receive-pack", b"0000"),
    ("POST", "/o/r.git/info/refs?service=git-upload-pack", b"0000"),
    ("PUT", "/o/r.git/git-upload-pack", b"0000"),
    ("GET", "/o/r.git/git-receive-pack", b""),
]


@pytest.mark.parametrize("push", PUSHES, ids=[f"{method} {target}" for method, target, _ in PUSHES])
def test_egress_case_067_both_requests_of_a_push_however_they_are_written(
    push: tuple[str, str, bytes], sites: Sites, rollout: Attached, site: Origin
) -> None:
    method, target, body = push
    with sites.inside(rollout, HOST) as client:
        reply = ask(client, HOST, target, method=method, body=body)
    assert reply.status in (400, 403)
    assert rollout.last("net.request")["verdict"] == "denied"
    assert site.received == []


WRITES = [
    ("POST", "/gists", b"{}"),
    ("PUT", "/repos/o/r/contents/file", b"{}"),
    ("PATCH", "/repos/o/r", b"{}"),
    ("DELETE", "/repos/o/r", b""),
    ("POST", "/graphql", b"{}"),
    ("POST", "/repos/o/r/forks", b""),
    ("POST", "/repos/o/r/issues", b"{}"),
    ("POST", "/o/r.git/info/lfs/objects/batch", b"{}"),
    ("POST", "/repos/o/r/releases/1/assets?name=x", b"data"),
    ("GET", "/repos/o/r/contents/file", b"data"),
    ("GET", "/gists", b""),
    ("GET", "/user", b""),
]


@pytest.mark.parametrize("write", WRITES, ids=[f"{method} {target}" for method, target, _ in WRITES])
def test_egress_case_068_the_write_paths_of_a_forge(
    write: tuple[str, str, bytes], sites: Sites, rollout: Attached, site: Origin
) -> None:
    method, target, body = write
    for line in ("X-HTTP-Method-Override: PUT", "X-Any: 1"):
        with sites.inside(rollout, "api.test") as client:
            reply = ask(client, "api.test", target, line, method=method, body=body)
        assert reply.status == 403
        assert re.fullmatch(r"(method|path|body)_not_allowed", reply.reason)
    assert site.received == []


def test_the_worker_has_counted_no_fault(sites: Sites) -> None:
    """Stays last: none of the above went through an exception that nobody expected."""
    assert sites.worker.ask("stats")["faults"] == 0
