"""Giving out what was kept: nothing leaves before all of it was verified, and nothing that changed since.

A blob is read and hashed once by each worker, a slice at a time so that the loop goes on; after that its inode, its
size and the time of its last change stand for its content (any write and any truncation changes that time). They are
asked again for each piece, so a blob that is damaged while it is on its way stops there. To a client without TLS the
pieces go by ``sendfile``: no byte of the body enters this process.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections import OrderedDict

from stockade.egress._store_files import Failing, Identity, StoreFailed, identity
from stockade.egress.gate import ResponseHead

PIECE_BYTES = 256 * 1024
"""Most bytes that one call reads, hashes or sends."""

_KNOWN = 4096
_EMPTY = hashlib.sha256(b"").hexdigest()


class Verified:
    """Blobs whose content this process has seen, by identity; the least recently used are forgotten."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: OrderedDict[Identity, str] = OrderedDict()

    def knows(self, one: Identity, digest: str) -> bool:
        """Say whether the file's content is known to be ``digest``."""
        if self._known.get(one) != digest:
            return False
        self._known.move_to_end(one)
        return True

    def add(self, one: Identity, digest: str) -> None:
        """Remember it."""
        self._known[one] = digest
        if len(self._known) > _KNOWN:
            self._known.popitem(last=False)


class Serving:
    """One stored answer on its way to one client: ``head``, and a body that is read or sent in pieces.

    Call :meth:`verify` until it says True, with turns of the loop in between; only then :meth:`read` or :meth:`send`.
    ``left`` are the bytes of the body still to come. Every method may raise :class:`StoreFailed`: then what was sent
    so far is good, and the client's connection must be reset.
    """

    __slots__ = ("_at", "_digest", "_fd", "_hash", "_identity", "_known", "_size", "head", "verified")

    def __init__(
        self, head: ResponseHead, digest: str, size: int, known: Verified, file: tuple[int, Identity] | None
    ) -> None:
        """``file`` is the blob's descriptor, which becomes this object's, with what it is told apart by."""
        self.head = head
        self._digest = digest
        self._size = size
        self._known = known
        self._fd: int
        self._identity: Identity | None
        self._fd, self._identity = (-1, None) if file is None else file
        self._at = 0
        self._hash = hashlib.sha256()
        self.verified = digest == _EMPTY if self._identity is None else known.knows(self._identity, digest)
        """Whether the body may leave."""

    def verify(self) -> bool:
        """Hash one more slice; return whether all of it was found to be what it must be."""
        if self.verified:
            return True
        piece = self._pread(PIECE_BYTES)
        self._hash.update(piece)
        self._at += len(piece)
        if self._at < self._size:
            return False
        self._unchanged()
        if self._hash.hexdigest() != self._digest or self._identity is None:
            raise StoreFailed(f"store: blob {self._digest[:12]} is damaged")
        self._known.add(self._identity, self._digest)
        self._at = 0
        self.verified = True
        return True

    @property
    def left(self) -> int:
        """How many bytes of the body are still to come."""
        return self._size - self._at if self.verified else self._size

    def read(self, size: int = PIECE_BYTES) -> bytes:
        """Return the next piece of the body, ``b""`` at its end."""
        self._ready()
        if self._at == self._size:
            return b""
        piece = self._pread(min(size, PIECE_BYTES))
        self._unchanged()  # after the read: what was read before a change is good
        self._at += len(piece)
        return piece

    def send(self, socket_fd: int, size: int = PIECE_BYTES) -> int:
        """Send the next piece to a non-blocking socket by ``sendfile``; return how many bytes went.

        Raises BlockingIOError when the socket takes none now, and other OSErrors for a client that is gone.
        """
        self._ready()
        if self._at == self._size:
            return 0
        self._unchanged()
        try:
            sent = os.sendfile(socket_fd, self._fd, self._at, min(size, PIECE_BYTES, self._size - self._at))
        except OSError as error:
            if error.errno == errno.EIO:  # of the disk; a socket has no such error
                raise StoreFailed(f"store: blob {self._digest[:12]}: {error.strerror}") from error
            raise
        if not sent:
            raise StoreFailed(f"store: blob {self._digest[:12]} was cut off")
        self._at += sent
        return sent

    def close(self) -> None:
        """Let the blob go. Idempotent."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _ready(self) -> None:
        if not self.verified:
            raise ValueError("not verified yet")

    def _pread(self, size: int) -> bytes:
        with Failing(f"blob {self._digest[:12]}"):
            piece = os.pread(self._fd, min(size, self._size - self._at), self._at)
        if not piece:
            raise StoreFailed(f"store: blob {self._digest[:12]} was cut off")
        return piece

    def _unchanged(self) -> None:
        with Failing(f"blob {self._digest[:12]}"):
            now = identity(os.fstat(self._fd))
        if now != self._identity:
            raise StoreFailed(f"store: blob {self._digest[:12]} was changed")
