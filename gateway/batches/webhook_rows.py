"""The rows of webhook deliveries in the store: the jobs that add, claim, end and remove them.

Each job may be done twice. An event is added within the transaction that ends its object, so that
none is lost and none is told too early. Its ids come of what it tells and where: it is added once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, delete, func, literal_column, select, update
from sqlalchemy.dialects import postgresql, sqlite

from gateway.config.webhooks import WebhookUrl
from gateway.store.schema import webhook_deliveries as deliveries

LONGEST_ERROR = 200
"""Characters of `last_error`."""


class DeliveryState(StrEnum):
    """Where a delivery is."""

    WAITING = "waiting"
    """For its next attempt, or under way: then `next_at` is behind the attempt's time limit."""
    DELIVERED = "delivered"
    GIVEN_UP = "given_up"
    """Tried for too long."""
    REFUSED = "refused"
    """The receiver wants no more (410)."""


@dataclass(frozen=True, slots=True)
class WebhookEvent:
    """What has happened to an object. The receiver asks for the object itself."""

    type: str
    """One of `gateway.config.webhooks.EVENTS`."""
    object_id: str
    owner: str
    """The id of the key that has the object."""
    group_name: str | None
    created_at: float
    """Unix time at which it happened."""

    def body(self) -> str:
        """What is sent, signed as it is."""
        told = {
            "object": "event",
            "id": f"evt_{_digest(self.type, self.object_id)}",
            "type": self.type,
            "created_at": int(self.created_at),
            "data": {"id": self.object_id},
        }
        return json.dumps(told, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Delivery:
    """One event for one receiver."""

    id: str
    """`wh_...`: the field `webhook-id`, the same in each attempt."""
    owner: str
    group_name: str | None
    event: str
    object_id: str
    url: str
    origin: str
    body: str
    created_at: float
    attempts: int
    """Attempts that have begun, the one that it is claimed for included."""


_WAITS = deliveries.c.state == literal_column("'waiting'")
"""A literal, as in the index: SQLite does not use it for a bound value."""

_COLUMNS = tuple(deliveries.c[name] for name in Delivery.__dataclass_fields__)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def add_deliveries(
    connection: Connection, urls: Iterable[WebhookUrl], event: WebhookEvent, now: float
) -> list[str]:
    """Let the event be sent to each URL, from `now` on; returns the ids of the deliveries."""
    body = event.body()
    rows: list[dict[str, Any]] = [
        {
            "id": f"wh_{_digest(event.type, event.object_id, str(url))}",
            "owner": event.owner,
            "group_name": event.group_name,
            "event": event.type,
            "object_id": event.object_id,
            "url": str(url),
            "origin": url.origin,
            "body": body,
            "created_at": event.created_at,
            "next_at": now,
            "state": DeliveryState.WAITING,
        }
        for url in urls
    ]
    if rows:
        postgres = connection.dialect.name == "postgresql"
        added = postgresql.insert(deliveries) if postgres else sqlite.insert(deliveries)
        connection.execute(added.values(rows).on_conflict_do_nothing(index_elements=["id"]))
    return [str(row["id"]) for row in rows]


class WaitingOrigin(NamedTuple):
    """What waits for the receivers of one origin."""

    origin: str
    number: int
    next_at: float
    """When the first of them is due."""


def waiting_origins(connection: Connection) -> list[WaitingOrigin]:
    """What waits for which origin; the one that has been due for longest comes first."""
    first = func.min(deliveries.c.next_at)
    asked = select(deliveries.c.origin, func.count(), first)
    asked = asked.where(_WAITS)
    found = connection.execute(asked.group_by(deliveries.c.origin).order_by(first)).all()
    return [WaitingOrigin(*row) for row in found]


@dataclass(frozen=True, slots=True)
class ClaimDeliveries:
    """A job of the store: take due deliveries, so that no other process tries them until `until`.

    `places`: how many of each origin. Each counts as tried from now on: a process that is killed in
    an attempt has made it, as far as anybody knows.
    """

    places: Mapping[str, int]
    now: float
    until: float

    def __call__(self, connection: Connection) -> list[Delivery]:
        """Run within the transaction of `connection`."""
        claimed: list[Delivery] = []
        for origin, places in self.places.items():
            due = (
                select(*_COLUMNS)
                .where(
                    _WAITS,
                    deliveries.c.origin == origin,
                    deliveries.c.next_at <= self.now,
                )
                .order_by(deliveries.c.next_at)
                .limit(places)
                .with_for_update(skip_locked=True)
            )
            claimed += [_claimed(row) for row in connection.execute(due)]
        taken = update(deliveries).where(deliveries.c.id.in_([one.id for one in claimed]))
        connection.execute(taken.values(next_at=self.until, attempts=deliveries.c.attempts + 1))
        return claimed


def _claimed(row: Row[Any]) -> Delivery:
    # In the order of the fields.
    values: tuple[Any, ...] = tuple(row)
    found = Delivery(*values)
    return replace(found, attempts=found.attempts + 1)


def end_delivery(
    connection: Connection, delivery: Delivery, state: DeliveryState, now: float, error: str | None
) -> None:
    """Try it no more. That it was delivered holds whoever tries it meanwhile."""
    ended = update(deliveries).where(deliveries.c.id == delivery.id, _WAITS)
    if state is not DeliveryState.DELIVERED:
        ended = ended.where(deliveries.c.attempts == delivery.attempts)
    connection.execute(ended.values(state=state, next_at=now, last_error=_cut(error)))


def retry_delivery(
    connection: Connection, delivery: Delivery, next_at: float, error: str | None
) -> None:
    """Try it again at `next_at`, unless somebody else has begun to."""
    again = update(deliveries).where(
        deliveries.c.id == delivery.id,
        _WAITS,
        deliveries.c.attempts == delivery.attempts,
    )
    connection.execute(again.values(next_at=next_at, last_error=_cut(error)))


def put_back_deliveries(
    connection: Connection, claimed: Sequence[Delivery], next_at: float
) -> None:
    """Let others try at `next_at` what this process has claimed and can't end."""
    for delivery in claimed:
        retry_delivery(connection, delivery, next_at, "the gateway has ended")


def remove_ended(connection: Connection, before: float, limit: int) -> int:
    """Remove deliveries that ended before that time, so many at most; returns how many."""
    old = select(deliveries.c.id).where(
        deliveries.c.state != DeliveryState.WAITING, deliveries.c.next_at < before
    )
    ids = list(connection.scalars(old.limit(limit)))
    connection.execute(delete(deliveries).where(deliveries.c.id.in_(ids)))
    return len(ids)


def _cut(error: str | None) -> str | None:
    return None if error is None else error[:LONGEST_ERROR]
