"""A node without a Python of its own: the staged one must be whole, and be found."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from stockade.sandbox import _tools
from tests.live import Owner
from tests.support import requires


def test_a_staged_interpreter_uses_its_own_library_and_is_on_the_path(tmp_path, monkeypatch):
    """It took the system's libpython of another version, or none at all, and no command found it by its name."""
    library = Path(sys.base_prefix, "lib", f"python3.{sys.version_info.minor}", "os.py")
    requires(library.exists(), "this Python's library lies elsewhere", must_run_in_ci=False)
    monkeypatch.setattr(_tools, "_SYSTEM_PYTHON", "/usr/bin/no-such-python")
    owner = Owner(tmp_path / "state")
    try:
        sandbox = owner.create()
        maps = "[line.split()[-1] for line in open('/proc/self/maps') if 'libpython' in line]"
        libraries = owner.inside(sandbox, f"import _ctypes, _socket, _struct; say({maps})")
        assert not [name for name in libraries if not name.startswith(_tools.STAGED_PYTHON)]
        found = owner.exec(sandbox, ["/bin/sh", "-c", f"echo $PATH; ls -d {_tools.STAGED_PYTHON}/bin/python3"])
        assert found.stdout.decode().splitlines()[0].split(":")[-1] == f"{_tools.STAGED_PYTHON}/bin"
        assert found.exit.code == 0
    finally:
        owner.close()
        staged = tmp_path / "state" / "interpreters"
        for path in staged.rglob("*"):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o700)
        shutil.rmtree(staged)
