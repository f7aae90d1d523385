from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway.watch.problems import OVER_SECONDS, Problem, ProblemLog, Severity

DOWN = Problem(
    "down:a", "a is down", "Connection refused.", "Look at the machine.",
    ("llama-gateway nodes probe a",), ("a",),
)  # fmt: skip


class Looks:
    """Looks at the problems, a second apart."""

    def __init__(self) -> None:
        self.now = 100.0
        self.log = ProblemLog(lambda: self.now)

    def see(self, *problems: Problem, times: int = 1) -> list[dict[str, Any]]:
        """What the log is told meanwhile."""
        with capture_logs() as told:
            for _ in range(times):
                self.now += 1
                self.log.take(problems)
        return [dict(line) for line in told]


@pytest.fixture
def looks() -> Looks:
    return Looks()


def test_a_problem_and_its_end_are_told_once(looks: Looks) -> None:
    (line,) = looks.see(DOWN, times=11)
    assert (line["event"], line["log_level"], line["title"]) == ("problem", "warning", "a is down")
    assert line["cause"] == "Connection refused."
    assert line["commands"] == "llama-gateway nodes probe a"
    (line,) = looks.see(times=30)
    assert (line["event"], line["id"], line["seconds"]) == ("problem is over", "down:a", 10.0)


def test_a_problem_that_comes_and_goes_is_told_once(looks: Looks) -> None:
    assert len(looks.see(DOWN)) == 1
    for _ in range(20):
        assert looks.see(times=int(OVER_SECONDS) - 1) == []
        assert looks.see(DOWN) == []


def test_one_that_gets_worse_is_told_again_and_one_that_gets_better_is_not(looks: Looks) -> None:
    worse = replace(DOWN, severity=Severity.CRITICAL)
    looks.see(DOWN)
    assert [line["severity"] for line in looks.see(worse, times=3)] == ["critical"]
    assert looks.see(DOWN, times=3) == []
