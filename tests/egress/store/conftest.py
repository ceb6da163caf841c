"""A store of one's own for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stockade.egress._store import Store
from tests.egress.store.kit import opened


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(place: Path) -> Iterator[Store]:
    with opened(place) as store:
        yield store
