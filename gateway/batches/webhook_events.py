"""Which events of batches and responses are delivered, recorded in the transaction that ends them.

end_batch(connection, ..., also=webhook_events.batch_ended)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from sqlalchemy import Connection

from gateway.batches.batch_rows import Batch
from gateway.batches.request_rows import StoredRow
from gateway.batches.states import BatchState
from gateway.batches.webhook_rows import WebhookEvent, add_deliveries
from gateway.batches.webhook_targets import WebhookTargets

ResponseEnd = Literal["completed", "failed", "incomplete", "cancelled"]
"""How a response ends, in the words of OpenAI's API."""

_BATCH_EVENTS = {
    BatchState.COMPLETED: "batch.completed",
    BatchState.FAILED: "batch.failed",
    BatchState.EXPIRED: "batch.expired",
    BatchState.CANCELLED: "batch.cancelled",
}


class WebhookEvents:
    """Records what is to be delivered. Its methods are parts of jobs of the store.

    `now` gives Unix seconds.
    """

    def __init__(self, targets: WebhookTargets, now: Callable[[], float]) -> None:
        self._targets = targets
        self._now = now
        self.recorded = 0
        """Deliveries that jobs have added; those of a job that fails are counted, too."""

    def batch_ended(self, connection: Connection, batch: Batch) -> None:
        """A batch of either API has ended."""
        type_ = _BATCH_EVENTS.get(batch.state)
        if type_ is not None:
            ended_at = self._now() if batch.ended_at is None else batch.ended_at
            event = WebhookEvent(type_, batch.id, batch.owner, batch.group_name, ended_at)
            self._add(connection, event, batch.webhook_url)

    def response_ended(
        self, connection: Connection, row: StoredRow, end: ResponseEnd, ended_at: float
    ) -> None:
        """A response in the background has ended."""
        event = WebhookEvent(f"response.{end}", row.id, row.owner, row.group_name, ended_at)
        self._add(connection, event, row.webhook_url)

    def _add(self, connection: Connection, event: WebhookEvent, named: str | None) -> None:
        urls = self._targets.receivers(event.owner, event.group_name, event.type, named)
        self.recorded += len(add_deliveries(connection, urls, event, self._now()))
