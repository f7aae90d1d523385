"""The completion rate, and the `Retry-After` that follows from it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.scheduling.admission import (
    DEFAULT_RETRY_AFTER,
    LONGEST_RETRY_AFTER,
    RATE_WINDOW,
    CompletionRate,
)


def test_no_rate_is_known_at_first() -> None:
    rate = CompletionRate()
    assert rate.per_second(10.0) is None
    assert rate.seconds_until(3, 10.0) is None
    assert rate.retry_after(3, 10.0) == DEFAULT_RETRY_AFTER
    rate.completed(10.0)
    assert rate.per_second(10.0) is None


def test_the_rate_is_completions_per_second() -> None:
    rate = CompletionRate()
    for second in range(10):
        rate.completed(float(second))
    assert rate.per_second(10.0) == 1.0
    assert rate.seconds_until(5, 10.0) == 5.0
    assert rate.retry_after(5, 10.0) == 5.0


def test_completions_before_the_window_are_forgotten() -> None:
    rate = CompletionRate()
    for second in range(10):
        rate.completed(float(second))
    assert rate.per_second(10.0 + RATE_WINDOW) is None


@given(st.lists(st.floats(0, 1e6), max_size=50), st.integers(0, 10_000), st.floats(0, 1e3))
def test_retry_after_is_whole_seconds_within_bounds(
    ends: list[float], ahead: int, later: float
) -> None:
    rate = CompletionRate()
    for end in sorted(ends):
        rate.completed(end)
    advice = rate.retry_after(ahead, max(ends, default=0.0) + later)
    assert advice == int(advice)
    assert 1 <= advice <= LONGEST_RETRY_AFTER
