from __future__ import annotations

from tests.calls import count_calls


def test_ten_times_the_calls_are_ten_times_the_count() -> None:
    def work(times: int) -> int:
        return count_calls(lambda: [abs(number) for number in range(times)])

    assert work(1100) - work(100) == 10 * (work(200) - work(100)) == 1000
