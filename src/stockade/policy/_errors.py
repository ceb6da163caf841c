"""How a validator says what is wrong before anybody knows in which file, line and key it stands.

Value types and models raise :class:`BadValue`; the reader (:mod:`stockade.policy._bind`) turns it into the error
of the file that is being read, with its place.
"""

from __future__ import annotations

import datetime as dt
import difflib
from typing import TYPE_CHECKING, TypeAlias

from stockade.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Iterable

Loc: TypeAlias = tuple[str | int, ...]
"""Where a value stands in a document: keys and list indices from the root."""

_SHOWN = 80


class BadValue(PolicyError):
    """A value that no policy may hold; ``loc`` is relative to the model that found it."""

    def __init__(self, message: str, *, hint: str | None = None, loc: Loc = ()) -> None:
        super().__init__(message, hint=hint)
        self.loc = loc


def shown(text: str) -> str:
    """Return ``text`` quoted, escaped and capped: a file's author must not write to the reader's terminal."""
    return ascii(text) if len(text) <= _SHOWN else ascii(text[:_SHOWN]) + "..."


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return a hint that names the valid name nearest to ``name``, or all of them where none is near."""
    names = sorted(valid)
    near = difflib.get_close_matches(name[:_SHOWN].lower(), [one.lower() for one in names], n=1, cutoff=0.6)
    if near:
        return f"did you mean {next(one for one in names if one.lower() == near[0])!r}?"
    return "valid here: " + ", ".join(names)


def found(value: object) -> str:
    """Return what a value is, for people."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, dt.date):
        return f"the date {value}"
    if isinstance(value, str):
        return f"the text {shown(value)}"
    return "nothing" if value is None else f"a {type(value).__name__}"


def text_of(value: object) -> str:
    """Return ``value`` if it is text; a number or a date in its place is a scalar that lacks quotes."""
    if not isinstance(value, str):
        raise BadValue(f"expected text, found {found(value)}", hint="quote it")
    return value
