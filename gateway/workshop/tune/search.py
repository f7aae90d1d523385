"""Searches for the best setting of a machine's servers, by measurements so far.

It begins with the rule of thumb and turns one knob after the other. From the best value known it
walks in both directions until the score is clearly worse. Values that seem better are measured
again, the worse half dropping out each time; the last one must be better by more than noise. The
search ends when a round over all knobs has changed nothing. Measurements are kept in a file, from
which a stopped search goes on.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from gateway.local.embedded import DEFAULT_BATCH, DEFAULT_MICRO_BATCH
from gateway.local.plan import DEFAULT_SLOTS
from gateway.local.server import ServerSpec
from gateway.local.topology import NumaNode, Topology

# free: any CPU. node: the performance CPUs of its NUMA node. cores: one CPU of each such core.
Pinning = Literal["free", "node", "cores"]
# In the order of the search: the knob that usually matters most comes first.
KNOBS = ("threads", "micro_batch", "slots", "batch", "pinning")
BATCH_SIZES = (128, 256, 512, 1024, 2048)  # tokens of a step; 2048 is llama.cpp's own default
MICRO_BATCH_SIZES = (64, 128, 256, 512, 1024)  # tokens of a computation; llama.cpp's default is 512
SLOT_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@dataclass(frozen=True, slots=True)
class Setting:
    """The setting with which every server of the machine is started."""

    threads: int
    batch: int  # tokens of one step
    micro_batch: int  # tokens of one computation
    slots: int
    pinning: Pinning

    def __str__(self) -> str:
        return (
            f"threads {self.threads}, batch {self.batch}/{self.micro_batch}, slots {self.slots}, "
            f"{PINNING_LABELS[self.pinning]}"
        )

    def with_knob(self, knob: str, value: Any) -> Setting:
        """Return the setting with one knob changed; the micro-batch never exceeds the batch."""
        changed: Setting = replace(self, **{knob: value})
        if knob == "batch":
            return replace(changed, micro_batch=min(changed.micro_batch, changed.batch))
        return replace(changed, batch=max(changed.batch, changed.micro_batch))


PINNING_LABELS: dict[Pinning, str] = {
    "free": "not pinned",
    "node": "on its node",
    "cores": "on its cores",
}


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The values of each knob; numbers ascend."""

    threads: tuple[int, ...]
    batch: tuple[int, ...]
    micro_batch: tuple[int, ...]
    slots: tuple[int, ...]
    pinning: tuple[Pinning, ...]

    def values(self, knob: str) -> tuple[Any, ...]:
        """Return all values of a knob."""
        values: tuple[Any, ...] = getattr(self, knob)
        return values

    def directions(self, knob: str, value: Any) -> tuple[tuple[Any, ...], ...]:
        """Return the other values by direction from `value`, the nearest first."""
        values = self.values(knob)
        if knob == "pinning":
            return tuple((other,) for other in values if other != value)
        below = tuple(other for other in reversed(values) if other < value)
        return below, tuple(other for other in values if other > value)

    @property
    def knobs(self) -> list[str]:
        """The knobs that have several values, in the order of the search."""
        return [knob for knob in KNOBS if len(self.values(knob)) > 1]

    @property
    def size(self) -> int:
        """Number of settings of the full grid."""
        pairs = sum(micro <= batch for batch in self.batch for micro in self.micro_batch)
        return len(self.threads) * pairs * len(self.slots) * len(self.pinning)


def rule_of_thumb(topology: Topology) -> Setting:
    """Return the setting of `llama-gateway up` and the role `llama_node`, where a search begins."""
    nodes = topology.nodes
    # Those of the smallest node, since all servers of a host get the same setting.
    cores = min(topology.threads_per_server(node) for node in nodes)
    is_pinned = len(nodes) > 1 or any(node.efficiency_cpus for node in nodes)
    pinning: Pinning = "node" if is_pinned else "free"
    return Setting(cores, DEFAULT_BATCH, DEFAULT_MICRO_BATCH, DEFAULT_SLOTS, pinning)


