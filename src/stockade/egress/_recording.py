"""Keeping one answer while it passes: the body first, under no name; then its entry. The first one wins."""

from __future__ import annotations

import contextlib
import hashlib
import os
from typing import TYPE_CHECKING

from stockade.egress._store_entry import body_length, render_entry
from stockade.egress._store_files import Draft, Failing, StoreFailed, StoreFault, StoreFull, identity
from stockade.egress._store_space import blocks
from stockade.egress.gate import ResponseHead

if TYPE_CHECKING:
    from stockade.egress._store import Store

_STEP_BYTES = 1024 * 1024
"""How much room is taken at a time for a body of unknown length."""


class Recording:
    """One answer on its way into the store. Made by :meth:`Store.begin`.

    Nobody sees anything of it before :meth:`commit`, and a process that is killed before leaves nothing. Every method
    may raise StoreFailed and StoreFull; afterwards, and after :meth:`commit`, it is over and holds nothing.
    """

    __slots__ = (
        "_announced",
        "_draft",
        "_entry_blocks",
        "_hash",
        "_head",
        "_key",
        "_reserved",
        "_store",
        "over",
        "size",
    )

    def __init__(self, store: Store, key: bytes, head: ResponseHead) -> None:
        self._store = store
        self._key = key
        self._head = head
        self._hash = hashlib.sha256()
        self._draft: Draft | None = None
        self._announced = body_length(head)
        self._reserved = 0
        self.size = 0
        """Bytes of the body so far."""
        self.over = False
        # Rendered now as it will be rendered then: what cannot be an entry is refused before a byte is kept.
        entry = render_entry(key, head, self._hash.hexdigest(), self._announced or 0)
        self._entry_blocks = blocks(len(entry) + 32)
        self._reserve(self._entry_blocks + blocks(self._announced or 0))

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append a piece of the body (without its framing)."""
        if self.over:
            raise StoreFailed("store: the recording is over")
        if not data:
            return
        try:
            size = self.size + len(data)
            if self._announced is not None and size > self._announced:
                raise StoreFailed("store: the body is longer than its head says")
            self._make_room(blocks(size) + self._entry_blocks - self._reserved)
            with Failing("a body"):
                if self._draft is None:
                    self._draft = self._store.draft_blob()
                self._draft.write(data)
        except BaseException:
            self.abort()
            raise
        self._hash.update(data)
        self.size = size

    def commit(self) -> bool:
        """Keep the answer; return False if another was there first, which then stays.

        A body that is shorter than its head says raises StoreFailed: it was cut off, whatever the caller thinks.
        """
        if self.over:
            raise StoreFailed("store: the recording is over")
        try:
            if self._announced is not None and self.size != self._announced:
                raise StoreFailed("store: the body is shorter than its head says")
            with Failing("an answer"):
                return not self._store.has(self._key) and self._publish()
        finally:
            self.abort()

    def abort(self) -> None:
        """Drop what was written. Idempotent, and never raises for the store's faults: there is nothing to save."""
        if self.over:
            return
        self.over = True
        if self._draft is not None:
            self._draft.close()
        with contextlib.suppress(StoreFault):
            self._release(0)

    def _publish(self) -> bool:
        digest, used = self._hash.hexdigest(), 0
        try:
            if self._draft is not None and self._publish_blob(self._draft, digest):
                used += blocks(self.size)
            entry = render_entry(self._key, self._head, digest, self.size)
            if not self._store.publish_entry(self._key, entry):
                return False
            used += blocks(len(entry))
            return True
        finally:
            self._release(used)

    def _publish_blob(self, draft: Draft, digest: str) -> bool:
        """Give the body its name; False if the same bytes are there already."""
        if draft.publish(digest):
            # These bytes went through this process's own hash on their way into this very inode.
            self._store.known.add(identity(os.fstat(draft.fd)), digest)
            return True
        if self._store.blob_size(digest) != self.size:
            raise StoreFailed(f"store: blob {digest[:12]} is damaged")
        return False

    def _make_room(self, lacking: int) -> None:
        if lacking <= 0:
            return
        try:
            self._reserve(max(lacking, _STEP_BYTES))
        except StoreFull:
            self._reserve(lacking)

    def _reserve(self, size: int) -> None:
        self._store.space.reserve(size)
        self._reserved += size

    def _release(self, used: int) -> None:
        size, self._reserved = self._reserved, 0
        if size:
            self._store.space.release(size, used=used)
