"""Writing one chain.

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
from types import MappingProxyType

from stockade.errors import RecordError
from stockade.events._head import ChainHead, format_head
from stockade.events._line import LINE_LIMIT_BYTES, canonical_of_sorted, chain_hash, to_line, uuid7
from stockade.events._schema import (
    MAX_SEVERITY,
    VERSION,
    Event,
    EventVerdict,
    Producer,
    Trust,
    Value,
)
from stockade.events._shape import Shapes, key_of
from stockade.events._validate import context_problem, field_problem
from stockade.ids import RUN_SCOPE

_SEALS = frozenset({"rollout.sealed", "run.sealed"})
_HELD_LIMIT_BYTES = 256 * 1024


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
        self._shapes = Shapes.of(self._base)
        head = start or ChainHead()
        self._seq, self._hash, self._sealed = head.seq, head.hash, head.sealed
        self._written = (head.seq, head.hash)
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._broken = False
        self._end = _appendable_size(fd)
        if (self._end == 0) != (self._seq == 0):
            raise RecordError(
                f"a chain that starts after event {self._seq} cannot go on in a file of {self._end} bytes",
                hint="take the start from recover_head, and use a fresh file for a fresh chain",
            )

    @property
    def head(self) -> ChainHead:
        """Where the chain ends in the file: what is held does not count."""
        return ChainHead(*self._written, self._sealed)

    @property
    def held(self) -> int:
        """How many events wait for :meth:`flush` or the next :meth:`append`."""
        return len(self._held)

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
        return self._add(kind, dotted, fields, trust, verdict, severity, time_ns, hold=False)

    def append_lazy(
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
        """Take one event as :meth:`append` does, but hold its line until the next one is written, or :meth:`flush`.

        For what has happened already and nobody acts on, such as how a request ended. Whoever uses this flushes after
        a while and at the end: a writer that is given up takes along what it holds. Raises :class:`RecordError` for
        an event that does not fit, and, when so much is held that it is written now, as :meth:`append`.
        """
        return self._add(kind, dotted, fields, trust, verdict, severity, time_ns, hold=True)

    def flush(self) -> None:
        """Write what is held. Raises :class:`RecordError`, and then the chain is broken."""
        if self._broken:
            raise RecordError("the record broke earlier and takes no more events")
        if self._held:
            self._put(b"", (self._seq, self._hash))

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
        return self._write("rollout.sealed", {**own, **fields})

    def seal(self, heads: Mapping[Producer, ChainHead] | None = None, **fields: Value) -> ChainHead:
        """Write the last line, with the number of lines as ``count``, and return the final head.

        ``heads`` belongs to the seal of a run chain and names the other run-scope chains of the
        node, if any. A run chain is also flushed to the disk. Raises :class:`RecordError`.
        """
        self._refuse_if_closed()
        own: dict[str, Value] = {"count": self._seq + 1, **fields}
        if heads:
            own["heads"] = _formatted(heads)
        self._write(self._seal_kind, own)
        self._sealed = True
        if self._run_scope:
            self.sync()
        return self.head

    def sync(self) -> None:
        """Write what is held, and wait until the disk has it all.

        Raises :class:`RecordError`, and then the chain is broken.
        """
        self.flush()
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

    def _add(
        self,
        kind: str,
        dotted: Mapping[str, Value],
        fields: dict[str, Value],
        trust: Trust,
        verdict: EventVerdict,
        severity: int,
        time_ns: int | None,
        *,
        hold: bool,
    ) -> Event:
        self._refuse_if_closed()
        if kind in _SEALS:
            raise RecordError(f"not recorded: {kind} is written by seal() or append_sealed_rollout()")
        own = {**dotted, **fields} if dotted else fields
        return self._write(kind, own, trust, verdict, severity, time_ns, hold=hold)

    def _write(
        self,
        kind: str,
        fields: Event,
        trust: Trust = Trust.OBSERVED,
        verdict: EventVerdict = EventVerdict.OBSERVED,
        severity: int = 0,
        time_ns: int | None = None,
        *,
        hold: bool = False,
    ) -> Event:
        key = key_of(kind, fields)
        own, shape = fields, self._shapes.get(key)
        if shape is None or not shape.holds(fields):
            own = _clean_fields(fields)
            problem = field_problem(kind, own)
            if problem is not None:
                raise RecordError(f"not recorded: {problem}")
            shape = self._shapes.learn(key, fields, own)
        if type(severity) is not int or not 0 <= severity <= MAX_SEVERITY:
            raise RecordError(f"not recorded: severity {severity!r} is not between 0 and {MAX_SEVERITY}")
        now = self._clock_ns()
        event: Event = {**shape.blank, **self._base, **own}
        event["id"] = uuid7(now)
        event["observed"] = str(now)
        event["time"] = event["observed"] if time_ns is None else str(time_ns)
        event["seq"] = self._seq + 1
        event["trust"] = trust.value if type(trust) is Trust else Trust(trust).value
        event["kind"] = kind
        event["severity"] = severity
        event["verdict"] = verdict.value if type(verdict) is EventVerdict else EventVerdict(verdict).value
        event["prev"] = self._hash
        try:
            body = canonical_of_sorted(event)
        except UnicodeEncodeError:
            event.update(_clean_fields(own))
            body = canonical_of_sorted(event)
        digest = chain_hash(self._hash, body)
        line = to_line(body, digest)
        if len(line) > LINE_LIMIT_BYTES:
            raise RecordError(f"not recorded: a {kind} event of {len(line)} bytes is longer than a line may be")
        if hold and self._held_bytes + len(line) <= _HELD_LIMIT_BYTES:
            self._held.append(line)
            self._held_bytes += len(line)
        else:
            self._put(line, (self._seq + 1, digest))
        self._seq += 1
        self._hash = digest
        event["hash"] = digest
        return event

    def _put(self, line: bytes, head: tuple[int, str]) -> None:
        """Write what is held and ``line``; then the file ends at ``head``."""
        if self._held:
            line = b"".join((*self._held, line))
            self._held.clear()
            self._held_bytes = 0
        try:
            written = os.write(self._fd, line)
            why = f"only {written} of {len(line)} bytes were written"
        except OSError as error:
            written, why = -1, str(error.strerror)
        if written == len(line):
            self._end += written
            self._written = head
            return
        self._broken = True
        try:
            os.ftruncate(self._fd, self._end)
        except OSError as error:
            why += f"; and the torn line stays: {error.strerror}"
        raise RecordError(f"the record cannot be written: {why}", hint="free space where the run directory lies")


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
