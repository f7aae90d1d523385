"""The trend of a figure over time: the slope of its second half."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations


@dataclass(frozen=True, slots=True)
class Trend:
    """A line through samples of (seconds, value); `is_flat` judges its growth."""

    slope: float
    """Growth of the value in a second: the Theil-Sen estimator, which ignores single spikes."""
    median: float
    seconds: float  # time that the line spans

    def is_flat(self, *, share: float, least: float) -> bool:
        """Whether it grows by at most `share` of its median, or by at most `least`."""
        return self.slope * self.seconds <= max(share * self.median, least)

    def __str__(self) -> str:
        growth = self.slope * self.seconds
        return f"{self.median:.1f}, grown by {growth:+.2f} in the last {self.seconds:.0f} s"


def trend(samples: Sequence[tuple[float, float]]) -> Trend:
    """The trend of the second half of the samples. ValueError for fewer than three."""
    settled = samples[len(samples) // 2 :]
    if len(settled) < 2:
        raise ValueError(f"{len(samples)} samples are too few for a trend")
    thin = settled[:: max(1, len(settled) // 300)]
    slopes = [(b - a) / (t - s) for (s, a), (t, b) in combinations(thin, 2) if t > s]
    median = statistics.median(value for _, value in settled)
    return Trend(statistics.median(slopes), median, settled[-1][0] - settled[0][0])
