"""Real sandboxes for tests of the backend."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stockade.sandbox import LiveSandbox
from tests.live import Owner


@pytest.fixture(scope="module")
def owner(tmp_path_factory) -> Iterator[Owner]:
    owner = Owner(tmp_path_factory.mktemp("o") / "state")
    yield owner
    owner.close()


@pytest.fixture
def sandbox(owner) -> Iterator[LiveSandbox]:
    sandbox = owner.create()
    yield sandbox
    owner.destroy(sandbox)
