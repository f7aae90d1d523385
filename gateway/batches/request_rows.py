"""The rows of stored requests: one dataclass for a row, and the jobs that read and write them.

Each job may be done twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.batches.states import RequestKind, RequestState


@dataclass(frozen=True, slots=True)
class StoredRow:
    """A stored request. Its body is `length` bytes of the folder's file `place`."""

    id: str
    """Also that of the ledger's row."""
    kind: RequestKind
    owner: str
    path: str
    """A path of `ROUTES`."""
    place: str
    offset: int
    length: int
    created_at: float
    """Unix time, as all times here."""
    keep_until: float
    folder: str
    class_: str = "batch"
    """The label of its class."""
    batch: str | None = None
    number: int | None = None
    """Of its line in the input, from 1."""
    custom_id: str | None = None
    """None: the line has none, or an earlier line has the same."""
    group_name: str | None = None
    user: str | None = None
    model: str | None = None
    """As its body names it."""
    stream: bool = False
    webhook_url: str | None = None
    prompt_tokens: int = 0
    """Estimated."""
    max_tokens: int = 0
    """0: its body names none."""
    prefix: int = 0
    """Equal for prompts that begin alike; 0: too short to matter."""
    state: RequestState = RequestState.WAITING
    attempts: int = 0
    """Runs that nodes have failed."""
    claimed_by: str | None = None
    """The id of the process that runs it."""
    claimed_until: float | None = None
    not_before: float = 0.0
    deadline: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    status: int | None = None
    """The HTTP status of its result."""
    result_place: str | None = None
    result_offset: int | None = None
    result_length: int | None = None
    error_code: str | None = None
