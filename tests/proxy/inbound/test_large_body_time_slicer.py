from __future__ import annotations

import asyncio
from collections.abc import Generator

import pytest

from gateway.proxy.inbound.body import TimeSlicer


class Work:
    """Work of some steps, which writes down the turn of the event loop in which each ran."""

    def __init__(self, steps: int, turns: list[int]) -> None:
        self.steps = steps
        self.turns = turns
        self.turn = 0
        self.closed = False

    def run(self) -> Generator[None, None, str]:
        try:
            for _ in range(self.steps):
                self.turns.append(self.turn)
                yield
            return "done"
        finally:
            self.closed = True


async def test_all_work_together_takes_one_step_in_each_turn_of_the_loop() -> None:
    turns: list[int] = []
    slicer, works = TimeSlicer(), [Work(5, turns) for _ in range(3)]

    async def count_turns() -> None:
        while True:
            for work in works:
                work.turn += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    results = await asyncio.gather(*(slicer.run(work.run()) for work in works))
    counting.cancel()
    assert results == ["done"] * 3
    assert len(turns) == 15
    assert len(set(turns)) == 15, "two steps in one turn"


async def test_work_of_one_step_waits_its_turn_like_any_other() -> None:
    turns: list[int] = []
    slicer, long = TimeSlicer(), Work(3, turns)
    order: list[str] = []

    async def one(name: str) -> None:
        await slicer.run_once(lambda: order.append(name))

    await asyncio.gather(slicer.run(long.run()), one("a"), one("b"))
    assert order == ["a", "b"]


async def test_an_error_ends_the_work_and_lets_the_next_run() -> None:
    slicer = TimeSlicer()

    def fails() -> Generator[None, None, None]:
        yield
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await slicer.run(fails())
    assert await slicer.run_once(lambda: 7) == 7


async def test_cancelled_work_is_closed_and_blocks_nobody() -> None:
    slicer, work = TimeSlicer(), Work(1000, [])
    running = asyncio.create_task(slicer.run(work.run()))
    for _ in range(10):
        await asyncio.sleep(0)
    assert work.turns, "it has begun"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert work.closed
    assert len(work.turns) < 1000
    assert await slicer.run_once(lambda: 7) == 7
