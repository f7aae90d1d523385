"""What came of a load: its figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gateway.tools.bench.client_lag import ClientFigures
from gateway.tools.bench.exchange import RequestResult
from gateway.tools.bench.load import Load
from gateway.tools.bench.runner import LoadRun
from gateway.tools.simulate.report import Percentiles

MOST_SAMPLES = 5_000
"""Requests whose figures a report holds for each load; of more, evenly spread ones."""

MOST_REASONS_EXPLAINED = 20


@dataclass(frozen=True, slots=True)
class Goal:
    """What a request must keep; seconds. None: does not matter."""

    ttft: float | None = None
    inter_token: float | None = None
    completion: float | None = None

    def __bool__(self) -> bool:
        return any(one is not None for one in (self.ttft, self.inter_token, self.completion))

    def is_met(self, result: RequestResult) -> bool:
        """Whether a request succeeded and kept all of it. A figure that it lacks is kept."""
        pairs = (
            (self.ttft, result.ttft),
            (self.inter_token, result.inter_token),
            (self.completion, result.completion),
        )
        return result.error is None and all(
            wanted is None or found is None or found <= wanted for wanted, found in pairs
        )


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that kept the goal."""

    share: float
    """Of all, failed ones included."""
    requests_per_second: float


@dataclass(frozen=True, slots=True)
class Parts:
    """Where the mean request's time went; seconds. None: not known."""

    network: float | None = None
    """Connecting, and one round trip."""
    waiting: float | None = None
    """For a slot."""
    prefill: float | None = None
    decode: float | None = None
    waiting_source: str = ""
    """How waiting and prefill were told apart."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Figures of single requests that succeeded, in the order of their ends; seconds, tokens."""

    ttft: list[float]
    inter_token: list[float]
    completion: list[float]
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """One load's figures. Times are seconds; those of requests are of requests that succeeded."""

    load: Load
    is_whole: bool
    requests: int
    succeeded: int
    errors: dict[str, int]
    """Failed requests by reason."""
    details: dict[str, str]
    """For each reason an example of the server's words."""
    seconds: float
    """From the first start to the last end."""
    ttft: Percentiles | None
    """None: no request has one."""
    inter_token: Percentiles | None
    stall: Percentiles | None
    """A request's longest time between two events."""
    completion: Percentiles | None
    tokens_per_second: Percentiles | None
    """Of a request, from its first token on."""
    total_tokens_per_second: float
    """Written, all requests together."""
    total_prompt_tokens_per_second: float | None
    requests_per_second: float
    """That succeeded."""
    prompt_tokens: float | None
    """Mean; None: the server does not tell."""
    cached_tokens: float | None
    completion_tokens: float
    """Mean."""
    tokens_per_event: float | None
    goodput: Goodput | None
    """None: no goal."""
    client: ClientFigures | None
    parts: Parts
    joules: float | None = None
    """Of the whole machine."""
    joules_per_token: float | None = None
    """For a token written; reading prompts and idling included."""
    samples: Samples = field(
        default_factory=lambda: Samples([], [], [], []), repr=False, compare=False
    )

    @property
    def failed(self) -> int:
        """Requests that failed."""
        return self.requests - self.succeeded

    def as_dict(self) -> dict[str, Any]:
        """For scripts."""
        return {"label": self.load.label, "failed": self.failed} | asdict(self)


