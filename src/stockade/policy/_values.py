"""Sizes, durations, methods, ports and lines of text, each parsed once into its only form."""

from __future__ import annotations

import re
import unicodedata
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from stockade.policy._errors import BadValue, nearest, shown

MAX_SIZE_BYTES = 1 << 50
MAX_DURATION_S = 30 * 86_400.0

_BYTES = re.compile(r"([0-9]{1,15}) ?([A-Za-z]+)")
_BYTE_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?) ?([A-Za-z]+)")
_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}

METHODS = frozenset(
    # RFC 9110 §9 and RFC 5789; then WebDAV, which git and package stores still use (RFC 4918, 3253, 5323).
    {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
    | {"PROPFIND", "PROPPATCH", "MKCOL", "COPY", "MOVE", "LOCK", "UNLOCK", "REPORT", "SEARCH"}
)
"""Methods that a rule may list. CONNECT is a way in, not a method; TRACE echoes what proxies add (RFC 9110 §9.3.8)."""


def parse_bytes(value: Any) -> Any:
    """Return a size such as ``"256 MiB"`` in bytes; anything but text is left to the type check."""
    if not isinstance(value, str):
        return value
    match = _BYTES.fullmatch(value)
    if match is None:
        raise BadValue(f"{shown(value)} is not a size", hint="write '256 MiB', '64 KiB' or a whole number of bytes")
    if match[2] not in _BYTE_UNITS:
        hint = "units are binary: B, KiB, MiB, GiB, TiB"
        raise BadValue(f"{shown(match[2])} is not a unit of size", hint=hint)
    return int(match[1]) * _BYTE_UNITS[match[2]]


def parse_duration(value: Any) -> Any:
    """Return a duration such as ``"10 min"`` in seconds; anything but text is left to the type check."""
    if not isinstance(value, str):
        return value
    match = _DURATION.fullmatch(value)
    if match is None:
        raise BadValue(f"{shown(value)} is not a duration", hint="write '90 s', '10 min', '1 h' or a number of seconds")
    if match[2] not in _DURATION_UNITS:
        raise BadValue(f"{shown(match[2])} is not a unit of time", hint="units are ms, s, min, h, d")
    return float(match[1]) * _DURATION_UNITS[match[2]]


def parse_method(value: Any) -> Any:
    """Return an HTTP method of :data:`METHODS`."""
    if not isinstance(value, str) or value in METHODS:
        return value
    if value.upper() == "CONNECT":
        hint = "it asks for a tunnel, whose requests are what a rule names; remove it"
        raise BadValue("CONNECT cannot be listed", hint=hint)
    if value.upper() == "TRACE":
        raise BadValue("TRACE cannot be allowed", hint="it echoes what proxies add to a request; remove it")
    if value.upper() in METHODS:
        raise BadValue(f"{shown(value)} is not a method: methods are case-sensitive", hint=f"write {value.upper()}")
    raise BadValue(f"{shown(value)} is not an HTTP method", hint=nearest(value, METHODS))


def parse_line(value: str) -> str:
    """Return one line of printable text without blanks around it."""
    if value != value.strip() or not value:
        raise BadValue("empty, or blanks at an end", hint="write a few words")
    bad = next((char for char in value if unicodedata.category(char)[0] == "C"), None)
    if bad is not None:
        raise BadValue(f"the character U+{ord(bad):04X} in a line of text", hint="write one line of printable text")
    return value


_LABEL = re.compile(r"[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?")
_RECORDING = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")


def parse_label(value: str) -> str:
    """Return the name of something of the operator's, such as a credential; what is none may be the secret itself."""
    if not _LABEL.fullmatch(value):
        hint = "a lower-case letter, then at most 62 lower-case letters, digits and inner hyphens"
        raise BadValue("this is not a name", hint=hint)
    return value


def parse_recording(value: str) -> str:
    """Return the name of a recording: one that is a file name everywhere."""
    if not _RECORDING.fullmatch(value):
        hint = "at most 64 letters, digits and inner '.', '_' and '-'"
        raise BadValue(f"{shown(value)} is not the name of a recording", hint=hint)
    return value


T = TypeVar("T")


def unique(values: tuple[T, ...]) -> tuple[T, ...]:
    """Refuse an item given twice."""
    seen: set[T] = set()
    for index, value in enumerate(values):
        if value in seen:
            raise BadValue(f"{str(value)[:80]} is listed twice", hint="keep one of them", loc=(index,))
        seen.add(value)
    return values


def distinct(values: tuple[T, ...] | None) -> tuple[T, ...] | None:
    """Refuse an item given twice and an empty list, which one reader takes for *none* and the next for *any*."""
    if values is None:
        return None
    if not values:
        raise BadValue("an empty list", hint="remove the key, or list what is allowed")
    return unique(values)


_SIZE_SCHEMA = {
    "anyOf": [
        {"type": "integer", "minimum": 1, "maximum": MAX_SIZE_BYTES},
        {"type": "string", "pattern": "^[0-9]{1,15} ?(B|KiB|MiB|GiB|TiB)$"},
    ],
    "description": "Bytes, or a whole number with a binary unit.",
}
_DURATION_SCHEMA = {
    "anyOf": [
        {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_DURATION_S},
        {"type": "string", "pattern": "^[0-9]{1,9}(\\.[0-9]{1,6})? ?(ms|s|min|h|d)$"},
    ],
    "description": "Seconds, or a number with a unit.",
}

ByteCount = Annotated[int, Field(ge=1, le=MAX_SIZE_BYTES), BeforeValidator(parse_bytes), WithJsonSchema(_SIZE_SCHEMA)]
"""A size in bytes; in YAML also ``256 MiB``."""

Seconds = Annotated[
    float,
    Field(gt=0, le=MAX_DURATION_S, allow_inf_nan=False),
    BeforeValidator(parse_duration),
    WithJsonSchema(_DURATION_SCHEMA),
]
"""A duration in seconds; in YAML also ``10 min``."""

Method = Annotated[str, BeforeValidator(parse_method), WithJsonSchema({"enum": sorted(METHODS)})]
Port = Annotated[int, Field(ge=1, le=65_535)]
Line = Annotated[str, Field(max_length=500), AfterValidator(parse_line)]
Label = Annotated[str, AfterValidator(parse_label)]
RecordingName = Annotated[str, AfterValidator(parse_recording)]
