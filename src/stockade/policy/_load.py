"""Reading files: the only part of this room that touches the world, once, at the start of a run."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, TypeVar

from stockade.errors import ConfigError, PolicyError
from stockade.policy import _bind
from stockade.policy._base import StrictModel
from stockade.policy._models import Policy
from stockade.policy._yaml import MAX_BYTES, Source

M = TypeVar("M", bound=StrictModel)


def load_policy(path: Path) -> Policy:
    """Read a policy file.

    Raises:
        PolicyError: with file, line, key and hint, for anything that is not exactly a policy. There is no default
            policy: an empty, missing or unreadable file never means *allow* (CVE-2025-66479).
    """
    return load_document(path, Policy, error=PolicyError)


def parse_policy(text: str, *, source: str) -> Policy:
    """Read a policy from text; ``source`` is the file name for messages.

    Raises:
        PolicyError: as :func:`load_policy`.
    """
    return parse_document(text, Policy, source=source, error=PolicyError)


def load_document(path: Path, model: type[M], *, error: type[ConfigError] = ConfigError) -> M:
    """Read any YAML file as strictly as a policy.

    Args:
        path: a regular file of at most 1 MiB that not everybody may write to.
        model: what the file must hold.
        error: the class of errors to raise, such as :class:`~stockade.errors.JobError`.

    Raises:
        ConfigError: of class ``error``, with file, line, key and hint.
    """
    text = _read(path, Source(str(path), error))
    return parse_document(text, model, source=str(path), error=error)


def parse_document(text: str, model: type[M], *, source: str, error: type[ConfigError] = ConfigError) -> M:
    """Read any YAML text as strictly as a policy; see :func:`load_document`."""
    return _bind.parse_document(text, model, Source(source, error))


def policy_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of the policy file, for editors and documentation.

    It describes the shape; the rules between values are checked by :func:`load_policy` only.
    """
    schema = _plain(Policy.model_json_schema(mode="validation", by_alias=True))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _plain(schema: Any) -> Any:
    """Return a schema without null, which no file may hold, and without defaults that are mappings of field names."""
    if isinstance(schema, list):
        return [_plain(one) for one in schema if one != {"type": "null"}]
    if not isinstance(schema, dict):
        return schema
    plain = {
        key: _plain(value)
        for key, value in schema.items()
        if not (key == "default" and (value is None or isinstance(value, dict)))
    }
    choices = plain.get("anyOf")
    if isinstance(choices, list) and len(choices) == 1:
        del plain["anyOf"]
        plain = {**choices[0], **plain}
    return plain


def _read(path: Path, source: Source) -> str:
    try:
        # O_NONBLOCK: a FIFO put in place of the file must not hang whoever starts a run.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        hint = "name an existing file that you may read"
        raise source.fail(f"cannot be read: {error.strerror or error}", None, hint=hint) from None
    except ValueError:  # a NUL in the path
        raise source.fail("cannot be read: not a file name", None) from None
    try:
        _check_status(os.fstat(descriptor), path, source)
        data = _read_all(descriptor)
    except OSError as error:
        raise source.fail(f"cannot be read: {error.strerror or error}", None, hint="try again") from None
    finally:
        os.close(descriptor)
    if len(data) > MAX_BYTES:
        raise source.fail("the file is larger than 1 MiB", None, hint="a file of rules has a few kilobytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise source.fail("the file is not UTF-8", line, hint="save it as UTF-8 without a byte order mark") from None


def _check_status(status: os.stat_result, path: Path, source: Source) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise source.fail("not a regular file", None, hint="name a file")
    if status.st_mode & stat.S_IWOTH:
        # Whoever can write the policy decides what rollouts may do (egress.md case 93).
        raise source.fail("everybody may write to the file", None, hint=f"run: chmod o-w {path}")


def _read_all(descriptor: int) -> bytes:
    data = b""
    while len(data) <= MAX_BYTES and (piece := os.read(descriptor, MAX_BYTES + 1 - len(data))):
        data += piece
    return data
