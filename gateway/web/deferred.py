"""`/v1/background/{id}`: the status of a deferred request, then its response as it was."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from gateway.batches.background_requests import (
    DEFERRED_PATH,
    BackgroundRequests,
    decode_result,
    not_found,
)
from gateway.batches.folder import folder_errors_told
from gateway.batches.request_rows import RequestKind, RequestState, StoredRow
from gateway.catalog import RequestQueue
from gateway.errors import GatewayError
from gateway.proxy.json_values import JsonObject
from gateway.request import Caller, Headers
from gateway.web.asgi import JsonResponse, error_response
from gateway.web.owners import no_store, owner_of
from gateway.web.request_context import HandlerConfig

RETRY_SECONDS = 2
"""`Retry-After` while nothing better is known."""

LONGEST_RETRY_SECONDS = 30
"""The longest `Retry-After`."""

REPLAY = "x-gateway-replay"
"""Marks a response that was made before, so that its status is not taken for that of this path."""

_STATUS = {RequestState.WAITING: "queued", RequestState.RUNNING: "in_progress"}

_OF_CONNECTION = frozenset({"content-length", "transfer-encoding", "connection", "keep-alive"})


async def background_object(
    row: StoredRow, requests: BackgroundRequests, queue: RequestQueue
) -> JsonObject:
    """What is told of a request that waits or runs.

    Its place is left out while the store can't tell it: the request itself is there, and who had an
    error for it would send it again.
    """
    place = queue.queue_position(row.id)
    position: int | None = None
    expected: float | None = None
    if place is not None:
        position, expected = place.position, place.expected_seconds
    elif row.state is RequestState.WAITING:
        with contextlib.suppress(GatewayError):
            position = 1 + await requests.ahead_of(row)
    status = "queued" if place is not None else _STATUS.get(row.state, row.state.value)
    return {
        "id": row.id,
        "object": "background",
        "status": status,
        "path": row.path,
        "url": DEFERRED_PATH.format(id=row.id),
        "created_at": int(row.created_at),
        "expires_at": None if row.deadline is None else int(row.deadline),
        "position": position,
        "expected_start_seconds": None if expected is None else round(expected, 1),
    }


def accepted(row: StoredRow, described: JsonObject) -> Headers:
    """The header fields of a 202."""
    expected = described["expected_start_seconds"]
    wait = RETRY_SECONDS if expected is None else math.ceil(expected)
    wait = min(max(1, wait), LONGEST_RETRY_SECONDS)
    return [
        (b"location", DEFERRED_PATH.format(id=row.id).encode()),
        (b"retry-after", b"%d" % wait),
    ]


@dataclass(frozen=True, slots=True)
class DeferredEndpoints:
    """The endpoints. `identify` gives the caller of a request, or raises GatewayError."""

    requests: BackgroundRequests | None
    """None: there is no store."""
    queue: RequestQueue
    config: Callable[[], HandlerConfig]
    identify: Callable[[Request], Caller]

    async def show(self, request: Request) -> Response:
        """202 while it waits or runs, then its response."""
        requests, owner = self._access(request)
        row = await requests.find(owner, request.path_params["id"], RequestKind.DEFERRED)
        if not row.state.ended:
            described = await background_object(row, requests, self.queue)
            response: Response = JsonResponse(described, 202)
            response.raw_headers += accepted(row, described)
            return response
        if row.state is RequestState.EXPIRED:
            error = GatewayError(
                504, "queue_timeout", "The time was over before there was a response.",
                retryable=False,
            )  # fmt: skip
            response = error_response(error, {**request.scope, "path": row.path})
        elif row.result_place is None:
            error = GatewayError(500, row.error_code or "internal_error", "The response is lost.")
            response = error_response(error, {**request.scope, "path": row.path})
        else:
            with folder_errors_told("request"):
                result = decode_result(await requests.answer(row))
            response = Response(result.content, result.head.status)
            lines = result.head.header_lines.split("\r\n")
            fields = [line.partition(":")[::2] for line in lines if line]
            kept = {name.lower(): value.strip() for name, value in fields}
            for name in kept.keys() - _OF_CONNECTION:
                response.headers[name] = kept[name]
            response.headers["x-request-id"] = result.head.x_request_id
        response.headers[REPLAY] = "true"
        # Clients would repeat the question, and have the same answer.
        response.headers["x-should-retry"] = "false"
        return response

    async def delete(self, request: Request) -> Response:
        """End it, if it has not ended, and remove all that is kept of it."""
        requests, owner = self._access(request)
        row = await requests.delete(owner, request.path_params["id"], RequestKind.DEFERRED)
        cancelled = not row.state.ended
        return JsonResponse(
            {"id": row.id, "object": "background", "deleted": True, "cancelled": cancelled}
        )

    def _access(self, request: Request) -> tuple[BackgroundRequests, str]:
        caller, config = self.identify(request), self.config()
        owner = owner_of(request, caller, config, "Background requests")
        if self.requests is None:
            raise no_store("background requests")
        id_ = request.path_params["id"]
        if len(id_) > 64:
            raise not_found(id_, RequestKind.DEFERRED)
        return self.requests, owner
