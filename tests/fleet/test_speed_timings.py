"""Samples from a node's timings and from the gateway's clock."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.speed import (
    ObservedTiming,
    SpeedSample,
    TokenTime,
    sample_from_clock,
    sample_from_timings,
)


def timings(read: float = 2.0, wrote: float = 8.0) -> dict[str, object]:
    return {
        "cache_n": 50,
        "prompt_n": 200,
        "prompt_ms": read * 1000,
        "predicted_n": 80,
        "predicted_ms": wrote * 1000,
    }


def bounds(rate: TokenTime | None) -> tuple[float, float]:
    """The least and the most seconds that it may have taken."""
    assert rate is not None
    return rate.low * rate.tokens, rate.high * rate.tokens


def test_plausible_timings_are_taken_as_they_are() -> None:
    sample = sample_from_timings(timings(), ObservedTiming(10.1, 2.05, busy_slots=1.5))
    assert bounds(sample.prefill) == pytest.approx((2, 2))
    assert bounds(sample.decode) == pytest.approx((8, 8))
    assert (sample.busy_slots, sample.context_tokens) == (1.5, 250)


def test_without_our_clock_timings_are_taken_as_they_are() -> None:
    sample = sample_from_timings(timings(wrote=0.001))
    assert bounds(sample.decode) == pytest.approx((0.001, 0.001))
    assert sample.busy_slots is None


def test_timings_that_are_far_too_short_are_only_the_lower_end() -> None:
    sample = sample_from_timings(timings(read=0.002, wrote=0.008), ObservedTiming(10, 2))
    assert bounds(sample.prefill) == pytest.approx((0.002, 2))
    assert bounds(sample.decode) == pytest.approx((0.008, 8))


def test_timings_that_are_far_too_long_are_bounded_by_our_clock() -> None:
    sample = sample_from_timings(timings(read=2000, wrote=8000), ObservedTiming(10, 2))
    assert bounds(sample.prefill) == pytest.approx((2, 2))
    assert bounds(sample.decode) == pytest.approx((10, 10))


def test_an_answer_in_one_piece_is_compared_with_the_whole_duration() -> None:
    assert bounds(sample_from_timings(timings(), ObservedTiming(10.2)).decode) == pytest.approx(
        (8, 8)
    )
    assert bounds(
        sample_from_timings(timings(wrote=0.008), ObservedTiming(10.0)).decode
    ) == pytest.approx((0.008, 8))


def test_the_time_that_other_prefills_may_have_taken_stays_open() -> None:
    sample = sample_from_timings(
        timings(), ObservedTiming(10, 2, busy_slots=2, stalled_seconds=3, mean_prefills=2)
    )
    assert bounds(sample.prefill) == pytest.approx((1, 2))
    assert bounds(sample.decode) == pytest.approx((5, 8))


def test_neighbours_of_an_answer_in_one_piece_are_assumed_to_prefill_as_long() -> None:
    """A fifth of their time, with two neighbours."""
    sample = sample_from_timings(timings(), ObservedTiming(10, None, busy_slots=3))
    assert bounds(sample.prefill) == pytest.approx((2 / 1.4, 2))
    assert bounds(sample.decode) == pytest.approx((8 * 0.6, 8))


def test_a_decode_is_never_all_stall() -> None:
    low, _ = bounds(
        sample_from_timings(timings(), ObservedTiming(10, 2, stalled_seconds=100)).decode
    )
    assert low == pytest.approx(1)


def test_an_endpoint_without_timings_is_measured_by_our_clock() -> None:
    sample = sample_from_clock(250, 50, 81, ObservedTiming(10, 2))
    assert bounds(sample.prefill) == pytest.approx((2, 2))
    assert bounds(sample.decode) == pytest.approx((8, 8))
    in_one_piece = sample_from_clock(250, 50, 80, ObservedTiming(10))
    assert in_one_piece.prefill is None
    assert bounds(in_one_piece.decode) == pytest.approx((5, 10))
    embedding = sample_from_clock(250, 0, 0, ObservedTiming(2))
    assert embedding.decode is None
    assert bounds(embedding.prefill) == pytest.approx((2, 2))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_impossible_times_of_our_clock_are_ignored(bad: float) -> None:
    assert sample_from_clock(250, 50, 80, ObservedTiming(bad)) == SpeedSample()
    assert sample_from_clock(bad, 50, 80, ObservedTiming(10)) == SpeedSample()
    assert sample_from_timings(
        timings(), ObservedTiming(10, 2, stalled_seconds=bad)
    ) == sample_from_timings(timings())


anything: Any = st.floats() | st.integers() | st.none() | st.text(max_size=3) | st.booleans()
seconds = st.floats() | st.floats(0, 1e4)
KEYS = ["cache_n", "prompt_n", "prompt_ms", "predicted_n", "predicted_ms"]


@given(
    st.dictionaries(st.sampled_from(KEYS), anything),
    st.none() | st.builds(ObservedTiming, seconds, st.none() | seconds, seconds, seconds, seconds),
)
def test_any_timings_make_an_interval_of_positive_numbers(
    told: dict[str, object], seen: ObservedTiming | None
) -> None:
    sample = sample_from_timings(told, seen)
    for rate in (sample.prefill, sample.decode):
        if rate is not None:
            assert 0 < rate.low <= rate.high < math.inf
            assert 2 <= rate.tokens < math.inf
    assert sample.busy_slots is None or 1 <= sample.busy_slots < math.inf
    assert 0 <= sample.context_tokens < math.inf
