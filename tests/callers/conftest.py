from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Connection, create_engine

from gateway.store.schema import metadata
from gateway.store.store import Store
from tests.hurry import hurried
from tests.store.stores import opened

__all__ = ["hurried"]


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    """Return an open store, of each kind in turn."""
    with opened(store_url) as one:
        yield one


@pytest.fixture
def connection() -> Iterator[Connection]:
    """Return a connection to a store in memory, with all tables."""
    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        metadata.create_all(connection)
        yield connection
    engine.dispose()
