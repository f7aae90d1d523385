"""Scores of settings that were measured several times, and how far they can be told apart.

A score is seconds: less is better. It is compared by its logarithm, so noise is a share.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

from gateway.local.tuning.setting import Setting

USUAL_NOISE = 0.02  # a share: what a quiet machine shows between two starts of a server
USUAL_WEIGHT = 2  # repeats that this is worth beside those that were measured
CLEARLY = 3.6
"""Standard errors by which medians must differ. Some twenty settings are compared: with this a
search among equals keeps the first one 19 times of 20 (seen in simulated searches)."""
LEAST_GAIN = 0.01  # a share below which no change is worth its risk


@dataclass(slots=True)
class History:
    """All scores so far."""

    scores: dict[Setting, list[float]] = field(default_factory=dict)
    failed: set[Setting] = field(default_factory=set)

    def add(self, setting: Setting, score: float | None) -> None:
        """Take a measurement; None where the setting did not run."""
        if score is None:
            self.failed.add(setting)
        else:
            self.scores.setdefault(setting, []).append(score)

    def count(self, setting: Setting) -> int:
        """How often it was measured."""
        return len(self.scores.get(setting, ()))

    def level(self, setting: Setting) -> float:
        """The median score."""
        return statistics.median(self.scores[setting])

    def noise(self) -> float:
        """The standard deviation of one measurement, as a share of it.

        From settings measured more than once, pooled; few repeats are held together by what is
        usual.
        """
        squares, repeats = USUAL_NOISE**2 * USUAL_WEIGHT, USUAL_WEIGHT
        for scores in self.scores.values():
            logs = [math.log(score) for score in scores]
            middle = statistics.fmean(logs)
            squares += sum((value - middle) ** 2 for value in logs)
            repeats += len(logs) - 1
        return math.sqrt(squares / repeats)

    def margin(self, one: Setting, other: Setting) -> float:
        """The share by which their medians must differ to be told apart."""
        error = self.noise() * math.sqrt(1 / self.count(one) + 1 / self.count(other))
        return max(LEAST_GAIN, CLEARLY * error)

    def resolution(self, times: int) -> float:
        """The share by which two settings must differ that are measured so often."""
        return max(LEAST_GAIN, CLEARLY * self.noise() * math.sqrt(2 / times))

    def gain(self, one: Setting, other: Setting) -> float:
        """By which share of the other's score `one` is less; negative where it is more."""
        return 1 - self.level(one) / self.level(other)

    def clearly_better(self, one: Setting, other: Setting) -> bool:
        """Whether `one` is better by more than noise."""
        ahead = math.log(self.level(other) / self.level(one))
        return ahead > self.margin(one, other)
