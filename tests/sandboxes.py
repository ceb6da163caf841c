"""Fixtures for tests that need real sandboxes, for the conftest of each folder that does, and namespaces without one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from stockade.sandbox import LiveSandbox
from tests.live import PATIENCE_S, PRELUDE, Owner
from tests.support import ROOT

_NAMESPACES = """
sys.path.insert(0, ARGS["src"])
from stockade.sandbox import _anyip, _holder, _syscalls
_holder._namespaces()
exec(ARGS["first"])
_syscalls.loopback_up()
ARGS = ARGS["arguments"]
"""


def as_holder(source: str, arguments: object = None, *, first: str = "") -> Any:
    """Run a probe in namespaces like a sandbox's network, which it owns: with every capability over them, ``lo`` up.

    What a holder can do, and what code in a sandbox could if it were not one user namespace further down. ``first`` is
    code to run before ``lo`` is up; ``_anyip`` and ``_syscalls`` are there.
    """
    everything = {"src": str(ROOT / "src"), "first": first, "arguments": arguments}
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-B", "-c", PRELUDE + _NAMESPACES + source, json.dumps(everything)],
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def owner(tmp_path_factory) -> Iterator[Owner]:
    """A backend of this module's own."""
    owner = Owner(tmp_path_factory.mktemp("o") / "state")
    yield owner
    owner.close()


@pytest.fixture
def sandbox(owner) -> Iterator[LiveSandbox]:
    """A sandbox without network."""
    sandbox = owner.create()
    yield sandbox
    owner.destroy(sandbox)
