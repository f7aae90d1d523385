"""The store and the folder of a gateway in virtual time, while their threads live in real time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from functools import wraps
from typing import ParamSpec, TypeVar
from unittest.mock import patch

from gateway.store.store import Store
from gateway.stored.folder import DiskThreads
from tests.virtual import VirtualLoop

P = ParamSpec("P")
T = TypeVar("T")


def holding_the_clock(work: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """Virtual time stands still while this work, which is done by threads, goes on."""

    @wraps(work)
    async def run(*args: P.args, **keys: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop._virtual.threads += 1
        try:
            return await work(*args, **keys)
        finally:
            loop._virtual.threads -= 1

    return run


@contextlib.contextmanager
def store_in_virtual_time() -> Iterator[None]:
    with (
        patch.object(Store, "run", holding_the_clock(Store.run)),
        patch.object(Store, "wait_opened", holding_the_clock(Store.wait_opened)),
        patch.object(DiskThreads, "run", holding_the_clock(DiskThreads.run)),
    ):
        yield
