"""Chats come as fast beside a batch as without, but for the step that their nodes share."""

from __future__ import annotations

from statistics import quantiles

from tests.batches.measure_feeding import chats_beside
from tests.virtual import in_virtual_time


@in_virtual_time
async def test_chats_do_not_wait_for_the_lines_of_a_batch() -> None:
    alone = await chats_beside(0, 300, 30)
    beside = await chats_beside(200, 300, 30)
    assert beside.busy > 6.0 > alone.busy
    assert quantiles(beside.seconds, n=20)[-1] <= 1.25 * quantiles(alone.seconds, n=20)[-1]
