"""A line through noisy measurements."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.speed import LinearTrend


def a_trend() -> LinearTrend:
    return LinearTrend(half_life=1000, slope_prior=0.2, prior_strength=50, most_slope=2)


def exactly(trend: LinearTrend, x: float, y: float, weight: float = 40) -> bool:
    return trend.learn(x, y, y, weight)


def test_the_first_measurement_is_believed_with_the_usual_slope() -> None:
    trend = a_trend()
    assert (trend.level, trend.slope) == (0, 0)
    exactly(trend, 1, 1.2)
    assert (trend.level, trend.slope) == pytest.approx((1.0, 0.2))


def test_a_line_is_found_under_noise() -> None:
    trend, rng = a_trend(), random.Random(7)
    for _ in range(300):
        x = rng.uniform(0, 3)
        exactly(trend, x, (2 + 0.8 * x) * rng.lognormvariate(0, 0.15))
    assert trend.level == pytest.approx(2, rel=0.12)
    assert trend.slope == pytest.approx(0.8, rel=0.25)


@pytest.mark.parametrize("factor", [0.001, 1000])
def test_two_surprises_move_it_little(factor: float) -> None:
    trend = a_trend()
    for _ in range(20):
        exactly(trend, 0, 1)
    exactly(trend, 0, factor)
    exactly(trend, 0, factor)
    assert trend.level == pytest.approx(1, rel=0.15)


@pytest.mark.parametrize("factor", [0.25, 4])
def test_a_lasting_change_is_believed_within_a_few_measurements(factor: float) -> None:
    trend = a_trend()
    for _ in range(200):
        exactly(trend, 0, 1)
    for _ in range(8):
        exactly(trend, 0, factor)
    assert trend.level == pytest.approx(factor, rel=0.2)


def test_an_interval_around_the_line_leaves_it_nearly_as_it_was() -> None:
    trend = a_trend()
    for _ in range(20):
        exactly(trend, 0, 1)
    trend.learn(0, 0.001, 10, 40)
    assert trend.level == pytest.approx(1, rel=0.01)


def test_an_interval_moves_it_to_its_nearer_end_at_most_at_once() -> None:
    trend = a_trend()
    exactly(trend, 0, 1)
    trend.learn(0, 2, 4, 1000)
    assert 1 < trend.level <= 2


def test_a_first_interval_that_is_too_wide_is_ignored() -> None:
    trend = a_trend()
    assert not trend.learn(0, 0.001, 1000, 40)
    assert trend.level == 0
    assert trend.learn(0, 1, 4, 40)
    assert trend.level == pytest.approx(2)


positive = st.floats(1e-6, 1e6)


@given(st.lists(st.tuples(st.floats(0, 100), positive, st.floats(1, 1e6), st.floats(0.1, 1e8))))
def test_it_stays_positive(
    told: list[tuple[float, float, float, float]],
) -> None:
    trend = a_trend()
    for x, low, width, weight in told:
        trend.learn(x, low, low * width, weight)
        for at in (0, 1, 64):
            assert 0 <= trend.level + trend.slope * at < math.inf
        assert trend.level > 0 or trend.slope == 0
        assert trend.slope <= trend.most_slope * trend.level * 1.001
