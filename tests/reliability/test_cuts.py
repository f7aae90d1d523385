"""Streams of real servers, cut: a sample of what `python -m tests.reliability.cuts` does."""

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


async def test_by_default_they_nearly_always_are() -> None:
    check(await run_cuts(STREAMS, 7, "text"), identical=95)


async def test_of_words_that_read_otherwise_than_they_were_written_as_well() -> None:
    check(await run_cuts(STREAMS, 7, "text", fragments=True), identical=90)


async def test_exact_streams_are_those_of_the_uninterrupted_run_whatever_their_words() -> None:
    check(await run_cuts(STREAMS, 7, "exact", fragments=True), identical=100)
