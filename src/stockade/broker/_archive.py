"""Directories on the wire: gzipped tar, read as if an attacker had made it.

Only regular files and directories count; links, devices, absolute names, ``..`` and duplicates refuse the whole
archive. Nothing is ever unpacked on this host: the content goes straight into the sandbox.
"""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import PurePosixPath

from stockade.broker._errors import Code, Refusal

MAX_MEMBERS = 20_000


def unpack(archive: bytes, *, limit_bytes: int) -> dict[str, bytes]:
    """Return path → content; raises :class:`Refusal`. ``limit_bytes`` bounds the unpacked size (zip bombs)."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(archive)) as packed:
            plain = packed.read(limit_bytes + 1)
        if len(plain) > limit_bytes:
            raise Refusal(Code.PAYLOAD_TOO_LARGE, "the archive unpacks to more than is allowed")
        with tarfile.open(fileobj=io.BytesIO(plain), mode="r:") as tar:
            return _members(tar, limit_bytes)
    except (tarfile.TarError, EOFError, OSError, zlib.error, UnicodeError) as error:
        raise Refusal(Code.INVALID_REQUEST, f"not a gzipped tar: {error}") from error


def _members(tar: tarfile.TarFile, limit_bytes: int) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    left = limit_bytes
    for number, member in enumerate(tar):
        if number >= MAX_MEMBERS:
            raise Refusal(Code.INVALID_REQUEST, f"more than {MAX_MEMBERS} members")
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts or "\0" in member.name:
            raise Refusal(Code.INVALID_REQUEST, f"member {member.name!r} is not relative to the directory")
        if member.isdir():
            continue
        # A sparse member is a terabyte of holes in a few bytes of archive: no bound on the archive is one on it.
        if not member.isreg() or member.issparse():
            raise Refusal(Code.INVALID_REQUEST, f"member {member.name!r} is neither a plain file nor a directory")
        left -= member.size
        if left < 0:
            raise Refusal(Code.PAYLOAD_TOO_LARGE, "the archive unpacks to more than is allowed")
        content = tar.extractfile(member)
        if content is None or str(path) in files:
            raise Refusal(Code.INVALID_REQUEST, f"member {member.name!r} occurs twice")
        files[str(path)] = content.read()
    return files


def pack(files: Mapping[str, bytes]) -> bytes:
    """Return a gzipped tar of plain files: no owner, no time, mode 0644; the same files give the same bytes."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w:", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(files):
            member = tarfile.TarInfo(name)
            member.size = len(files[name])
            member.mode = 0o644
            tar.addfile(member, io.BytesIO(files[name]))
    return gzip.compress(plain.getvalue(), compresslevel=1, mtime=0)
