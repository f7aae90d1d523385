from __future__ import annotations

import asyncio
import itertools
import random
import time
from unittest.mock import patch

import pytest

from gateway.workshop.bench.load import (
    LEAST_REQUESTS,
    MOST_REQUESTS,
    OPEN_SECONDS,
    TICK_SECONDS,
    LagMonitor,
    LoadError,
    Loop,
    parse_loads,
    poisson_times,
)
from tests.each_case import each_case
from tests.virtual import in_virtual_time, now


def test_levels_make_a_load_each() -> None:
    loads = parse_loads(Loop.CLOSED, "1, 4,8", None, None)
    assert [(one.loop, one.level) for one in loads] == [(Loop.CLOSED, n) for n in (1, 4, 8)]
    assert [one.requests for one in loads] == [LEAST_REQUESTS, 16, 32]
    assert loads[1].label == "4 at a time"


def test_a_duration_alone_bounds_the_time_and_not_the_number() -> None:
    (load,) = parse_loads(Loop.CLOSED, "4", None, 30.0)
    assert (load.requests, load.seconds) == (MOST_REQUESTS, 30.0)
    (load,) = parse_loads(Loop.CLOSED, "4", 7, 30.0)
    assert (load.requests, load.seconds) == (7, 30.0)
    (load,) = parse_loads(Loop.POISSON, "0.5", None, None)
    assert (load.requests, load.seconds) == (MOST_REQUESTS, OPEN_SECONDS)


LEVELS = ("", "0", "1,,2", "-1", "1.5", "a", "99999", "1" * 5000, "²", ",".join("1" * 40))
RATES = ("", "0", "-1", "nan", "inf", "1e9", "x")


@each_case(
    ("loop", "text"),
    [*((Loop.CLOSED, text) for text in LEVELS), *((Loop.POISSON, text) for text in RATES)],
)
def test_impossible_levels_and_rates_are_refused(loop: Loop, text: str) -> None:
    with pytest.raises(LoadError):
        parse_loads(loop, text, None, None)


def test_arrivals_have_the_rate_and_vary_as_a_poisson_process_does() -> None:
    (load,) = parse_loads(Loop.POISSON, "4", 20_000, None)
    times = list(poisson_times(load, random.Random(1)))
    assert len(times) == 20_000
    assert times == sorted(times)
    assert len(times) / times[-1] == pytest.approx(4, rel=0.03)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance == pytest.approx(mean**2, rel=0.1)


def test_no_arrival_is_later_than_the_duration() -> None:
    (load,) = parse_loads(Loop.POISSON, "100", None, 2.0)
    times = list(poisson_times(load, random.Random(1)))
    assert times[-1] <= 2.0
    assert 150 < len(times) < 250


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
    with patch("gateway.workshop.bench.load.MOST_SAMPLES", 100):
        async with monitor.watching():
            await asyncio.sleep(250 * TICK_SECONDS)
    assert monitor._seen > 200
    assert len(monitor._samples) == 100
