"""The states of batches and of stored requests, what may follow which, and their ids."""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import StrEnum
from typing import Final

LINE_PREFIX = "batch_req_"
"""Begins the id of a batch's line."""


class BatchState(StrEnum):
    """Where a batch is, in the words of OpenAI's API."""

    VALIDATING = "validating"
    """Its input is being read."""
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    """All its lines have ended; its output is being put together."""
    COMPLETED = "completed"
    FAILED = "failed"
    """Its input could not be used at all: nothing was run."""
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether it never changes again."""
        return self in _ENDED


_ENDED = frozenset(
    {BatchState.COMPLETED, BatchState.FAILED, BatchState.EXPIRED, BatchState.CANCELLED}
)

BEFORE: Final[dict[BatchState, Collection[BatchState]]] = {
    BatchState.VALIDATING: (),
    BatchState.IN_PROGRESS: (BatchState.VALIDATING,),
    BatchState.FINALIZING: (BatchState.VALIDATING, BatchState.IN_PROGRESS),
    BatchState.FAILED: (BatchState.VALIDATING,),
    BatchState.CANCELLING: (
        BatchState.VALIDATING, BatchState.IN_PROGRESS, BatchState.FINALIZING,
    ),
    BatchState.COMPLETED: (BatchState.FINALIZING,),
    BatchState.EXPIRED: (BatchState.FINALIZING,),
    BatchState.CANCELLED: (BatchState.CANCELLING,),
}  # fmt: skip
"""The states from which a batch may come into each state."""


class RequestState(StrEnum):
    """Where a stored request is."""

    WAITING = "waiting"
    RUNNING = "running"
    """A process has claimed it, and says again and again that it still runs it."""
    DONE = "done"
    FAILED = "failed"
    """It has an error as its result: that of a node, or what is wrong with it."""
    CANCELLED = "cancelled"
    """It was not run, or not to its end, because its caller did not want it any more."""
    EXPIRED = "expired"
    """Its time was over before it had a result."""

    @property
    def ended(self) -> bool:
        """Whether it never changes again."""
        return self not in {RequestState.WAITING, RequestState.RUNNING}


class RequestKind(StrEnum):
    """What a stored request is for."""

    LINE = "line"
    """A line of a batch."""
    RESPONSE = "response"
    """A response in the background, or one that is kept."""
    DEFERRED = "deferred"
    """Any other generation that its caller wants to have later."""


def new_id(prefix: str, now: float, token: Callable[[int], str]) -> str:
    """A new id: ids of the same prefix grow with time.

    `now` is Unix time; `token` gives random hex digits for so many bytes.
    """
    return f"{prefix}{int(now * 1000):012x}{token(10)}"


def line_id(batch: str, number: int) -> str:
    """The id of a batch's line: the same however often its input is read."""
    return f"{LINE_PREFIX}{batch.rpartition('_')[2]}_{number}"
