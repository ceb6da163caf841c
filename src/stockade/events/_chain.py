"""Writing one chain, and picking it up again after its writer died.

A chain is one file with one writer. A line is one ``write(2)`` on an ``O_APPEND`` descriptor, so a
writer that is killed leaves whole lines. If a write fails or falls short (disk full, quota, file
size limit) the file is cut back to its last whole line and the chain is *broken*: every later
append raises, and so the guard that wanted to record a decision must say no. Nothing is fsynced per
line; what a caller may rely on is that the kernel has the line.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from stockade.errors import RecordError
from stockade.events._line import (
    GENESIS,
    LINE_LIMIT_BYTES,
    canonical,
    chain_hash,
    decode,
    to_line,
    uuid7,
)
from stockade.events._schema import (
    MAX_SEVERITY,
    VERSION,
    Event,
    EventVerdict,
    Producer,
    Trust,
    Value,
)
from stockade.events._validate import context_problem, event_problem, field_problem
from stockade.ids import RUN_SCOPE

_SEALS = frozenset({"rollout.sealed", "run.sealed"})


@dataclass(frozen=True, slots=True)
class ChainHead:
    """The end of a chain: the number of events written (also the last ``seq``) and the hash of the last one."""

    seq: int = 0
    hash: str = GENESIS
    sealed: bool = False


@dataclass(frozen=True, slots=True)
class Context:
    """What every event of a chain says about where it belongs.

    ``None`` means the field is left out.
    """

    run_id: str
    rollout_id: str
    policy_digest: str
    task_id: str | None = None
    group_id: str | None = None
    train_step: int | None = None
    attempt: int | None = None
    stage: int | None = None

    def fields(self) -> Event:
        """Return the fields that are set, by name."""
        found = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in found if value is not None}


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


class ChainWriter:
    """The one writer of one (rollout, producer) chain, on a descriptor that the caller opened and will close.

    ``fd`` is a regular file opened for appending; ``start`` is where an earlier writer of the same
    file stopped (:func:`recover_head`). Synchronous, and not safe to share between threads.
    """

    def __init__(
        self,
        fd: int,
        context: Context,
        producer: Producer,
        *,
        start: ChainHead | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._fd = fd
        self._producer = Producer(producer)
        self._clock_ns = clock_ns
        self._run_scope = context.rollout_id == RUN_SCOPE
        own = _clean_fields(context.fields())
        problem = context_problem(own)
        if problem is not None:
            raise RecordError(f"this cannot be the context of a record: {problem}")
        self._base: Event = {"v": VERSION, "producer": self._producer.value, **own}
        head = start or ChainHead()
        self._seq, self._hash, self._sealed = head.seq, head.hash, head.sealed
        self._broken = False
        self._end = _appendable_size(fd)
        if (self._end == 0) != (self._seq == 0):
            raise RecordError(
                f"a chain that starts after event {self._seq} cannot go on in a file of {self._end} bytes",
                hint="take the start from recover_head, and use a fresh file for a fresh chain",
            )

    @property
    def head(self) -> ChainHead:
        """Where the chain ends now."""
        return ChainHead(self._seq, self._hash, self._sealed)

    @property
    def broken(self) -> bool:
        """Whether a write failed; then nothing can be appended any more."""
        return self._broken

    @property
    def sealed(self) -> bool:
        """Whether the last line says that it is the last."""
        return self._sealed

    def append(
        self,
        kind: str,
        dotted: Mapping[str, Value] = MappingProxyType({}),
        /,
        *,
        trust: Trust = Trust.OBSERVED,
        verdict: EventVerdict = EventVerdict.OBSERVED,
        severity: int = 0,
        time_ns: int | None = None,
        **fields: Value,
    ) -> Event:
        r"""Write one event and return it as written.

        Fields are keywords; those that no keyword can spell come in ``dotted``, as
        ``{"url.path": "/"}``. ``time_ns`` is when it happened (Unix, UTC) if that is not now. Lone
        surrogates in a text become ``\\udcXX`` spelled out; text from inside a sandbox should have
        gone through :func:`clip` first.

        Raises :class:`RecordError`: if the event does not fit the schema or is longer than a line
        may be, the chain is as before; if it cannot be written, the chain is broken.
        """
        self._refuse_if_closed()
        if kind in _SEALS:
            raise RecordError(f"not recorded: {kind} is written by seal() or append_sealed_rollout()")
        return self._write(kind, trust, verdict, severity, time_ns, {**dotted, **fields})

    def append_sealed_rollout(self, rollout_id: str, heads: Mapping[Producer, ChainHead], **fields: Value) -> Event:
        """In a run chain, name all chains of a rollout with their last events; all must be sealed.

        From here on the record of this rollout can be neither edited nor cut nor removed without
        breaking the run chain too. Raises :class:`RecordError`.
        """
        self._refuse_if_closed()
        unsealed = sorted(producer for producer, head in heads.items() if not head.sealed)
        if unsealed or not self._run_scope:
            raise RecordError(
                f"cannot record {rollout_id} as sealed: "
                + (f"not sealed: {', '.join(unsealed)}" if unsealed else "this is not a run chain")
            )
        own: dict[str, Value] = {
            "sealed_rollout_id": rollout_id,
            "heads": _formatted(heads),
            "count": sum(head.seq for head in heads.values()),
        }
        return self._write("rollout.sealed", Trust.OBSERVED, EventVerdict.OBSERVED, 0, None, {**own, **fields})

    def seal(self, heads: Mapping[Producer, ChainHead] | None = None, **fields: Value) -> ChainHead:
        """Write the last line, with the number of lines as ``count``, and return the final head.

        ``heads`` belongs to the seal of a run chain and names the other run-scope chains of the
        node, if any. A run chain is also flushed to the disk. Raises :class:`RecordError`.
        """
        self._refuse_if_closed()
        own: dict[str, Value] = {"count": self._seq + 1, **fields}
        if heads:
            own["heads"] = _formatted(heads)
        self._write(self._seal_kind, Trust.OBSERVED, EventVerdict.OBSERVED, 0, None, own)
        self._sealed = True
        if self._run_scope:
            self.sync()
        return self.head

    def sync(self) -> None:
        """Wait until the disk has what was written.

        Raises :class:`RecordError`, and then the chain is broken.
        """
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            # After a failed fsync the kernel may have dropped the pages and report success next
            # time (fsyncgate).
            self._broken = True
            raise RecordError(f"the record cannot be flushed: {error.strerror}") from error

    @property
    def _seal_kind(self) -> str:
        return "run.sealed" if self._run_scope else "rollout.sealed"

    def _refuse_if_closed(self) -> None:
        if self._broken:
            raise RecordError("the record broke earlier and takes no more events")
        if self._sealed:
            raise RecordError("the record is sealed and takes no more events")

    def _write(
        self,
        kind: str,
        trust: Trust,
        verdict: EventVerdict,
        severity: int,
        time_ns: int | None,
        fields: Mapping[str, Value],
    ) -> Event:
        own = _clean_fields(fields)
        problem = field_problem(kind, own)
        if problem is not None:
            raise RecordError(f"not recorded: {problem}")
        if type(severity) is not int or not 0 <= severity <= MAX_SEVERITY:
            raise RecordError(f"not recorded: severity {severity!r} is not between 0 and {MAX_SEVERITY}")
        now = self._clock_ns()
        event: Event = {
            **self._base,
            "id": uuid7(now),
            "time": str(now if time_ns is None else time_ns),
            "observed": str(now),
            "seq": self._seq + 1,
            "trust": Trust(trust).value,
            "kind": kind,
            "severity": severity,
            "verdict": EventVerdict(verdict).value,
            "prev": self._hash,
            **own,
        }
        body = canonical(event)
        digest = chain_hash(self._hash, body)
        line = to_line(body, digest)
        if len(line) > LINE_LIMIT_BYTES:
            raise RecordError(f"not recorded: a {kind} event of {len(line)} bytes is longer than a line may be")
        self._put(line)
        self._seq += 1
        self._hash = digest
        event["hash"] = digest
        return event

    def _put(self, line: bytes) -> None:
        try:
            written = os.write(self._fd, line)
            why = f"only {written} of {len(line)} bytes were written"
        except OSError as error:
            written, why = -1, str(error.strerror)
        if written == len(line):
            self._end += written
            return
        self._broken = True
        try:
            os.ftruncate(self._fd, self._end)
        except OSError as error:
            why += f"; and the torn line stays: {error.strerror}"
        raise RecordError(f"the record cannot be written: {why}", hint="free space where the run directory lies")


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


def _formatted(heads: Mapping[Producer, ChainHead]) -> list[str]:
    return sorted(format_head(producer, head) for producer, head in heads.items())


def _appendable_size(fd: int) -> int:
    try:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        status = os.fstat(fd)
    except OSError as error:
        raise RecordError(f"the record's descriptor {fd} is not usable: {error.strerror}") from error
    if not flags & os.O_APPEND or flags & os.O_ACCMODE == os.O_RDONLY or not stat.S_ISREG(status.st_mode):
        raise RecordError(f"the record's descriptor {fd} is not a regular file opened for appending")
    return status.st_size


def _clean_fields(fields: Mapping[str, Value]) -> Event:
    return {name: _clean(value) for name, value in fields.items()}


def _clean(value: Value) -> Value:
    """Return ``value`` as plain JSON can hold it.

    Enums as their text, tuples as lists, lone surrogates escaped.
    """
    if isinstance(value, str):
        return _clean_text(value)
    if isinstance(value, list | tuple):
        return [_clean_text(item) if isinstance(item, str) else item for item in value]
    return value


def _clean_text(text: str) -> str:
    text = str.__str__(text)
    if text.isascii():
        return text
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
