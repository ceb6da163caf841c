"""Path globs of rules, and the grammar of paths in mounts.

A glob is matched against the *normalised* path that is forwarded, never against bytes that a server may read
differently (egress.md case 66): so the glob itself must be in normal form. ``*`` stands for characters within one
segment (a segment that is only ``*`` is never empty), ``**`` for any number of whole segments, also none:

=============  ======================================  =====================
glob           matches                                 does not match
=============  ======================================  =====================
``/simple/*``  ``/simple/x``                           ``/simple/``, ``/simple/x/``
``/a/**``      ``/a/``, ``/a/x/y``                     ``/a``, ``/ab``
``/**/info``   ``/info``, ``/x/y/info``                ``/xinfo``
=============  ======================================  =====================

Matching takes no regular expression: the path is the attacker's, and each step here is linear in it.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from stockade.policy._errors import BadValue, shown, text_of

_MAX_GLOB = 1024
_MAX_ANY = 8
_CHARS = re.compile(r"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@/]|%[0-9A-F]{2})*")
_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})")
_UNRESERVED = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_EXAMPLE = "write it like '/simple/**'"


@dataclass(frozen=True, slots=True)
class PathGlob:
    """A glob over URL paths in the only spelling allowed.

    Raises:
        PolicyError: if the text is not a glob in normal form.
    """

    text: str
    _runs: tuple[tuple[str, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_glob(self.text)
        runs: list[list[str]] = [[]]
        for segment in self.text[1:].split("/"):
            if segment == "**":
                runs.append([])
            else:
                runs[-1].append(segment)
        object.__setattr__(self, "_runs", tuple(tuple(run) for run in runs))

    def __str__(self) -> str:
        return self.text

    def matches(self, path: str) -> bool:
        """Tell whether a normalised absolute path without query matches."""
        if not path.startswith("/"):
            return False
        segments = path[1:].split("/")
        first, *rest = self._runs
        if not rest:
            return len(segments) == len(first) and _run_at(first, segments, 0)
        *middle, last = rest
        if self.text.endswith("/**"):
            # A closing ** needs the slash before it: /a/** covers what is below /a, not /a itself.
            if len(segments) <= len(first) + sum(map(len, middle)):
                return False
        elif len(segments) < len(first) + len(last) or not _run_at(last, segments, len(segments) - len(last)):
            return False
        if not _run_at(first, segments, 0):
            return False
        at, end = len(first), len(segments) - max(len(last), 1 if self.text.endswith("/**") else 0)
        for run in middle:
            found = next((i for i in range(at, end - len(run) + 1) if _run_at(run, segments, i)), None)
            if found is None:
                return False
            at = found + len(run)
        return at <= end

    def covers(self, other: PathGlob) -> bool:
        """Tell whether every path of ``other`` surely matches this glob (False where it is not plain)."""
        if self.text in {"/**", other.text}:
            return True
        stem = self.text.removesuffix("**")
        return self.text.endswith("/**") and "*" not in stem and other.text.startswith(stem)

    @property
    def first_segment_is_literal(self) -> bool:
        """Whether the first segment names one thing (a bucket) instead of a pattern."""
        first = self.text[1:].split("/", 1)[0]
        return bool(first) and "*" not in first


def _check_glob(text: str) -> None:
    if not text_of(text).startswith("/"):
        raise BadValue(f"the path {shown(text)} does not start with '/'", hint=_EXAMPLE)
    if len(text) > _MAX_GLOB:
        raise BadValue(f"the path is longer than {_MAX_GLOB} characters", hint="use '**'")
    if "?" in text or "#" in text:
        raise BadValue("a query or fragment in a path", hint="rules see the path only; remove what follows '?' or '#'")
    _check_escapes(text)
    if not _CHARS.fullmatch(text):
        raise BadValue(f"{shown(text)} has characters that no URL path has", hint="percent-encode them (RFC 3986 §3.3)")
    if "//" in text:
        raise BadValue("an empty segment ('//') in a path", hint="servers merge or keep it; write one '/'")
    segments = text[1:].split("/")
    if any(segment in {".", ".."} for segment in segments):
        raise BadValue("'.' or '..' as a path segment", hint="write the path that it leads to")
    if any("**" in segment and segment != "**" for segment in segments):
        raise BadValue("'**' must be a whole segment", hint="write '/a/**' or '/a*'")
    if any(pair == ("**", "**") for pair in itertools.pairwise(segments)):
        raise BadValue("'**' twice in a row", hint="one '**' already means any number of segments")
    if segments.count("**") > _MAX_ANY or any(segment.count("*") > _MAX_ANY for segment in segments):
        raise BadValue(f"more than {_MAX_ANY} wildcards", hint="write a wider or a plainer glob")


def _check_escapes(text: str) -> None:
    for match in _ESCAPE.finditer(text):
        code = int(match[1], 16)
        if code in b"/\\" or code < 0x20 or code == 0x7F:
            hint = "servers disagree on where such a path leads"
            raise BadValue(f"the encoded character {match[0]} in a path", hint=hint)
        if code in _UNRESERVED:
            raise BadValue(f"{match[0]} is not in normal form", hint=f"write {chr(code)!r}")
        if match[1] != match[1].upper():
            raise BadValue(f"{match[0]} is not in normal form", hint=f"write {match[0].upper()}")


def _run_at(run: tuple[str, ...], segments: list[str], at: int) -> bool:
    if at + len(run) > len(segments):
        return False
    return all(_segment_matches(glob, segments[at + index]) for index, glob in enumerate(run))


def _segment_matches(glob: str, segment: str) -> bool:
    if "*" not in glob:
        return glob == segment
    if glob == "*":
        return bool(segment)
    first, *middle, last = glob.split("*")
    if len(segment) < len(first) + len(last) or not segment.startswith(first) or not segment.endswith(last):
        return False
    at, end = len(first), len(segment) - len(last)
    for part in middle:
        found = segment.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True


def _parse_glob(value: Any) -> PathGlob:
    return value if isinstance(value, PathGlob) else PathGlob(text_of(value))


PathGlobField = Annotated[
    PathGlob,
    PlainValidator(_parse_glob),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string", "pattern": "^/", "maxLength": _MAX_GLOB}),
]

RESERVED_TARGETS = (
    *("/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/lib32", "/lib64", "/libx32", "/lost+found", "/proc"),
    *("/root", "/run", "/sandbox", "/sbin", "/sys", "/tmp", "/usr", "/var", "/workspace"),  # noqa: S108
)
"""What the sandbox itself makes, or what programs trust without looking: no mount at, above or below these."""

_SECRET_TREES = ("/boot", "/dev", "/proc", "/run", "/sys", "/var/run")
_WHOLE_TREES = ("/", "/etc", "/home", "/root", "/usr", "/var")
_MOUNT_PATH = re.compile(r"(?:/[A-Za-z0-9._+@,=~:-]+(?: [A-Za-z0-9._+@,=~:-]+)*)+|/")
_MAX_PATH = 4096


def parse_mount_path(text: str) -> str:
    """Return an absolute path in its only spelling."""
    if not text.startswith("/"):
        raise BadValue(f"the path {shown(text)} is not absolute", hint="write it from '/'")
    if len(text) > _MAX_PATH or not _MOUNT_PATH.fullmatch(text):
        hint = "no '//', no '/' at the end, letters, digits and . _ + @ , = ~ : - only"
        raise BadValue(f"{shown(text)} is not a plain path", hint=hint)
    if any(part in {".", ".."} for part in text.split("/")):
        raise BadValue("'.' or '..' in a path", hint="write the path that it leads to")
    return text


def parse_mount_source(text: str) -> str:
    """Return the path of a directory or file of the host that a sandbox may be shown."""
    path = parse_mount_path(text)
    if path in _WHOLE_TREES or any(within(path, tree) for tree in _SECRET_TREES):
        hint = "sockets, devices and credentials of the host live there; name a directory made for the data"
        raise BadValue(f"{path} of the host must not be mounted", hint=hint)
    return path


def parse_mount_target(text: str) -> str:
    """Return the place of a mount in the sandbox: never one that the sandbox makes itself."""
    path = parse_mount_path(text)
    for reserved in RESERVED_TARGETS:
        if path == "/" or within(path, reserved):
            where = "/" if path == "/" else reserved
            raise BadValue(f"{where} is the sandbox's own", hint="choose a new directory such as /data")
    return path


def within(path: str, tree: str) -> bool:
    """Tell whether ``path`` is ``tree`` or lies below it."""
    return path == tree or path.startswith(tree.rstrip("/") + "/")
