"""Query parameters against rules: what exactly one server reading allows, and what any reading denies.

Servers disagree about separators, case, escapes, brackets and repetition, so an allow rule takes only a query that
all of them read alike, and a deny rule meets what one of them might read (cases 67 and 69).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stockade.egress.gate._rule import Pairs

_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})")
_SEPARATORS = re.compile(r"[&;]")
_OVERRIDE = re.compile(
    r"(?:^|[&;])(?:_method|x[-_]http[-_]method(?:[-_]override)?|x[-_]method[-_]override)(?:=|[&;]|\Z)",
    re.IGNORECASE | re.ASCII,
)


def overrides_method(query: str) -> bool:
    """Say whether the query asks frameworks for another method (``?_method=DELETE``, case 69)."""
    return _OVERRIDE.search(_decoded(query)) is not None


def holds(query: str | None, pairs: Pairs) -> bool:
    """Say whether every server reads each of ``pairs`` in ``query``, once and with that value."""
    if query is None or ";" in query:
        return False
    parts = query.split("&")
    names = [_loose_name(part) for part in parts]
    return all(f"{name}={value}" in parts and names.count(_loose_name(name)) == 1 for name, value in pairs)


def may_hold(query: str | None, pairs: Pairs) -> bool:
    """Say whether some server might read all of ``pairs`` in ``query``."""
    if not query:
        return False
    if "%25" in query:  # whoever decodes twice sees something else than we do
        return True
    found: dict[str, list[str]] = {}
    for part in _SEPARATORS.split(query):
        found.setdefault(_loose_name(part), []).append(_decoded(part.partition("=")[2]).strip().lower())
    return all(value.lower() in found.get(_loose_name(name), ()) for name, value in pairs)


def _loose_name(part: str) -> str:
    """Return a parameter's name as the most lenient server reads it: PHP cuts at ``[`` and folds ``.`` and blanks."""
    name = _decoded(part.partition("=")[0]).partition("[")[0].partition("\0")[0].strip().lower()
    return name.replace(".", "_").replace(" ", "_").replace("-", "_")


def _decoded(text: str) -> str:
    if "+" in text:
        text = text.replace("+", " ")
    return _ESCAPE.sub(lambda match: chr(int(match[1], 16)), text) if "%" in text else text
