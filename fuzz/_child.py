"""The process that fuzzes: ``python -m fuzz._child NAME [options of libFuzzer] FOLDER``.

The target is imported under atheris' instrumentation, so nothing of it may be imported before.
"""

from __future__ import annotations

import importlib
import shlex
import sys

import atheris

from fuzz._targets import TARGETS


def main() -> None:
    """Fuzz until the options say so; does not return."""
    name, *options = sys.argv[1:]
    target = TARGETS[name]
    with atheris.instrument_imports(include=list(target.follow)):
        check = importlib.import_module(target.module).check
    # libFuzzer runs argv[0] again, by a shell, where it minimises.
    atheris.Setup([f"{shlex.quote(sys.executable)} -m fuzz._child {name}", *options], check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
