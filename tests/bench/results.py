"""Medians, ratios and verdicts from samples."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

PEER = "nginx"
OURS = "gateway"
SGLANG_TO_NGINX = 144 / 22
"""CPU of sglang-router 0.3 to nginx 1.22 at plain c32, measured on the reference machine."""
DELAY_LIMIT_MS = 50.0  # a number of streams is sustained while their p99 delay stays below this

Verdict = Literal["aim", "must", "MISS", "not measured"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement of one target; with errors it is invalid and counts in no figure."""

    scenario: str
    target: str
    round: int
    figures: dict[str, float]
    errors: int = 0
    first_error: str = ""


@dataclass(frozen=True, slots=True)
class Results:
    """The samples of one run of the benchmark."""

    samples: Sequence[Sample]

    def invalid(self) -> list[Sample]:
        """Samples with errors."""
        return [sample for sample in self.samples if sample.errors]

    def rounds(self, scenario: str, target: str, figure: str) -> dict[int, float]:
        """A figure of the valid samples, by round."""
        return {
            sample.round: sample.figures[figure]
            for sample in self.samples
            if (sample.scenario, sample.target) == (scenario, target)
            and not sample.errors
            and figure in sample.figures
        }

    def median(self, scenario: str, target: str, figure: str) -> float | None:
        """Median over the rounds; None where nothing valid was measured."""
        values = self.rounds(scenario, target, figure).values()
        return statistics.median(values) if values else None

    def paired(
        self,
        one: tuple[str, str],
        other: tuple[str, str],
        figure: str,
        combine: Callable[[float, float], float],
    ) -> float | None:
        """Median over the rounds of two figures, which are combined within each round.

        `one` and `other` are (scenario, target). Within a round both ran under the same
        conditions; medians of each alone would mix conditions.
        """
        left, right = self.rounds(*one, figure), self.rounds(*other, figure)
        both = [combine(left[i], right[i]) for i in left.keys() & right.keys()]
        return statistics.median(both) if both else None

    def ratio(
        self, one: tuple[str, str], other: tuple[str, str], figure: str = "cpu_us"
    ) -> float | None:
        """Median over the rounds of the ratio of one to the other."""
        return self.paired(one, other, figure, lambda a, b: a / b if b else float("inf"))


@dataclass(frozen=True, slots=True)
class Goal:
    """A target figure of the data plane."""

    name: str
    must: float
    aim: float
    measure: Callable[[Results], float | None]
    more_is_better: bool = False

    def verdict(self, value: float | None) -> Verdict:
        """The better of the two bounds that a value keeps."""
        if value is None:
            return "not measured"
        sign = -1 if self.more_is_better else 1
        if value * sign <= self.aim * sign:
            return "aim"
        return "must" if value * sign <= self.must * sign else "MISS"


def _to_peer(scenario: str, peer_scenario: str = "") -> Callable[[Results], float | None]:
    return lambda results: results.ratio((scenario, OURS), (peer_scenario or scenario, PEER))


def _to_sglang(results: Results) -> float | None:
    ratio = results.ratio(("plain-c32", OURS), ("plain-c32", PEER))
    return None if ratio is None else ratio / SGLANG_TO_NGINX


def _added(results: Results) -> float | None:
    ours, direct = ("latency", OURS), ("latency", "direct")
    return results.paired(ours, direct, "p50_ms", lambda a, b: a - b)


def _streams(results: Results) -> float | None:
    """The largest number of streams with a p99 delay below the limit; 0 when there is none."""
    counts = {
        int(sample.figures["streams"])
        for sample in results.samples
        if sample.target == OURS and "streams" in sample.figures and "p99_ms" in sample.figures
    }
    sustained = [
        count
        for count in counts
        if (delay := results.median(f"streams-{count}", OURS, "p99_ms")) is not None
        and delay < DELAY_LIMIT_MS
    ]
    return max(sustained, default=0) if counts else None


GOALS = (
    Goal("chunk / nginx", 2.0, 1.5, _to_peer("chunk")),
    Goal("chunk full / nginx", 2.5, 1.5, _to_peer("chunk-full")),
    Goal("plain c32 / nginx", 6, 5, _to_peer("plain-c32")),
    Goal("assembled plain chat: per token / nginx chunk", 2.5, 1.5, _to_peer("assembled", "chunk")),
    Goal(
        "plain c256 / own c32",
        1.5,
        1.2,
        lambda results: results.ratio(("plain-c256", OURS), ("plain-c32", OURS)),
    ),
    Goal("plain c32 / sglang-router (by its recorded 6.5 x nginx)", 1.0, 0.7, _to_sglang),
    Goal("added median at 100 requests/s, ms", 1.0, 0.6, _added),
    Goal("streams of 10 tokens/s with p99 delay < 50 ms", 2000, 3000, _streams, True),
    Goal(
        "RSS with idle streams, MB",
        100,
        60,
        lambda results: results.median("rss", OURS, "rss_mb"),
    ),
)
