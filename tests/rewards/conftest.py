"""Graders against two doors: a real broker, and a double that is only bubblewrap and pipes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from stockade.client import BrokerClient
from tests.agents import open_run
from tests.rewards.local_client import LocalClient


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """As everywhere, but wide enough for the module's broker."""
    return "asyncio"


@pytest.fixture
def local_client(tmp_path: Path) -> Iterator[Any]:
    client = LocalClient(tmp_path)
    yield client
    assert not client.open, "episodes were left open"


@pytest.fixture(scope="module")
async def broker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[BrokerClient]:
    """A real run, one for the module: every grading is fresh anyway, and one hack after another must not matter."""
    async with open_run(tmp_path_factory.mktemp("run")) as run:
        yield run.client


@pytest.fixture(params=["local", "broker"])
def client(request: pytest.FixtureRequest) -> BrokerClient:
    """The client under test."""
    name = "local_client" if request.param == "local" else "broker"
    client: BrokerClient = request.getfixturevalue(name)
    return client
