from __future__ import annotations

import pytest

from tests.fresh.chroot import LEFT_BEHIND, left_behind
from tests.fresh.commands import counts


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("== 2 failed, 5482 passed in 130.25s (0:02:10) ==", {"failed": 2, "passed": 5482}),
        (
            "5867 passed, 2 skipped, 6 errors in 838.04s",
            {"passed": 5867, "skipped": 2, "error": 6},
        ),
        ("make: *** [Makefile:59: test] Error 4", {}),
    ],
)
def test_test_outcomes_are_read_from_pytests_last_line(line: str, expected: dict[str, int]) -> None:
    assert counts(f"SKIPPED [1] tests/x.py:30: nginx is not installed\n{line}\n") == expected


def test_processes_that_outlive_ctrl_c_are_reported() -> None:
    assert left_behind(f"INFO ended\n{LEFT_BEHIND}17 (llama-server) S 1 7\nmake: done\n") == [
        "17 (llama-server) S 1 7"
    ]
