"""An authority per module, and a loop for each test that moves bytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.egress.tls.harness import LoopThread, Run


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    run = Run()
    yield run
    run.close()


@pytest.fixture
def looping() -> Iterator[LoopThread]:
    with LoopThread() as looping:
        yield looping
        assert not looping.faults, looping.faults
