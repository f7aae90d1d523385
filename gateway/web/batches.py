"""`/v1/batches` as OpenAI's API has it, and what the gateway adds to it.

Its own are pausing, results before the end, and what is in `llama_gateway` of a batch.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway import errors
from gateway.api.json_values import JsonObject
from gateway.callers.callers import cache_policy_of
from gateway.config.fields import format_duration
from gateway.errors import GatewayError
from gateway.http.heads import Callers, no_store, owner_by_head
from gateway.stored.batch_registry import BatchRegistry, NewBatch
from gateway.stored.batch_rows import Batch, BatchProgress, read_batches
from gateway.stored.claims import BatchState
from gateway.stored.waits import BatchWait
from gateway.stored.webhooks import WebhookTargets
from gateway.terms import Caller
from gateway.web.asgi import (
    JsonResponse,
    Metadata,
    listed,
    named_field,
    page_limit,
    read_fields,
)
from gateway.web.files import ContentResponse, Expiry, content_headers

CREATE_BYTES = 64 * 1024  # most bytes of a request for a batch
OPENAI = "openai"  # the API whose batches these are
DEFAULT_PAGE, LONGEST_PAGE = "20", 100  # batches of a page, as OpenAI's API has it
LONGEST_IDEMPOTENCY_KEY = 255  # characters
JSON_LINES = "application/x-jsonl"

_NAME = re.compile(r"[a-z0-9_-]{1,64}")


def _text(longest: int) -> msgspec.Meta:
    return msgspec.Meta(max_length=longest, pattern=r"\A[^\x00-\x1f\x7f]+\Z")


class BatchFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the requests for a batch of both APIs have."""

    completion_window: Annotated[str, _text(40)] | None = None  # checked with the settings
    webhook_url: Any = None


class _NewBatchFields(BatchFields, kw_only=True):
    input_file_id: Annotated[str, _text(256)]
    endpoint: Annotated[str, _text(256)]
    metadata: Metadata | None = None
    output_expires_after: Expiry | None = None


FieldsT = TypeVar("FieldsT", bound=BatchFields)


def read_batch_fields(fields: JsonObject, kind: type[FieldsT]) -> FieldsT:
    """The fields of a request for a batch. Raises: GatewayError 400, with OpenAI's codes."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        problem = str(error)
    code = next((code for words, code in _CODES.items() if words in problem), "invalid_value")
    shown = errors.truncate_echo(problem)
    raise GatewayError(400, code, f"{shown}.", param=named_field(problem))


_CODES = {
    "unknown field": "unknown_parameter",
    "required field": "missing_required_parameter",
    ", got `": "invalid_type",
}


@dataclass(frozen=True, slots=True)
class BatchAccess:
    """Whose batches a request is about."""

    registry: BatchRegistry | None  # None: there is no store
    callers: Callers
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
        return self.callers.owner(request, "Batches")

    def new_batch(self, request: Request, api: str, endpoint: str) -> NewBatch:
        """A batch of the request's caller. Raises: GatewayError 400, 401, 403."""
        config, caller = self.callers.config(), self.callers.identify(request)
        owner = owner_by_head(request.scope["headers"], caller, config, "Batches")
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

    def checked(self, new: NewBatch, fields: BatchFields) -> NewBatch:
        """`new` with what both APIs take. Raises: GatewayError 400."""
        url = fields.webhook_url
        if url is not None:
            url = self.webhooks.check(new.owner, new.group_name, url)
        return replace(new, window=fields.completion_window, webhook_url=url)

    async def progress(self, batch: Batch) -> tuple[BatchProgress | None, BatchWait | None]:
        """How far it is, and what it waits for; None while the store can't tell.

        What was asked for is done: who had an error for it would ask again, for another batch.
        """
        try:
            return await self.batches().progress(batch)
        except GatewayError as error:
            errors.drop_traceback(error)
            return None, None

    def shows_cached_tokens(self, request: Request) -> bool:
        """Whether the caller may know how much of its prompts was cached."""
        settings = self.callers.config().settings
        return not cache_policy_of(self.callers.identify(request), settings).hide


