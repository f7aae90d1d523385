"""`/v1/batches` as OpenAI's API has it, and what the gateway adds to it.

Its own are pausing, results before the end, and what is in `llama_gateway` of a batch.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway import errors
from gateway.access.callers import cache_policy_of
from gateway.batches.batch_registry import BatchProgress, BatchRegistry, NewBatch
from gateway.batches.batch_rows import Batch
from gateway.batches.request_rows import BatchState
from gateway.batches.webhook_receivers import WebhookTargets
from gateway.config.fields import format_duration
from gateway.errors import GatewayError
from gateway.proxy.json_values import JsonObject
from gateway.request import Caller
from gateway.web.asgi import JsonResponse, read_fields
from gateway.web.files import LONGEST_EXPIRY, SHORTEST_EXPIRY
from gateway.web.owners import no_store, owner_of
from gateway.web.request_context import HandlerConfig
from gateway.web.stored_content import ContentResponse, content_headers

CREATE_BYTES = 64 * 1024
"""Most bytes of a request for a batch."""

OPENAI = "openai"
"""The API whose batches these are."""

DEFAULT_PAGE, LONGEST_PAGE = 20, 100
"""Batches of a page, as OpenAI's API has it."""

MOST_METADATA, LONGEST_METADATA_KEY, LONGEST_METADATA_VALUE = 16, 64, 512
"""Pairs of a batch's metadata, and characters of their names and values, as OpenAI's API has it."""

LONGEST_IDEMPOTENCY_KEY = 255
"""Characters."""

JSON_LINES = "application/x-jsonl"

_FIELDS = frozenset(
    {
        "input_file_id",
        "endpoint",
        "completion_window",
        "metadata",
        "output_expires_after",
        "webhook_url",
    }
)

_NAME = re.compile(r"[a-z0-9_-]{1,64}")

_PAGE_SIZE = re.compile(r"[0-9]{1,4}")

_TYPES: dict[type, str] = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a decimal",
    list: "an array",
    dict: "an object",
    type(None): "null",
}
"""In the words of OpenAI's errors."""


@dataclass(frozen=True, slots=True)
class BatchAccess:
    """Whose batches a request is about. `identify` gives its caller, or raises GatewayError."""

    registry: BatchRegistry | None
    """None: there is no store."""
    config: Callable[[], HandlerConfig]
    identify: Callable[[Request], Caller]
    limited: Callable[[Caller, str | None], Caller]
    """The caller within the limits that hold for it and for the end user that it names."""
    webhooks: WebhookTargets

    def batches(self) -> BatchRegistry:
        """The registry. Raises: GatewayError 501."""
        if self.registry is None:
            raise no_store("batches")
        return self.registry

    def owner(self, request: Request) -> str:
        """Whose batches the request is about. Raises: GatewayError 401, 403."""
        return owner_of(request, self.identify(request), self.config(), "Batches")

    def new_batch(self, request: Request, api: str, endpoint: str) -> NewBatch:
        """A batch of the request's caller. Raises: GatewayError 400, 401, 403."""
        config = self.config()
        caller = self.identify(request)
        owner = owner_of(request, caller, config, "Batches")
        user = config.identity_headers.end_user(request.scope["headers"], caller)
        limited = self.limited(caller, user)
        return NewBatch(
            owner=owner,
            api=api,
            endpoint=endpoint,
            idempotency_key=idempotency_key(request),
            group_name=caller.group,
            user=user,
            class_=limited.late_priority.label,
        )

    def checked(self, new: NewBatch, fields: JsonObject) -> NewBatch:
        """`new` with what both APIs take. Raises: GatewayError 400."""
        url = fields.get("webhook_url")
        return replace(
            new,
            # Its length is checked with the settings.
            window=_text(fields, "completion_window", 40),
            webhook_url=None
            if url is None
            else self.webhooks.check(new.owner, new.group_name, url),
        )

    async def progress(self, batch: Batch) -> BatchProgress | None:
        """How far it is; None while the store can't tell.

        What was asked for is done: who had an error for it would ask again, for another batch.
        """
        try:
            return await self.batches().progress(batch)
        except GatewayError as error:
            errors.drop_traceback(error)
            return None

    def shows_cached_tokens(self, request: Request) -> bool:
        """Whether the caller may know how much of its prompts was cached."""
        return not cache_policy_of(self.identify(request), self.config().settings).hide


