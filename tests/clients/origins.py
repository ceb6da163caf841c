"""Origins that clients know how to talk to: files, a package index (PEP 503), an npm registry, git over smart HTTP."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import os
import subprocess
import tarfile
import zipfile
from pathlib import Path

from tests.egress.netlab import Received, response

DATA = bytes(range(256)) * 1024
"""256 KiB with every byte value: enough for several TLS records and several turns of the relay."""

NOT_FOUND = response(b"nothing here\n", "404 Not Found")


def path_of(request: Received) -> tuple[str, str, str]:
    """Return (method, path, query) of an origin-form request."""
    method, target, _ = request.line.decode("latin-1").split(" ")
    path, _, query = target.partition("?")
    return method, path, query


def files(request: Received) -> bytes:
    """Serve ``/data.bin`` and take uploads at ``/upload``."""
    method, path, _ = path_of(request)
    if path == "/upload" and method in ("POST", "PUT"):
        return response(b"taken %d\n" % len(request.body))
    return response(DATA, "200 OK", "Content-Type: application/octet-stream") if path == "/data.bin" else NOT_FOUND


# ------------------------------------------------------------------------------------------ packages


def wheel(name: str, version: str, source: str) -> tuple[str, bytes]:
    """Return the file name and the bytes of a pure wheel with one module (PEP 427)."""
    module = name.replace("-", "_")
    folder = f"{module}-{version}.dist-info"
    members = {
        f"{module}.py": source,
        f"{folder}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{folder}/WHEEL": "Wheel-Version: 1.0\nGenerator: by hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = []
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for path, text in members.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            lines.append(f"{path},sha256={digest},{len(text.encode())}")
            archive.writestr(path, text)
        archive.writestr(f"{folder}/RECORD", "\n".join([*lines, f"{folder}/RECORD,,", ""]))
    return f"{module}-{version}-py3-none-any.whl", out.getvalue()


class Index:
    """A package index. ``elsewhere`` maps a project to the base address of the host that has its files."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[str, bytes]] = {}
        self.elsewhere: dict[str, str] = {}

    def add(self, name: str, version: str, source: str, *, elsewhere: str = "") -> None:
        """Publish a project with one release."""
        self._files[name] = wheel(name, version, source)
        self.elsewhere[name] = elsewhere

    def respond(self, request: Received) -> bytes:
        """Answer the simple API and the downloads."""
        _, path, _ = path_of(request)
        for name, (filename, data) in self._files.items():
            if path == f"/simple/{name}/":
                link = f"{self.elsewhere[name]}/files/{filename}#sha256={hashlib.sha256(data).hexdigest()}"
                page = f'<!DOCTYPE html><html><body><a href="{link}">{filename}</a></body></html>'
                return response(page.encode(), "200 OK", "Content-Type: text/html")
            if path == f"/files/{filename}":
                return response(data, "200 OK", "Content-Type: application/octet-stream")
        return NOT_FOUND


def registry(host: str) -> dict[str, bytes]:
    """Return the answers of an npm registry with the one package ``sample-answer``."""
    members = {
        "package/package.json": json.dumps({"name": "sample-answer", "version": "1.2.3", "main": "index.js"}),
        "package/index.js": "module.exports = 6 * 7;\n",
    }
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for path, text in members.items():
            member = tarfile.TarInfo(path)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    tarball = gzip.compress(plain.getvalue())
    dist = {
        "tarball": f"https://{host}/sample-answer/-/sample-answer-1.2.3.tgz",
        "integrity": "sha512-" + base64.b64encode(hashlib.sha512(tarball).digest()).decode(),
    }
    release = {"name": "sample-answer", "version": "1.2.3", "main": "index.js", "dist": dist}
    document = {"name": "sample-answer", "dist-tags": {"latest": "1.2.3"}, "versions": {"1.2.3": release}}
    return {
        "/sample-answer": response(json.dumps(document).encode(), "200 OK", "Content-Type: application/json"),
        "/sample-answer/-/sample-answer-1.2.3.tgz": response(tarball),
    }


# ----------------------------------------------------------------------------------------------- git


class Forge:
    """A repository ``/project.git`` that anybody may push to: what holds a push back is not the forge."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.repository = folder / "project.git"
        source = folder / "source"
        source.mkdir()
        (source / "answer.py").write_text("ANSWER = 42\n")
        self._git("init", "--quiet", "--initial-branch=main", str(source))
        self._git("-C", str(source), "add", "answer.py")
        self._git("-C", str(source), "commit", "--quiet", "-m", "The answer")
        self._git("clone", "--quiet", "--bare", str(source), str(self.repository))
        self._git("-C", str(self.repository), "config", "http.receivepack", "true")

    def branches(self) -> list[str]:
        """Return the branches that the forge has."""
        return self._git("-C", str(self.repository), "branch", "--format=%(refname:short)").decode().split()

    def respond(self, request: Received) -> bytes:
        """Answer through git's own CGI program: git-http-backend(1)."""
        method, path, query = path_of(request)
        variables = {
            "GIT_PROJECT_ROOT": str(self._folder),
            "GIT_HTTP_EXPORT_ALL": "1",
            "REQUEST_METHOD": method,
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "CONTENT_LENGTH": str(len(request.body)),
        }
        for name in ("Content-Type", "Content-Encoding", "Git-Protocol"):
            key = name.upper().replace("-", "_")
            for value in request.header(name):
                variables[key if key == "CONTENT_TYPE" else f"HTTP_{key}"] = value.decode("latin-1")
        answer = self._git("http-backend", stdin=request.body, **variables)
        head, _, body = answer.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        status = next((line[8:] for line in lines if line.lower().startswith("status: ")), "200 OK")
        return response(body, status, *(line for line in lines if not line.lower().startswith("status:")))

    def _git(self, *words: str, stdin: bytes = b"", **variables: str) -> bytes:
        people = {
            f"GIT_{who}_{what}": "tester@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
        }
        done = subprocess.run(
            ["git", *words],
            input=stdin,
            capture_output=True,
            check=True,
            timeout=60,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(self._folder),
                "GIT_CONFIG_NOSYSTEM": "1",
                "GIT_CONFIG_GLOBAL": "/dev/null",
                **people,
                **variables,
            },
        )
        return done.stdout
