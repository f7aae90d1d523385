"""Cut streams of real servers: a short run of `python -m tests.reliability.cuts`."""

from __future__ import annotations

import pytest

from tests.reliability.cuts import Outcome, run_cuts

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(900)]

STREAMS = 20


def check(outcome: Outcome, *, identical: int) -> None:
    assert outcome.wrong == []
    assert outcome.streams > STREAMS * 0.9
    assert outcome.resumed >= outcome.streams
    assert outcome.identical + outcome.other_continuation == outcome.streams
    assert outcome.identical >= identical * outcome.streams / 100
    assert outcome.usage_equal >= identical * outcome.streams / 100


async def test_resumed_streams_of_word_fragments_are_nearly_always_identical() -> None:
    check(await run_cuts(STREAMS, 7, "text", fragments=True), identical=90)


@pytest.mark.smoke
async def test_exactly_resumed_streams_are_always_identical() -> None:
    check(await run_cuts(STREAMS, 7, "exact", fragments=True), identical=100)
