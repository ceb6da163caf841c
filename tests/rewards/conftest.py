"""Graders against two doors: the real broker, and a double that is only bubblewrap and pipes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.rewards.local_client import LocalClient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stockade.client import BrokerClient


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def local_client(tmp_path: Path) -> Iterator[Any]:
    client = LocalClient(tmp_path)
    yield client
    assert not client.open, "episodes were left open"


@pytest.fixture(params=["local", "broker"])
def client(request: pytest.FixtureRequest) -> BrokerClient:
    """The client under test; ``broker_client`` comes from ``tests/conftest.py``."""
    if request.param == "local":
        return request.getfixturevalue("local_client")
    try:
        return request.getfixturevalue("broker_client")
    except pytest.FixtureLookupError as error:
        if error.argname != "broker_client":
            raise
        pytest.skip("no fixture broker_client in this tree")
