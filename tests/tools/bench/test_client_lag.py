from __future__ import annotations

import asyncio
import time

from gateway.tools.bench.client_lag import MOST_SAMPLES, TICK_SECONDS, LagMonitor
from tests.virtual import in_virtual_time, now


@in_virtual_time
async def test_a_free_event_loop_has_no_lag() -> None:
    monitor = LagMonitor(now)
    async with monitor.watching():
        await asyncio.sleep(10)
    assert monitor.figures([], 0).lag.p99 < 1e-6


async def test_work_that_blocks_the_event_loop_is_seen_as_lag_and_cpu_time() -> None:
    cpu = iter((10.0, 12.5))
    monitor = LagMonitor(cpu_clock=lambda: next(cpu))
    began = time.monotonic()
    async with monitor.watching():
        for _ in range(5):
            await asyncio.sleep(TICK_SECONDS)
            time.sleep(0.05)  # noqa: ASYNC251 - it blocks the event loop on purpose
    seconds = time.monotonic() - began
    found = monitor.figures([0.25], 3)
    assert found.lag.p99 > 0.02
    assert 2.5 / seconds <= found.cpu_share <= 2.5 / 0.25
    assert (found.start_lag.p50, found.held_back) == (0.25, 3)


@in_virtual_time
async def test_a_long_watch_keeps_a_bounded_number_of_looks() -> None:
    monitor = LagMonitor(now)
    async with monitor.watching():
        await asyncio.sleep(2.5 * MOST_SAMPLES * TICK_SECONDS / 10)
        for _ in range(MOST_SAMPLES + 10):
            monitor._keep(0.001)
    assert len(monitor._samples) == MOST_SAMPLES
