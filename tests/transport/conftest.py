"""Every test of the transport runs on the gateway's own event loop, and on asyncio's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import uvloop

from tests.http.authority import authority

__all__ = ["authority"]


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
