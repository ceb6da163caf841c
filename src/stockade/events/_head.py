"""Where a chain ends: the head, its text in the seal of a run, and finding it after a writer died."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from stockade.errors import RecordError
from stockade.events._line import GENESIS, LINE_LIMIT_BYTES, canonical, chain_hash, decode
from stockade.events._schema import Producer
from stockade.events._validate import event_problem
from stockade.ids import RUN_SCOPE


@dataclass(frozen=True, slots=True)
class ChainHead:
    """The end of a chain: the number of events written (also the last ``seq``) and the hash of the last one."""

    seq: int = 0
    hash: str = GENESIS
    sealed: bool = False


class SealedHead(NamedTuple):
    """One entry of ``heads``: the last event of a sealed chain, written ``producer:seq:hash``."""

    producer: str
    seq: int
    hash: str


def format_head(producer: Producer, head: ChainHead) -> str:
    """Return the ``heads`` entry for the chain of ``producer`` that ended at ``head``."""
    return f"{producer}:{head.seq}:{head.hash}"


def parse_head(text: str) -> SealedHead:
    """Return the parts of a ``heads`` entry; raises ``ValueError``."""
    producer, seq, digest = text.split(":")
    parsed = SealedHead(Producer(producer).value, int(seq), digest)
    if f"{parsed.producer}:{parsed.seq}:{parsed.hash}" != text or len(digest) != len(GENESIS):
        raise ValueError(text)
    return parsed


def recover_head(path: Path) -> ChainHead:
    """Return where the chain in ``path`` ends, after its writer died; a torn last line is cut off.

    A torn line was never acted on, since its writer had not got to know that it was written. Reads
    only the end of the file: whether everything before is sound, :func:`verify_run` tells. Raises
    :class:`RecordError` if the file is not a regular file or its last whole line is no sound event.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise RecordError(f"{path}: cannot be opened: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise RecordError(f"{path}: not a regular file")
        return _recover(fd, path)
    finally:
        os.close(fd)


def _recover(fd: int, path: Path) -> ChainHead:
    size = os.fstat(fd).st_size
    # Enough for a torn line after a whole one, each as long as a line may be.
    start = max(0, size - 2 * LINE_LIMIT_BYTES - 1)
    tail = os.pread(fd, size - start, start)
    whole = tail[: tail.rfind(b"\n") + 1]
    if start and not whole:
        raise RecordError(f"{path}: the last line is longer than a line may be")
    if len(whole) < len(tail):
        os.ftruncate(fd, start + len(whole))
    if not whole:
        return ChainHead()
    line = whole[whole.rfind(b"\n", 0, -1) + 1 :]
    try:
        event = decode(line)
    except ValueError as error:
        raise RecordError(f"{path}: the last line is not JSON: {error}") from error
    digest = str(event.pop("hash", ""))
    prev, seq = event.get("prev"), event.get("seq")
    problem = event_problem({**event, "hash": digest})
    if problem is None and chain_hash(str(prev), canonical(event)) != digest:
        problem = "its hash is wrong"
    if problem is not None or type(seq) is not int:
        raise RecordError(f"{path}: the last line is no sound event: {problem}")
    return ChainHead(seq, digest, is_seal(event))


def is_seal(event: Mapping[str, object]) -> bool:
    """Return whether ``event`` says that it is the last of its chain."""
    if event.get("rollout_id") == RUN_SCOPE:
        return event.get("kind") == "run.sealed"
    return event.get("kind") == "rollout.sealed"
