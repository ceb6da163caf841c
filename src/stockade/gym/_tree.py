"""Files of a repository without its history.

SWE-bench's images kept later commits, tags and dangling objects, and agents found the fix there (SWE-bench #465,
mini-swe-agent #787). So a rollout gets one tree, written out file by file; no ``.git`` travels.
"""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from stockade.errors import TaskError

_GIT_TIMEOUT_S: Final = 120
# A repository's own configuration could name programs for git to run.
_GIT: Final = (
    "git",
    "-c",
    "core.fsmonitor=false",
    "-c",
    "core.hooksPath=/dev/null",
    "-c",
    "core.attributesFile=/dev/null",
)
_ENV: Final = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null"}


class Tree(msgspec.Struct, frozen=True, kw_only=True):
    """Regular files by path below the root, and what was left out (links, submodules, ``.git`` names)."""

    files: dict[str, bytes]
    skipped: tuple[str, ...]


def export_tree(repository: str | Path, revision: str = "HEAD") -> Tree:
    """Read the files of one commit of a git repository, without history.

    Raises :class:`TaskError` when git is missing or the revision is not a commit of the repository.
    """
    repository = Path(repository)
    commit = _git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    archive = _git(repository, "archive", "--format=tar", commit.decode("ascii").strip())
    files: dict[str, bytes] = {}
    skipped: list[str] = []
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
        for member in tar:
            if member.isdir():
                continue
            source = tar.extractfile(member) if member.isreg() else None
            if source is None or _is_git_name(member.name):
                skipped.append(member.name)
            else:
                files[member.name] = source.read()
    return Tree(files=files, skipped=tuple(skipped))


def _is_git_name(name: str) -> bool:
    return any(part.lower() == ".git" for part in PurePosixPath(name).parts)


def _git(repository: Path, *arguments: str) -> bytes:
    command = [*_GIT, "-c", f"safe.directory={repository.resolve()}", "-C", str(repository), *arguments]
    try:
        done = subprocess.run(
            command, env=_ENV, stdin=subprocess.DEVNULL, capture_output=True, timeout=_GIT_TIMEOUT_S, check=False
        )
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
