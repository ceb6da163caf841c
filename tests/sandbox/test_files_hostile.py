"""The collector against trees that an attacker arranges, and rearranges while they are read."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stockade.sandbox import PathRefused, Skipped, _files

CANARY = b"canary-of-the-host"
LIMIT = 4096


@contextmanager
def tree() -> Iterator[tuple[int, Path, Path]]:
    """A sandbox's tmpfs as the collector sees it, beside a secret; yields (descriptor, workspace, secret directory)."""
    top = Path(tempfile.mkdtemp(prefix="h-"))
    fd = -1
    try:
        for name in ("workspace", "tmp", "home", "guest"):
            (top / "root" / name).mkdir(parents=True)
        (top / "root" / "home" / "private").write_bytes(CANARY)
        (top / "root" / "guest" / "agent.py").write_bytes(CANARY)
        (top / "secret").mkdir()
        (top / "secret" / "key").write_bytes(CANARY)
        fd = os.open(top / "root", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        yield fd, top / "root" / "workspace", top / "secret"
    finally:
        if fd >= 0:
            os.close(fd)
        shutil.rmtree(top)


names = st.binary(min_size=1, max_size=8).filter(
    lambda name: b"/" not in name and b"\0" not in name and name not in (b".", b"..")
)
names |= st.sampled_from([b"a", b"b", b"key", b"..a", b" ", b"-", b"\n"])
TARGETS = (
    "secret",
    "key",
    "/etc/passwd",
    "..",
    "../home/private",
    "../../secret/key",
    "/proc/self/environ",
    "a",
    ".",
    "/dev/zero",
    "",
)
kinds = st.one_of(
    st.tuples(st.just("file"), st.binary(max_size=64)),
    st.tuples(st.just("link"), st.sampled_from(TARGETS[:-1])),
    st.tuples(st.sampled_from(["fifo", "folder", "hard link", "secret's second name", "shut", "sparse"]), st.just(b"")),
)
steps = st.lists(st.tuples(st.lists(names, min_size=1, max_size=3), kinds), max_size=12)


def arrange(workspace: Path, secret: Path, plan: list) -> dict[bytes, bytes]:
    """Do what an attacker may; return the content of every honest regular file by its path."""
    honest: dict[bytes, bytes] = {}
    for parts, (kind, value) in plan:
        path = os.path.join(os.fsencode(workspace), *parts)
        with suppress(OSError):
            folder = os.path.dirname(path)
            if os.path.realpath(folder) != folder:
                continue  # through one of the links made before: not our own tree
            os.makedirs(folder, exist_ok=True)
            if kind == "file":
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                os.write(descriptor, value)
                os.close(descriptor)
                honest[os.path.relpath(path, os.fsencode(workspace))] = value
            elif kind == "link":
                places = {"secret": str(secret), "key": str(secret / "key")}
                os.symlink(os.fsencode(places.get(value, value)), path)
            elif kind == "fifo":
                os.mkfifo(path)
            elif kind == "folder":
                os.mkdir(path)
            elif kind == "secret's second name":
                os.link(secret / "key", path)
            elif kind == "sparse":
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                os.ftruncate(descriptor, 1 << 40)
                os.close(descriptor)
            elif kind == "shut":
                os.mkdir(path, 0o000 if os.geteuid() else 0o700)
            else:
                os.link(os.path.join(os.fsencode(workspace), parts[0]), path, follow_symlinks=False)
                honest.pop(parts[0], None)
    return honest


@settings(max_examples=60)
@given(steps)
def test_only_honest_files_come_out(plan):
    """Whatever the tree is: each regular file with one name comes out whole, everything else is named, nothing else."""
    with tree() as (root_fd, workspace, secret):
        honest = arrange(workspace, secret, plan)
        found = _files.get_dir(root_fd, "/workspace", limit_bytes=LIMIT)
        taken = {os.fsencode(path): data for path, data in found.files.items()}
        assert CANARY not in b"".join(taken.values())
        assert taken == honest
        entries = set()
        for top, folders, files in os.walk(os.fsencode(workspace)):
            entries |= {os.path.relpath(os.path.join(top, name), os.fsencode(workspace)) for name in files}
            entries |= {
                os.path.relpath(os.path.join(top, name), os.fsencode(workspace))
                for name in folders
                if os.path.islink(os.path.join(top, name))
            }
        skipped = {os.fsencode(item.path): item.reason for item in found.skipped}
        assert entries - set(taken) <= set(skipped)
        assert not set(skipped) & set(taken)
        shut = {path: reason for path, reason in skipped.items() if path not in entries}
        assert set(shut.values()) <= {"changed_while_read"}
        for path, data in taken.items():
            assert _files.read_file(root_fd, f"/workspace/{os.fsdecode(path)}", limit_bytes=LIMIT) == data
        _restore(workspace)


@settings(max_examples=60)
@given(steps, st.lists(names, min_size=1, max_size=4))
def test_nothing_outside_is_written(plan, parts):
    """Writing through whatever stands there: refused, or inside. The secret and the home stay as they were."""
    with tree() as (root_fd, workspace, secret):
        arrange(workspace, secret, plan)
        path = "/workspace/" + "/".join(os.fsdecode(part) for part in parts)
        with suppress(PathRefused, OSError):
            _files.write_file(root_fd, path, b"overwritten")
            written = os.path.join(os.fsencode(workspace), *parts)
            assert os.path.realpath(written) == written
        assert [path.read_bytes() for path in secret.iterdir()] == [CANARY]
        assert (workspace.parent / "home" / "private").read_bytes() == CANARY
        assert sorted(path.name for path in workspace.parent.iterdir()) == ["guest", "home", "tmp", "workspace"]
        _restore(workspace)


def _restore(workspace: Path) -> None:
    for top, folders, _ in os.walk(workspace):
        for name in folders:
            path = os.path.join(top, name)
            if not os.path.islink(path):
                os.chmod(path, 0o700)


@given(st.text(alphabet=st.sampled_from("/.a\0~wWorkspcetmh"), max_size=24))
def test_paths_lead_into_the_writable_roots_or_nowhere(text):
    for path in (text, f"/workspace/{text}", f"/sandbox/home/{text}"):
        try:
            place = _files.locate(path, collect=True)
        except PathRefused:
            continue
        assert place.root in ("workspace", "tmp")
        assert not {"", ".", ".."} & set(place.parts)
        assert not any("/" in part or "\0" in part for part in place.parts)


def _swap(workspace: str, secret: str) -> None:
    """Rename a directory, a file and links to the secret back and forth, as fast as it goes."""
    os.chdir(workspace)
    while True:
        for name in ("folder", "file"):
            os.rename(name, name + "-honest")
            os.rename(name + "-link", name)
            os.rename(name, name + "-link")
            os.rename(name + "-honest", name)


@contextmanager
def swapping(workspace: Path, secret: Path) -> Iterator[None]:
    (workspace / "folder").mkdir()
    (workspace / "folder" / "key").write_bytes(b"honest")
    (workspace / "file").write_bytes(b"honest")
    (workspace / "folder-link").symlink_to(secret)
    (workspace / "file-link").symlink_to(secret / "key")
    attacker = multiprocessing.get_context("fork").Process(target=_swap, args=(str(workspace), str(secret)))
    attacker.start()
    try:
        yield
    finally:
        attacker.kill()
        attacker.join()
        attacker.close()


def naive(workspace: Path) -> bytes:
    """Check, then use: between the two the name changes its meaning."""
    found = b""
    for path in (workspace / "folder" / "key", workspace / "file"):
        with suppress(OSError):
            if not path.is_symlink() and not path.parent.is_symlink():
                found += path.read_bytes()
    return found


@pytest.mark.parametrize("work", ["collect", "read", "write"])
def test_race_with_renames(work):
    with tree() as (root_fd, workspace, secret), swapping(workspace, secret):
        end, rounds, seen = time.monotonic() + 1.0, 0, set()
        while time.monotonic() < end:
            rounds += 1
            with suppress(PathRefused, FileNotFoundError):
                if work == "collect":
                    seen |= set(_files.get_dir(root_fd, "/workspace", limit_bytes=LIMIT).files.values())
                elif work == "read":
                    for name in ("folder/key", "file"):
                        seen.add(_files.read_file(root_fd, f"/workspace/{name}", limit_bytes=LIMIT))
                else:
                    for name in ("folder/key", "file"):
                        _files.write_file(root_fd, f"/workspace/{name}", b"honest")
        assert rounds > 10
        assert seen <= {b"honest"}
        assert [path.read_bytes() for path in secret.iterdir()] == [CANARY]


def test_race_is_lost_by_check_then_use():
    """The same race against a collector that checks and then opens: it takes the secret."""
    with tree() as (_, workspace, secret), swapping(workspace, secret):
        end, taken = time.monotonic() + 20, False
        while not taken and time.monotonic() < end:
            taken = CANARY in naive(workspace)
        assert taken


def test_a_directory_moved_out_while_it_is_read(tmp_path):
    """A directory moved up and out of the tree between two of its entries: no later path starts from it."""
    with tree() as (root_fd, workspace, secret):
        for number in range(50):
            (workspace / "a" / "b" / f"c{number}").mkdir(parents=True)
            (workspace / "a" / "b" / f"c{number}" / "f").write_bytes(b"honest")
        walking = _files.walk(root_fd, "/workspace")
        first = next(walking)
        assert isinstance(first, _files.Opened)
        os.rename(workspace / "a" / "b", secret.parent / "moved")
        (workspace / "a" / "b").symlink_to(secret)
        rest = list(walking)
        assert all(isinstance(item, Skipped) and item.reason == "changed_while_read" for item in rest)
        assert len(rest) == 49


def test_a_file_that_grows_while_it_is_read(monkeypatch):
    """Its size was within the limit when it was looked at; what is read is bounded all the same."""
    with tree() as (root_fd, workspace, _):
        (workspace / "f").write_bytes(b"x" * 10_000)
        real = os.fstat
        monkeypatch.setattr(os, "fstat", lambda fd: os.stat_result([*real(fd)[:6], 5, *real(fd)[7:10]]))
        with pytest.raises(PathRefused, match="too large"):
            _files.read_file(root_fd, "/workspace/f", limit_bytes=100)


def test_budgets():
    with tree() as (root_fd, workspace, _):
        for name in "abc":
            (workspace / name).write_bytes(b"x" * 40)
        (workspace / "d").write_bytes(b"x" * 400)
        found = _files.get_dir(root_fd, "/workspace", limit_bytes=100)
        assert sorted(found.files) == ["a", "b"]
        assert {item.path: item.reason for item in found.skipped} == {"c": "too_large", "d": "too_large"}
