from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.config.settings import Settings
from gateway.store.database import locate_store
from gateway.store.store import Store
from gateway.usage import limit_sync
from gateway.usage.limit_sync import LimitSync
from gateway.usage.limits import LimitBook
from tests.gateways import until
from tests.store.stores import add, opened


class CountingStore(Store):
    """Counts the jobs."""

    jobs = 0

    async def run(self, job: Callable[..., Any], **named: Any) -> Any:
        self.jobs += 1
        return await super().run(job, **named)


async def test_the_store_is_read_again_only_when_it_may_have_something_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limit_sync, "POLL_SECONDS", 0.01)
    store = CountingStore(
        locate_store(f"sqlite:///{tmp_path}/gateway.db", tmp_path), look_seconds=0.01
    )
    store.start()
    recovered, now, polls = 0, 0.0, 0

    def count() -> int:
        nonlocal polls
        polls += 1
        return recovered

    sync = LimitSync(
        LimitBook(Settings()), store, "own", clock=lambda: now, now=lambda: 1e9, recovered=count
    )
    with opened(f"sqlite:///{tmp_path}/gateway.db") as other:
        await store.wait_opened(30.0)
        await sync.start()
        work = asyncio.create_task(sync.worker.run())

        async def after_polls() -> int:
            least = polls + 20
            await until(lambda: polls >= least)
            return store.jobs

        before = await after_polls()
        assert await after_polls() == before
        recovered = 1
        await until(lambda: store.jobs == before + 1)
        await other.run(add("another's"))
        await until(lambda: store.jobs == before + 2)
        assert await after_polls() == before + 2
        now = limit_sync.LONGEST_UNREAD
        await until(lambda: store.jobs == before + 3)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
    assert await store.aclose(30.0)
