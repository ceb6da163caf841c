"""The record of one rollout's traffic, written by the worker itself.

A decision is on record before the first byte of what it allows is forwarded; if it cannot be written the answer is
no (egress case 102). Denials allow nothing, so a flood of them may be folded (case 103): of equal denials the first
few of a second are written as they come, the others are counted and written as one event with ``count`` at the end
of it. No count is lost while the worker lives; SIGKILL loses what the running second has folded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stockade.egress._counts import DECISIONS
from stockade.egress._masking import Mask
from stockade.egress.gate import Budget, Reason
from stockade.events import KINDS, ChainHead, ChainWriter, Event, EventVerdict, Value

_ALLOWED = EventVerdict.ALLOWED
_OBSERVED = EventVerdict.OBSERVED
_DENIED = EventVerdict.DENIED
FOLD_WINDOW_S = 1.0
_SINGLE_PER_KEY = 5
_SINGLE_PER_WINDOW = 20
_KEYS_PER_WINDOW = 16

_SEVERITY: Mapping[Reason, int] = {
    Reason.METADATA_ADDRESS: 5,
    Reason.SNI_MISMATCH: 5,
    Reason.MIXED_ANSWER: 5,
    Reason.INTERNAL_ADDRESS: 4,
    Reason.OWN_ADDRESS: 4,
    Reason.DENIED_ADDRESS: 4,
    Reason.BYTES_OUT_EXCEEDED: 4,
    Reason.REQUEST_TOO_LARGE: 4,
    Reason.NOT_TLS: 4,
    Reason.INTERNAL_ERROR: 4,
    Reason.SECRET_FOUND: 5,
    Reason.FOREIGN_CREDENTIAL: 4,
    Reason.HOST_MISMATCH: 4,
    Reason.LABEL_TOO_LONG: 4,
    Reason.TOO_MANY_NAMES: 4,
}
_DENIED_SEVERITY = 3
_TEXT: Mapping[Reason, str] = {reason: reason.value for reason in Reason}
"""An enum's ``value`` is a look-up in Python; this one is not."""
_NAME = "net.dns"
"""Questions about names are on record, but no requests: nothing leaves because of one."""
_ALLOWED_TEXT = _TEXT[Reason.ALLOWED]

_PLACE: Mapping[str, str] = {
    "net.request": "server.address",
    "net.connect": "server.address",
    "net.dns": "dns.question.name",
}
_Key = tuple[str, Reason, Value, Value]
LEARNT = frozenset(
    {
        Reason.HOST_NOT_ALLOWED,
        Reason.PORT_NOT_ALLOWED,
        Reason.METHOD_NOT_ALLOWED,
        Reason.PATH_NOT_ALLOWED,
        Reason.QUERY_NOT_ALLOWED,
    }
)
"""Denials that rules are learnt from. Each was counted as a request before, so no flood of them fills a record."""


@dataclass(slots=True)
class _Fold:
    fields: dict[str, Value]
    count: int = 0


