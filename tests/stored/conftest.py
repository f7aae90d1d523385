from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from gateway.store.store import Store
from tests.hurry import hurried
from tests.store.stores import opened
from tests.stored.batch_place import BatchPlace, batch_place

__all__ = ["hurried"]


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    with opened(store_url) as made:
        yield made


@pytest.fixture
async def here(store_url: str, tmp_path: Path) -> AsyncIterator[BatchPlace]:
    async with batch_place(store_url, tmp_path / "kept") as made:
        yield made
