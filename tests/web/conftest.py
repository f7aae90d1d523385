"""Tests of the edge run on uvloop, as the gateway does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
import uvloop

from tests.hurry import hurried
from tests.web.raw_client import Public, public

__all__ = ["hurried"]


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Public]:
    """A gateway with default settings; a module may override this fixture."""
    async with public(tmp_path_factory.mktemp("gate")) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def gate(shared_gateway: Public) -> AsyncIterator[Public]:
    """The shared gateway; no test may leave anything behind that the next one notices."""
    shared_gateway.forget()
    yield shared_gateway
    await shared_gateway.is_well()
