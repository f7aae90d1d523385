"""`/v1/responses/{id}`: stored responses, shown, followed, cancelled and deleted."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway import errors
from gateway.batches.background_requests import BackgroundRequests
from gateway.batches.request_rows import RequestKind, StoredRow
from gateway.batches.response_log import LogBroken
from gateway.batches.stored_responses import (
    input_items,
    item_id,
    listed_item,
    read_fields,
    response_not_found,
)
from gateway.request import Caller
from gateway.web.asgi import JsonResponse
from gateway.web.owners import no_store, owner_of
from gateway.web.request_context import HandlerConfig

MOST_ITEMS, USUAL_ITEMS = 100, 20
"""Input items of a page, as OpenAI's API has it."""

ITEM_WORK, STEP_WORK = 1024, 1 << 20
"""Bytes that take as long as one item, and those that are read in one turn of the event loop."""

_ID = re.compile(r"resp_[0-9a-f]{32}")

_NUMBER = re.compile(r"[0-9]{1,12}")

_TRUE = frozenset({"true", "1"})

_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


@dataclass(frozen=True, slots=True)
class StoredResponseEndpoints:
    """The endpoints. `identify` gives the caller of a request, or raises GatewayError."""

    requests: BackgroundRequests | None
    """None: there is no store."""
    config: Callable[[], HandlerConfig]
    identify: Callable[[Request], Caller]

    async def show(self, request: Request) -> Response:
        """The response as it is now, or its events."""
        after = _after(request)
        requests, row = await self._row(request)
        if request.query_params.get("stream", "").lower() not in _TRUE:
            return JsonResponse(await requests.response(row))
        if request.method == "HEAD":
            return Response(media_type="text/event-stream", headers=_STREAM_HEADERS)
        return _FollowedResponse(
            _followed(requests, row, after),
            media_type="text/event-stream",
            headers=_STREAM_HEADERS,
        )

    async def cancel(self, request: Request) -> Response:
        """End it, if it has not ended."""
        requests, row = await self._row(request)
        row = await requests.cancel(row.owner, row.id, RequestKind.RESPONSE)
        return JsonResponse(await requests.response(row))

    async def delete(self, request: Request) -> Response:
        """Remove all that is kept of it; it ends, if it has not."""
        requests, row = await self._row(request)
        await requests.delete(row.owner, row.id, RequestKind.RESPONSE)
        return JsonResponse({"id": row.id, "object": "response", "deleted": True})

    async def input_items(self, request: Request) -> Response:
        """The conversation that it was asked with."""
        limit, order, after = _page(request)
        requests, row = await self._row(request)
        fields = read_fields(await requests.body(row))
        await asyncio.sleep(0)  # The body may have 64 MB: its items are another turn's work.
        items = input_items(fields)
        numbers = range(len(items)) if order == "asc" else range(len(items))[::-1]
        if after is not None:
            numbers = numbers[await _place(row.id, items, numbers, after) + 1 :]
        page = [listed_item(row.id, number, items[number]) for number in numbers[:limit]]
        found: dict[str, Any] = {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(numbers) > limit,
        }
        return JsonResponse(found)

    async def _row(self, request: Request) -> tuple[BackgroundRequests, StoredRow]:
        """Raises: GatewayError 401, 403, 404, 501."""
        caller, config = self.identify(request), self.config()
        owner = owner_of(request, caller, config, "Stored responses")
        if self.requests is None:
            raise no_store("responses")
        id_ = request.path_params["id"]
        if _ID.fullmatch(id_) is None:
            raise response_not_found(id_)
        return self.requests, await self.requests.find(owner, id_, RequestKind.RESPONSE)


class _FollowedResponse(StreamingResponse):
    """Events of a stored response. Where they break off, so does the connection.

    That is no fault of the gateway's, which may just end: its client follows it again.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        try:
            await super().__call__(scope, receive, send)
        except (LogBroken, FileNotFoundError):
            scope["state"]["abort"]()
            while (await receive())["type"] != "http.disconnect":
                pass


async def _followed(
    requests: BackgroundRequests, row: StoredRow, after: int
) -> AsyncIterator[bytes]:
    """Its events; an error where they break off: a polite end would read as the response's."""
    async with contextlib.aclosing(requests.follow(row, after)) as pieces:
        async for piece in pieces:
            yield piece


def _after(request: Request) -> int:
    word = request.query_params.get("starting_after")
    if word is None:
        return -1
    if _NUMBER.fullmatch(word) is None:
        raise errors.invalid_request(
            "'starting_after' must be the sequence number of an event.", "starting_after"
        )
    return int(word)


async def _place(response_id: str, items: Sequence[msgspec.Raw], numbers: range, after: str) -> int:
    """Where in `numbers` the item with the id `after` stands. Raises: GatewayError 400."""
    work = 0
    for place, number in enumerate(numbers):
        if item_id(response_id, number, items[number]) == after:
            return place
        work += ITEM_WORK + len(memoryview(items[number]))
        if work > STEP_WORK:
            work = 0
            await asyncio.sleep(0)
    raise errors.invalid_request("'after' must be the id of an input item.", "after")


def _page(request: Request) -> tuple[int, str, str | None]:
    query = request.query_params
    limit, order = query.get("limit", str(USUAL_ITEMS)), query.get("order", "desc")
    if _NUMBER.fullmatch(limit) is None or not 1 <= int(limit) <= MOST_ITEMS:
        raise errors.invalid_request(f"'limit' must be 1 to {MOST_ITEMS}.", "limit")
    if order not in {"asc", "desc"}:
        raise errors.invalid_request("'order' must be 'asc' or 'desc'.", "order")
    return int(limit), order, query.get("after") or None
