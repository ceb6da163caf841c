"""Verifying the whole record of a run.

Each node's run chain (``_run.control.jsonl``) opens with the digest of the manifest, names the last
event of every chain of every rollout, and is sealed. So a change anywhere is a break in some chain,
and removing, adding or cutting a file contradicts the run chain.

What this cannot see: whoever may rewrite *all* files of a run can also build new chains. That takes
a witness who keeps the run chain's head out of that person's reach. Until one is configured, a
report says "unwitnessed".
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from stockade.events._check import ChainCheck
from stockade.events._files import (
    EVENTS_DIR,
    MANIFEST,
    RUN_CHAIN,
    ChainName,
    chain_name,
    is_node_name,
    open_directory,
    open_regular,
    open_run,
    parse_chain_name,
)
from stockade.events._head import ChainHead, parse_head
from stockade.events._line import LINE_LIMIT_BYTES
from stockade.events._schema import Event, Producer
from stockade.ids import RUN_SCOPE, parse_rollout_id

_PROBLEMS_PER_FILE = 20
_BUFFER_BYTES = 1 << 18


class Problem(NamedTuple):
    """One thing that is wrong.

    The file, relative to the run's directory; the line, if one can be named; and what.
    """

    file: str
    line: int | None
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}" if self.line is None else f"{self.file}:{self.line}: {self.what}"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What verifying found.

    ``events`` counts lines; ``witnessed`` is whether somebody else vouches for the heads.
    """

    run_dir: Path
    problems: tuple[Problem, ...]
    files: int
    events: int
    witnessed: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong. An unwitnessed record can be ok."""
        return not self.problems

    @property
    def witness(self) -> str:
        """``witnessed`` or ``unwitnessed``."""
        return "witnessed" if self.witnessed else "unwitnessed"

    def __bool__(self) -> bool:
        raise TypeError("a report is neither true nor false; ask .ok")

    def __str__(self) -> str:
        state = "record verified" if self.ok else f"record DOES NOT VERIFY: {len(self.problems)} problem(s)"
        return f"{state}; {self.files} chains, {self.events} events, {self.witness}"


def verify_run(run_dir: Path) -> VerifyReport:
    """Verify every chain of the run in ``run_dir``; the directory must be called by the run's ID.

    Reads each file once, one line at a time. Raises :class:`RecordError` only if there is no such
    directory: all else that is wrong is a problem in the report.
    """
    survey = _Survey(run_id=run_dir.resolve().name)
    with open_run(run_dir) as root:
        survey.manifest_digest = _manifest_digest(root, survey)
        try:
            with open_directory(EVENTS_DIR, root) as events:
                _check_nodes(events, survey)
        except OSError as error:
            survey.add(EVENTS_DIR, None, f"no directory of events: {_why(error)}")
    return VerifyReport(run_dir, tuple(survey.problems), survey.files, survey.events)


@dataclass(slots=True)
class _Survey:
    run_id: str
    manifest_digest: str | None = None
    problems: list[Problem] = field(default_factory=list)
    files: int = 0
    events: int = 0

    def add(self, file: str, line: int | None, what: str) -> None:
        self.problems.append(Problem(file, line, what))


class _Named(NamedTuple):
    """A chain's end as the run chain states it, and the line that does."""

    seq: int
    hash: str
    line: int


def _manifest_digest(root: int, survey: _Survey) -> str | None:
    try:
        with os.fdopen(open_regular(MANIFEST, root), "rb") as file:
            return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    except OSError as error:
        survey.add(MANIFEST, None, f"cannot be read: {_why(error)}")
        return None


def _check_nodes(events: int, survey: _Survey) -> None:
    nodes = sorted(os.listdir(events))
    if not nodes:
        survey.add(EVENTS_DIR, None, "no node has written anything")
    for node in nodes:
        place = f"{EVENTS_DIR}/{_printable(node)}"
        if not is_node_name(node):
            survey.add(place, None, "not the name of a node")
            continue
        try:
            with open_directory(node, events) as directory:
                _check_node(directory, place, survey)
        except OSError as error:
            survey.add(place, None, f"not a node's directory: {_why(error)}")


