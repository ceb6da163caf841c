"""Run tests again as an ordinary user: ``.venv/bin/python tools/test_as_user.py tests/attacks tests/sandbox``.

Root may do what an ordinary user may not, so a guard that holds for root proves nothing for users, and the other way
round. Started as root, this picks a uid without a password entry and without processes, gives it a home and a temporary
folder of its own, runs pytest under it and then makes sure that no process and no file of that uid is left. Where the
checkout or its interpreter lies under a private home that the uid cannot enter, a copy is staged and removed again.

Exit status: pytest's; 1 if something was left behind; 2 if no interpreter can be made reachable.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("build", "core", "dev")  # what tests/attacks and tests/sandbox import
COPIED = ("src", "tests", "tools", "requirements", "docs", "examples")
SYSTEM_PYTHON = Path("/usr/bin/python3")


def main() -> int:
    """Run the tests named on the command line; return the exit status."""
    targets = [name for name in sys.argv[1:] if (ROOT / name).exists()]
    if not targets:
        print("as a user: none of the tests asked for exists", file=sys.stderr)
        return 2
    if os.geteuid() != 0:
        print("as a user: the suite above already ran as an ordinary user")
        return 0
    uid = free_uid()
    with private_folder(uid) as folder:
        python, checkout = reachable(uid, folder)
        print(f"as a user: uid {uid}, {python}, {checkout}", flush=True)
        status = subprocess.run(
            [python, "-m", "pytest", "-p", "no:cacheprovider", *targets],
            cwd=checkout,
            env=environment(folder),
            user=uid,
            group=uid,
            extra_groups=[],
            check=False,
        ).returncode
        return status or (1 if left_behind(uid) else 0)


def free_uid() -> int:
    """Return a uid that nobody has and that no process runs under."""
    taken = {entry.pw_uid for entry in pwd.getpwall()} | {uid for uid, _ in processes()}
    return next(uid for uid in range(61_184, 65_000) if uid not in taken)


def processes() -> Iterator[tuple[int, int]]:
    """Yield (real uid, pid) of every process but zombies, which have ended."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                # Not the owner of /proc/PID: that is root for every process that forbids dumps.
                lines = Path(f"/proc/{name}/status").read_text().splitlines()
                status = {key: value.split() for key, _, value in (line.partition(":") for line in lines)}
                if status["State"][0] != "Z":
                    yield int(status["Uid"][0]), int(name)


@contextlib.contextmanager
def private_folder(uid: int) -> Iterator[Path]:
    """Make a short-named folder with ``home``, ``tmp`` and ``stage`` in it; remove it at the end."""
    folder = Path(tempfile.mkdtemp(prefix="sku-", dir="/tmp"))
    try:
        folder.chmod(0o755)
        for name in ("home", "tmp"):
            (folder / name).mkdir(mode=0o700)
            os.chown(folder / name, uid, uid)
        yield folder
    finally:
        shutil.rmtree(folder)


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of an ordinary login, and what the tests want to know."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "CI", "STOCKADE_MUST_RUN") if name in os.environ}
    return kept | {
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        "USER": "stockade-test",
        "LOGNAME": "stockade-test",
        "STOCKADE_TEST_PASS": "user",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }


def reachable(uid: int, folder: Path) -> tuple[Path, Path]:
    """Return an interpreter with the tests' packages and a checkout, both usable by ``uid``; stage what is not."""
    python = ROOT / ".venv/bin/python"
    if can_run(uid, python, "import pytest, stockade; open('tests/conftest.py')", cwd=ROOT):
        return python, ROOT
    stage = folder / "stage"
    stage.mkdir(mode=0o755)
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, stage / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, stage / path.name)
    base = base_interpreter(uid, folder)
    venv = stage / ".venv"
    subprocess.run([base, "-I", "-m", "venv", venv], check=True)
    pip: list[str | Path] = [
        venv / "bin/python",
        "-I",
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--no-input",
        "install",
        "--quiet",
    ]
    subprocess.run(
        [*pip, *(word for part in PARTS for word in ("-r", f"requirements/{part}.txt"))], cwd=stage, check=True
    )
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--editable", "."], cwd=stage, check=True)
    subprocess.run(["chmod", "-R", "go+rX", stage], check=True)
    return venv / "bin/python", stage


def base_interpreter(uid: int, folder: Path) -> Path:
    """Return a Python of 3.11 or newer that ``uid`` can run: ours, the system's, or a copy of ours."""
    ours = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    recent = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))"
    for candidate in (ours, SYSTEM_PYTHON):
        if candidate.exists() and can_run(uid, candidate, recent, cwd=Path("/")):
            return candidate
    copy = folder / "python"
    unwanted = shutil.ignore_patterns("__pycache__", "site-packages", "test", "*.a")
    shutil.copytree(sys.base_prefix, copy, symlinks=True, ignore=unwanted)
    moved = copy / "bin" / ours.name
    if can_run(uid, moved, recent, cwd=Path("/")):
        return moved
    print("as a user: no Python of 3.11 or newer can be made reachable; install python3 and python3-venv")
    raise SystemExit(2)


def can_run(uid: int, python: Path, code: str, *, cwd: Path) -> bool:
    """Return whether ``uid`` can run ``python`` in ``cwd`` and ``code`` succeeds."""
    try:
        return (
            subprocess.run(
                ["/bin/sh", "-c", 'cd "$1" && exec "$2" -c "$3"', "sh", cwd, python, code],
                cwd="/",
                env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"},
                user=uid,
                group=uid,
                extra_groups=[],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=60,
                check=False,
            ).returncode
            == 0
        )
    except (OSError, subprocess.TimeoutExpired):
        return False


def left_behind(uid: int) -> bool:
    """Report and remove processes and files of ``uid``; return whether there were any."""
    found = False
    for owner, pid in list(processes()):
        if owner == uid:
            found = True
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                print(f"as a user: process {pid} was left behind: {line}", file=sys.stderr)
                os.kill(pid, signal.SIGKILL)  # no other process has this uid: free_uid chose it for that
    for folder in (Path("/tmp"), Path("/dev/shm"), Path("/var/tmp")):
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.lstat().st_uid == uid:
                found = True
                print(f"as a user: {path} was left behind", file=sys.stderr)
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
    return found


if __name__ == "__main__":
    sys.exit(main())
