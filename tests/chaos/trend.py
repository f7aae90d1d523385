"""The trend of a figure over time: the slope of its second half."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Trend:
    """A line through samples of (seconds, value); `is_flat` judges its growth."""

    slope: float
    """Growth of the value in a second: the Theil-Sen estimator, which ignores single spikes."""
    median: float
    seconds: float
    """Time that the line spans."""

    @property
    def growth(self) -> float:
        """Growth of the value over the whole line."""
        return self.slope * self.seconds

    def is_flat(self, *, share: float, least: float) -> bool:
        """Whether it grows by at most `share` of its median, or by at most `least`."""
        return self.growth <= max(share * self.median, least)

    def __str__(self) -> str:
        return f"{self.median:.1f}, grown by {self.growth:+.2f} in the last {self.seconds:.0f} s"


def trend(samples: Sequence[tuple[float, float]], warm: float = 0.5) -> Trend:
    """The trend of all samples but the first `warm` share. ValueError for fewer than four."""
    settled = samples[int(len(samples) * warm) :]
    if len(settled) < 2:
        raise ValueError(f"{len(samples)} samples are too few for a trend")
    step = max(1, len(settled) // 300)
    thin = settled[::step]
    slopes = [
        (b - a) / (t - s)
        for number, (s, a) in enumerate(thin)
        for t, b in thin[number + 1 :]
        if t > s
    ]
    return Trend(
        statistics.median(slopes),
        statistics.median(value for _, value in settled),
        settled[-1][0] - settled[0][0],
    )