@dataclass(frozen=True, slots=True)
class BatchEndpoints:
    """The endpoints of `/v1/batches`."""

    access: BatchAccess

    async def create(self, request: Request) -> Response:
        new, batches = self.access.new_batch(request, OPENAI, ""), self.access.batches()
        limits = self.access.config().settings.limits
        fields = await read_fields(request, CREATE_BYTES, limits.body_timeout)
        for name in fields:
            if name not in _FIELDS:
                _refuse(f"Unknown parameter: '{errors.truncate_echo(name)}'.", "unknown_parameter")
        asked = replace(
            self.access.checked(new, fields),
            input_file=_required_text(fields, "input_file_id"),
            endpoint=_required_text(fields, "endpoint"),
            metadata=_metadata(fields),
            output_seconds=_output_seconds(fields),
            request_digest=request_digest(OPENAI, fields),
        )
        return await self._shown(request, await batches.create(asked))

    async def list(self, request: Request) -> Response:
        owner, batches = self.access.owner(request), self.access.batches()
        after = page_edge(request, "after")
        limit = page_size(request, DEFAULT_PAGE, LONGEST_PAGE)
        page = await batches.page(owner, OPENAI, limit, after=after)
        shows_cached = self.access.shows_cached_tokens(request)
        found = [batch_object(one, None, shows_cached=shows_cached) for one in page.batches]
        return JsonResponse(
            {
                "object": "list",
                "data": found,
                "first_id": found[0]["id"] if found else None,
                "last_id": found[-1]["id"] if found else None,
                "has_more": page.has_more,
            }
        )

    async def show(self, request: Request) -> Response:
        owner, batches = self.access.owner(request), self.access.batches()
        return await self._shown(request, await batches.find(owner, _id(request), OPENAI))

    async def cancel(self, request: Request) -> Response:
        owner, batches = self.access.owner(request), self.access.batches()
        return await self._shown(request, await batches.cancel(owner, _id(request), OPENAI))

    async def pause(self, request: Request) -> Response:
        owner, batches = self.access.owner(request), self.access.batches()
        return await self._shown(request, await batches.pause(owner, _id(request), OPENAI))

    async def resume(self, request: Request) -> Response:
        owner, batches = self.access.owner(request), self.access.batches()
        return await self._shown(request, await batches.resume(owner, _id(request), OPENAI))

    async def output(self, request: Request) -> Response:
        """The lines with a response, also before the end."""
        return await self._lines(request, of_errors=False)

    async def errors(self, request: Request) -> Response:
        """The lines with an error, also before the end."""
        return await self._lines(request, of_errors=True)

    async def _lines(self, request: Request, *, of_errors: bool) -> Response:
        owner, batches = self.access.owner(request), self.access.batches()
        return await lines_response(
            batches, owner, _id(request), OPENAI, of_errors=of_errors, head=request.method == "HEAD"
        )

    async def _shown(self, request: Request, batch: Batch) -> Response:
        progress = await self.access.progress(batch)
        shows_cached = self.access.shows_cached_tokens(request)
        return JsonResponse(batch_object(batch, progress, shows_cached=shows_cached))


async def lines_response(
    batches: BatchRegistry, owner: str, id_: str, api: str, *, of_errors: bool, head: bool
) -> Response:
    """The lines of a batch: the final file, or what there is so far. Raises: GatewayError."""
    output = await batches.open_output(owner, id_, api, errors=of_errors)
    headers = content_headers(output.name, output.size, JSON_LINES)
    if head:
        await output.close()
        return Response(headers=headers)
    return ContentResponse(output, headers)


def batch_object(
    batch: Batch, progress: BatchProgress | None, *, shows_cached: bool = True
) -> dict[str, Any]:
    """A batch as OpenAI's API shows it; without `progress`, what only its lines tell is null."""
    state = batch.state
    listed = batch.errors or []

    def ended(as_: BatchState) -> int | None:
        return _second(batch.ended_at) if state is as_ else None

    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": {"object": "list", "data": listed} if state is BatchState.FAILED else None,
        "input_file_id": batch.input_file,
        "completion_window": format_duration(round(batch.expires_at - batch.created_at)),
        "status": state.value,
        # Many clients take an id of an output for the end.
        "output_file_id": batch.output_file if state.ended else None,
        "error_file_id": batch.error_file if state.ended else None,
        "created_at": int(batch.created_at),
        "in_progress_at": _second(batch.in_progress_at),
        "expires_at": int(batch.expires_at),
        "finalizing_at": _second(batch.finalizing_at),
        "completed_at": ended(BatchState.COMPLETED),
        "failed_at": ended(BatchState.FAILED),
        "expired_at": ended(BatchState.EXPIRED),
        "cancelling_at": _second(batch.cancelling_at),
        "cancelled_at": ended(BatchState.CANCELLED),
        "request_counts": {
            "total": batch.total,
            "completed": batch.completed,
            "failed": batch.failed,
        },
        "usage": {
            "input_tokens": batch.prompt_tokens,
            "input_tokens_details": {"cached_tokens": batch.cached_tokens if shows_cached else 0},
            "output_tokens": batch.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": batch.prompt_tokens + batch.completion_tokens,
        },
        "metadata": batch.metadata,
        "llama_gateway": own_fields(batch, progress),
    }


def own_fields(batch: Batch, progress: BatchProgress | None) -> dict[str, Any]:
    """What the gateway tells besides; both APIs' batches have it as `llama_gateway`."""
    paused = batch.paused_at is not None and not batch.state.ended
    return {
        "waiting": None if progress is None else progress.waiting,
        "running": None if progress is None else progress.running,
        "cancelled": batch.cancelled,
        "expired": batch.expired,
        "tokens_per_second": None if progress is None else progress.tokens_per_second,
        "expected_end": None if progress is None else _second(progress.expected_end),
        "cost": batch.cost if progress is None else progress.cost,
        "expected_cost": None if progress is None else progress.expected_cost,
        "paused": {"at": _second(batch.paused_at), "reason": batch.pause_reason}
        if paused
        else None,
    }


