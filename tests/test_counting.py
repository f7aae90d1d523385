from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.counting import instructions

COUNT_TWICE = """
from tests.counting import instructions
print(*(instructions(lambda: [i for i in range(9)]) for _ in range(2)))
"""


def test_the_first_count_of_a_process_is_that_of_every_other() -> None:
    command = [sys.executable, "-c", COUNT_TWICE]
    root = Path(__file__).resolve().parents[1]
    told = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    first, second = map(int, told.split())
    assert first == second > 0


def test_ten_times_the_work_is_ten_times_the_count() -> None:
    def work(times: int) -> int:
        return instructions(lambda: [None for _ in range(times)])

    assert 9 < (work(1100) - work(100)) / (work(200) - work(100)) < 11
