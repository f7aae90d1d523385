"""The public listener is tested on the event loop that it is made for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
import uvloop

from tests.web.raw_client import Public, public


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Public]:
    """A gateway as it comes; a module that needs another has a fixture of this name."""
    async with public(tmp_path_factory.mktemp("gate")) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def gate(shared_gateway: Public) -> AsyncIterator[Public]:
    """One gateway for all: whatever a test does to it must not be noticed by the next."""
    shared_gateway.forget()
    yield shared_gateway
    await shared_gateway.is_well()