def search_space(topology: Topology, *, context: int, max_slots: int) -> SearchSpace:
    """Return the values to try on this machine, with slots of `context` tokens.

    There are no more threads than physical cores of a NUMA node. With several NUMA nodes a server
    is always pinned to its own.
    """
    start, first = rule_of_thumb(topology), topology.nodes[0]
    cores, pinnings = start.threads, [start.pinning]
    if len(topology.nodes) == 1 and any(len(core) > 1 for core in first.performance_cores):
        pinnings.append("cores")
    return SearchSpace(
        threads=tuple(sorted({max(1, n) for n in (cores // 2, cores * 3 // 4, cores - 1, cores)})),
        batch=tuple(size for size in BATCH_SIZES if size <= max(context, start.batch)),
        micro_batch=tuple(n for n in MICRO_BATCH_SIZES if n <= max(context, start.micro_batch)),
        slots=tuple(count for count in SLOT_COUNTS if count <= max(max_slots, start.slots)),
        pinning=tuple(pinnings),
    )


def server_spec(setting: Setting, spec: ServerSpec, topology: Topology, context: int) -> ServerSpec:
    """Return the planned server with this setting, and without a cache of evicted prompts."""
    numa_node = next(node for node in topology.nodes if node.number == spec.numa_node)
    return replace(
        spec,
        name=f"tune-{spec.numa_node}",
        slots=setting.slots,
        context=context,
        threads=setting.threads,
        batch=setting.batch,
        micro_batch=setting.micro_batch,
        cpus=pinned_cpus(setting.pinning, numa_node),
        prompt_cache_bytes=0,
    )


def pinned_cpus(pinning: Pinning, node: NumaNode) -> tuple[int, ...] | None:
    """Return the CPUs that a server on this node is pinned to; None for any."""
    if pinning == "cores":
        return tuple(sorted(core[0] for core in node.performance_cores))
    return node.performance_cpus if pinning == "node" else None


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
        for line in filter(str.strip, self.path.read_text(errors="replace").splitlines()):
            try:
                value = json.loads(line)
                if value["subject"] == self.subject:
                    measurements.append(msgspec.convert(value, Measurement))
            except (ValueError, TypeError, KeyError, msgspec.ValidationError):
                broken += 1
        return measurements, broken

    def append(self, one: Measurement) -> None:
        """Write a line at once. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"subject": self.subject, **asdict(one)}, sort_keys=True)
        with self.path.open("a+b") as file:
            # A kill may have cut the last line short: begin a new one.
            if file.tell() > 0:
                file.seek(-1, 2)
                line = line if file.read(1) == b"\n" else f"\n{line}"
            file.write(f"{line}\n".encode())

    def rotate(self) -> None:
        """Begin a new file; the old one stays as `<name>.1`."""
        if self.path.exists():
            self.path.replace(self.path.with_name(f"{self.path.name}.1"))


TuningGoal = Literal["latency", "throughput", "balanced"]


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


@dataclass(frozen=True, slots=True)
class Measurement:
    """The figures of a setting, or the error where there are none."""

    setting: Setting
    figures: Figures | None
    error: str | None
    seconds: float  # its duration
    at: float  # Unix time of its end
    other_work: float | None = None  # CPUs' worth of other work meanwhile


def score(figures: Figures, request: BenchmarkRequest, goal: TuningGoal) -> float:
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
    balanced = math.sqrt(latency * throughput)
    return {"latency": latency, "throughput": throughput, "balanced": balanced}[goal]


def median_figures(repeats: Sequence[Figures]) -> Figures:
    """Return the median of each figure, and the maximum of the memory."""
    return _combined(repeats, statistics.median, {"memory": max})


def combine_servers(servers: Sequence[Figures]) -> Figures:
    """Combine servers that ran at the same time: mean speeds, longest stall, all memory."""
    return _combined(servers, statistics.fmean, {"stall": max, "memory": sum})


def _combined(
    several: Sequence[Figures],
    usual: Callable[[list[Any]], Any],
    special: Mapping[str, Callable[[list[Any]], Any]],
) -> Figures:
    """Combine the known values of each figure."""
    found: dict[str, Any] = {}
    for one in fields(Figures):
        values = [getattr(figures, one.name) for figures in several]
        known = [value for value in values if value is not None]
        found[one.name] = special.get(one.name, usual)(known) if known else None
    return Figures(**found)


PRIOR_NOISE = 0.02  # a share: seen on a quiet machine between two starts of a server
PRIOR_WEIGHT = 2  # repeats that PRIOR_NOISE counts as
# Standard errors by which medians must differ. About twenty settings are compared: with this value
# a search among equals keeps the first one 19 times of 20 (in simulated searches).
SIGNIFICANT_ERRORS = 3.6
LEAST_GAIN = 0.01  # a share; no smaller gain is worth a change


@dataclass(slots=True)
class ScoreHistory:
    """The scores of all measurements, and what differences between them mean."""

    scores: defaultdict[Setting, list[float]] = field(default_factory=lambda: defaultdict(list))
    failed: set[Setting] = field(default_factory=set)

    def add(self, setting: Setting, score: float | None) -> None:
        """Add the score of a measurement; None where the setting did not run."""
        if score is None:
            self.failed.add(setting)
        else:
            self.scores[setting].append(score)

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

    def significant_difference(self, *times: int) -> float:
        """The share by which the medians of two settings must differ to be more than noise.

        `times`: how often each was measured.
        """
        error = self.noise() * math.sqrt(sum(1 / count for count in times))
        return max(LEAST_GAIN, SIGNIFICANT_ERRORS * error)

    def clearly_better(self, one: Setting, other: Setting) -> bool:
        """Whether the score of `one` is lower by more than noise."""
        ahead = math.log(self.median_score(other) / self.median_score(one))
        return ahead > self.significant_difference(self.count(one), self.count(other))


REPEATS = 3  # measurements of a setting before it can win, and of the first one before any other
MOST_ROUNDS = 3  # rounds over all knobs at most


@dataclass(slots=True)
class Search:
    """A search: `settings_to_measure` yields what to measure, `best` is the best setting so far."""

    space: SearchSpace
    baseline: Setting
    history: ScoreHistory = field(default_factory=ScoreHistory)
    best: Setting = field(init=False)
    searched_knobs: list[str] = field(default_factory=list)  # in order
    current_knob: str | None = None

    def __post_init__(self) -> None:
        self.best = self.baseline

    def settings_to_measure(self) -> Iterator[Setting]:
        """Yield the next setting; add its score to the history before taking another."""
        yield from self._measured(self.baseline, REPEATS)
        if self.baseline in self.history.failed:
            return
        unchanged = 0
        for knob in self.space.knobs * MOST_ROUNDS:
            if unchanged == len(self.space.knobs):
                break
            if self.searched_knobs:
                # A machine that has become slower since would make every new value look bad.
                yield from self._measured(self.best, self.history.count(self.best) + 1)
            before = self.best
            self.current_knob = knob
            yield from self._search_knob(knob)
            self.current_knob = None
            self.searched_knobs.append(knob)
            unchanged = unchanged + 1 if self.best == before else 1

    def unsearched_knobs(self) -> list[str]:
        """Return the knobs whose values were not all tried."""
        return [knob for knob in self.space.knobs if knob not in self.searched_knobs]

    def expected_measurements(self) -> int:
        """Estimate the number of measurements: each value once, and some repeats."""
        return REPEATS + sum(len(self.space.values(knob)) + 3 for knob in self.space.knobs)

    def _search_knob(self, knob: str) -> Iterator[Setting]:
        base, history = self.best, self.history
        tried: list[Setting] = []
        for direction in self.space.directions(knob, getattr(base, knob)):
            for value in direction:
                rival = base.with_knob(knob, value)
                yield from self._measured(rival, 1)
                if rival in history.failed:
                    break  # what does not fit will not fit with more of it
                tried.append(rival)
                if history.clearly_better(base, rival):
                    break  # farther on it is worse still
        candidates = self._ahead(tried, base)
        for times in range(2, REPEATS + 1):
            candidates = candidates[: math.ceil(len(candidates) / 2)]
            if not candidates:
                return
            for rival in candidates:
                yield from self._measured(rival, times)
            yield from self._measured(base, history.count(base) + 1)
            candidates = self._ahead(candidates, base)
        if candidates and history.clearly_better(candidates[0], base):
            self.best = candidates[0]

    def _ahead(self, rivals: list[Setting], base: Setting) -> list[Setting]:
        """Return the rivals with a better score than `base`, the best first."""
        score = self.history.median_score
        ran = (rival for rival in rivals if rival not in self.history.failed)
        return sorted((rival for rival in ran if score(rival) < score(base)), key=score)

    def _measured(self, setting: Setting, times: int) -> Iterator[Setting]:
        for _ in range(times - self.history.count(setting)):
            if setting not in self.history.failed:
                yield setting


class SettingFailedError(Exception):
    """Servers with this setting can't be started or measured. The text says why."""


# Of one measurement: figures, and CPUs' worth of other work meanwhile (None: unknown).
BenchmarkResult = tuple[Figures, float | None]
EndReason = Literal["complete", "time", "interrupted"]


@dataclass(slots=True)
class TuningSession:
    """A search and its measurements. Cancelling `run` keeps what was measured."""

    search: Search
    request: BenchmarkRequest
    goal: TuningGoal
    earlier: list[Measurement]  # of earlier runs, used instead of measuring again
    measurements: list[Measurement] = field(default_factory=list)
    end_reason: EndReason = "interrupted"

    async def run(
        self,
        measure: Callable[[Setting, float], Awaitable[BenchmarkResult]],
        *,
        seconds: float,
        record: Callable[[Measurement], None],
        on_begin: Callable[[Setting, float, float | None], None] = lambda *_: None,
        on_end: Callable[[Measurement], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Measure until the search ends or `seconds` are over; `record` stores each measurement.

        `on_begin` gets the setting, the seconds left, and those that a measurement took so far. No
        measurement begins that would take longer than the time left. Raises what `measure` and
        `record` raise, but a SettingFailedError is recorded as a measurement.
        """
        until = clock() + seconds
        # A setting that failed may run now.
        unused = [one for one in self.earlier if one.figures is not None]
        for setting in self.search.settings_to_measure():
            earlier = next((one for one in unused if one.setting == setting), None)
            if earlier is not None:
                unused.remove(earlier)
                self._add(earlier)
                continue
            left = until - clock()
            took = [one.seconds for one in self.measurements if one.figures is not None]
            each = statistics.median(took) if took else None
            if left <= (each or 0.0):
                self.end_reason = "time"
                return
            on_begin(setting, left, each)
            begun = clock()
            figures, error, others = None, None, None
            try:
                figures, others = await measure(setting, left)
            except SettingFailedError as failure:
                error = str(failure)
            except TimeoutError:
                self.end_reason = "time"
                return
            one = Measurement(setting, figures, error, clock() - begun, now(), others)
            record(one)
            self._add(one)
            on_end(one)
        self.end_reason = "complete"

    def median_by_setting(self) -> dict[Setting, Figures]:
        """Return the median figures of each setting that ran, the first measured first."""
        by_setting: defaultdict[Setting, list[Figures]] = defaultdict(list)
        for one in self.measurements:
            if one.figures is not None:
                by_setting[one.setting].append(one.figures)
        return {setting: median_figures(figures) for setting, figures in by_setting.items()}

    def errors(self) -> dict[Setting, str]:
        """Return the errors of settings that did not run."""
        return {one.setting: one.error for one in self.measurements if one.error is not None}

    def _add(self, one: Measurement) -> None:
        self.measurements.append(one)
        value = None if one.figures is None else score(one.figures, self.request, self.goal)
        self.search.history.add(one.setting, value)
