"""Directories of the user, read into and written from memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from stockade.errors import ConfigError

_LIMIT_BYTES = 20 << 20


def read_tree(root: Path) -> dict[str, bytes]:
    """Return the regular files below ``root``; links are not followed, and too much is an error."""
    if not root.is_dir():
        raise ConfigError("not a directory", path=root, hint="give the directory to copy")
    files: dict[str, bytes] = {}
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            if path.is_symlink() or not path.is_file():
                continue
            data = path.read_bytes()
            total += len(data)
            if total > _LIMIT_BYTES:
                raise ConfigError(f"more than {_LIMIT_BYTES >> 20} MiB", path=root, hint="use a mount of the policy")
            files[path.relative_to(root).as_posix()] = data
    return files


def write_tree(root: Path, files: Mapping[str, bytes]) -> None:
    """Write collected files below ``root``, a fresh directory; names come from inside, so each part is checked."""
    for name, data in files.items():
        parts = PurePosixPath(name).parts
        if not parts or any(part in ("..", "/") or "\0" in part for part in parts):
            raise ConfigError(f"collected name {name!r} would leave the directory", path=root)
        target = root.joinpath(*parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        with open(fd, "wb") as file:
            file.write(data)


def make_fresh(path: Path) -> None:
    """Make a new directory; what collected files are written into must hold nothing before."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError("exists already", path=path, hint="name a directory that does not exist") from None