def _check_node(directory: int, place: str, survey: _Survey) -> None:
    run_chain = _RunChain(survey, f"{place}/{RUN_CHAIN}")
    _check_file(directory, ChainName(RUN_SCOPE, Producer.CONTROL), run_chain.path, survey, run_chain)
    named = run_chain.named
    for file in sorted(os.listdir(directory)):
        path = f"{place}/{_printable(file)}"
        name = parse_chain_name(file)
        if file == RUN_CHAIN:
            continue
        if name is None:
            survey.add(path, None, "not the name of a chain")
            continue
        head = _check_file(directory, name, path, survey)
        stated = named.pop(name, None)
        if stated is None:
            survey.add(path, None, f"{RUN_CHAIN} does not name this file")
        elif head is not None and (head.seq, head.hash) != (stated.seq, stated.hash):
            survey.add(
                path,
                head.seq,
                f"ends otherwise than {RUN_CHAIN}:{stated.line} states (event {stated.seq})",
            )
    for name, stated in named.items():
        path = f"{place}/{chain_name(*name)}"
        survey.add(path, None, f"missing, though {RUN_CHAIN}:{stated.line} names it")


class _RunChain:
    """What a node's run chain says about the other files of the node."""

    def __init__(self, survey: _Survey, path: str) -> None:
        self._survey = survey
        self.path = path
        self.named: dict[ChainName, _Named] = {}

    def take(self, line: int, event: Event) -> str | None:
        """Read one event; return what is wrong with it as a part of the run chain."""
        kind = event.get("kind")
        if line == 1 and kind != "run.start":
            return "a run chain opens with run.start"
        if kind == "run.start":
            return self._start(event)
        if kind == "rollout.sealed":
            return self._heads(line, event, str(event.get("sealed_rollout_id")))
        if kind == "run.sealed":
            return self._heads(line, event, RUN_SCOPE)
        return None

    def _start(self, event: Event) -> str | None:
        found = self._survey.manifest_digest
        if found is None or event.get("manifest_digest") == found:
            return None
        return f"states another manifest: {MANIFEST} was changed (it is {found} now)"

    def _heads(self, line: int, event: Event, rollout: str) -> str | None:
        heads = event.get("heads", [])
        try:
            rollout_id = parse_rollout_id(rollout)
            parsed = [parse_head(text) for text in heads] if isinstance(heads, list) else []
        except ValueError:
            return "names chains in a way that cannot be read"
        for head in parsed:
            name = ChainName(rollout_id, Producer(head.producer))
            if name in self.named:
                return f"names {chain_name(*name)} a second time"
            self.named[name] = _Named(head.seq, head.hash, line)
        return None


def _check_file(
    directory: int, name: ChainName, path: str, survey: _Survey, run_chain: _RunChain | None = None
) -> ChainHead | None:
    check = ChainCheck(survey.run_id, name)
    found = 0
    try:
        with os.fdopen(open_regular(chain_name(*name), directory), "rb", _BUFFER_BYTES) as file:
            survey.files += 1
            for line in _lines(file):
                event, what = check.feed(line) if line is not None else check.skip()
                if what is None and run_chain is not None and event is not None:
                    what = run_chain.take(check.lines, event)
                if what is not None:
                    found += 1
                    if found <= _PROBLEMS_PER_FILE:
                        survey.add(path, check.lines, what)
    except OSError as error:
        survey.add(path, None, f"cannot be read: {_why(error)}")
        return None
    survey.events += check.lines
    if found > _PROBLEMS_PER_FILE:
        survey.add(path, None, f"{found - _PROBLEMS_PER_FILE} more lines are wrong")
    what = check.end()
    if what is not None:
        survey.add(path, check.lines or None, what)
    return check.head if found == 0 and what is None else None


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Yield the lines of ``file``; ``None`` stands for one that is too long to be a line."""
    while line := file.readline(LINE_LIMIT_BYTES + 1):
        if len(line) <= LINE_LIMIT_BYTES:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(LINE_LIMIT_BYTES)
        yield None


def _printable(name: str) -> str:
    return ascii(name)[1:-1]


def _why(error: OSError) -> str:
    return error.strerror or str(error)
