"""What the tests of the store share."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from stockade.egress._keys import key
from stockade.egress._store import Serving, Store, Stored
from stockade.egress._store_tool import prepare_store
from stockade.egress.gate import (
    Destination,
    Framing,
    Headers,
    HeadLimits,
    Host,
    Mode,
    Request,
    ResponseHead,
    Way,
    parse_response_head,
)

MIB = 1024 * 1024
LIMITS = HeadLimits()


def ask(path: str = "/a", *, method: str = "GET", query: str | None = None, host: str = "files.example") -> Request:
    return Request(Destination(Way.TLS, Host(host), 443), method, path, query, "https")


def record_key(path: str = "/a", headers: Headers = (), *, mode: Mode = Mode.RECORD, method: str = "GET") -> bytes:
    return key(ask(path, method=method), headers, mode=mode)


def answer(length: int | None = None, *lines: bytes, status: int = 200, method: str = "GET") -> ResponseHead:
    """Return a parsed head; ``length`` None means chunked."""
    framing = b"Transfer-Encoding: chunked" if length is None else b"Content-Length: %d" % length
    raw = b"HTTP/1.1 %d OK\r\n%b\r\n\r\n" % (status, b"\r\n".join([*lines, framing]))
    return parse_response_head(raw, LIMITS, method=method)


def keep(store: Store, name: bytes, body: bytes, *lines: bytes, chunked: bool = False, piece: int = 64 * 1024) -> bool:
    """Record a whole answer."""
    recording = store.begin(name, answer(None if chunked else len(body), *lines))
    for start in range(0, len(body), piece):
        recording.write(body[start : start + piece])
    return recording.commit()


def found(store: Store, name: bytes) -> Stored:
    """Return an answer that is there."""
    stored = store.lookup(name)
    assert stored is not None
    return stored


def verified(store: Store, name: bytes) -> Serving:
    """Return an answer that may be served."""
    serving = found(store, name).open()
    try:
        while not serving.verify():
            pass
    except BaseException:
        serving.close()
        raise
    return serving


def fetch(store: Store, name: bytes) -> bytes:
    """Return a whole body out of the store."""
    with contextlib.closing(verified(store, name)) as serving:
        return b"".join(iter(serving.read, b""))


@contextlib.contextmanager
def opened(path: Path, max_bytes: int = 64 * MIB, recording: str = "default") -> Iterator[Store]:
    """Open the store at ``path``, made if it is missing, as this user's."""
    fd = prepare_store(path, os.geteuid(), os.getegid())
    try:
        with contextlib.closing(Store(fd, max_bytes, recording)) as store:
            yield store
    finally:
        os.close(fd)


def blob_path(path: Path, body: bytes) -> Path:
    return path / "blobs" / hashlib.sha256(body).hexdigest()


def entry_path(path: Path, name: bytes, recording: str = "default") -> Path:
    return path / "index" / recording / hashlib.sha256(name).hexdigest()


def size_of(path: Path) -> int:
    """Return what lies in a store, in whole blocks; a file with two names counts once."""
    sizes = {}
    for part in ("blobs", "index"):
        for one in (path / part).rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                status = one.stat()
                if stat.S_ISREG(status.st_mode):
                    sizes[status.st_ino] = -(-status.st_size // 4096) * 4096
    return sum(sizes.values())


def damage(path: Path, at: int = 0) -> None:
    """Flip a byte in place."""
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def cut(path: Path, size: int) -> None:
    """Make a file shorter, or longer by zeros."""
    path.chmod(0o600)
    os.truncate(path, size)


def head_is_plain(head: ResponseHead) -> bool:
    return head.framing in (Framing.LENGTH, Framing.NONE) and head.keep_alive and not head.interim
