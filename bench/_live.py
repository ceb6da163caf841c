"""A run to measure: a temporary directory, a policy, an agent."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import stockade

POLICY = """\
version: 1
sandbox: {memory: 512 MiB, pids: 64, disk: 64 MiB, wall: 10 min}
data: {private: false}
"""


@contextlib.asynccontextmanager
async def live_run(policy: str = POLICY, *, operator: str | None = None) -> AsyncIterator[stockade.Run]:
    """Start an agent under ``policy`` in a temporary run directory; everything is gone at the end."""
    with tempfile.TemporaryDirectory(prefix="sk-bench-") as folder:
        policy_path = Path(folder, "policy.yaml")
        policy_path.write_text(policy)
        operator_path = None
        if operator is not None:
            operator_path = Path(folder, "operator.yaml")
            operator_path.write_text(operator)
        async with stockade.connect(policy_path, runs=Path(folder, "runs"), operator=operator_path) as run:
            yield run
