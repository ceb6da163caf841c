"""Reading a run's events in the order of time, while it runs or afterwards.

A big run has more chains than a process may have open files and more events than it has memory. So
each chain is read in pieces, its file open only while a piece is read, and only the chains that
overlap at the present moment of the merge hold a piece.
"""

from __future__ import annotations

import heapq
import os
import time
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from stockade.errors import RecordError
from stockade.events._files import (
    EVENTS_DIR,
    RUN_CHAIN,
    is_node_name,
    open_directory,
    open_regular,
    open_run,
    parse_chain_name,
)
from stockade.events._head import is_seal
from stockade.events._line import LINE_LIMIT_BYTES, decode
from stockade.events._schema import Event

_FIRST_BYTES = 4 << 10
_PIECE_BYTES = 64 << 10


def iter_events(
    run_dir: Path,
    *,
    rollout: str | None = None,
    kinds: Collection[str] | None = None,
    follow: bool = False,
    poll_s: float = 0.25,
) -> Iterator[Event]:
    """Yield the events of a run, merged by time; only those of ``rollout`` and of ``kinds``, if given.

    Without ``follow`` it ends with what is there now. With it, new events are looked for every
    ``poll_s`` seconds until every node's run chain is sealed; events of different chains that are
    written within one such interval are in order, others come as they are found. A line that is
    being written is left for the next look.

    This reads; it does not verify. Raises :class:`RecordError` for a line that is no event at all,
    for a file that got shorter, and where no run is.
    """
    reader = _Reader(run_dir, rollout)
    wanted = None if kinds is None else frozenset(kinds)
    while True:
        # Asked before looking: what was written before the seal is then certainly seen in this
        # round.
        last = not follow or reader.is_sealed()
        for event in reader.merge():
            if wanted is None or event.get("kind") in wanted:
                yield event
        if last:
            return
        time.sleep(poll_s)


def is_run_sealed(run_dir: Path) -> bool:
    """Return whether the run chain of every node, and of at least one, is sealed.

    Raises :class:`RecordError` where no run is.
    """
    return _Reader(run_dir, None).is_sealed()


@dataclass(slots=True)
class _Chain:
    """One chain's file: how far it was read, and the events read ahead."""

    node: str
    file: str
    rank: int
    offset: int = 0
    line: int = 0
    sealed: bool = False
    ahead: deque[Event] = field(default_factory=deque)

    @property
    def place(self) -> str:
        return f"{EVENTS_DIR}/{self.node}/{self.file}"

    def load(self, events: int, size_bytes: int) -> None:
        """Read on by about ``size_bytes``, at least one whole line if there is one."""
        try:
            with open_directory(self.node, events) as directory:
                fd = open_regular(self.file, directory)
        except OSError as error:
            raise RecordError(f"{self.place}: cannot be read: {error.strerror or error}") from error
        try:
            if os.fstat(fd).st_size < self.offset:
                raise RecordError(f"{self.place}: got shorter while it was read")
            piece = os.pread(fd, size_bytes, self.offset)
            if b"\n" not in piece and len(piece) == size_bytes:
                piece = os.pread(fd, LINE_LIMIT_BYTES, self.offset)
                if b"\n" not in piece and len(piece) == LINE_LIMIT_BYTES:
                    raise RecordError(f"{self.place}:{self.line + 1}: longer than a line may be")
        finally:
            os.close(fd)
        self._take(piece[: piece.rfind(b"\n") + 1])

    def _take(self, lines: bytes) -> None:
        self.offset += len(lines)
        for line in lines.splitlines(keepends=True):
            self.line += 1
            try:
                event = decode(line)
                _time_of(event)
            except ValueError as error:
                raise RecordError(f"{self.place}:{self.line}: not an event: {error}") from error
            self.ahead.append(event)
            self.sealed = is_seal(event)


class _Reader:
    def __init__(self, run_dir: Path, rollout: str | None) -> None:
        self._run_dir = run_dir
        self._rollout = rollout
        self._chains: dict[tuple[str, str], _Chain] = {}

    def merge(self) -> Iterator[Event]:
        """Yield, by time, what was written since the last round."""
        with self._open_events() as events:
            for node in _nodes(events):
                self._find_chains(node, events)
            heap: list[tuple[int, int, _Chain]] = []
            for chain in self._chains.values():
                _push(heap, chain, events, _FIRST_BYTES)
            while heap:
                _, _, chain = heapq.heappop(heap)
                yield chain.ahead.popleft()
                _push(heap, chain, events, _PIECE_BYTES)

    def is_sealed(self) -> bool:
        """Return whether the run chain of every node, and of at least one, is sealed."""
        with self._open_events() as events:
            nodes = _nodes(events)
            return bool(nodes) and all(_ends_sealed(node, events) for node in nodes)

    @contextmanager
    def _open_events(self) -> Iterator[int]:
        with open_run(self._run_dir) as root, ExitStack() as stack:
            try:
                events = stack.enter_context(open_directory(EVENTS_DIR, root))
            except OSError as error:
                raise RecordError(f"{self._run_dir}: holds no record: {error.strerror or error}") from error
            yield events

    def _find_chains(self, node: str, events: int) -> None:
        with open_directory(node, events) as directory:
            for file in sorted(os.listdir(directory)):
                name = parse_chain_name(file)
                if name is not None and self._rollout in (None, name.rollout):
                    self._chains.setdefault((node, file), _Chain(node, file, len(self._chains)))


def _push(heap: list[tuple[int, int, _Chain]], chain: _Chain, events: int, size_bytes: int) -> None:
    """Put ``chain`` back among those that have events ahead, reading on if need be."""
    if not chain.ahead and not chain.sealed:
        chain.load(events, size_bytes)
    if chain.ahead:
        heapq.heappush(heap, (_time_of(chain.ahead[0]), chain.rank, chain))


def _nodes(events: int) -> list[str]:
    with os.scandir(events) as entries:
        return sorted(e.name for e in entries if is_node_name(e.name) and e.is_dir(follow_symlinks=False))


def _ends_sealed(node: str, events: int) -> bool:
    try:
        with open_directory(node, events) as directory:
            fd = open_regular(RUN_CHAIN, directory)
    except FileNotFoundError:
        return False
    try:
        size = os.fstat(fd).st_size
        tail = os.pread(fd, _PIECE_BYTES, max(0, size - _PIECE_BYTES))
    finally:
        os.close(fd)
    last = tail[tail.rfind(b"\n", 0, -1) + 1 :]
    try:
        return last.endswith(b"\n") and is_seal(decode(last))
    except ValueError:
        return False


def _time_of(event: Event) -> int:
    text = event.get("time")
    if not isinstance(text, str) or not text.isdecimal():
        raise ValueError("no time")
    return int(text)
