"""Batches for their callers: created, shown, listed, cancelled, paused, deleted, and read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Connection

from gateway.batches.batch_rows import Batch
from gateway.batches.disk_threads import DiskThreads
from gateway.batches.folder import Folder, NewFile
from gateway.config.batches import BatchSettings
from gateway.store.store import Store

T = TypeVar("T")

OnEnd = Callable[[Connection, Batch], None]
"""Called in the transaction that ends a batch, such as `webhooks.add_deliveries`."""

TokenPrice = Callable[[str | None], float | None]
"""The mean cost of a token of this model; None: unknown."""


@dataclass(frozen=True, slots=True)
class NewBatch:
    """What a caller asks for. `owner` is the id of a key."""

    owner: str
    api: str
    """`openai` or `anthropic`."""
    endpoint: str
    """The path of all its lines: one of `ENDPOINTS`."""
    input_file: str | None = None
    """Id of a file with the purpose `batch`; None: `requests` has the lines."""
    requests: str | None = None
    """Name of a complete file of the folder, of `BatchRegistry.new_requests`, in the form of an
    input file. It belongs to the batch from now on; if `create` raises, it is removed."""
    window: str | None = None
    """Its `completion_window`, such as `24h`; None: the settings' default."""
    metadata: dict[str, str] | None = None
    output_seconds: float | None = None
    """For how long its output files are kept (`output_expires_after`)."""
    idempotency_key: str | None = None
    request_digest: str | None = None
    webhook_url: str | None = None
    group_name: str | None = None
    user: str | None = None
    class_: str = "batch"
    """Label of the highest class that its lines may be raised to."""


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """How far a batch is."""

    waiting: int = 0
    running: int = 0
    tokens_per_second: float | None = None
    """Recorded completion tokens of the last minutes; None: not known yet, or it has ended."""
    expected_end: float | None = None
    """Unix time; None: not known."""
    cost: float = 0.0
    """Of its recorded results, in the settings' currency."""
    expected_cost: float | None = None
    """Of all its lines, also before it starts; None: no price is known."""


class BatchOutput:
    """The lines of a batch as a file. Its reader closes it."""

    name: str
    """For `Content-Disposition`."""
    size: int | None
    """Bytes; None: the batch has not ended, so these are the lines recorded so far."""

    def pieces(self) -> AsyncIterator[bytes]:
        """Its bytes. Raises: GatewayError 503."""
        raise NotImplementedError

    async def close(self) -> None:
        """Close it; called again, nothing."""
        raise NotImplementedError


class BatchRegistry:
    """The batches of all callers, in one folder and one store.

    `settings` gives those in force, `now` Unix time, `clock` monotonic seconds, `price` the mean
    cost of a token. `owner` is always the id of a key.
    """

    def __init__(
        self,
        store: Store,
        folder: Folder,
        settings: Callable[[], BatchSettings],
        now: Callable[[], float],
        clock: Callable[[], float],
        threads: DiskThreads | None = None,
        *,
        price: TokenPrice = lambda _: None,
        on_end: OnEnd | None = None,
        on_rows: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_rows` is called when rows may run: `Feeder.wake`."""
        raise NotImplementedError

    # For callers. All raise GatewayError 503 while the store or the folder can't be used.

    async def create(self, new: NewBatch) -> Batch:
        """A new batch, or the earlier one with the same idempotency key.

        Raises: GatewayError 400, 422 (that key with another request), 429.
        """
        raise NotImplementedError

    async def new_requests(self, size: int | None = None) -> NewFile:
        """A file of the folder for the lines of a batch without an input file.

        The caller ends it by `on_disk(new.finish)` or `new.discard`. Raises: GatewayError 507.
        """
        raise NotImplementedError

    async def on_disk(self, work: Callable[..., T], *arguments: Any) -> T:
        """Do work on a file, on a thread. Raises: GatewayError 503, 507; the work's own error."""
        raise NotImplementedError

    async def find(self, owner: str, id_: str, api: str) -> Batch:
        """The owner's batch. Raises: GatewayError 404."""
        raise NotImplementedError

    async def page(
        self,
        owner: str,
        api: str,
        limit: int,
        *,
        after: str | None = None,
        before: str | None = None,
    ) -> Any:
        """Some of the owner's batches, newest first: a `batch_rows.BatchPage`."""
        raise NotImplementedError

    async def cancel(self, owner: str, id_: str, api: str) -> Batch:
        """Cancel it; again, nothing. Raises: GatewayError 404, 409 (OpenAI's, if it has ended)."""
        raise NotImplementedError

    async def pause(self, owner: str, id_: str, api: str) -> Batch:
        """Start no more of its lines. Raises: GatewayError 404, 409 if it has ended."""
        raise NotImplementedError

    async def resume(self, owner: str, id_: str, api: str) -> Batch:
        """Go on with it. Raises: GatewayError 404, 409 if it has ended."""
        raise NotImplementedError

    async def delete(self, owner: str, id_: str, api: str) -> None:
        """Remove an ended batch and its results. Raises: GatewayError 400 (unended), 404."""
        raise NotImplementedError

    async def progress(self, batch: Batch) -> BatchProgress:
        """How far it is."""
        raise NotImplementedError

    async def open_output(
        self, owner: str, id_: str, api: str, *, errors: bool = False
    ) -> BatchOutput:
        """Its output or error lines: the final file, or what is recorded so far.

        Those of `anthropic` are all output. Raises: GatewayError 404.
        """
        raise NotImplementedError

    # The gateway's own work.

    async def run(self) -> None:
        """Read the input of new batches, end those whose lines have ended, until cancelled."""
        raise NotImplementedError