def figures_of(
    run: LoadRun, goal: Goal, round_trip: float | None, alone_ttft: float | None
) -> LoadFigures:
    """The figures of a load.

    `round_trip`: seconds of a trivial request. `alone_ttft`: TTFT of a request that was alone.
    """
    results, sound = run.results, [one for one in run.results if one.error is None]
    began = min((one.intended for one in results), default=0.0)
    seconds = max((one.ended for one in results), default=0.0) - began
    tokens = sum(one.tokens for one in sound)
    prompts = _known(sound, lambda one: one.server.prompt_tokens)
    events = sum(one.events for one in sound)
    good = sum(goal.is_met(one) for one in results)
    speeds = [1 / gap for gap in _known(sound, lambda one: one.inter_token) if gap > 0]
    failed = [one for one in results if one.error is not None]
    return LoadFigures(
        load=run.load,
        is_whole=run.is_whole,
        requests=len(results),
        succeeded=len(sound),
        errors=dict(Counter(str(one.error) for one in failed).most_common()),
        details=_examples(failed),
        seconds=seconds,
        ttft=_percentiles(sound, lambda one: one.ttft),
        inter_token=_percentiles(sound, lambda one: one.inter_token),
        stall=_percentiles(sound, lambda one: one.longest_gap if one.events > 1 else None),
        completion=_percentiles(sound, lambda one: one.completion),
        tokens_per_second=Percentiles.of(speeds) if speeds else None,
        total_tokens_per_second=_rate(tokens, seconds),
        total_prompt_tokens_per_second=_rate(sum(prompts), seconds) if prompts else None,
        requests_per_second=_rate(len(sound), seconds),
        prompt_tokens=_mean(prompts),
        cached_tokens=_mean(_known(sound, lambda one: one.server.cached_tokens)),
        completion_tokens=_rate(tokens, len(sound)),
        tokens_per_event=tokens / events if events else None,
        goodput=Goodput(_rate(good, len(results)), _rate(good, seconds)) if goal else None,
        client=run.client,
        parts=_parts(sound, round_trip, alone_ttft),
        joules=run.joules,
        joules_per_token=run.joules / tokens if run.joules is not None and tokens else None,
        samples=_samples(sound),
    )


def _parts(
    sound: Sequence[RequestResult], round_trip: float | None, alone_ttft: float | None
) -> Parts:
    """Where the time went, as far as the server, the gateway or a request alone tell."""
    if not sound:
        return Parts()
    network = _rate(sum(one.connect_seconds for one in sound), len(sound)) + (round_trip or 0.0)
    decode = _mean(
        [one.last - one.first for one in sound if one.first is not None and one.last is not None]
    )
    ttft = _mean(_known(sound, lambda one: one.ttft))
    if ttft is None:
        return Parts(network=network)
    prefill = _mean(_known(sound, lambda one: one.server.prefill_seconds))
    queued = _mean(_known(sound, lambda one: one.queue_seconds))
    if prefill is not None:
        waiting, source = max(0.0, ttft - network - prefill), "the server's own timings"
    elif queued is not None:
        waiting, source = queued, "the gateway's X-Gateway-Queue-Ms"
        prefill = max(0.0, ttft - network - queued)
    elif alone_ttft is not None:
        waiting, source = max(0.0, ttft - alone_ttft), "a request that was alone"
        prefill = max(0.0, min(alone_ttft, ttft) - network)
    else:
        return Parts(network=network, decode=decode)
    return Parts(network, waiting, prefill, decode, source)


def _samples(sound: Sequence[RequestResult]) -> Samples:
    step = -(-len(sound) // MOST_SAMPLES) or 1
    kept = sound[::step]
    return Samples(
        _known(kept, lambda one: one.ttft),
        _known(kept, lambda one: one.inter_token),
        [one.completion for one in kept],
        [one.tokens for one in kept],
    )


def _examples(failed: Sequence[RequestResult]) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in failed:
        reason = str(one.error)
        if reason not in found and len(found) < MOST_REASONS_EXPLAINED and one.detail:
            found[reason] = one.detail
    return found


def _percentiles(
    results: Sequence[RequestResult], read: Callable[[RequestResult], float | None]
) -> Percentiles | None:
    values = _known(results, read)
    return Percentiles.of(values) if values else None


def _known(
    results: Sequence[RequestResult], read: Callable[[RequestResult], float | None]
) -> list[float]:
    return [value for one in results if (value := read(one)) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _rate(count: float, per: float) -> float:
    return count / per if per > 0 else 0.0
