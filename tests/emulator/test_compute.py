from __future__ import annotations

import asyncio
from math import inf

import pytest

from tests.emulator.compute import Compute
from tests.virtual import in_virtual_time, now


def compute(prefill: float = inf, decode: float = inf, step: float = 0.0) -> Compute:
    return Compute(prefill_tps=prefill, decode_tps=decode, step=step, batch=100, clock=now)


async def read(work: Compute, tokens: int) -> list[tuple[int, float]]:
    return [progress async for progress in work.read(tokens)]


async def write(work: Compute, tokens: int, width: int = 1) -> None:
    with work.writing(width) as writer:
        for _ in range(tokens):
            await writer.next()


@in_virtual_time
async def test_prompts_are_read_one_after_the_other() -> None:
    work = compute(prefill=10_000)
    first, second = await asyncio.gather(read(work, 300), read(work, 300))
    assert first[-1][0] == second[-1][0] == 300
    assert second[-1][1] >= first[-1][1] + 0.025  # begun when the first was nearly done
    assert work.busy_seconds == pytest.approx(0.06)


@in_virtual_time
async def test_each_further_decoding_slot_adds_a_step() -> None:
    work = compute(decode=1000, step=0.002)
    await asyncio.gather(*(write(work, 10) for _ in range(3)))
    assert work.busy_seconds == pytest.approx(10 * (0.001 + 2 * 0.002))
    work = compute(decode=1000, step=0.002)
    await write(work, 10, width=3)
    assert work.busy_seconds == pytest.approx(10 * (0.001 + 2 * 0.002))


@in_virtual_time
async def test_during_a_prefill_other_slots_decode_one_token_a_batch() -> None:
    work = compute(prefill=2000, decode=1000)
    written = 0

    async def neighbour() -> None:
        nonlocal written
        with work.writing(1) as writer:
            while True:
                await writer.next()
                written += 1

    task = asyncio.create_task(neighbour())
    await asyncio.sleep(0.02)
    before = written
    progress = await read(
        work, 297
    )  # each batch has one token of the neighbour and 99 of the prompt
    assert [done for done, _ in progress] in ([0, 99, 198, 297], [0, 0, 99, 198, 297])
    assert written - before <= 5  # not the hundred and fifty of 0.15 s
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
