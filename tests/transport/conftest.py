"""Every test of the transport runs on the gateway's own event loop, and on asyncio's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from gateway.transport import connection


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


@pytest.fixture
def however_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reused connection that breaks is stale, though this machine stood still meanwhile."""
    monkeypatch.setattr(connection, "STALE_SECONDS", 60.0)
