"""Package managers and git as a rollout uses them: nothing but their own words for where to fetch from."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import sysconfig
from pathlib import Path

from stockade.client import Episode, ExecReply
from tests.clients.lab import PACKAGES, Way, ok, packed
from tests.support import requires

INSIDE = "/usr/local/bin:/usr/bin:/bin"
"""Where a sandbox looks for programs."""
UV = "/workspace/bin/uv"

AUTHOR = {
    **{f"GIT_{who}_NAME": "rollout" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_EMAIL": "rollout@example.org" for who in ("AUTHOR", "COMMITTER")},
    "GIT_TERMINAL_PROMPT": "0",
}


def needs(*programs: str) -> None:
    """Skip the test unless a sandbox has these programs."""
    for program in programs:
        requires(shutil.which(program, path=INSIDE), f"{program} is not installed in /usr")


# ------------------------------------------------------------------------------------------ pip and uv


def pip_files() -> dict[str, bytes]:
    """Return pip itself, for the workspace."""
    try:
        importlib.metadata.distribution("pip")
    except importlib.metadata.PackageNotFoundError:
        requires(False, "pip is not installed beside the tests")
    return {PACKAGES: packed("pip")}


async def pip(rollout: Episode, way: Way, index: str, *words: str) -> ExecReply:
    """Run pip against the index at an address."""
    common = ("--disable-pip-version-check", "--no-cache-dir", "--retries", "0", "--timeout", "20")
    return await rollout.exec(
        way.argv("python3", "-m", "pip", *words, *common, "--index-url", f"{index}/simple/"),
        env={"PYTHONPATH": PACKAGES},
        timeout_s=90,
    )


async def bring_uv(rollout: Episode) -> None:
    """Put uv into the workspace: it is one program, and too large to come with the rollout's files."""
    found = Path(sysconfig.get_path("scripts"), "uv")
    requires(found.is_file(), "uv is not installed beside the tests")
    await rollout.put_dir(str(Path(UV).parent), {Path(UV).name: found.read_bytes()})
    ok(await rollout.exec(["chmod", "+x", UV]))


async def uv(rollout: Episode, way: Way, *words: str) -> ExecReply:
    """Run uv without a cache, so that each run fetches."""
    return await rollout.exec(way.argv(UV, "--no-cache", "--no-config", *words), timeout_s=90)


async def uv_install(rollout: Episode, way: Way, index: str, name: str, into: str) -> ExecReply:
    """Install a package from the index at an address."""
    words = ("--python", "/usr/bin/python3", "--target", into, "--default-index", f"{index}/simple/")
    return await uv(rollout, way, "pip", "install", *words, name)


# ------------------------------------------------------------------------------------------ npm, apt, git


async def npm(rollout: Episode, way: Way, registry: str, *words: str, cwd: str = "/workspace") -> ExecReply:
    """Run npm against the registry at an address."""
    quiet = (
        "--no-fund",
        "--no-update-notifier",
        "--fetch-retries=0",
        "--cache",
        f"/tmp/npm-{way.name}",
    )
    return await rollout.exec(way.argv("npm", *words, f"--registry={registry}/", *quiet), cwd=cwd, timeout_s=90)


async def apt(rollout: Episode, way: Way, source: str, *packages: str) -> ExecReply:
    """Update from the archive at an address and download packages, with a state of its own: no root is inside."""
    folder = f"/workspace/apt-{way.name}-" + "".join(char if char.isalnum() else "-" for char in source)
    script = """
        mkdir -p "$1/state/lists/partial" "$1/cache/archives/partial" "$1/etc/preferences.d" && touch "$1/status" && cd "$1" || exit 1
        # What signs an archive is its publisher; here nobody does.
        echo "deb [trusted=yes] $2 stable main" > etc/sources.list
        words="-qq -o APT::Architecture=amd64 -o APT::Architectures=amd64 -o Dir::Etc=$1/etc -o Dir::State=$1/state"
        words="$words -o Dir::State::status=$1/status -o Dir::Cache=$1/cache -o Acquire::Retries=0 -o Acquire::Languages=none"
        shift 2
        apt-get $words update && apt-get $words download "$@" && ls *.deb
    """
    return await rollout.exec(way.argv("bash", "-c", script, "bash", folder, source, *packages), timeout_s=90)


async def git(rollout: Episode, way: Way, *words: str, cwd: str = "/workspace") -> ExecReply:
    """Run git as somebody who is never asked for a password."""
    return await rollout.exec(way.argv("git", *words), cwd=cwd, env=AUTHOR, timeout_s=60)


async def commit(rollout: Episode, branch: str, size_bytes: int, *, cwd: str = "/workspace/project") -> None:
    """Commit ``size_bytes`` of what does not compress to a branch of a clone."""
    script = (
        f"git checkout --quiet -b {branch} && head -c {size_bytes} /dev/urandom > loot && git add loot"
        " && git commit --quiet -m loot"
    )
    ok(await rollout.exec(["sh", "-c", script], cwd=cwd, env=AUTHOR, timeout_s=60))
