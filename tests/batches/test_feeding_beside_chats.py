"""Chats come as fast beside a batch as without."""

from __future__ import annotations

from statistics import quantiles

import pytest

from tests.batches.measure_feeding import Site, chats_beside
from tests.virtual import in_virtual_time


def p95(seconds: list[float]) -> float:
    return quantiles(seconds, n=20)[-1]


@pytest.mark.slow
@in_virtual_time
async def test_long_prompts_do_not_notice_the_lines_of_a_batch_beside_them() -> None:
    site = Site(nodes=2, slots=4, reserve=0.25)
    alone = await chats_beside(site, 0, 300, 30)
    beside = await chats_beside(site, 200, 300, 30)
    assert beside.busy > 6.0 > alone.busy
    assert p95(beside.seconds) <= 1.25 * p95(alone.seconds)


@pytest.mark.slow
@in_virtual_time
async def test_no_prompt_notices_a_batch_that_stays_off_as_many_nodes_as_there_are_chats() -> None:
    site = Site(nodes=4, slots=2, reserve=0.5, line_words=300)
    alone = await chats_beside(site, 0, 0, 30)
    beside = await chats_beside(site, 100, 0, 30)
    assert beside.busy > 4.0 > alone.busy
    assert p95(beside.seconds) <= 1.25 * p95(alone.seconds)
