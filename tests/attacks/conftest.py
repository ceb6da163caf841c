"""What attacks run against: a real sandbox, and a node full of canaries to take."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sandboxes import owner, sandbox
from tests.support import requires

__all__ = ["CARELESS", "Node", "node", "owner", "sandbox"]

NODE = Path(__file__).with_name("node.py")
CARELESS = ("--ro-bind", "/", "/", "--dev-bind", "/dev", "/dev", "--proc", "/proc", "--unshare-user", "--unshare-pid")
"""Options that look like a sandbox: everything is read-only, in namespaces of its own, and most of the list works."""


class Node:
    """The test's end of tests/attacks/node.py."""

    def __init__(self, folder: Path) -> None:
        for name in ("home", "tmp"):
            (folder / name).mkdir()
        self._process = subprocess.Popen(
            [sys.executable, "-B", NODE, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            self.close()
            requires(False, "no namespaces for a node of its own can be made here")
        self.facts: dict[str, Any] = json.loads(line)
        self.token: str = self.facts["token"]

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def _probe(self, op: str, source: str, arguments: object, **more: object) -> Any:
        code, out, err = self._ask({"op": op, "source": source, "arguments": arguments, **more})
        assert code == 0, err
        return json.loads(out)

    def plain(self, source: str, arguments: object = None) -> Any:
        """Run a probe as a child of the launcher: no guard."""
        return self._probe("plain", source, arguments)

    def careless(self, source: str, arguments: object = None, options: tuple[str, ...] = CARELESS) -> Any:
        """Run a probe under bubblewrap with careless options."""
        return self._probe("careless", source, arguments, options=options)

    def inside(self, source: str, arguments: object = None) -> Any:
        """Run a probe in a sandbox of the backend."""
        return self._probe("inside", source, arguments)

    def reached(self) -> dict[str, int]:
        """Return how often each listener of the node was reached, and each address through one of the sandbox's own."""
        counts: dict[str, int] = self._ask({"op": "reached"})
        return counts

    def close(self) -> None:
        """End the node and everything in it."""
        if self._process.stdin:
            self._process.stdin.close()
        self._process.wait(30)
        if self._process.stdout:
            self._process.stdout.close()


@pytest.fixture(scope="module")
def node(tmp_path_factory) -> Iterator[Node]:
    node = Node(tmp_path_factory.mktemp("n"))
    yield node
    node.close()
