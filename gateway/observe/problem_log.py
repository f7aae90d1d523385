"""Tells the log of each problem once: when it begins or gets worse, and when it is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from gateway.observe.problem import Problem, Severity

OVER_SECONDS = 5.0
"""Seconds for which a problem must be away to be over: some come and go around a limit."""

_RANKS = {severity: rank for rank, severity in enumerate(Severity)}

log = structlog.get_logger()


@dataclass(slots=True)
class _Told:
    """A problem that the log was told of."""

    problem: Problem
    since: float
    """Monotonic seconds, like the next one."""
    seen_at: float


@dataclass(slots=True)
class ProblemLog:
    """Compares the problems of each look with those that were told. `clock` is monotonic."""

    clock: Callable[[], float]
    _told: dict[str, _Told] = field(default_factory=dict)
    """By the problem's id: as many as `find_problems` gives, and those that have just gone."""

    def take(self, problems: Sequence[Problem]) -> None:
        """Tell what has changed; `problems` are all that there are now."""
        now = self.clock()
        for problem in problems:
            told = self._told.get(problem.id)
            if told is None:
                self._told[problem.id] = _Told(problem, now, now)
                _tell(problem)
                continue
            if _RANKS[problem.severity] < _RANKS[told.problem.severity]:
                told.problem = problem
                _tell(problem)
            told.seen_at = now
        gone = [told for told in self._told.values() if now - told.seen_at >= OVER_SECONDS]
        for told in gone:
            problem = told.problem
            del self._told[problem.id]
            seconds = round(told.seen_at - told.since, 1)
            log.info("problem is over", id=problem.id, title=problem.title, seconds=seconds)


def _tell(problem: Problem) -> None:
    # As texts, whose control characters the log escapes: nodes and callers name themselves.
    fields = {
        "id": problem.id,
        "severity": problem.severity.value,
        "title": problem.title,
        "cause": problem.cause,
        "remedy": problem.remedy,
        "commands": "; ".join(problem.commands),
        "nodes": ", ".join(problem.nodes),
        "caller": problem.caller,
    }
    level = log.info if problem.severity is Severity.NOTICE else log.warning
    level("problem", **{name: value for name, value in fields.items() if value})
