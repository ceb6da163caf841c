"""The manifest as YAML that people can read, and that every reader of YAML reads alike.

Written by hand, since the answer to "is ``no`` a string?" differs between YAML 1.1 and 1.2: here every text is in
double quotes, with everything beyond printable ASCII escaped.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path, PurePath

from stockade.errors import RunError

_MAX_DEPTH = 20
_ESCAPED = re.compile(r"[^ !#-\[\]-~]")


def dump_manifest(manifest: Mapping[str, object]) -> bytes:
    """Return ``manifest`` as YAML; raises :class:`RunError` for a value that plain data cannot hold."""
    return "".join(f"{line}\n" for line in _block(manifest, 0)).encode("ascii")


def load_manifest(data: bytes, path: Path) -> Mapping[str, object]:
    """Return the mapping in ``data``; raises :class:`RunError` naming ``path``."""
    from ruamel.yaml import YAML  # late: writing, which the agent does, needs none of it
    from ruamel.yaml.error import YAMLError

    try:
        manifest = YAML(typ="safe", pure=True).load(io.BytesIO(data))
    except (YAMLError, ValueError, RecursionError) as error:
        raise RunError(f"{path} cannot be read as YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(manifest, dict):
        raise RunError(f"{path} is no manifest")
    return manifest


def _block(value: Mapping[str, object] | list[object], depth: int) -> Iterator[str]:
    """Yield the lines of a mapping or a sequence that is not empty."""
    if depth > _MAX_DEPTH:
        raise RunError("a manifest is nested too deeply")
    items = (
        [(f"{_key(name)}:", item) for name, item in value.items()]
        if isinstance(value, Mapping)
        else [("-", item) for item in value]
    )
    for lead, item in items:
        plain = _plain(item)
        if isinstance(plain, str):
            yield f"{lead} {plain}"
        else:
            yield lead
            yield from (f"  {line}" for line in _block(plain, depth + 1))


def _plain(value: object) -> str | Mapping[str, object] | list[object]:
    """Return a scalar (or an empty collection) as written, anything else as a mapping or a list."""
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, str | PurePath):
        return _quoted(str(value))
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return repr(value)
    if isinstance(value, Mapping):
        return value or "{}"
    if isinstance(value, list | tuple):
        return list(value) or "[]"
    raise RunError(f"a manifest cannot hold {value!a}")


def _key(name: object) -> str:
    if not isinstance(name, str):
        raise RunError(f"a manifest cannot have the key {name!a}")
    return name if re.fullmatch(r"[a-z][a-z_]{2,40}", name) and name not in _WORDS else _quoted(name)


# What YAML 1.1 takes for a boolean or nothing.
_WORDS = frozenset({"yes", "off", "true", "false", "null"})


def _quoted(text: str) -> str:
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return f'"{_ESCAPED.sub(_escape, text)}"'


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    if character in '"\\':
        return f"\\{character}"
    point = ord(character)
    return f"\\x{point:02x}" if point < 0x100 else f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"
