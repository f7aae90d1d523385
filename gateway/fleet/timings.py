"""What one request says of its node's speed: the node's own figures, checked by our clock.

A node may lie in its `timings`, or mean something else. What no request can have done is
ignored; what our own clock contradicts counts as an interval that reaches from what the node says
to what we saw, so that it teaches nothing where an honest reason is possible (others' work queued
inside the node, a client that lags).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

LEAST_TOKENS = 2
"""One token's time is mostly rounding and overhead."""
SLOWEST, FASTEST = 1e-3, 1e6
"""Tokens/s outside of which a measurement is a mistake."""
MOST_TOKENS = 1e8
"""Of one request; what claims more is wrong."""
SLACK = 0.25
"""Seconds by which our clock and the node's may differ for reasons of the way between them."""
SUSPICIOUS = 4.0
"""A node that claims to have been so many times quicker than we saw is not taken at its word."""
MOST_STALLED = 0.875
"""Share of a decode that others' prompts can at most have taken."""


_NEVER, _NAN = math.inf, math.nan


@dataclass(slots=True)
class Seen:
    """What the gateway saw of a request. Seconds by its own clock."""

    duration: float
    """From when it was sent until it had ended."""
    ttft: float | None = None
    """Of it, until the first content; None: the answer came in one piece."""
    busy: float = 1.0
    """Mean number of slots in use while it wrote, its own included."""
    stalled: float = 0.0
    """Seconds, of those in which it wrote, in which the node read others' prompts."""
    readers: float = 1.0
    """Mean number of prompts being read while its own was, its own included."""


@dataclass(slots=True)
class Rate:
    """So many tokens took between `low` and `high` seconds each."""

    tokens: float
    low: float
    high: float


@dataclass(slots=True)
class Sample:
    """What one request measured; None: nothing."""

    prefill: Rate | None = None
    decode: Rate | None = None
    busy: float | None = None
    """Mean number of busy slots during the decode; None: unknown."""
    context: float = 0.0
    """Tokens in the slot when the decode began."""


def read_timings(timings: Mapping[str, object], seen: Seen | None = None) -> Sample:
    """Read llama.cpp's `timings` (`cache_n`, `prompt_n`, `prompt_ms`, `predicted_n`, ...).

    `prompt_n` leaves out what the cache held (`cache_n`), so it is what was read.
    """
    prefill = _rate(_number(timings, "prompt_n"), _number(timings, "prompt_ms") / 1000)
    decode = _rate(_number(timings, "predicted_n"), _number(timings, "predicted_ms") / 1000)
    sample = Sample(prefill, decode)
    if prefill is not None:
        cached = _number(timings, "cache_n")
        sample.context = prefill.tokens + (cached if 0 < cached <= MOST_TOKENS else 0.0)
    if seen is None or not _is_sane(seen):
        return sample
    sample.busy = max(1.0, seen.busy)
    read, readers, stalled = seen.ttft, seen.readers, seen.stalled
    if prefill is not None:
        _bound(prefill, seen.duration if read is None else read)
        if read is None:
            read = prefill.high * prefill.tokens
        else:
            _doubt(prefill, read)
    if decode is not None:
        _bound(decode, seen.duration)
        _doubt(decode, seen.duration - (read or 0.0))
        if seen.ttft is None and read:
            # Nobody knows when its neighbours read: for the same share of their time, say.
            wrote = decode.high * decode.tokens
            others = (sample.busy - 1) * read / (read + wrote)
            readers, stalled = max(readers, 1 + others), max(stalled, others * wrote)
        _spare(decode, stalled)
    if prefill is not None:
        prefill.low /= max(1.0, readers)
    return sample


def by_clock(prompt: float, cached: float, completion: float, seen: Seen) -> Sample:
    """The same for an endpoint that tells no timings: what we saw, its own queue included."""
    if not _is_sane(seen) or not all(
        math.isfinite(n) and 0 <= n <= MOST_TOKENS for n in (prompt, cached, completion)
    ):
        return Sample()
    sample = Sample(busy=max(1.0, seen.busy), context=prompt)
    if seen.ttft is None:
        # Reading is in it, for how long nobody knows.
        sample.decode = _rate(completion, seen.duration)
        if sample.decode is not None:
            sample.decode.low /= 2
        else:
            sample.prefill = _rate(prompt - cached, seen.duration)
    else:
        sample.prefill = _rate(prompt - cached, seen.ttft)
        sample.decode = _rate(completion - 1, seen.duration - seen.ttft)
    if sample.prefill is not None:
        sample.prefill.low /= max(1.0, seen.readers)
    if sample.decode is not None:
        _spare(sample.decode, seen.stalled)
    return sample


def _rate(tokens: float, seconds: float) -> Rate | None:
    if not (LEAST_TOKENS <= tokens <= MOST_TOKENS and 0 < seconds < _NEVER):
        return None
    each = seconds / tokens
    return Rate(tokens, each, each) if 1 / FASTEST <= each <= 1 / SLOWEST else None


def _bound(rate: Rate, saw: float) -> None:
    """It can't have worked on it for longer than the `saw` seconds that the whole took."""
    if rate.high * rate.tokens > saw + SLACK:
        rate.low = rate.high = max(saw, SLACK) / rate.tokens


def _doubt(rate: Rate, saw: float) -> None:
    """It should not have been idle for most of the `saw` seconds that this took."""
    if saw > SUSPICIOUS * rate.high * rate.tokens + SLACK:
        rate.high = saw / rate.tokens


def _spare(rate: Rate, stalled: float) -> None:
    """Leave open how much of its time a decode stood still while others' prompts were read."""
    seconds = rate.low * rate.tokens
    rate.low = (seconds - min(stalled, MOST_STALLED * seconds)) / rate.tokens


def _is_sane(seen: Seen) -> bool:
    return (
        0 < seen.duration < _NEVER
        and 0 <= (seen.ttft or 0.0) < _NEVER
        and 0 <= seen.busy < _NEVER
        and 0 <= seen.stalled < _NEVER
        and 0 <= seen.readers < _NEVER
    )


def _number(timings: Mapping[str, object], key: str) -> float:
    value = timings.get(key)
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _NAN
    try:
        return float(value)
    except OverflowError:
        return _NAN
