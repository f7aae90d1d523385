"""`/admin/audit`: the changes that were made and refused, the latest first."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from gateway import errors
from gateway.observe.audit import LONGEST_TEXT, AuditQuery, AuditTrail
from gateway.store.failures import StoreError
from gateway.web.asgi import JsonResponse, number_parameter, store_unavailable

AUDIT_TARGET_KEY = "gateway.audit_target"
"""Key of the change's target in the ASGI scope, where no parameter of the path is it."""

MOST_LISTED = 1000
"""Most changes of one response."""

DEFAULT_LISTED = 100

LARGEST_ID = 2**63 - 1


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
            action=_text(request, "action"),
            target=_text(request, "target"),
            limit=limit + 1,
        )
        try:
            found = await self.audit.entries(query)
        except StoreError as error:
            raise store_unavailable(f"The store can't be read: {error}") from None
        shown = found[:limit]
        return JsonResponse(
            {
                "entries": [entry.as_json() for entry in shown],
                "next": shown[-1].id if len(found) > limit else None,
            }
        )


def _seconds(request: Request, name: str) -> float | None:
    most = sys.float_info.max
    return number_parameter(request, name, -most, most, "a time in seconds since 1970")


def _text(request: Request, name: str) -> str | None:
    word = request.query_params.get(name)
    if word is not None and not (word.isprintable() and len(word) <= LONGEST_TEXT + 1):
        raise errors.invalid_request(
            f"'{name}' must be printable, and of at most {LONGEST_TEXT} characters.", name
        )
    return word


def _integer(request: Request, name: str, most: int) -> int | None:
    word = request.query_params.get(name)
    if word is None:
        return None
    if not (word.isascii() and word.isdigit() and len(word) < 20 and 0 < int(word) <= most):
        raise errors.invalid_request(f"'{name}' must be a number from 1 to {most}.", name)
    return int(word)
