"""Whether a figure stays as it was: the slope of its second half, and how sure that is."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Flatness:
    """A line through samples of (seconds, value)."""

    slope: float
    """Of the value, a second; Theil and Sen's median of slopes, which single spikes don't move."""
    median: float
    seconds: float
    """That the line spans."""

    @property
    def growth(self) -> float:
        """Of the value, over the whole line."""
        return self.slope * self.seconds

    def flat(self, *, share: float, least: float) -> bool:
        """Whether it grows by no more than this share of its median, or by no more than `least`."""
        return self.growth <= max(share * self.median, least)

    def __str__(self) -> str:
        return f"{self.median:.1f}, grown by {self.growth:+.2f} in the last {self.seconds:.0f} s"


def flatness(samples: Sequence[tuple[float, float]], warm: float = 0.5) -> Flatness:
    """Of all samples but the first `warm` share of them. ValueError for fewer than four."""
    settled = samples[int(len(samples) * warm) :]
    if len(settled) < 2:
        raise ValueError(f"{len(samples)} samples tell nothing")
    step = max(1, len(settled) // 300)
    thin = settled[::step]
    slopes = [
        (b - a) / (t - s)
        for number, (s, a) in enumerate(thin)
        for t, b in thin[number + 1 :]
        if t > s
    ]
    return Flatness(
        statistics.median(slopes),
        statistics.median(value for _, value in settled),
        settled[-1][0] - settled[0][0],
    )
