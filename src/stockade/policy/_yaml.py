"""A strict reading of YAML: text in, a tree of nodes with line numbers out, nothing guessed.

Everything that makes one YAML file mean two things to two readers is refused: duplicate keys, anchors, aliases,
merge keys, tags, directives, several documents, tabs, invisible or direction-changing characters. What a plain
scalar *is* gets decided later (:mod:`stockade.policy._scalars`), where the expected type is known.

The parser is ruamel.yaml's pure event parser (YAML 1.2); it is imported on first use, and its work is bounded by
size, depth and number of nodes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from stockade.errors import ConfigError, PolicyError
from stockade.policy._errors import Loc, shown

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_BYTES = 1 << 20
MAX_DEPTH = 16
MAX_NODES = 20_000

_FORBIDDEN = re.compile(
    "["
    "\x00-\x09\x0b\x0c\x0e-\x1f\x7f-\x9f"  # controls, among them tab, NEL and ESC; only LF and CR LF break lines
    "\u2028\u2029"  # line breaks to some readers, characters to others
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # bidirectional controls (CVE-2021-42574, "Trojan Source")
    "\u200b-\u200d\u2060\ufeff"  # invisible
    "\ud800-\udfff\ufffe\uffff"  # not characters at all
    "]"
    "|\r(?!\n)"
)
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]{1,40}")


@dataclass(frozen=True, slots=True)
class ScalarNode:
    """Text as written; ``plain`` means without quotes and not as a block."""

    line: int
    text: str
    plain: bool


@dataclass(frozen=True, slots=True)
class ListNode:
    """A sequence."""

    line: int
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One ``key: value`` of a mapping; ``line`` is the key's."""

    line: int
    key: str
    value: Node


@dataclass(frozen=True, slots=True)
class MapNode:
    """A mapping whose keys are distinct texts."""

    line: int
    entries: tuple[Entry, ...]


Node: TypeAlias = ScalarNode | ListNode | MapNode


@dataclass(frozen=True, slots=True)
class Source:
    """The name of the document that is being read and the error class of its kind."""

    name: str
    error: type[ConfigError] = PolicyError

    def fail(self, message: str, line: int | None, loc: Loc = (), hint: str | None = None) -> ConfigError:
        """Return (not raise) the error for one place."""
        return self.error(message, path=self.name, line=line, key=dotted(loc) or None, hint=hint)


def dotted(loc: Loc) -> str:
    """Return a place as people write it: ``egress.allow[2].host``; list items count from 0."""
    text = ""
    for part in loc:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (part if _BARE_KEY.fullmatch(part) else shown(part))
    return text


def read_tree(text: str, source: Source) -> MapNode:
    """Return the single mapping that ``text`` holds.

    Raises:
        ConfigError: of the source's class, with the line, for anything else.
    """
    _check_characters(text, source)
    root = _Composer(text, source).document()
    if not isinstance(root, MapNode):
        found = "a list" if isinstance(root, ListNode) else "a single value"
        hint = "start with 'version: 1'"
        raise source.fail(f"the file must be a mapping of keys, found {found}", root.line, hint=hint)
    return root


def _check_characters(text: str, source: Source) -> None:
    if len(text) > MAX_BYTES:
        raise source.fail("the file is larger than 1 MiB", None, hint="a file of rules has a few kilobytes")
    bad = _FORBIDDEN.search(text)
    if bad is None:
        return
    line = text.count("\n", 0, bad.start()) + 1
    if bad[0] == "\t":
        raise source.fail("a tab character", line, hint="indent with spaces; YAML readers disagree on tabs")
    name = f"U+{ord(bad[0]):04X}"
    raise source.fail(f"the control or invisible character {name}", line, hint="remove it")


class _Composer:
    """Builds the tree from the parser's events."""

    def __init__(self, text: str, source: Source) -> None:
        self._source = source
        self._nodes = 0
        self._line = 1
        self._events = self._parse(text)

    def document(self) -> Node:
        self._next()  # the start of the stream
        first = self._next()
        if _kind(first) == "StreamEnd":
            raise self._source.fail("the file is empty", None, hint="start with 'version: 1'")
        if first.version is not None or first.tags:
            raise self._source.fail("a YAML directive", 1, hint="remove the lines that start with '%'")
        root = self._node(self._next(), ())
        self._next()  # the end of the document
        extra = self._next()
        if _kind(extra) != "StreamEnd":
            line = _line(extra)
            raise self._source.fail("a second YAML document", line, hint="one file holds one document; remove '---'")
        if isinstance(root, ScalarNode) and root.plain and not root.text:
            raise self._source.fail("the file is empty", None, hint="start with 'version: 1'")
        return root

    def _parse(self, text: str) -> Iterator[Any]:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import MarkedYAMLError

        try:
            yield from YAML(typ="safe", pure=True).parse(text)
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = self._line if mark is None else mark.line + 1
            problem = str(error.problem or error.context or "it does not parse")
            raise self._source.fail(f"not valid YAML: {problem}", line, hint="see the line and the one above") from None
        except Exception as error:  # what it cannot read must not be used; it raises OverflowError for "\\UFFFFFFFF"
            message = f"not valid YAML: {type(error).__name__} near this line"
            raise self._source.fail(message, self._line) from error

    def _next(self) -> Any:
        event = next(self._events)
        self._line = _line(event)
        return event

    def _node(self, event: Any, loc: Loc) -> Node:
        kind = _kind(event)
        line = _line(event)
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise self._source.fail(f"more than {MAX_NODES} values", line, hint="use fewer, wider rules")
        if len(loc) > MAX_DEPTH:
            raise self._source.fail(f"nested deeper than {MAX_DEPTH} levels", line)
        if kind == "Alias" or event.anchor is not None:
            hint = "write the value out where it is used"
            raise self._source.fail("a YAML anchor or alias ('&' or '*')", line, loc, hint)
        if event.tag is not None:
            hint = "remove it; the type follows from the key"
            raise self._source.fail(f"the YAML tag {shown(str(event.tag))}", line, loc, hint)
        if kind == "Scalar":
            return ScalarNode(line, event.value, plain=not event.style)
        if kind == "SequenceStart":
            return self._list(line, loc)
        return self._map(line, loc)

    def _list(self, line: int, loc: Loc) -> ListNode:
        items: list[Node] = []
        while _kind(event := self._next()) != "SequenceEnd":
            items.append(self._node(event, (*loc, len(items))))
        return ListNode(line, tuple(items))

    def _map(self, line: int, loc: Loc) -> MapNode:
        entries: dict[str, Entry] = {}
        while _kind(event := self._next()) != "MappingEnd":
            key = self._node(event, loc)
            if not isinstance(key, ScalarNode):
                raise self._source.fail("a key that is a list or a mapping", key.line, loc, "keys are plain words")
            here = (*loc, key.text)
            if key.plain and key.text == "<<":
                raise self._source.fail("a YAML merge key ('<<')", key.line, loc, "write the keys out")
            if key.text in entries:
                message = f"the key is given twice (first on line {entries[key.text].line})"
                raise self._source.fail(message, key.line, here, "keep one of them")
            value = self._node(self._next(), here)
            if isinstance(value, ScalarNode) and not value.text:
                value = ScalarNode(key.line, "", value.plain)  # the parser puts what is not there on the next line
            entries[key.text] = Entry(key.line, key.text, value)
        return MapNode(line, tuple(entries.values()))


def _kind(event: Any) -> str:
    return type(event).__name__.removesuffix("Event")


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1
