"""A PostgreSQL server of a module's own, which its tests may stop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.postgres import PostgresServer, running_postgres
from tests.store.stores import opened


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """Return a server that tests may stop."""
    with running_postgres() as made:
        yield made


@pytest.fixture
def server_url(server: PostgresServer) -> str:
    """Return the URL of a store with its tables in that server."""
    url = server.new_database()
    with opened(url):
        return url