class BatchActions:
    """What both APIs do with a batch in the same way."""

    api: str
    not_found: str  # the error's message where the path has no batch's id

    def __init__(self, access: BatchAccess) -> None:
        self.access = access

    async def show(self, request: Request) -> Response:
        return await self._shown(request, await self._do(request, BatchRegistry.find))

    async def cancel(self, request: Request) -> Response:
        return await self._shown(request, await self._do(request, BatchRegistry.cancel))

    async def pause(self, request: Request) -> Response:
        return await self._shown(request, await self._do(request, BatchRegistry.pause))

    async def resume(self, request: Request) -> Response:
        return await self._shown(request, await self._do(request, BatchRegistry.resume))

    async def _do(self, request: Request, act: Callable[..., Awaitable[Batch]]) -> Batch:
        named = await self._named(request)
        return await act(self.access.batches(), *named)

    async def _named(self, request: Request) -> tuple[str, str, str]:
        """Owner, id and API of the batch that the request is about. Raises: GatewayError."""
        return self.access.owner(request), self._id(request), self.api

    async def results(self, request: Request) -> Response:
        """The lines with a response, also before the end."""
        return await self._lines(request)

    async def errors(self, request: Request) -> Response:
        """The lines with an error, also before the end."""
        return await self._lines(request, of_errors=True)

    async def _lines(self, request: Request, *, of_errors: bool = False) -> Response:
        """The lines of a batch: the final file, or what there is so far. Raises: GatewayError."""
        owner, id_, api = await self._named(request)
        output = await self.access.batches().open_output(owner, id_, api, errors=of_errors)
        headers = content_headers(output.name, output.size, JSON_LINES)
        if request.method == "HEAD":
            await output.close()
            return Response(headers=headers)
        return ContentResponse(output, headers)

    async def _shown(self, request: Request, batch: Batch) -> Response:
        raise NotImplementedError

    def _id(self, request: Request) -> str:
        """The id in the path. Raises: GatewayError 404, if it is none."""
        id_: str = request.path_params["id"]
        if not is_batch_name(id_):
            message = self.not_found.format(errors.truncate_echo(id_))
            raise GatewayError(404, "batch_not_found", message)
        return id_


class BatchEndpoints(BatchActions):
    """The endpoints of `/v1/batches`."""

    api = OPENAI
    not_found = "No batch found with id '{}'."

    async def create(self, request: Request) -> Response:
        new, batches = self.access.new_batch(request, OPENAI, ""), self.access.batches()
        limits = self.access.callers.config().settings.limits
        fields = await read_fields(request, CREATE_BYTES, limits.body_timeout)
        read = read_batch_fields(fields, _NewBatchFields)
        expiry = read.output_expires_after
        asked = replace(
            self.access.checked(new, read),
            input_file=read.input_file_id,
            endpoint=read.endpoint,
            metadata=read.metadata,
            output_seconds=None if expiry is None else float(expiry.seconds),
            request_digest=request_digest(OPENAI, fields),
        )
        return await self._shown(request, await batches.create(asked))

    async def list(self, request: Request) -> Response:
        owner, batches = self.access.owner(request), self.access.batches()
        after = page_edge(request, "after")
        limit = page_limit(request.query_params.get("limit") or DEFAULT_PAGE, LONGEST_PAGE)
        page = await batches.storage.read_for_caller(read_batches, owner, OPENAI, limit, after)
        shows_cached = self.access.shows_cached_tokens(request)
        waits = await batches.waits_of(page.batches)
        found = [
            batch_object(one, None, wait, shows_cached=shows_cached)
            for one, wait in zip(page.batches, waits, strict=True)
        ]
        return JsonResponse({"object": "list", **listed(found, has_more=page.has_more)})

    async def _shown(self, request: Request, batch: Batch) -> Response:
        progress, wait = await self.access.progress(batch)
        shows_cached = self.access.shows_cached_tokens(request)
        return JsonResponse(batch_object(batch, progress, wait, shows_cached=shows_cached))


UnixTime = Annotated[int | None, "Unix seconds"]


class BatchFigures(msgspec.Struct, kw_only=True):
    """What the gateway tells of a batch besides: `llama_gateway` of both APIs' batches."""

    waiting: Annotated[
        int | None, "lines that wait; null in lists, as all that only its lines tell"
    ]
    running: Annotated[int | None, "lines that run now"]
    cancelled: Annotated[int, "lines that will never run, because it was cancelled"]
    expired: Annotated[int, "lines that will never run, because its time is over"]
    tokens_per_second: Annotated[float | None, "tokens of results, over the last minutes"]
    expected_start: Annotated[
        int | None,
        "when a line of it is expected to run, in Unix seconds; null: one does, or nobody knows",
    ]
    expected_end: Annotated[int | None, "when it is expected to end, in Unix seconds"]
    expected_by: Annotated[
        str | None,
        "how the end is reckoned: `speed` (its own results of the "
        "last minutes), `nodes` (what its nodes read and write, if it had all their slots)",
    ]
    cost: Annotated[float, "what its results have cost"]
    expected_cost: Annotated[float | None, "what all its lines will cost; null: no price is known"]
    paused: Annotated[
        dict[str, Any] | None, "since when (`at`) and why (`reason`) it is paused; null: it is not"
    ]
    why_waiting: Annotated[dict[str, Any] | None, "why none of its lines runs (`reason`, "
        "`message`), since when (`since`), and until when, if that is known (`until`); null: it "
        "does not wait"]  # fmt: skip


