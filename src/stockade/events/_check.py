"""Checking one chain, line by line, with the memory of one line.

A line that is unsound by itself is counted and otherwise forgotten, and the line after it is taken
at its word; so one edit is one problem, at its own line.
"""

from __future__ import annotations

from dataclasses import dataclass

from stockade.events._files import ChainName
from stockade.events._head import ChainHead, is_seal
from stockade.events._line import GENESIS, canonical, chain_hash, decode, to_line
from stockade.events._schema import Event
from stockade.events._validate import event_problem


@dataclass(slots=True)
class ChainCheck:
    """The state of checking the chain called ``name`` of run ``run_id``.

    ``head`` is where the chain ends as far as it was fed; ``lines`` counts what was fed.
    """

    run_id: str
    name: ChainName
    lines: int = 0
    seq: int = 0
    hash: str | None = GENESIS
    sealed: bool = False

    @property
    def head(self) -> ChainHead:
        """The last event that was fed."""
        return ChainHead(self.seq, self.hash or "", self.sealed)

    def feed(self, line: bytes) -> tuple[Event | None, str | None]:
        """Take the next line, with its newline.

        Return its event, if it is one, and what is wrong, if anything.
        """
        self.lines += 1
        after_seal, self.sealed = self.sealed, False
        event, digest, problem = _parse(line)
        if event is None:
            # What this line said of itself is lost: the next one can only be taken at its word.
            self.hash = None
            self.seq += 1
            return None, problem
        problem = self._misplaced(event) or self._broken_link(event)
        if after_seal:
            problem = "a line after the line that sealed the chain"
        self.hash, self.seq = digest, int(str(event["seq"]))
        self.sealed = is_seal(event)
        if self.sealed and problem is None and event.get("count") != self.seq:
            problem = f"the seal counts {event.get('count')} events, the chain has {self.seq}"
        return event, problem

    def skip(self) -> tuple[None, str]:
        """Take a line that is too long to be looked at."""
        self.lines += 1
        self.seq += 1
        self.hash, self.sealed = None, False
        return None, "longer than a line may be"

    def end(self) -> str | None:
        """Return what is wrong with a chain that ends here, if anything."""
        if self.lines == 0:
            return "not sealed: the file is empty"
        return None if self.sealed else "not sealed: the chain was cut, or its writer has not ended it"

    def _misplaced(self, event: Event) -> str | None:
        rollout, producer = self.name
        for field, expected in (
            ("run_id", self.run_id),
            ("rollout_id", rollout),
            ("producer", producer.value),
        ):
            if event.get(field) != expected:
                return f"{field} is {event.get(field)!a}, but this file belongs to {expected!r}"
        return None

    def _broken_link(self, event: Event) -> str | None:
        seq = event.get("seq")
        if seq != self.seq + 1:
            return f"event {seq} follows event {self.seq}: lines were removed, added, or moved"
        if self.hash is not None and event.get("prev") != self.hash:
            return "does not follow the line before it (prev is not that line's hash)"
        return None


def _parse(line: bytes) -> tuple[Event | None, str, str | None]:
    """Return the event of a sound line and its hash, or what is wrong with the line by itself."""
    if not line.endswith(b"\n"):
        return None, "", "the line is torn: no newline at its end"
    try:
        event = decode(line)
        problem = event_problem(event)
        if problem is not None:
            return None, "", problem
        digest = str(event.pop("hash"))
        body = canonical(event)
    except ValueError as error:
        return None, "", f"not an event: {error}"
    if chain_hash(str(event["prev"]), body) != digest:
        return None, "", "was edited: the hash is not that of the line"
    if to_line(body, digest) != line:
        return None, "", "was edited: the same content in other bytes than a writer leaves"
    return event, digest, None
