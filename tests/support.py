"""What tests need to know about the machine and about the pass they run in.

A skip is a statement about the machine, never about the code. :func:`requires` makes it, and where the machine is meant
to be complete (``CI=true`` or ``STOCKADE_MUST_RUN=1``) turns the skip of a must-run test into a failure. The suite runs
twice on such a machine: everything as root, then ``tests/attacks`` and ``tests/sandbox`` as an ordinary user
(``STOCKADE_TEST_PASS=user``, set by tools/test_as_user.py).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).resolve().parent.parent
"""The checkout."""

OPTIONAL = "[optional] "
"""Starts the reason of a skip that is fine everywhere; every other skip fails a must-run session."""


def must_run() -> bool:
    """Return whether this machine is meant to be able to run every test."""
    return os.environ.get("CI", "").lower() in ("1", "true") or os.environ.get("STOCKADE_MUST_RUN") == "1"


def user_pass() -> bool:
    """Return whether this is the second pass, as an ordinary user, of a suite that root has already run."""
    return os.environ.get("STOCKADE_TEST_PASS") == "user"


def requires(condition: object, reason: str, *, must_run_in_ci: bool = True) -> None:
    """Skip the test (or, at module level, the module) unless ``condition``; where it must run, fail instead.

    ``reason`` says what the machine lacks, for example "no unprivileged user namespaces".
    """
    if condition:
        return
    if not must_run_in_ci:
        pytest.skip(OPTIONAL + reason, allow_module_level=True)
    if must_run():
        pytest.fail(f"this must run here, and cannot: {reason}", pytrace=False)
    pytest.skip(reason, allow_module_level=True)


def requires_root() -> None:
    """Skip unless root; must run, except in the second pass, which root's own pass came before."""
    requires(os.geteuid() == 0, "needs root", must_run_in_ci=not user_pass())


def requires_ordinary_user() -> None:
    """Skip as root: the second pass runs ``tests/attacks`` and ``tests/sandbox`` as an ordinary user."""
    requires(os.geteuid() != 0, "needs an ordinary user", must_run_in_ci=False)


def unreachable(why: str) -> NoReturn:
    """Fail because the test reached what must not be reached, for branches that a type checker cannot close."""
    pytest.fail(why, pytrace=False)
