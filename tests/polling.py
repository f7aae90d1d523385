"""Waiting for what a look finds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], bool], limit: float = 30.0) -> None:
    """Wait without an event loop; an AssertionError after `limit` seconds."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, f"not within {limit} s"
        time.sleep(0.005)


async def eventually(look: Callable[[], Awaitable[T | None]], limit: float = 60.0) -> T:
    """What `look` returns once that is not None; an AssertionError after `limit` seconds."""
    try:
        async with asyncio.timeout(limit):
            while (found := await look()) is None:  # noqa: ASYNC110 - no event tells it
                await asyncio.sleep(0.02)
            return found
    except TimeoutError:
        raise AssertionError(f"not within {limit} s") from None
