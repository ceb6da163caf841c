"""A repository's files without its history (R24)."""

from __future__ import annotations

import subprocess

import pytest

from stockade.errors import TaskError
from stockade.gym import export_tree


def _git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *identity, "-C", str(folder), *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "r"
    (folder / "pkg").mkdir(parents=True)
    _git(folder, "init", "-q")
    (folder / "pkg" / "a.py").write_bytes(b"a = 1\n\xff")
    (folder / "link").symlink_to("/etc/passwd")
    (folder / "new line\n").write_text("odd")
    _git(folder, "add", ".")
    _git(folder, "commit", "-q", "-m", "first")
    (folder / "pkg" / "a.py").write_text("a = 2\n")
    _git(folder, "commit", "-q", "-am", "second")
    (folder / "untracked").write_text("no")
    return folder


def test_one_commit_is_files_and_nothing_else(repository):
    tree = export_tree(repository, "HEAD~1")
    assert tree.files == {"pkg/a.py": b"a = 1\n\xff", "new line\n": b"odd"}
    assert tree.skipped == ("link",)
    assert export_tree(repository).files["pkg/a.py"] == b"a = 2\n"


def test_the_repository_names_no_program_to_run(repository, tmp_path):
    """A filter or a monitor that the repository configures is not started."""
    ran = tmp_path / "ran"
    _git(repository, "config", "core.fsmonitor", f"touch {ran}; false")
    _git(repository, "config", "filter.evil.smudge", f"touch {ran}; cat")
    (repository / ".gitattributes").write_text("*.py filter=evil\n")
    _git(repository, "add", ".gitattributes")
    _git(repository, "commit", "-q", "-m", "attributes")
    ran.unlink(missing_ok=True)
    assert export_tree(repository).files["pkg/a.py"] == b"a = 2\n"
    assert not ran.exists()


@pytest.mark.parametrize("revision", ["none", "--output=x", "HEAD:pkg", "-h"])
def test_what_is_no_commit_is_refused(repository, revision):
    with pytest.raises(TaskError, match="git rev-parse failed"):
        export_tree(repository, revision)


def test_what_is_no_repository_is_refused(tmp_path):
    with pytest.raises(TaskError, match="git"):
        export_tree(tmp_path)
