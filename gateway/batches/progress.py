"""How far a batch is, how fast it is, when it will end and what it will cost: pure estimates."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from gateway.batches.batch_rows import Batch
from gateway.batches.request_rows import WorkLeft

SAMPLE_SECONDS = 5.0  # seconds between two looks at what a batch has done
WINDOW_SECONDS = 180.0  # seconds over which its speed is measured

DEFAULT_COMPLETION_TOKENS = 256
"""Of a line whose request names no limit, while no line of its batch has ended."""


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """How far a batch is."""

    waiting: int = 0
    running: int = 0
    tokens_per_second: float | None = None
    """Recorded completion tokens of the last minutes; None: not known yet, or it has ended."""
    expected_end: float | None = None  # Unix time; None: not known
    cost: float = 0.0  # of its recorded results, in the settings' currency
    expected_cost: float | None = None
    """Of all its lines, also before it starts; None: no price is known."""


class _Sample(NamedTuple):
    at: float  # monotonic seconds
    tokens: int
    lines: int


class BatchSpeed(NamedTuple):
    """What was recorded in a second, of late."""

    tokens: float
    lines: float


class SpeedMeter:
    """Measures the speeds of batches by what is recorded of them."""

    def __init__(self) -> None:
        self._samples: dict[str, deque[_Sample]] = {}

    def look(self, batches: Iterable[Batch], now: float) -> None:
        """Note what these have done, and forget all others; `now` in monotonic seconds."""
        before, self._samples = self._samples, {}
        for batch in batches:
            samples = before.get(batch.id) or deque()
            self._samples[batch.id] = samples
            if batch.paused_at is not None:
                samples.clear()
            elif not samples or now - samples[-1].at >= SAMPLE_SECONDS:
                ended = batch.completed + batch.failed
                samples.append(_Sample(now, batch.completion_tokens, ended))
            while samples and now - samples[0].at > WINDOW_SECONDS:
                samples.popleft()

    def speed(self, id_: str) -> BatchSpeed | None:
        """The speed of this batch; None: it is not known yet."""
        samples = self._samples.get(id_)
        if not samples or len(samples) < 2:
            return None
        first, last = samples[0], samples[-1]
        seconds = last.at - first.at
        return BatchSpeed(
            (last.tokens - first.tokens) / seconds, (last.lines - first.lines) / seconds
        )


def progress_of(
    batch: Batch, left: WorkLeft, speed: BatchSpeed | None, price: float | None, now: float
) -> BatchProgress:
    """How far the batch is.

    `price`: the mean cost of a token of its model, as far as known; `now`: Unix time.
    """
    lines = left.waiting + left.running
    if batch.state.ended or not lines:
        return BatchProgress(
            cost=batch.cost, expected_cost=batch.cost if batch.state.ended else None
        )
    tokens = _completion_tokens_left(batch, left)
    expected_end = None
    if speed is not None and batch.paused_at is None:
        if speed.tokens > 0 and tokens > 0:
            expected_end = now + tokens / speed.tokens
        elif speed.lines > 0:
            expected_end = now + lines / speed.lines
    done = batch.prompt_tokens + batch.completion_tokens
    mean = batch.cost / done if done and batch.cost > 0 else price
    expected_cost = None
    if mean is not None and batch.in_progress_at is not None:
        expected_cost = batch.cost + mean * (left.prompt_tokens + tokens)
    return BatchProgress(
        left.waiting,
        left.running,
        None if speed is None else speed.tokens,
        expected_end,
        batch.cost,
        expected_cost,
    )


def _completion_tokens_left(batch: Batch, left: WorkLeft) -> float:
    """What the lines that have not ended will probably generate."""
    lines = left.waiting + left.running
    named = left.max_tokens / lines
    if not batch.completed:
        return lines * (named or DEFAULT_COMPLETION_TOKENS)
    mean = batch.completion_tokens / batch.completed
    return lines * (min(mean, named) if named else mean)
