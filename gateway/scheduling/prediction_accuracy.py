"""How well what was expected of requests agrees with what came of them, for metrics.

A ratio of 2 means that it took twice as long as was expected when the slot was granted. Only
attempts that were not cut short count, and whose tokens their node has told.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field

from gateway.scheduling.decision_log import Grant

RATIO_BOUNDS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)

LEAST_SECONDS = 0.01
"""Shorter expectations say nothing: a ratio of milliseconds is that of the network's whims."""


@dataclass(slots=True, eq=False)
class RatioCounts:
    """How often each ratio was met; the last count is of those above all bounds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(RATIO_BOUNDS) + 1))
    sum: float = 0.0

    def count(self, ratio: float) -> None:
        """Count a ratio."""
        self.counts[bisect_left(RATIO_BOUNDS, ratio)] += 1
        self.sum += ratio


@dataclass(slots=True, eq=False)
class PredictionAccuracy:
    """Counts of this gateway, over its restarts."""

    first_token: RatioCounts = field(default_factory=RatioCounts)
    completion: RatioCounts = field(default_factory=RatioCounts)
    cached_expected: float = 0.0
    """Tokens that nodes were believed to have cached of the prompts that they got."""
    cached_found: int = 0
    """Tokens of the same prompts that they had cached."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not (
            any(self.first_token.counts) or any(self.completion.counts) or self.cached_found
        )

    def restore(self, earlier: PredictionAccuracy) -> None:
        """Go on from an earlier process's counts. Raises: ValueError."""
        if any(
            len(ratios.counts) != len(RATIO_BOUNDS) + 1 or min(ratios.counts) < 0
            for ratios in (earlier.first_token, earlier.completion)
        ):
            raise ValueError("counts of other classes")
        sums = (
            earlier.first_token.sum, earlier.completion.sum,
            earlier.cached_expected, earlier.cached_found,
        )  # fmt: skip
        if not all(0 <= one < math.inf for one in sums):
            raise ValueError("no sums")
        self.first_token, self.completion = earlier.first_token, earlier.completion
        self.cached_expected, self.cached_found = earlier.cached_expected, earlier.cached_found

    def settled(self, grant: Grant) -> None:
        """A complete response's tokens are known."""
        if grant.used is None:
            return
        if grant.first_content_at is not None and grant.expected_ttft >= LEAST_SECONDS:
            self.first_token.count((grant.first_content_at - grant.at) / grant.expected_ttft)
        if grant.ended_at is not None and grant.expected_seconds >= LEAST_SECONDS:
            self.completion.count((grant.ended_at - grant.at) / grant.expected_seconds)
        if grant.comparison is not None:
            prompt, cached, _ = grant.used
            self.cached_expected += min(grant.comparison.chosen.cached, prompt)
            self.cached_found += cached
