"""Origins that clients know how to talk to: files, a package index, an npm registry, a Debian archive, git over smart HTTP.

Each answers whatever it is asked, under any name: what holds a client back is never the origin.
"""

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
from urllib.parse import unquote

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
    last = ["Connection: close"] if b"close" in request.header("Connection") else []
    return (
        response(DATA, "200 OK", "Content-Type: application/octet-stream", *last) if path == "/data.bin" else NOT_FOUND
    )


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
    """A package index (PEP 503, 658) and the host of its files. ``base`` is the address of the files, without a slash."""

    def __init__(self, base: str = "") -> None:
        self._base = base
        self._pages: dict[str, str] = {}
        self._files: dict[str, bytes] = {}

    def add(self, name: str, version: str, source: str, *, base: str | None = None) -> None:
        """Publish a project with one release; ``base`` is another host that has its file."""
        filename, data = wheel(name, version, source)
        digest = hashlib.sha256(data).hexdigest()
        path = f"/packages/{digest[:2]}/{digest[2:4]}/{digest[4:]}/{filename}"
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            metadata = archive.read(f"{name.replace('-', '_')}-{version}.dist-info/METADATA")
        self._files |= {path: data, f"{path}.metadata": metadata}
        self._pages[f"/simple/{name}/"] = (
            f'<a href="{self._base if base is None else base}{path}#sha256={digest}"'
            f' data-core-metadata="sha256={hashlib.sha256(metadata).hexdigest()}">{filename}</a>'
        )

    def respond(self, request: Received) -> bytes:
        """Answer the simple API and the downloads."""
        _, path, _ = path_of(request)
        if path in self._pages:
            page = f"<!DOCTYPE html><html><body>{self._pages[path]}</body></html>"
            return response(page.encode(), "200 OK", "Content-Type: text/html")
        if path in self._files:
            return response(self._files[path], "200 OK", "Content-Type: application/octet-stream")
        return NOT_FOUND


class Registry:
    """An npm registry, each package in one version."""

    def __init__(self, base: str) -> None:
        self._base = base
        self._answers: dict[str, bytes] = {}

    def add(self, name: str, version: str, source: str) -> None:
        """Publish a package; a scoped one is called ``@scope/name``."""
        manifest = {"name": name, "version": version, "main": "index.js"}
        tarball = gzip.compress(
            _tar({"package/package.json": json.dumps(manifest), "package/index.js": source}), mtime=0
        )
        path = f"/{name}/-/{name.rpartition('/')[2]}-{version}.tgz"
        dist = {
            "tarball": self._base + path,
            "integrity": "sha512-" + base64.b64encode(hashlib.sha512(tarball).digest()).decode(),
        }
        document = {"name": name, "dist-tags": {"latest": version}, "versions": {version: {**manifest, "dist": dist}}}
        packument = response(json.dumps(document).encode(), "200 OK", "Content-Type: application/json")
        self._answers |= {f"/{name}": packument, path: response(tarball)}

    def respond(self, request: Received) -> bytes:
        """Answer for a package or its archive, and take whatever is sent."""
        method, path, _ = path_of(request)
        if method != "GET":
            return response(b"{}", "201 Created", "Content-Type: application/json")
        return self._answers.get(unquote(path), NOT_FOUND)  # the slash behind a scope comes encoded


def _tar(members: dict[str, str]) -> bytes:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for path, text in members.items():
            member = tarfile.TarInfo(path)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return plain.getvalue()


class Archive:
    """A Debian archive below ``prefix``, with one suite and its indices by digest; nobody signs it."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._files: dict[str, bytes] = {}
        self._packages = ""

    def add(self, name: str, version: str) -> None:
        """Publish a package (deb(5)) that has no files, and the indices with it."""
        control = f"Package: {name}\nVersion: {version}\nArchitecture: all\nMaintainer: Nobody <nobody@example.org>\nDescription: a test\n"
        parts = {
            "debian-binary": b"2.0\n",
            "control.tar.gz": gzip.compress(_tar({"./control": control}), mtime=0),
            "data.tar.gz": gzip.compress(_tar({}), mtime=0),
        }
        package = b"!<arch>\n"
        for part, data in parts.items():
            package += (
                f"{part:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(data):<10}`\n".encode()
                + data
                + b"\n" * (len(data) % 2)
            )
        path = f"pool/main/{name[0]}/{name}/{name}_{version}_all.deb"
        digest = hashlib.sha256(package).hexdigest()
        self._packages += f"{control}Filename: {path}\nSize: {len(package)}\nSHA256: {digest}\n\n"
        self._files[path] = package
        plain = self._packages.encode()
        lines = []
        # As archives do: the plain index is named, and only the compressed one is there.
        for suffix, index in (("", plain), (".gz", gzip.compress(plain, mtime=0))):
            digest = hashlib.sha256(index).hexdigest()
            lines.append(f" {digest} {len(index)} main/binary-amd64/Packages{suffix}\n")
            if suffix:
                self._files[f"dists/stable/main/binary-amd64/by-hash/SHA256/{digest}"] = index
        self._files["dists/stable/Release"] = (
            "Suite: stable\nCodename: stable\nDate: Sat, 01 Nov 2025 00:00:00 UTC\nArchitectures: amd64\nComponents: main\n"
            "Acquire-By-Hash: yes\nSHA256:\n" + "".join(lines)
        ).encode()

    def respond(self, request: Received) -> bytes:
        """Answer for one of the files."""
        _, path, _ = path_of(request)
        data = self._files.get(path.removeprefix(self._prefix))
        return NOT_FOUND if data is None else response(data)


# ----------------------------------------------------------------------------------------------- git


class Forge:
    """A repository that anybody may push to: what holds a push back is not the forge. ``name`` is its path."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self.repository = folder / name
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
