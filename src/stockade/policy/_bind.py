"""From a tree of nodes to a model, with the place of everything that is wrong.

The model is the only description of the format: its fields give the valid keys, its types say what a scalar must be,
its validators judge the values. The keys are checked first, so that a misspelt one is reported as such instead of as
a missing one.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, ValidationError

from stockade.policy._base import UNREAD, StrictModel
from stockade.policy._errors import BadValue, Loc, found, nearest, shown
from stockade.policy._scalars import Ambiguous, resolve
from stockade.policy._yaml import Entry, ListNode, MapNode, Node, ScalarNode, Source, read_tree

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from stockade.errors import ConfigError

M = TypeVar("M", bound=StrictModel)

_LINE_FIELD = "source_line"
_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "date_type": "a date like 2027-01-31",
    "tuple_type": "a list",
}
_BOUND = {
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
}


def parse_document(text: str, model: type[M], source: Source) -> M:
    """Return the document ``text`` as ``model``; each error has file, line and key."""
    return _Binder(source).bind(read_tree(text, source), model)


def yaml_keys(model: type[BaseModel]) -> Mapping[str, Any]:
    """Return the keys of a model as a file spells them, with the annotation of each field."""
    return {
        str(field.validation_alias or name): field.annotation
        for name, field in model.model_fields.items()
        if name not in UNREAD
    }


class _Binder:
    def __init__(self, source: Source) -> None:
        self._source = source
        self._lines: dict[Loc, int] = {}

    def bind(self, root: MapNode, model: type[M]) -> M:
        data = self._value(root, model, ())
        try:
            return model.model_validate(data)
        except ValidationError as error:
            details = error.errors(include_url=False)
            raise min((self._translate(one) for one in details), key=_line_of) from None

    def _value(self, node: Node, annotation: Any, loc: Loc) -> Any:
        self._lines[loc] = node.line
        wanted = _unwrapped(annotation)
        if isinstance(wanted, type) and issubclass(wanted, BaseModel):
            if not isinstance(node, MapNode):
                raise self._mismatch(node, loc, "a mapping of keys", "valid here: " + ", ".join(yaml_keys(wanted)))
            return self._mapping(node, wanted, loc)
        if typing.get_origin(wanted) is tuple:
            if not isinstance(node, ListNode):
                raise self._mismatch(node, loc, "a list", "write [one, two], also for a single item")
            inner = typing.get_args(wanted)[0]
            return tuple(self._value(item, inner, (*loc, index)) for index, item in enumerate(node.items))
        if typing.get_origin(wanted) in {dict, Mapping}:
            if not isinstance(node, MapNode):
                raise self._mismatch(node, loc, "a mapping", "write {name: value}")
            inner = typing.get_args(wanted)[1]
            return {one.key: self._value(one.value, inner, (*loc, one.key)) for one in node.entries}
        if not isinstance(node, ScalarNode):
            raise self._mismatch(node, loc, "a single value", None)
        return self._scalar(node, loc)

    def _mapping(self, node: MapNode, model: type[BaseModel], loc: Loc) -> dict[str, Any]:
        keys = yaml_keys(model)
        reserved = model.reserved_keys if issubclass(model, StrictModel) else frozenset()
        values: dict[str, Any] = {}
        for entry in node.entries:
            if entry.key not in keys:
                raise self._unknown(entry, frozenset(keys), reserved, loc)
            values[entry.key] = self._value(entry.value, keys[entry.key], (*loc, entry.key))
        if _LINE_FIELD in model.model_fields:
            values[_LINE_FIELD] = node.line
        return values

    def _unknown(self, entry: Entry, keys: frozenset[str], reserved: frozenset[str], loc: Loc) -> ConfigError:
        here = (*loc, entry.key)
        if entry.key in reserved:
            return self._source.fail("reserved for a later version", entry.line, here, "remove it")
        return self._source.fail(f"unknown key {shown(entry.key)}", entry.line, here, nearest(entry.key, keys))

    def _scalar(self, node: ScalarNode, loc: Loc) -> object:
        value = resolve(node)
        if isinstance(value, Ambiguous):
            raise self._source.fail(value.message, node.line, loc, value.hint)
        if value is None:
            hint = "write a value, or remove the key"
            raise self._source.fail("the value is empty", node.line, loc, hint)
        return value

    def _mismatch(self, node: Node, loc: Loc, wanted: str, hint: str | None) -> ConfigError:
        if isinstance(node, ScalarNode):
            value = self._scalar(node, loc)
            return self._source.fail(f"expected {wanted}, found {found(value)}", node.line, loc, hint)
        what = "a list" if isinstance(node, ListNode) else "a mapping of keys"
        return self._source.fail(f"expected {wanted}, found {what}", node.line, loc, hint)

    def _translate(self, error: ErrorDetails) -> ConfigError:
        loc: Loc = error["loc"]
        cause = error.get("ctx", {}).get("error")
        if isinstance(cause, BadValue):
            loc = (*loc, *cause.loc)
        line = self._line(loc)
        message, hint = _explained(error)
        return self._source.fail(message, line, loc, hint)

    def _line(self, loc: Loc) -> int:
        while loc not in self._lines:
            loc = loc[:-1]
        return self._lines[loc]


def _explained(error: ErrorDetails) -> tuple[str, str | None]:
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, BadValue):
        return cause.message, cause.hint
    if kind == "missing":
        return "the key is missing", "every " + ("file" if len(error["loc"]) == 1 else "item") + " needs it"
    if kind in _EXPECTED:
        hint = "quote it" if kind == "string_type" else None
        if isinstance(value, str) and kind != "string_type":
            hint = "remove the quotes"
        return f"expected {_EXPECTED[kind]}, found {found(value)}", hint
    if kind in _BOUND:
        return f"{found(value)} is out of range", "write " + _BOUND[kind].format(
            **{key: f"{one:.15g}" for key, one in context.items()}
        )
    if kind == "literal_error":
        return _literal(error)
    if kind in {"string_too_short", "too_short"}:
        return "the text is too short", f"write at least {context['min_length']} characters"
    if kind == "string_too_long":
        return "the text is too long", f"write at most {context['max_length']} characters"
    if kind == "too_long":
        return "the list is too long", f"list at most {context['max_length']}"
    return error["msg"][:1].lower() + error["msg"][1:], None


def _literal(error: ErrorDetails) -> tuple[str, str]:
    value = error["input"]
    choices = str(error.get("ctx", {}).get("expected", ""))
    if error["loc"] == ("version",):
        return f"{found(value)} is not a version of this format", f"this stockade reads version {choices}"
    words = [word.strip("'") for word in choices.replace(" or ", ", ").split(", ")]
    if isinstance(value, str):
        return f"{shown(value)} is not a valid value", nearest(value, words)
    return f"expected text, found {found(value)}", "valid here: " + ", ".join(words)


def _unwrapped(annotation: Any) -> Any:
    """Return an annotation without ``Annotated`` and ``| None``."""
    while True:
        origin = typing.get_origin(annotation)
        if origin is Annotated:
            annotation = typing.get_args(annotation)[0]
        elif origin in {typing.Union, types.UnionType}:
            rest = [arg for arg in typing.get_args(annotation) if arg is not types.NoneType]
            if len(rest) != 1:
                return annotation
            annotation = rest[0]
        else:
            return annotation


def _line_of(error: ConfigError) -> int:
    return error.line or 0
