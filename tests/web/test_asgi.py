"""Responses of many rows: made and encoded in steps."""

from __future__ import annotations

import asyncio
import time

from gateway.web.asgi import STEP_SECONDS, json_of_rows


async def test_other_work_runs_between_the_rows_of_a_large_response() -> None:
    turns = 0

    async def other_work() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def slow_row(number: int) -> int:
        until = time.perf_counter() + STEP_SECONDS
        while time.perf_counter() < until:
            pass
        return number

    other = asyncio.create_task(other_work())
    await json_of_rows("rows", range(5), slow_row)
    other.cancel()
    assert turns >= 4