@dataclass(slots=True)
class Journal:
    """Writes the ``net.*`` events of one chain. Every method but :meth:`head` may raise RecordError.

    Decisions are counted in ``budget``, folded ones too.
    """

    writer: ChainWriter
    budget: Budget
    tally: dict[str, int] = field(default_factory=dict)
    """Decisions by kind and reason, for the metrics of the whole worker."""
    whole: frozenset[Reason] = frozenset()
    """Denials for these reasons are never folded."""
    mask: Mask | None = None
    """Takes known secrets out of what is written."""
    _window_ends_s: float = 0.0
    _singles: int = 0
    _seen: dict[_Key, int] = field(default_factory=dict)
    _folds: dict[_Key, _Fold] = field(default_factory=dict)

    @property
    def head(self) -> ChainHead:
        """Where the chain ends."""
        return self.writer.head

    @property
    def broken(self) -> bool:
        """Whether the chain takes no more events."""
        return self.writer.broken

    @property
    def folding(self) -> bool:
        """Whether denials wait for :meth:`flush`."""
        return bool(self._folds)

    def allow(self, kind: str, fields: Mapping[str, Value]) -> str:
        """Record a permission; return the event's id, which ``net.end`` repeats as ``request_id``."""
        if kind != _NAME:
            self.budget.decided(denied=False)
        self._count(kind, Reason.ALLOWED)
        event = self._append(kind, _ALLOWED, 0, {**fields, "reason": _ALLOWED_TEXT})
        return str(event["id"])

    def deny(self, kind: str, reason: Reason, fields: Mapping[str, Value], now: float) -> None:
        """Record a refusal, or count it towards the fold of its like."""
        if kind != _NAME:
            self.budget.decided(denied=True)
        self._count(kind, reason)
        if reason in self.whole:
            self._write_denial(kind, reason, fields)
            return
        if now >= self._window_ends_s:
            self.flush()
            self._window_ends_s = now + FOLD_WINDOW_S
        key = self._key(kind, reason, fields)
        seen = self._seen.get(key, 0)
        if seen < _SINGLE_PER_KEY and self._singles < _SINGLE_PER_WINDOW:
            self._seen[key] = seen + 1
            self._singles += 1
            self._write_denial(kind, reason, fields)
            return
        fold = self._folds.get(key)
        if fold is None:
            fold = self._folds[key] = _Fold(_common(key, fields))
        fold.count += 1

    def end(self, reason: Reason, fields: Mapping[str, Value], *, denied: bool) -> None:
        """Record how something that was allowed ended; ``denied``: the gate ended it."""
        if denied:
            self.budget.decided(denied=True, first=False)
            self._count("net.end", reason)
        verdict = _DENIED if denied else _OBSERVED
        severity = _SEVERITY.get(reason, _DENIED_SEVERITY) if denied else 0
        # Nothing waits for it: it goes to the file together with the next line, or when the loop's round is over.
        told = {**fields, "reason": _TEXT[reason]}
        if self.mask is not None:
            self.mask(told)
        self.writer.append_lazy("net.end", told, verdict=verdict, severity=severity)

    def _count(self, kind: str, reason: Reason) -> None:
        name = DECISIONS[kind][reason]
        self.tally[name] = self.tally.get(name, 0) + 1

    @property
    def holding(self) -> bool:
        """Whether ends wait for :meth:`write_held`."""
        return self.writer.held > 0

    def write_held(self) -> None:
        """Write the ends that wait."""
        if not self.writer.broken:
            self.writer.flush()

    def flush(self) -> None:
        """Write what was folded or held, and start a new window."""
        self.write_held()
        folds, self._folds = self._folds, {}
        self._seen.clear()
        self._singles = 0
        for (kind, reason, _host, _port), fold in folds.items():
            self._write_denial(kind, reason, {**fold.fields, "count": fold.count})

    def _write_denial(self, kind: str, reason: Reason, fields: Mapping[str, Value]) -> None:
        severity = _SEVERITY.get(reason, _DENIED_SEVERITY)
        self._append(kind, _DENIED, severity, {**fields, "reason": reason.value})

    def _append(self, kind: str, verdict: EventVerdict, severity: int, fields: dict[str, Value]) -> Event:
        if self.mask is not None:
            self.mask(fields)
        return self.writer.append(kind, fields, verdict=verdict, severity=severity)

    def _key(self, kind: str, reason: Reason, fields: Mapping[str, Value]) -> _Key:
        """Equal denials share a key; past a bound, so do all of one reason: a flood may vary its host."""
        key = (kind, reason, fields.get(_PLACE[kind]), fields.get("server.port"))
        if key in self._seen or key in self._folds:
            return key
        if len(self._seen) + len(self._folds) >= _KEYS_PER_WINDOW:
            return (kind, reason, None, None)
        return key


def _common(key: _Key, fields: Mapping[str, Value]) -> dict[str, Value]:
    """Return the fields that all members of a fold share; what is required but differs is null."""
    kind, reason, host, port = key
    common: dict[str, Value] = dict.fromkeys(KINDS[kind])
    common |= {"reason": reason.value, _PLACE[kind]: host}
    if kind != "net.dns":
        common["server.port"] = port
    if host is not None and "rule" in fields:
        common["rule"] = fields["rule"]
    return common
