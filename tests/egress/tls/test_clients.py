"""Real clients, set up by nothing but trust_env(), accept a leaf of the Mint, and refuse one for a host that the
authority may not vouch for."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stockade.egress._trust import system_roots, trust_env, trust_files
from tests.egress.tls.harness import HOST, OUTSIDE, Front, Run
from tests.support import requires

HELLO = b"hello from the front\n"
APT_HELPER = "/usr/lib/apt/apt-helper"


@dataclasses.dataclass
class Place:
    """Where the clients run."""

    front: Front
    trust: Path
    folder: Path

    def run(self, *argv: str, **extra: str) -> subprocess.CompletedProcess[bytes]:
        """Run a client with the environment that a sandbox would have."""
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "TMPDIR": str(self.folder),
            "https_proxy": self.front.url,
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            **trust_env(folder=str(self.trust)),
            **extra,
        }
        return subprocess.run(
            argv,
            env=environment,
            cwd=self.folder,
            capture_output=True,
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=100,
        )


@pytest.fixture(scope="module")
def trust(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trust")
    for name, data in trust_files(run.authority.cert_pem, system_roots(), folder=str(folder)).items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture(scope="module")
def front(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("pages")
    pages = {"/hello.txt": HELLO, **_wheels(), **_registry(), **_crates(), **_repository(folder)}
    with Front(run.mint.context, pages) as front:
        yield front
        assert not front.faults


@pytest.fixture
def place(front: Front, trust: Path, tmp_path: Path) -> Place:
    for notes in (front.reached, front.seen, front.failed):
        notes.clear()
    return Place(front, trust, tmp_path)


# ------------------------------------------------------------------------------------- what is served


def _wheels() -> dict[str, bytes]:
    """A simple index with one wheel."""
    info = "demo-1.0.dist-info"
    metadata = b"Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n"
    wheel = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {"demo.py": b"x = 1\n", f"{info}/METADATA": metadata, f"{info}/WHEEL": wheel}
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"]).encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    page = b'<!DOCTYPE html><a href="/wheels/demo-1.0-py3-none-any.whl">demo-1.0-py3-none-any.whl</a>'
    return {"/simple/demo/": page, "/wheels/demo-1.0-py3-none-any.whl": packed.getvalue()}


def _registry() -> dict[str, bytes]:
    version = {"name": "demo", "version": "1.2.3", "dist": {"tarball": f"https://{HOST}/demo.tgz", "shasum": "0" * 40}}
    return {
        "/demo": json.dumps({"name": "demo", "dist-tags": {"latest": "1.2.3"}, "versions": {"1.2.3": version}}).encode()
    }


def _crates() -> dict[str, bytes]:
    """A sparse index with one crate."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, data in {
            "Cargo.toml": b'[package]\nname = "demo"\nversion = "1.0.0"\nedition = "2021"\n',
            "src/lib.rs": b"",
        }.items():
            member = tarfile.TarInfo(f"demo-1.0.0/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    crate = packed.getvalue()
    entry = {"name": "demo", "vers": "1.0.0", "deps": [], "features": {}, "yanked": False}
    entry["cksum"] = hashlib.sha256(crate).hexdigest()
    return {
        "/index/config.json": json.dumps({"dl": f"https://{HOST}/crates"}).encode(),
        "/index/de/mo/demo": json.dumps(entry).encode(),
        "/crates/demo/1.0.0/download": crate,
    }


def _repository(folder: Path) -> dict[str, bytes]:
    """A repository for the dumb protocol."""
    if shutil.which("git") is None:
        return {}
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
    for name in ("AUTHOR", "COMMITTER"):
        environment |= {f"GIT_{name}_NAME": "t", f"GIT_{name}_EMAIL": "t@files.test"}

    def git(*arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=folder, env=environment, check=True, capture_output=True)

    git("init", "-q", "-b", "main")
    (folder / "file").write_bytes(HELLO)
    git("add", "file")
    git("commit", "-q", "-m", "one")
    git("update-server-info")
    root = folder / ".git"
    return {f"/repo.git/{path.relative_to(root)}": path.read_bytes() for path in root.rglob("*") if path.is_file()}


# ------------------------------------------------------------------------------------- the clients

Client = Callable[[Place, str], bytes]
"""Fetches something from a host; returns what came, raises ``CalledProcessError`` for a refusal."""


def _need(program: str) -> None:
    requires(shutil.which(program), f"no {program}", must_run_in_ci=False)


def _checked(place: Place, *argv: str, **extra: str) -> bytes:
    done = place.run(*argv, **extra)
    print(done.stdout[-2000:], done.stderr[-2000:])  # noqa: T201 - shown when the test fails
    done.check_returncode()
    return done.stdout


def _openssl(place: Place, host: str) -> bytes:
    _need("openssl")
    argv = ["openssl", "s_client", "-proxy", f"127.0.0.1:{place.front.port}", "-connect", f"{host}:443"]
    _checked(place, *argv, "-verify_return_error", "-verify_hostname", host, "-brief")
    return HELLO


def _curl(place: Place, host: str) -> bytes:
    _need("curl")
    return _checked(place, "curl", "-sS", f"https://{host}/hello.txt")


def _wget(place: Place, host: str) -> bytes:
    _need("wget")
    return _checked(place, "wget", "-qO-", f"https://{host}/hello.txt")


def _apt(place: Place, host: str) -> bytes:
    requires(os.path.exists(APT_HELPER), "no apt", must_run_in_ci=False)
    _checked(place, APT_HELPER, "download-file", f"https://{host}/hello.txt", str(place.folder / "got"))
    return (place.folder / "got").read_bytes()


def _git(place: Place, host: str) -> bytes:
    _need("git")
    assert b"refs/heads/main" in _checked(place, "git", "ls-remote", f"https://{host}/repo.git")
    _checked(place, "git", "clone", "-q", f"https://{host}/repo.git", "cloned")
    return (place.folder / "cloned/file").read_bytes()


def _pip(place: Place, host: str) -> bytes:
    argv = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--disable-pip-version-check"]
    _checked(place, *argv, "--retries", "0", "-i", f"https://{host}/simple", "demo", PIP_CONFIG_FILE=os.devnull)
    assert (place.folder / "demo-1.0-py3-none-any.whl").exists()
    return HELLO


def _uv(place: Place, host: str) -> bytes:
    _need("uv")
    argv = ["uv", "pip", "install", "--no-cache", "--no-config", "--python", sys.executable, "--target", "into"]
    _checked(place, *argv, "-i", f"https://{host}/simple", "demo", UV_HTTP_RETRIES="0")
    assert (place.folder / "into/demo.py").exists()
    return HELLO


def _python(module: str, code: str) -> Client:
    def fetch(place: Place, host: str) -> bytes:
        requires(importlib.util.find_spec(module), f"no {module}", must_run_in_ci=False)
        return _checked(place, sys.executable, "-c", code, f"https://{host}/hello.txt")

    return fetch


AIOHTTP = """
import aiohttp, asyncio, sys
async def main():
    async with aiohttp.ClientSession(trust_env=True) as session, session.get(sys.argv[1]) as answer:
        print(await answer.text(), end="")
asyncio.run(main())
"""
# fetch() of Node 20 knows no proxy: it comes as programs do that find a local fake address for the name.
NODE = """
require('dns').lookup = (host, options, done) =>
  options.all ? done(null, [{address: '127.0.0.1', family: 4}]) : done(null, '127.0.0.1', 4)
fetch(process.argv[1]).then(answer => answer.text()).then(text => process.stdout.write(text))
"""
JAVA = """
import java.net.*;
import java.net.http.*;
public class Get {
  public static void main(String[] given) throws Exception {
    ProxySelector proxy = ProxySelector.of(new InetSocketAddress("127.0.0.1", Integer.parseInt(given[0])));
    HttpClient client = HttpClient.newBuilder().proxy(proxy).build();
    HttpRequest request = HttpRequest.newBuilder(URI.create(given[1])).build();
    System.out.print(client.send(request, HttpResponse.BodyHandlers.ofString()).body());
  }
}
"""


def _node(place: Place, host: str) -> bytes:
    _need("node")
    return _checked(place, "node", "-e", NODE, f"https://{host}:{place.front.port}/hello.txt")


def _npm(place: Place, host: str) -> bytes:
    _need("npm")
    argv = ["npm", "view", "demo", "version", "--registry", f"https://{host}/", "--fetch-retries", "0"]
    assert _checked(place, *argv, npm_config_update_notifier="false").strip() == b"1.2.3"
    return HELLO


def _java(place: Place, host: str) -> bytes:
    _need("javac")
    (place.folder / "Get.java").write_text(JAVA)
    return _checked(place, "java", "Get.java", str(place.front.port), f"https://{host}/hello.txt")


def _cargo(place: Place, host: str) -> bytes:
    _need("cargo")
    (place.folder / "src").mkdir()
    (place.folder / "src/lib.rs").touch()
    (place.folder / "Cargo.toml").write_text(
        '[package]\nname = "mine"\nversion = "0.1.0"\nedition = "2021"\n'
        '[dependencies]\ndemo = {version = "1", registry = "front"}\n'
    )
    registry = {"CARGO_REGISTRIES_FRONT_INDEX": f"sparse+https://{host}/index/", "CARGO_NET_RETRY": "0"}
    _checked(place, "cargo", "fetch", CARGO_HOME=str(place.folder / "cargo"), **registry, **_rustup())
    return HELLO


def _rustup() -> dict[str, str]:
    """Cargo may be a proxy of rustup, which looks for its toolchains at home."""
    home = Path(os.path.realpath(shutil.which("cargo") or "")).parent.parent.parent / ".rustup"
    return {"RUSTUP_HOME": str(home)} if home.is_dir() else {}


CLIENTS: dict[str, Client] = {
    "openssl": _openssl,
    "curl": _curl,
    "wget": _wget,
    "apt": _apt,
    "git": _git,
    "pip": _pip,
    "uv": _uv,
    "cargo": _cargo,
    "urllib": _python(
        "urllib", "import sys, urllib.request as r; print(r.urlopen(sys.argv[1]).read().decode(), end='')"
    ),
    "requests": _python("requests", "import requests, sys; print(requests.get(sys.argv[1]).text, end='')"),
    "httpx": _python("httpx", "import httpx, sys; print(httpx.get(sys.argv[1]).text, end='')"),
    "aiohttp": _python("aiohttp", AIOHTTP),
    "node": _node,
    "npm": _npm,
    "java": _java,
}


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_accepts_what_the_mint_made(name: str, place: Place) -> None:
    assert CLIENTS[name](place, HOST) == HELLO
    assert set(place.front.reached) == {HOST}
    assert not place.front.failed


@pytest.mark.promise("S3.12")
@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_refuses_a_name_that_the_authority_may_not_vouch_for(name: str, place: Place) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        CLIENTS[name](place, OUTSIDE)
    assert OUTSIDE in place.front.reached
    assert not place.front.seen


def test_a_client_without_the_settings_refuses(place: Place) -> None:
    _need("curl")
    done = place.run("curl", "-sS", f"https://{HOST}/hello.txt", CURL_CA_BUNDLE="", SSL_CERT_FILE="")
    assert done.returncode == 60
    assert place.front.reached
    assert not place.front.seen
