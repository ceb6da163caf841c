"""The helper ``get(name)`` of service tasks: a file that lies beside the program, ``toolbox.py``.

In a rollout it asks the service through the proxy and writes the answer into ``fetched.json``, a declared artifact.
In grading there is no network: it finds the collected file, or it fails. A program that forges the file deceives
only itself, because the expected values are made from what the grader knows.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Final

TOOLBOX: Final = "toolbox.py"
FETCHED: Final = "fetched.json"

PRELUDE: Final = 'import sys\n\nsys.path.append(".")\nfrom toolbox import get\n\n\n'
"""First lines of a program that may use it. At the end of the path: no file here can shadow the real library."""

VISIBLE_RUN: Final = '\n\nif __name__ == "__main__":\n    print(f(3))\n'
"""Last lines of every program: a rollout calls it once, as its author would. That proves nothing and is not graded."""

_PLACEHOLDER: Final = '"http://rates.stockade.internal:0"'


@cache
def toolbox(service_url: str) -> bytes:
    """Return the file for a job whose service is at ``service_url``, as seen from inside a sandbox."""
    text = files("stockade.training._guest").joinpath(TOOLBOX).read_text(encoding="utf-8")
    before, found, after = text.partition(_PLACEHOLDER)
    if not found:
        raise AssertionError(f"{TOOLBOX} lost its address")
    return f'{before}"{service_url}"{after}'.encode()
