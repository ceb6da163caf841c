"""Reading the operator's secrets: not when the file that names them is loaded, but by whoever puts them to use.

A secret's file is regular, small, and private to its owner, who is root or the user of this process: what a second
user can read is no secret, what a second user can write is not the operator's. Values never show in a ``repr``.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stockade.errors import ConfigError

if TYPE_CHECKING:
    from stockade.policy._operator import OperatorConfig

_MAX_BYTES = 16 << 10
_MIN_SECRET = 8
"""Shorter text stands in ordinary traffic by chance, and would be found there."""


@dataclass(frozen=True, slots=True)
class CredentialValue:
    """A credential with its secret: ``header`` (lower case) gets ``value``, which is prefix and ``secret``."""

    name: str
    header: str
    value: str = field(repr=False)
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class SecretValue:
    """One text that must not leave a sandbox, and the name by which a record may speak of it."""

    name: str
    value: str = field(repr=False)


def read_credentials(operator: OperatorConfig) -> tuple[CredentialValue, ...]:
    """Return the operator's credentials, each file holding one line of visible ASCII.

    Raises:
        ConfigError: naming the file, for one that cannot be read, is not private, or holds anything else.
    """
    return tuple(_credential(one.name, one.header, one.prefix, one.file) for one in operator.credentials)


def read_known_secrets(operator: OperatorConfig) -> tuple[SecretValue, ...]:
    """Return the operator's known secrets: each line of a file that has at least 8 characters is one.

    The lines of a key in PEM are told apart so, and its boundary lines, which every key has, are left out; several
    values may bear one name.

    Raises:
        ConfigError: as :func:`read_credentials`, and for a file without such a line.
    """
    found: list[SecretValue] = []
    for one in operator.known_secrets:
        lines = [line.strip() for line in _read_private(one.file).splitlines()]
        values = [line for line in lines if len(line) >= _MIN_SECRET and not line.startswith("-----")]
        if not values:
            message = f"holds no line of at least {_MIN_SECRET} characters"
            raise ConfigError(message, path=one.file, hint="a shorter secret would be found in ordinary traffic")
        found += (SecretValue(one.name, value) for value in dict.fromkeys(values))
    return tuple(found)


def _credential(name: str, header: str, prefix: str, path: str) -> CredentialValue:
    text = _read_private(path)
    secret = text.removesuffix("\n").removesuffix("\r")
    if not secret or not all("!" <= char <= "~" for char in secret):
        hint = "write the secret alone; what goes before it belongs under 'prefix'"
        raise ConfigError("is not one line of visible ASCII", path=path, hint=hint)
    return CredentialValue(name, header, prefix + secret, secret)


def _read_private(path: str) -> str:
    try:
        # O_NONBLOCK: a FIFO in place of the file must not hang whoever starts a run.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        hint = "name an existing file, not a link, that this user may read"
        raise ConfigError(f"cannot be read: {error.strerror or error}", path=path, hint=hint) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError("not a regular file", path=path, hint="name a file")
        if status.st_uid not in {0, os.geteuid()}:
            raise ConfigError("belongs to another user", path=path, hint="its owner must be root or this user")
        if status.st_mode & 0o077:
            raise ConfigError("is not private to its owner", path=path, hint=f"run: chmod 600 {path}")
        data = b""
        while len(data) <= _MAX_BYTES and (piece := os.read(descriptor, _MAX_BYTES + 1 - len(data))):
            data += piece
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror or error}", path=path, hint="try again") from None
    finally:
        os.close(descriptor)
    if len(data) > _MAX_BYTES:
        raise ConfigError("is larger than 16 KiB", path=path, hint="a secret has a few hundred bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError("is not UTF-8", path=path, hint="write text") from None
