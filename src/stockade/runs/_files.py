"""Reading files that somebody else may have put in place of the right ones."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_regular(path: Path, limit_bytes: int) -> bytes:
    """Return at most ``limit_bytes`` of a regular file, never through a link and never waiting for a FIFO.

    Raises ``OSError``; anything but a regular file is ``EINVAL``.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        data = b""
        while len(data) < limit_bytes and (piece := os.read(fd, limit_bytes - len(data))):
            data += piece
        return data
    finally:
        os.close(fd)
