"""What a scalar is: a type only where every YAML version agrees, else an error that says how to write it.

YAML 1.1 reads ``no`` as false, ``012`` as ten, ``1:30`` as ninety and ``1_000`` as a thousand; YAML 1.2 does not,
and readers of both kinds are in use (https://yaml.org/spec/1.2.2/#103-core-schema, https://yaml.org/type/). A rule
whose meaning depends on the reader is no rule.
"""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from stockade.policy._errors import shown

if TYPE_CHECKING:
    from stockade.policy._yaml import ScalarNode


@dataclass(frozen=True, slots=True)
class Ambiguous:
    """A plain scalar without one meaning."""

    message: str
    hint: str


Resolved: TypeAlias = str | int | float | bool | dt.date | Ambiguous | None

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLS = {"true": True, "false": False}
_BOOL_LIKE = frozenset({"true", "false", "yes", "no", "on", "off", "y", "n"})
_INT = re.compile(r"-?(?:0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"-?(?:0|[1-9][0-9]{0,11})\.[0-9]{1,9}")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_NUMBER_LIKE = re.compile(
    r"[-+]?0[xob][0-9a-f_]+"
    r"|[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?(?:e[-+]?[0-9]+)?"
    r"|[-+]?\.[0-9_]+(?:e[-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|nan)"
    r"|[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?",
    re.IGNORECASE,
)
_TIME_LIKE = re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}(?:[Tt ].*)?")


def resolve(node: ScalarNode) -> Resolved:  # noqa: PLR0911  one return per kind of scalar reads best
    """Return the value of a scalar: quoted and block scalars are text, plain ones what all readers agree on."""
    text = node.text
    if not node.plain:
        return text
    if text in _NULL:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if text.lower() in _BOOL_LIKE:
        return Ambiguous(f"{shown(text)} is a truth value to some YAML readers", "write true or false, or quote it")
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _DATE.fullmatch(text):
        return _date(text)
    if _NUMBER_LIKE.fullmatch(text):
        return Ambiguous(f"{shown(text)} is a number to some YAML readers", "write plain decimal digits, or quote it")
    if _TIME_LIKE.fullmatch(text):
        return Ambiguous(f"{shown(text)} is a date or time to some YAML readers", "write 2027-01-31, or quote it")
    if text in {"=", "<<"}:
        return Ambiguous(f"{shown(text)} has a special meaning to some YAML readers", "quote it")
    return text


def _date(text: str) -> dt.date | Ambiguous:
    try:
        return dt.date.fromisoformat(text)
    except ValueError:
        return Ambiguous(f"{text} is not a date of the calendar", "write year-month-day like 2027-01-31")
