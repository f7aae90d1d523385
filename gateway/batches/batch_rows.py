"""The rows of batches in the store: one dataclass for a row, and the jobs that read and write them.

Each job may be done twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gateway.batches.states import BatchState


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of a caller. Times are Unix seconds."""

    id: str
    """`batch_...` or `msgbatch_...`; ids grow with time."""
    owner: str
    """The id of a key."""
    api: str
    """`openai` or `anthropic`."""
    endpoint: str
    """The path of all its lines."""
    input_file: str | None
    created_at: float
    expires_at: float
    """Its deadline."""
    keep_until: float
    """When it and its results are removed."""
    folder: str
    """The id of the folder that holds its files."""
    class_: str = "batch"
    """The highest class that its lines may be raised to."""
    state: BatchState = BatchState.VALIDATING
    group_name: str | None = None
    user: str | None = None
    """The end user whom its caller has named."""
    output_file: str | None = None
    error_file: str | None = None
    in_progress_at: float | None = None
    finalizing_at: float | None = None
    ended_at: float | None = None
    cancelling_at: float | None = None
    paused_at: float | None = None
    pause_reason: str | None = None
    model: str | None = None
    """The model of its lines, if they name one only."""
    total: int = 0
    """Its lines, broken ones included."""
    completed: int = 0
    """Lines with a response (status below 400)."""
    failed: int = 0
    """Lines whose result is an error, broken lines included; not the next two."""
    cancelled: int = 0
    expired: int = 0
    prompt_tokens: int = 0
    """Of all recorded results, as the next three."""
    cached_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    output_seconds: float | None = None
    """For how long its output files are kept (`output_expires_after`)."""
    webhook_url: str | None = None
    metadata: dict[str, str] | None = None
    idempotency_key: str | None = None
    request_digest: str | None = None
    """Of the request that created it: the same idempotency key with another request is refused."""
    errors: list[dict[str, Any]] | None = None
    """Why it failed as a whole: objects with code, message, param and line."""

    @property
    def ended_lines(self) -> int:
        """Lines that have a result, or will never have one."""
        return self.completed + self.failed + self.cancelled + self.expired
