"""`/v1/messages/batches` as Anthropic's API has it, and what the gateway adds to it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from gateway import errors
from gateway.batches.batch_registry import BatchProgress
from gateway.batches.batch_rows import Batch
from gateway.batches.files import MOST_UPLOADS, MOST_UPLOADS_OF_OWNER, UPLOAD_RETRY_AFTER
from gateway.batches.folder import FolderError
from gateway.batches.results import ANTHROPIC
from gateway.errors import CLIENT_CLOSED_STATUS, GatewayError
from gateway.web.asgi import JsonResponse
from gateway.web.batches import (
    BatchAccess,
    is_batch_name,
    lines_response,
    own_fields,
    page_edge,
    page_size,
    request_digest,
)
from gateway.web.body_parts import body_parts, check_plain, content_length
from gateway.web.message_batch_body import MessageBatchBody

ENDPOINT = "/v1/messages"

DEFAULT_PAGE, LONGEST_PAGE = 20, 1000
"""Batches of a page, as Anthropic's API has it."""


@dataclass(frozen=True, slots=True)
class MessageBatchEndpoints:
    """The endpoints of `/v1/messages/batches`."""

    access: BatchAccess
    _receiving: Counter[str] = field(default_factory=Counter)
    """Bodies that are being received, by owner."""

    async def create(self, request: Request) -> Response:
        new, batches = self.access.new_batch(request, ANTHROPIC, ENDPOINT), self.access.batches()
        check_plain(request)
        settings = self.access.config().settings
        largest, length = settings.batches.file_bytes, content_length(request)
        if length is not None and length > largest:
            raise _too_large(largest)
        with self._one_more(new.owner):
            if new.idempotency_key is None:
                # Else it may be one that there is already.
                await batches.check_room(new.owner, length or 0)
            lines = await batches.new_requests(length)
            try:
                body = MessageBatchBody(
                    lines.write,
                    most_lines=settings.batches.lines,
                    line_bytes=settings.batches.line_bytes,
                )
                parts = body_parts(request, settings.limits, largest, lambda: _too_large(largest))
                try:
                    async for part in parts:
                        await batches.on_disk(body.feed, part)
                except ClientDisconnect:
                    return Response(status_code=CLIENT_CLOSED_STATUS)  # Nobody reads it.
                body.end()
                asked = replace(
                    self.access.checked(new, body.fields),
                    request_digest=request_digest(ANTHROPIC, body.digest()),
                )
                name = await batches.on_disk(lines.finish)
            finally:
                with contextlib.suppress(FolderError, GatewayError):
                    await batches.on_disk(lines.discard)
            asked = replace(asked, requests=name, requests_bytes=lines.size)
            batch = await batches.create(asked)
        if not batch.total:
            # Its lines are counted when they are read again, a moment later.
            batch = replace(batch, total=body.count)
        return await self._shown(request, batch)

    async def list(self, request: Request) -> Response:
        owner, batches = self.access.owner(request), self.access.batches()
        after, before = page_edge(request, "after_id"), page_edge(request, "before_id")
        if after is not None and before is not None:
            raise errors.invalid_request("Send 'after_id' or 'before_id', not both.", "before_id")
        limit = page_size(request, DEFAULT_PAGE, LONGEST_PAGE)
        page = await batches.page(owner, ANTHROPIC, limit, after=after, before=before)
        found = [message_batch_object(one, None, results_url(request, one)) for one in page.batches]
        return JsonResponse(
            {
                "data": found,
                "has_more": page.has_more,
                "first_id": found[0]["id"] if found else None,
                "last_id": found[-1]["id"] if found else None,
            }
        )

    async def show(self, request: Request) -> Response:
        owner, batches = self.access.owner(request), self.access.batches()
        return await self._shown(request, await batches.find(owner, _id(request), ANTHROPIC))

    async def results(self, request: Request) -> Response:
        """The result lines; before the end only with `?partial=true`."""
        owner, batches = self.access.owner(request), self.access.batches()
        id_ = _id(request)
        if request.query_params.get("partial") != "true":
            batch = await batches.find(owner, id_, ANTHROPIC)
            if not batch.state.ended:
                raise GatewayError(
                    404,
                    "batch_not_ended",
                    f"Message Batch {id_} has no available results. Wait until it has ended, or "
                    "ask for '?partial=true'.",
                )
        return await lines_response(
            batches, owner, id_, ANTHROPIC, of_errors=False, head=request.method == "HEAD"
        )

    async def cancel(self, request: Request) -> Response:
        owner, batches = self.access.owner(request), self.access.batches()
        return await self._shown(request, await batches.cancel(owner, _id(request), ANTHROPIC))

    async def pause(self, request: Request) -> Response:
        owner, batches = self.access.owner(request), self.access.batches()
        return await self._shown(request, await batches.pause(owner, _id(request), ANTHROPIC))

    async def resume(self, request: Request) -> Response:
        owner, batches = self.access.owner(request), self.access.batches()
        return await self._shown(request, await batches.resume(owner, _id(request), ANTHROPIC))

    async def delete(self, request: Request) -> Response:
        owner, batches = self.access.owner(request), self.access.batches()
        id_ = _id(request)
        await batches.delete(owner, id_, ANTHROPIC)
        return JsonResponse({"id": id_, "type": "message_batch_deleted"})

    async def _shown(self, request: Request, batch: Batch) -> Response:
        progress = await self.access.progress(batch)
        return JsonResponse(message_batch_object(batch, progress, results_url(request, batch)))

    @contextlib.contextmanager
    def _one_more(self, owner: str) -> Iterator[None]:
        """Count a body that is being received. Raises: GatewayError 429, if there are too many."""
        receiving = self._receiving
        if receiving.total() >= MOST_UPLOADS or receiving[owner] >= MOST_UPLOADS_OF_OWNER:
            raise errors.queue_full("Too many uploads at one time.", UPLOAD_RETRY_AFTER)
        receiving[owner] += 1
        try:
            yield
        finally:
            receiving[owner] -= 1
            if not receiving[owner]:
                del receiving[owner]


