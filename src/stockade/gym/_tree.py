"""Files of a repository without its history.

SWE-bench's images kept later commits, tags and dangling objects, and agents found the fix there (SWE-bench #465,
mini-swe-agent #787). So a rollout gets one tree, written out file by file; no ``.git`` travels.
"""

from __future__ import annotations

import subprocess
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from stockade.errors import TaskError

_GIT_TIMEOUT_S: Final = 120
_ENV: Final = {
    "PATH": "/usr/bin:/bin:/usr/local/bin",
    "LC_ALL": "C",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    # What the commit itself says, from this repository alone.
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_NO_LAZY_FETCH": "1",
}
_REGULAR: Final = frozenset({b"100644", b"100755"})


class Tree(msgspec.Struct, frozen=True, kw_only=True):
    """Regular files by path below the root, and what was left out (links, submodules, ``.git`` names)."""

    files: dict[str, bytes]
    skipped: tuple[str, ...]


def export_tree(repository: str | Path, revision: str = "HEAD") -> Tree:
    """Read the files of one commit of a git repository, as they are stored, without history.

    Only plumbing that reads objects is used: ``git archive`` or a checkout would start the filter programs that
    the repository's own configuration and ``.gitattributes`` name. Raises :class:`TaskError` when git is missing
    or ``revision`` is not a commit of the repository.
    """
    repository = Path(repository)
    name = ("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    commit = _git(repository, *name).decode("ascii").strip()
    wanted: list[tuple[str, bytes]] = []
    skipped: list[str] = []
    for entry in _git(repository, "ls-tree", "-r", "-z", "--full-tree", commit).split(b"\0")[:-1]:
        about, _, raw = entry.partition(b"\t")
        mode, _, digest = about.split(b" ")
        path = raw.decode("utf-8", "surrogateescape")
        if mode not in _REGULAR or any(part.lower() == ".git" for part in PurePosixPath(path).parts):
            skipped.append(path)
        else:
            wanted.append((path, digest))
    contents = _git(repository, "cat-file", "--batch", stdin=b"".join(digest + b"\n" for _, digest in wanted))
    files: dict[str, bytes] = {}
    at = 0
    for path, digest in wanted:
        start = contents.index(b"\n", at) + 1
        found, kind, size = contents[at : start - 1].split(b" ")
        if (found, kind) != (digest, b"blob"):
            raise TaskError(f"git lacks the content of {path!r}", path=repository, hint="use a complete clone")
        files[path] = contents[start : start + int(size)]
        at = start + int(size) + 1
    return Tree(files=files, skipped=tuple(skipped))


def _git(repository: Path, *arguments: str, stdin: bytes = b"") -> bytes:
    # Naming the folder safe is right here: nothing of its configuration that names a program is reached.
    command = ["git", "-c", f"safe.directory={repository.resolve()}", "-C", str(repository), *arguments]
    try:
        done = subprocess.run(command, env=_ENV, input=stdin, capture_output=True, timeout=_GIT_TIMEOUT_S, check=False)
    except FileNotFoundError as error:
        raise TaskError("git is not installed", path=repository, hint="install git") from error
    except subprocess.TimeoutExpired as error:
        raise TaskError(f"git took more than {_GIT_TIMEOUT_S} s", path=repository) from error
    if done.returncode != 0:
        reason = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise TaskError(
            f"git {arguments[0]} failed: {reason[-1] if reason else 'no such commit'}",
            path=repository,
            hint="give a git repository and a commit that is in it",
        )
    return done.stdout