class RequestCounts(msgspec.Struct):
    """How many lines of a batch there are, and how they ended."""

    total: int
    completed: int
    failed: int


class BatchObject(msgspec.Struct, kw_only=True):
    """A batch as OpenAI's API shows it."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    errors: dict[str, Any] | None
    input_file_id: str | None
    completion_window: str
    status: Annotated[str, msgspec.Meta(extra_json_schema={"enum": [*map(str, BatchState)]})]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: UnixTime
    expires_at: UnixTime
    finalizing_at: UnixTime
    completed_at: UnixTime
    failed_at: UnixTime
    expired_at: UnixTime
    cancelling_at: UnixTime
    cancelled_at: UnixTime
    request_counts: RequestCounts
    usage: dict[str, Any]
    metadata: dict[str, Any] | None
    llama_gateway: BatchFigures


def batch_object(
    batch: Batch,
    progress: BatchProgress | None,
    wait: BatchWait | None = None,
    *,
    shows_cached: bool = True,
) -> BatchObject:
    """The batch as its owner is shown it; without `progress`, what only its lines tell is null."""
    state = batch.state

    def ended(as_: BatchState) -> int | None:
        return _second(batch.ended_at) if state is as_ else None

    return BatchObject(
        id=batch.id,
        endpoint=batch.endpoint,
        model=batch.model,
        errors={"object": "list", "data": batch.errors or []}
        if state is BatchState.FAILED
        else None,
        input_file_id=batch.input_file,
        completion_window=format_duration(round(batch.expires_at - batch.created_at)),
        status=state.value,
        # Many clients take an id of an output for the end.
        output_file_id=batch.output_file if state.ended else None,
        error_file_id=batch.error_file if state.ended else None,
        created_at=int(batch.created_at),
        in_progress_at=_second(batch.in_progress_at),
        expires_at=int(batch.expires_at),
        finalizing_at=_second(batch.finalizing_at),
        completed_at=ended(BatchState.COMPLETED),
        failed_at=ended(BatchState.FAILED),
        expired_at=ended(BatchState.EXPIRED),
        cancelling_at=_second(batch.cancelling_at),
        cancelled_at=ended(BatchState.CANCELLED),
        request_counts=RequestCounts(batch.total, batch.completed, batch.failed),
        usage={
            "input_tokens": batch.prompt_tokens,
            "input_tokens_details": {"cached_tokens": batch.cached_tokens if shows_cached else 0},
            "output_tokens": batch.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": batch.prompt_tokens + batch.completion_tokens,
        },
        metadata=batch.metadata,
        llama_gateway=figures_of(batch, progress, wait),
    )


def figures_of(
    batch: Batch, progress: BatchProgress | None, wait: BatchWait | None
) -> BatchFigures:
    """What the gateway tells of the batch besides."""
    paused = batch.paused_at is not None and not batch.state.ended
    return BatchFigures(
        waiting=None if progress is None else progress.waiting,
        running=None if progress is None else progress.running,
        cancelled=batch.cancelled,
        expired=batch.expired,
        tokens_per_second=None if progress is None else progress.tokens_per_second,
        expected_start=None if progress is None else _second(progress.expected_start),
        expected_end=None if progress is None else _second(progress.expected_end),
        expected_by=None if progress is None else progress.expected_by,
        cost=batch.cost if progress is None else progress.cost,
        expected_cost=None if progress is None else progress.expected_cost,
        paused={"at": _second(batch.paused_at), "reason": batch.pause_reason} if paused else None,
        why_waiting=None
        if wait is None
        else {
            "reason": wait.reason,
            "message": wait.message,
            "since": _second(wait.since),
            "until": _second(wait.until),
        },
    )


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


def page_edge(request: Request, name: str) -> str | None:
    """The id behind or before which a page begins. Raises: GatewayError 400."""
    edge = request.query_params.get(name) or None
    if edge is not None and not is_batch_name(edge):
        raise errors.invalid_request(f"'{name}' must be the id of a batch.", name)
    return edge


def _second(moment: float | None) -> int | None:
    return None if moment is None else int(moment)
