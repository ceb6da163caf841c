"""What all events of one kind with the same names and types of fields share, found out once.

A worker writes a handful of shapes over and over. For one that was found good, only what depends on values is left to
check, and no key need be sorted again.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import NamedTuple

from stockade.events._schema import ENUMS, MAX_INT, Event, Value

_PLAIN = frozenset({str, int, bool, NoneType})
"""Exactly these types are written as they are: enums are not, and a list must be looked into."""
_FIRST = ("id", "time", "observed", "seq", "trust", "kind", "severity", "verdict", "prev")
_MAX_SHAPES = 4096

Key = tuple[object, ...]


class Shape(NamedTuple):
    """``blank`` has every name of the event but ``hash``, in order.

    Values of ``whole`` (integers) and ``closed`` (texts from a list) are bounded by more than their type.
    """

    blank: dict[str, None]
    whole: tuple[str, ...]
    closed: tuple[str, ...]

    def holds(self, fields: Mapping[str, Value]) -> bool:
        """Say whether the values of ``fields``, which have this shape, are among those that their names allow."""
        for name in self.whole:
            if not -MAX_INT <= fields[name] <= MAX_INT:  # type: ignore[operator]  # the shape says that it is an int
                return False
        return all(fields[name] in ENUMS[name] for name in self.closed) if self.closed else True


class Shapes:
    """The known shapes of events with the names ``base``. Chains whose events have the same base share them."""

    __slots__ = ("_base", "_known", "get")

    def __init__(self, base: tuple[str, ...]) -> None:
        self._base = base
        self._known: dict[Key, Shape] = {}
        self.get = self._known.get

    @classmethod
    def of(cls, base: Event) -> Shapes:
        """Return the shapes of events that have the names of ``base``."""
        names = tuple(base)
        return _BY_BASE.setdefault(names, cls(names))

    def learn(self, key: Key, fields: Mapping[str, Value], own: Event) -> Shape:
        """Return the shape of ``own``, which is ``fields`` made plain and found good; keep it if they are the same."""
        names = sorted((*self._base, *_FIRST, *own))
        whole = tuple(name for name, value in own.items() if type(value) is int)
        shape = Shape(dict.fromkeys(names), whole, tuple(ENUMS.keys() & own.keys()))
        if all(type(value) in _PLAIN for value in fields.values()) and len(self._known) < _MAX_SHAPES:
            self._known[key] = shape
        return shape


_BY_BASE: dict[tuple[str, ...], Shapes] = {}


def key_of(kind: str, fields: Mapping[str, Value]) -> Key:
    """Return what two events have in common that have the same shape."""
    return (kind, *fields, *map(type, fields.values()))
