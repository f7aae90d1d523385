from __future__ import annotations

from collections.abc import Iterator

import pytest

from gateway.store.store import Store
from tests.hurry import hurried
from tests.store.stores import opened

__all__ = ["hurried"]


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    with opened(store_url) as made:
        yield made
