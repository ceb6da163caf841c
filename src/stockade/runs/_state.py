"""``$STATE``: the one directory on this node for what must not lie on a shared filesystem.

SQLite and sockets go wrong on network filesystems (locks that do not lock, `ENXIO` on connect), so a candidate
there is skipped. Whoever can write into this directory could hand the agent another socket or another interpreter:
it must belong to the user, be closed to everybody else, and be no link.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from stockade.errors import RunError

_log = logging.getLogger(__name__)

# f_type of statfs(2), from linux/magic.h and the file systems' own headers.
_NETWORK_FILESYSTEMS: Mapping[int, str] = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFE534D42: "SMB2",
    0xFF534D42: "CIFS",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x65735546: "FUSE",
    0x00C36400: "Ceph",
    0x19830326: "BeeGFS",
    0xAAD7AAEA: "PanFS",
    0x20030528: "OrangeFS",
    0x5346414F: "AFS",
    0x6B414653: "AFS",
    0x73757245: "Coda",
    0x01021997: "9P",
    0x7461636F: "OCFS2",
    0x01161970: "GFS2",
    0x786F4256: "vboxsf",
    0x564C: "NCP",
}


def state_dir(*, environ: Mapping[str, str] | None = None, notice: Callable[[str], None] | None = None) -> Path:
    """Return this user's state directory on this node, made if need be (mode 0700).

    The first of ``$STOCKADE_STATE``, ``$XDG_STATE_HOME/stockade`` and ``/tmp/stockade-$UID`` that lies on a local
    filesystem; ``notice`` (by default the log) hears of each that was skipped. Raises :class:`RunError` if one is a
    link, belongs to somebody else or is open to others, or if none is left.
    """
    say = notice or _log.warning
    for candidate, origin in _candidates(os.environ if environ is None else environ):
        filesystem = _filesystem_of(candidate)
        if filesystem is None:
            return _claimed(candidate, origin)
        say(f"{candidate} ({origin}) lies on {filesystem} and is not used for state")
    raise RunError("no place for state: every candidate lies on a network filesystem", hint=_HINT)


_HINT = "set STOCKADE_STATE to a directory of yours on a local disk"


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[Path, str]]:
    if own := environ.get("STOCKADE_STATE"):
        yield _absolute(own, "STOCKADE_STATE"), "$STOCKADE_STATE"
    if xdg := environ.get("XDG_STATE_HOME"):
        yield _absolute(xdg, "XDG_STATE_HOME") / "stockade", "$XDG_STATE_HOME"
    yield Path(f"/tmp/stockade-{os.geteuid()}"), "the default"  # noqa: S108 - owner and mode are checked


def _absolute(text: str, variable: str) -> Path:
    path = Path(text)
    if not path.is_absolute():
        raise RunError(f"{variable} is not an absolute path: {text!r}", hint=_HINT)
    return path


def _claimed(path: Path, origin: str) -> Path:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        why = "it is a link" if path.is_symlink() else error.strerror
        raise RunError(f"{path} ({origin}) cannot hold state: {why}", hint=_HINT) from error
    try:
        status = os.fstat(fd)
    finally:
        os.close(fd)
    if status.st_uid != os.geteuid():
        raise RunError(f"{path} ({origin}) belongs to uid {status.st_uid}, not to you", hint=_HINT)
    if status.st_mode & 0o077:
        raise RunError(f"{path} ({origin}) is open to other users", hint=f"run: chmod 700 {path}")
    return path


def _filesystem_of(path: Path) -> str | None:
    """Return the kind of network filesystem that ``path`` lies, or would lie, on; ``None`` for a local one."""
    existing = path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    magic = _filesystem_magic(existing)
    if magic is None:
        return "an unknown filesystem"
    return _NETWORK_FILESYSTEMS.get(magic)


def _filesystem_magic(path: Path) -> int | None:
    """Return ``f_type`` of statfs(2), which os.statvfs leaves out; ``None`` if the kernel does not tell."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(512)
    if libc.statfs(os.fsencode(path), buffer) != 0:
        return None
    # The first member is a long on every 64-bit Linux (an int on s390x, whose value is read all the same).
    magic: int = struct.unpack_from("@l", buffer.raw)[0]
    return magic & 0xFFFF_FFFF
