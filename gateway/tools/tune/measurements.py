"""Measurements: their file, from which a stopped search goes on, their scores and noise."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from gateway.tools.tune.setting import Setting


@dataclass(frozen=True, slots=True)
class MeasurementLog:
    """A file of JSON lines, of which only those with the same `subject` are used.

    The subject is all that figures depend on besides the setting: model, server, machine and the
    sizes of the requests.
    """

    path: Path
    subject: dict[str, Any]

    def read(self) -> tuple[list[Measurement], int]:
        """Return the measurements of the subject, in order, and the number of broken lines."""
        if not self.path.exists():
            return [], 0
        measurements: list[Measurement] = []
        broken = 0
        for line in self._lines():
            try:
                value = json.loads(line)
                if value["subject"] == self.subject:
                    measurements.append(_measurement(value))
            except (ValueError, TypeError, KeyError):
                broken += 1
        return measurements, broken

    def append(self, one: Measurement) -> None:
        """Write a line at once. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"subject": self.subject, **asdict(one)}, sort_keys=True)
        with self.path.open("a+b") as file:
            # A kill may have cut the last line short: begin a new one.
            cut = file.tell() > 0 and not self._ends_whole()
            file.write(("\n" if cut else "").encode() + line.encode() + b"\n")

    def rotate(self) -> None:
        """Begin a new file; the old one stays as `<name>.1`."""
        if self.path.exists():
            self.path.replace(self.path.with_name(f"{self.path.name}.1"))

    def _lines(self) -> Iterator[str]:
        for line in self.path.read_text(errors="replace").splitlines():
            if line.strip():
                yield line

    def _ends_whole(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(-1, 2)
            return file.read(1) == b"\n"


def _measurement(value: dict[str, Any]) -> Measurement:
    return Measurement(
        setting=Setting(**value["setting"]),
        figures=Figures(**value["figures"]) if value["figures"] is not None else None,
        error=value["error"],
        seconds=float(value["seconds"]),
        at=float(value["at"]),
        other_work=value["other_work"],
    )


Goal = Literal["latency", "throughput", "balanced"]

GOALS: tuple[Goal, ...] = ("latency", "throughput", "balanced")


@dataclass(frozen=True, slots=True)
class BenchmarkRequest:
    """The request that settings are judged by; tokens."""

    prompt: int
    answer: int


@dataclass(frozen=True, slots=True)
class Figures:
    """Speeds, memory and energy of one server; the mean where there are several."""

    prefill: float  # prompt tokens/s, alone
    decode: float  # tokens/s of a request that is alone on its server
    decode_busy: float  # tokens/s of a server with all its slots busy
    stall: float | None  # longest silence in s during another prompt's prefill; None: one slot
    memory: int | None  # peak bytes of all servers; None: unknown on this system
    # Joules of the machine's processors and memory; None: it shows no energy counters.
    prefill_joules: float | None = None  # for a prompt token, alone on its server
    decode_joules: float | None = None  # for a token written with all slots busy

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Measurement:
    """The figures of a setting, or the error where there are none."""

    setting: Setting
    figures: Figures | None
    error: str | None
    seconds: float  # its duration
    at: float  # Unix time of its end
    other_work: float | None = None  # CPUs' worth of other work meanwhile


def score(figures: Figures, request: BenchmarkRequest, goal: Goal) -> float:
    """Seconds of a request under this goal; less is better.

    latency: prefill and decode of a request that is alone, and the stall by another one's prefill.
    With a single slot it queues behind the other one instead: half a request in the mean.
    throughput: its share of the server's time while all slots are busy.
    balanced: the geometric mean of both, so that neither counts for more.
    """
    prefill = request.prompt / figures.prefill
    alone = prefill + request.answer / figures.decode
    latency = alone + (alone / 2 if figures.stall is None else figures.stall)
    throughput = prefill + request.answer / figures.decode_busy
    match goal:
        case "latency":
            return latency
        case "throughput":
            return throughput
        case "balanced":
            return math.sqrt(latency * throughput)


def median_figures(repeats: Sequence[Figures]) -> Figures:
    """Return the median of each figure, and the maximum of the memory."""
    stalls = [one.stall for one in repeats if one.stall is not None]
    return Figures(
        prefill=statistics.median(one.prefill for one in repeats),
        decode=statistics.median(one.decode for one in repeats),
        decode_busy=statistics.median(one.decode_busy for one in repeats),
        stall=statistics.median(stalls) if stalls else None,
        memory=max((one.memory for one in repeats if one.memory is not None), default=None),
        prefill_joules=_known(statistics.median, (one.prefill_joules for one in repeats)),
        decode_joules=_known(statistics.median, (one.decode_joules for one in repeats)),
    )


def combine_servers(servers: Sequence[Figures]) -> Figures:
    """Combine servers that ran at the same time: mean speeds, longest stall, all memory."""
    stalls = [one.stall for one in servers if one.stall is not None]
    memories = [one.memory for one in servers if one.memory is not None]
    return Figures(
        prefill=statistics.fmean(one.prefill for one in servers),
        decode=statistics.fmean(one.decode for one in servers),
        decode_busy=statistics.fmean(one.decode_busy for one in servers),
        stall=max(stalls) if stalls else None,
        memory=sum(memories) if memories else None,
        prefill_joules=_known(statistics.fmean, (one.prefill_joules for one in servers)),
        decode_joules=_known(statistics.fmean, (one.decode_joules for one in servers)),
    )


def _known(
    combine: Callable[[Sequence[float]], float], values: Iterable[float | None]
) -> float | None:
    known = [value for value in values if value is not None]
    return combine(known) if known else None


PRIOR_NOISE = 0.02  # a share: seen on a quiet machine between two starts of a server

PRIOR_WEIGHT = 2  # repeats that PRIOR_NOISE counts as

SIGNIFICANT_ERRORS = 3.6
"""Standard errors by which medians must differ. About twenty settings are compared: with this
value a search among equals keeps the first one 19 times of 20 (in simulated searches)."""

LEAST_GAIN = 0.01  # a share; no smaller gain is worth a change


@dataclass(slots=True)
class ScoreHistory:
    """The scores of all measurements, and what differences between them mean."""

    scores: dict[Setting, list[float]] = field(default_factory=dict)
    failed: set[Setting] = field(default_factory=set)

    def add(self, setting: Setting, score: float | None) -> None:
        """Add the score of a measurement; None where the setting did not run."""
        if score is None:
            self.failed.add(setting)
        else:
            self.scores.setdefault(setting, []).append(score)

    def count(self, setting: Setting) -> int:
        """How often a setting was measured."""
        return len(self.scores.get(setting, ()))

    def median_score(self, setting: Setting) -> float:
        """The median score of a setting."""
        return statistics.median(self.scores[setting])

    def noise(self) -> float:
        """The standard deviation of one measurement, as a share of it.

        Pooled over settings that were measured more than once, with PRIOR_NOISE as a prior.
        """
        squares, repeats = PRIOR_NOISE**2 * PRIOR_WEIGHT, PRIOR_WEIGHT
        for scores in self.scores.values():
            logs = [math.log(score) for score in scores]
            middle = statistics.fmean(logs)
            squares += sum((value - middle) ** 2 for value in logs)
            repeats += len(logs) - 1
        return math.sqrt(squares / repeats)

    def significant_difference(self, one: Setting, other: Setting) -> float:
        """The share by which the medians of two settings must differ to be more than noise."""
        error = self.noise() * math.sqrt(1 / self.count(one) + 1 / self.count(other))
        return max(LEAST_GAIN, SIGNIFICANT_ERRORS * error)

    def detectable_difference(self, times: int) -> float:
        """The share by which two settings must differ that are measured `times` times each."""
        return max(LEAST_GAIN, SIGNIFICANT_ERRORS * self.noise() * math.sqrt(2 / times))

    def gain(self, one: Setting, other: Setting) -> float:
        """The share of the other's score by which `one` is lower; negative where it is higher."""
        return 1 - self.median_score(one) / self.median_score(other)

    def clearly_better(self, one: Setting, other: Setting) -> bool:
        """Whether the score of `one` is lower by more than noise."""
        ahead = math.log(self.median_score(other) / self.median_score(one))
        return ahead > self.significant_difference(one, other)
