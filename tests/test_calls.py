from __future__ import annotations

from tests.calls import count_calls


def test_ten_times_the_calls_are_ten_times_the_count() -> None:
    def work(times: int) -> int:
        return count_calls(lambda: [abs(number) for number in range(times)])

    assert work(1100) - work(100) == 10 * (work(200) - work(100)) == 1000


def test_two_counts_of_the_same_code_are_equal() -> None:
    first, second = (count_calls(lambda: sorted(range(9), key=lambda x: -x)) for _ in range(2))
    assert first == second > 9