def message_batch_object(
    batch: Batch, progress: BatchProgress | None, url: str | None
) -> dict[str, Any]:
    """A batch as Anthropic's API shows it; `url` is that of its results."""
    state = batch.state
    status = "ended" if state.ended else "in_progress"
    if not state.ended and batch.cancelling_at is not None:
        status = "canceling"
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": status,
        "request_counts": {
            "processing": 0 if state.ended else max(0, batch.total - batch.ended_lines),
            "succeeded": batch.completed,
            "errored": batch.failed,
            "canceled": batch.cancelled,
            "expired": batch.expired,
        },
        "created_at": _time_text(batch.created_at),
        "expires_at": _time_text(batch.expires_at),
        "ended_at": _time_text(batch.ended_at),
        "cancel_initiated_at": _time_text(batch.cancelling_at),
        "archived_at": None,
        "results_url": url,
        "llama_gateway": own_fields(batch, progress),
    }


def results_url(request: Request, batch: Batch) -> str | None:
    """Where the results are; None: the batch has not ended.

    Clients send their key there. Where the gateway itself speaks TLS it is a whole URL, of the host
    that the client has named. Else it is the path alone, which clients add to the origin that they
    know: a proxy in front may speak TLS, and a URL with `http` would take the key past it.
    """
    if not batch.state.ended:
        return None
    path = f"{ENDPOINT}/batches/{batch.id}/results"
    host = request.headers.get("host")
    if request.url.scheme != "https" or not host:
        return path
    return f"https://{host}{path}"


def _id(request: Request) -> str:
    """The id in the path. Raises: GatewayError 404, if it is none."""
    id_: str = request.path_params["id"]
    if not is_batch_name(id_):
        shown = errors.truncate_echo(id_)
        raise GatewayError(404, "batch_not_found", f"Message Batch {shown} not found.")
    return id_


def _time_text(moment: float | None) -> str | None:
    if moment is None:
        return None
    return datetime.fromtimestamp(moment, UTC).isoformat().replace("+00:00", "Z")


def _too_large(most_bytes: int) -> GatewayError:
    return GatewayError(
        413,
        "request_too_large",
        f"The body is larger than {most_bytes} bytes ('batches.file_bytes').",
    )
