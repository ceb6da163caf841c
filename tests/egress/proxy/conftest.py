"""One lab and one worker per module; each test attaches its own rollout."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.egress.netlab import NetLab
from tests.egress.proxy.harness import Worker
from tests.support import requires


@pytest.fixture(scope="module")
def lab() -> Iterator[NetLab]:
    requires(NetLab.possible(), "no network namespace can be made here")
    with NetLab() as lab:
        for name in ("plain", "other", "tunnel"):
            lab.add_host(f"{name}.example.org", "11.0.0.5")
        yield lab


@pytest.fixture(scope="module")
def worker(lab: NetLab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with Worker(lab, tmp_path_factory.mktemp("record")) as worker:
        yield worker
