"""Query parameters that a rule names: ``query: {service: git-upload-pack}``.

Names and values are unreserved characters only (RFC 3986 §2.3), so each has exactly one spelling. An allow rule takes a
request whose query holds each of them once and in that spelling; a deny rule meets what any server could read as all of
them. The gate compares; see its documentation for the words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import AfterValidator, PlainSerializer, WithJsonSchema

from stockade.policy._errors import BadValue, shown

_WORD = r"[A-Za-z0-9._~-]{1,128}"
_NAME = re.compile(_WORD)
_MAX_PARAMETERS = 8


def _checked(query: Mapping[str, str]) -> Mapping[str, str]:
    if not query:
        raise BadValue("an empty mapping", hint="remove the key, or name a parameter and its value")
    if len(query) > _MAX_PARAMETERS:
        raise BadValue(f"more than {_MAX_PARAMETERS} parameters", hint="name those that tell requests apart")
    for name, value in query.items():
        for text in (name, value):
            if not _NAME.fullmatch(text):
                hint = "letters, digits and - . _ ~ only: they have one spelling in a URL"
                raise BadValue(f"{shown(text)} is not a plain word of a query", hint=hint, loc=(name,))
    folded = [name.lower() for name in query]
    if len(set(folded)) < len(folded):
        raise BadValue("two parameters that differ in case only", hint="keep one of them")
    return MappingProxyType(dict(query))  # models are frozen, all the way down


def _plain(query: Any) -> dict[str, str]:
    return dict(query)


QueryField = Annotated[
    Mapping[str, str],
    AfterValidator(_checked),
    PlainSerializer(_plain, return_type=dict[str, str]),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": f"^{_WORD}$"},
            "additionalProperties": {"type": "string", "pattern": f"^{_WORD}$"},
            "minProperties": 1,
            "maxProperties": _MAX_PARAMETERS,
        }
    ),
]
