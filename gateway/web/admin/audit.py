"""`/admin/audit`: the changes that were made, the latest first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway import errors
from gateway.errors import GatewayError
from gateway.observe.audit import AuditEntry, AuditQuery, AuditTrail
from gateway.store.failures import StoreError
from gateway.web.asgi import JsonResponse

AUDIT_TARGET_KEY = "gateway.audit_target"
"""Key of the change's target in the ASGI scope, where no parameter of the path is it."""

MOST_LISTED = 1000
"""Most changes of one response."""

DEFAULT_LISTED = 100

LARGEST_ID = 2**63 - 1

STORE_RETRY_AFTER = 5.0
"""Seconds, of a store that can't be read."""


@dataclass(frozen=True, slots=True)
class AuditEndpoints:
    """The endpoint of the audit log."""

    audit: AuditTrail

    async def list(self, request: Request) -> Response:
        """Changes, the latest first; `next` is the parameter `before` of the page behind."""
        limit = _integer(request, "limit", MOST_LISTED) or DEFAULT_LISTED
        query = AuditQuery(
            since=_seconds(request, "since"),
            until=_seconds(request, "until"),
            before=_integer(request, "before", LARGEST_ID),
            limit=limit + 1,
        )
        try:
            found = await self.audit.entries(query)
        except StoreError as error:
            raise store_unavailable(error) from None
        shown = found[:limit]
        return JsonResponse(
            {
                "entries": [entry_json(entry) for entry in shown],
                "next": shown[-1].id if len(found) > limit else None,
            }
        )


def entry_json(entry: AuditEntry) -> dict[str, Any]:
    """A change as the admin API shows it."""
    at = datetime.fromtimestamp(entry.at, UTC).isoformat(timespec="milliseconds")
    return {
        "id": entry.id,
        "at": at.replace("+00:00", "Z"),
        "actor": entry.actor,
        "role": entry.role,
        "action": entry.action,
        "target": entry.target,
        "outcome": entry.outcome,
        "details": dict(entry.details),
    }


def store_unavailable(error: StoreError) -> GatewayError:
    """503: what was asked for is in the store, which can't be read now."""
    message = f"The store can't be read: {error}"
    return GatewayError(503, "store_unavailable", message, retry_after=STORE_RETRY_AFTER)


def _seconds(request: Request, name: str) -> float | None:
    word = request.query_params.get(name)
    if word is None:
        return None
    try:
        seconds = float(word)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise errors.invalid_request(f"'{name}' must be a time in seconds since 1970.", name)
    return seconds


def _integer(request: Request, name: str, most: int) -> int | None:
    word = request.query_params.get(name)
    if word is None:
        return None
    if not (word.isascii() and word.isdigit() and len(word) < 20 and 0 < int(word) <= most):
        raise errors.invalid_request(f"'{name}' must be a number from 1 to {most}.", name)
    return int(word)
