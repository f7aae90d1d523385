"""What is measured of a setting, and what a goal makes of it: seconds, less is better."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Goal = Literal["latency", "throughput", "balanced"]
GOALS: tuple[Goal, ...] = ("latency", "throughput", "balanced")


@dataclass(frozen=True, slots=True)
class Request:
    """The request that settings are judged by; tokens."""

    prompt: int
    answer: int


@dataclass(frozen=True, slots=True)
class Figures:
    """What one server did; the mean where there are several."""

    prefill: float  # prompt tokens/s, alone
    decode: float  # tokens/s of a request that is alone on its server
    decode_busy: float  # tokens/s of a server with all its slots busy
    stall: float | None  # longest silence in s while a neighbour's prompt is read; None: one slot
    memory: int | None  # bytes of all servers at their peak; None where the system doesn't tell

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def score(figures: Figures, request: Request, goal: Goal) -> float:
    """Seconds of a request under this goal.

    latency: reading and answering it alone, and the pause that a neighbour's prompt makes. With a
    single slot a neighbour is waited for instead: half a request in the mean.
    throughput: what it takes of the server's time while all slots are busy.
    balanced: the geometric mean of both, so neither unit counts for more.
    """
    read = request.prompt / figures.prefill
    alone = read + request.answer / figures.decode
    latency = alone + (alone / 2 if figures.stall is None else figures.stall)
    throughput = read + request.answer / figures.decode_busy
    match goal:
        case "latency":
            return latency
        case "throughput":
            return throughput
        case "balanced":
            return math.sqrt(latency * throughput)


def median(many: Sequence[Figures]) -> Figures:
    """The median of each figure; the most of the memory."""
    stalls = [one.stall for one in many if one.stall is not None]
    return Figures(
        prefill=statistics.median(one.prefill for one in many),
        decode=statistics.median(one.decode for one in many),
        decode_busy=statistics.median(one.decode_busy for one in many),
        stall=statistics.median(stalls) if stalls else None,
        memory=max((one.memory for one in many if one.memory is not None), default=None),
    )


def over_servers(each: Sequence[Figures]) -> Figures:
    """The figures of servers that worked at the same time: means, but the longest stall."""
    stalls = [one.stall for one in each if one.stall is not None]
    memories = [one.memory for one in each if one.memory is not None]
    return Figures(
        prefill=statistics.fmean(one.prefill for one in each),
        decode=statistics.fmean(one.decode for one in each),
        decode_busy=statistics.fmean(one.decode_busy for one in each),
        stall=max(stalls) if stalls else None,
        memory=sum(memories) if memories else None,
    )
