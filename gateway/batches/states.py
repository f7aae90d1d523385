"""The states of batches and of stored requests."""

from __future__ import annotations

from enum import StrEnum


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


class RequestKind(StrEnum):
    """What a stored request is for."""

    LINE = "line"
    """A line of a batch."""
    RESPONSE = "response"
    """A response in the background, or one that is kept."""
    DEFERRED = "deferred"
    """Any other generation that its caller wants to have later."""
