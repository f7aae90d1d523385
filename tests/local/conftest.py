from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from gateway.local.download import open_client
from tests.local.file_server import FileServer
from tests.servers import demo_model


@pytest.fixture(scope="session")
def content() -> bytes:
    """A whole model, of some 4 MiB."""
    return demo_model().read_bytes()


@pytest.fixture
def server(content: bytes) -> Iterator[FileServer]:
    with FileServer(content).serving() as server:
        yield server


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with open_client() as client:
        yield client
