"""The programs of the grading sandboxes as one file each: the codec, then one side.

Both sides get the codec from the same source file, so they cannot disagree; one file needs no import path, which
``-I`` does not give.
"""

from __future__ import annotations

import functools
import re
from importlib import resources
from typing import Final

TESTS_PATH: Final = "/workspace/.stockade-tests.py"
CANDIDATE_PATH: Final = "/workspace/.stockade-candidate.py"

_FUTURE: Final = "from __future__ import annotations\n"
_IMPORT: Final = re.compile(r"from stockade\.rewards\._guest\._codec import [\w, ]+\n")


@functools.cache
def tests_program() -> bytes:
    """The program that runs the tests."""
    return _bundle("_tests_side.py")


@functools.cache
def candidate_program() -> bytes:
    """The program that loads the candidate."""
    return _bundle("_candidate_side.py")


def _bundle(side: str) -> bytes:
    folder = resources.files("stockade.rewards") / "_guest"
    codec = (folder / "_codec.py").read_text("utf-8")
    text = (folder / side).read_text("utf-8")
    text, imports = _IMPORT.subn("", text.replace(_FUTURE, "", 1))
    if imports != 1:
        raise AssertionError(f"{side} imports the codec {imports} times")
    return (codec + "\n" + text).encode()
