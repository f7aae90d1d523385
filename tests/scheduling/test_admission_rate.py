"""How fast work gets done, and what is advised by it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.scheduling.admission import (
    DEFAULT_RETRY_AFTER,
    LONGEST_RETRY_AFTER,
    RATE_WINDOW,
    CompletionRate,
)


def test_nothing_is_known_at_first() -> None:
    rate = CompletionRate()
    assert rate.per_second(10.0) is None
    assert rate.seconds_until(3, 10.0) is None
    assert rate.retry_after(3, 10.0) == DEFAULT_RETRY_AFTER
    rate.completed(10.0)
    assert rate.per_second(10.0) is None


def test_a_rate_is_completions_by_the_time_they_took() -> None:
    rate = CompletionRate()
    for second in range(10):
        rate.completed(float(second))
    assert rate.per_second(10.0) == 1.0
    assert rate.seconds_until(5, 10.0) == 5.0
    assert rate.retry_after(5, 10.0) == 5.0


def test_the_past_is_forgotten() -> None:
    rate = CompletionRate()
    for second in range(10):
        rate.completed(float(second))
    assert rate.per_second(10.0 + RATE_WINDOW) is None


@given(st.lists(st.floats(0, 1e6), max_size=50), st.integers(0, 10_000), st.floats(0, 1e3))
def test_the_advice_is_whole_seconds_within_bounds(
    ends: list[float], ahead: int, later: float
) -> None:
    rate = CompletionRate()
    for end in sorted(ends):
        rate.completed(end)
    advice = rate.retry_after(ahead, max(ends, default=0.0) + later)
    assert advice == int(advice)
    assert 1 <= advice <= LONGEST_RETRY_AFTER