def idempotency_key(request: Request) -> str | None:
    """The value of `Idempotency-Key`; None: there is none. Raises: GatewayError 400."""
    values = request.headers.getlist("idempotency-key")
    if not values:
        return None
    # A draft of the IETF has it as a quoted string; clients send it plain.
    key = values[0].strip()
    if len(key) > 1 and key[0] == key[-1] == '"':
        key = key[1:-1]
    fits = 0 < len(key) <= LONGEST_IDEMPOTENCY_KEY and key.isascii() and key.isprintable()
    if len(values) > 1 or not fits:
        raise errors.invalid_request(
            f"'Idempotency-Key' must be one text of 1 to {LONGEST_IDEMPOTENCY_KEY} printable "
            "ASCII characters.",
            "Idempotency-Key",
        )
    return key


def request_digest(api: str, content: Any) -> str:
    """What a request with an idempotency key must have in common with the one before."""
    return hashlib.sha256(msgspec.json.encode([api, content], order="sorted")).hexdigest()


def is_batch_name(text: str) -> bool:
    """Whether a batch may have this id."""
    return _NAME.fullmatch(text) is not None


def page_size(request: Request, default: int, most: int) -> int:
    """The query's `limit`. Raises: GatewayError 400."""
    limit = request.query_params.get("limit") or str(default)
    if _PAGE_SIZE.fullmatch(limit) is None or not 1 <= int(limit) <= most:
        raise errors.invalid_request(f"'limit' must be 1 to {most}.", "limit")
    return int(limit)


def page_edge(request: Request, name: str) -> str | None:
    """The id behind or before which a page begins. Raises: GatewayError 400."""
    edge = request.query_params.get(name) or None
    if edge is not None and not is_batch_name(edge):
        raise errors.invalid_request(f"'{name}' must be the id of a batch.", name)
    return edge


def _id(request: Request) -> str:
    """The id in the path. Raises: GatewayError 404, if it is none."""
    id_: str = request.path_params["id"]
    if not is_batch_name(id_):
        shown = errors.truncate_echo(id_)
        raise GatewayError(404, "batch_not_found", f"No batch found with id '{shown}'.")
    return id_


def _second(moment: float | None) -> int | None:
    return None if moment is None else int(moment)


def _text(fields: JsonObject, name: str, longest: int) -> str | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        _refuse_type(name, "a string", value)
    if not 0 < len(value) <= longest or not value.isprintable():
        _refuse(f"'{name}' must have 1 to {longest} printable characters.", "invalid_value", name)
    return value


def _required_text(fields: JsonObject, name: str) -> str:
    value = _text(fields, name, 256)
    if value is None:
        _refuse(f"Missing required parameter: '{name}'.", "missing_required_parameter", name)
    return value


def _metadata(fields: JsonObject) -> dict[str, str] | None:
    value = fields.get("metadata")
    if value is None:
        return None
    if not isinstance(value, dict):
        _refuse_type("metadata", "an object", value)
    if len(value) > MOST_METADATA:
        _refuse(f"'metadata' has more than {MOST_METADATA} pairs.", "invalid_value", "metadata")
    for key, text in value.items():
        shown = f"metadata.{errors.truncate_echo(key)}"
        if not isinstance(text, str):
            _refuse_type(shown, "a string", text)
        if len(key) > LONGEST_METADATA_KEY or len(text) > LONGEST_METADATA_VALUE:
            _refuse(
                f"'{shown}' is too long: names have at most {LONGEST_METADATA_KEY} characters, "
                f"values {LONGEST_METADATA_VALUE}.",
                "invalid_value",
                "metadata",
            )
    return value


def _output_seconds(fields: JsonObject) -> float | None:
    value = fields.get("output_expires_after")
    if value is None:
        return None
    if not isinstance(value, dict):
        _refuse_type("output_expires_after", "an object", value)
    seconds = value.get("seconds")
    if (
        value.get("anchor") != "created_at"
        or type(seconds) is not int
        or not SHORTEST_EXPIRY <= seconds <= LONGEST_EXPIRY
        or len(value) > 2
    ):
        _refuse(
            "'output_expires_after' must have the 'anchor' 'created_at' and 'seconds' from "
            f"{SHORTEST_EXPIRY} to {LONGEST_EXPIRY}.",
            "invalid_value",
            "output_expires_after",
        )
    return float(seconds)


def _refuse_type(name: str, wanted: str, value: object) -> NoReturn:
    found = _TYPES[type(value)]
    _refuse(
        f"Invalid type for '{name}': expected {wanted}, but got {found} instead.",
        "invalid_type",
        name,
    )


def _refuse(message: str, code: str, param: str | None = None) -> NoReturn:
    raise GatewayError(400, code, message, param=param)
