"""Requests to routed paths whose responses are kept or made later: the store runs them.

`Prefer: respond-async` makes a deferred request, of `/v1/background/{id}`; `background` and `store`
of `/v1/responses` make stored responses, of `/v1/responses/{id}`, and `previous_response_id` puts a
stored conversation before the input. A stored response's own body holds its whole conversation, so
the next one needs only the body and the output of the one before.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway import errors
from gateway.api import json_values
from gateway.api.json_values import JsonObject
from gateway.catalog import RequestQueue
from gateway.errors import GatewayError
from gateway.events import RequestRecord
from gateway.forward.client_response import JSON_HEADER_LINE
from gateway.http.exchange import HttpExchange
from gateway.http.heads import (
    Callers,
    HandlerConfig,
    RequestContext,
    encode_headers,
    no_store,
    owner_by_head,
)
from gateway.request.body import BYTE_ORDER_MARK, is_slow_to_parse
from gateway.request.preparation import Request
from gateway.request.routes import ROUTES, Route
from gateway.stored import background_requests
from gateway.stored.background_requests import BackgroundRequests
from gateway.stored.claims import AskedRow, RequestKind, RequestState, StoredRow
from gateway.stored.folder import RETRY_AFTER, FolderError, folder_errors_told
from gateway.stored.response_events import REPEATED, queued_response
from gateway.stored.response_log import LogBroken
from gateway.stored.webhooks import WebhookTargets
from gateway.terms import Headers
from gateway.transport.eager_task import ensure_task
from gateway.web.asgi import (
    JsonResponse,
    Metadata,
    error_response,
    named_field,
    page_limit,
    page_order,
)

RESPONSES_PATH = "/v1/responses"

# Fields of a request that no node gets: the gateway does what they say.
OWN_FIELDS = frozenset(
    {
        *("background", "background_options", "store", "stream", "stream_options"),
        *("previous_response_id", "webhook_url", "metadata", "include"),
    }
)

# Without any of these names a request asks for nothing of the kind.
_MARKS = (b'"background"', b'"store"', b'"previous_response_id"')
# Values of `background_options.completion_window` that are a time, and their seconds.
COMPLETION_WINDOWS = {"2h": 7200.0, "8h": 28800.0}
# Bytes of a field that is read for the gateway itself: the longest `metadata` has fewer.
LONGEST_OPTION = 128 * 1024
# Bytes of the fields that a response repeats, all together. It repeats them in several events, and
# each that is larger is left out.
MOST_ECHOED_BYTES = 256 * 1024
# Statuses of responses that a conversation can go on from.
CONTINUABLE = frozenset({"completed", "incomplete"})


class _BackgroundOptions(msgspec.Struct):
    completion_window: Literal["soonest", "2h", "8h"] | None = None


class StoreOptions(msgspec.Struct):
    """What the caller asks besides the generation; None: the caller does not say."""

    background: bool | None = None
    store: bool | None = None
    stream: bool | None = None
    previous_response_id: str | None = None
    conversation: msgspec.Raw | None = None
    background_options: _BackgroundOptions | None = None
    webhook_url: object = None  # not checked yet
    metadata: Metadata | None = None


_OPTION_NAMES = StoreOptions.__struct_fields__
_OPTIONS = msgspec.json.Decoder(StoreOptions)


def may_ask_to_store(body: bytes) -> bool:
    """Whether the body may have a field that `read_options` reads."""
    return any(mark in body for mark in _MARKS)


def read_fields(body: bytes) -> dict[str, msgspec.Raw]:
    """The fields of a request's body. Raises: GatewayError 400."""
    try:
        return dict(json_values.FIELDS_DECODER.decode(body))
    except (*json_values.JSON_ERRORS, msgspec.ValidationError):
        raise errors.invalid_json("it must be an object") from None


def read_options(fields: Mapping[str, msgspec.Raw]) -> StoreOptions:
    """What these fields ask. Raises: GatewayError 400."""
    given = {name: fields[name] for name in _OPTION_NAMES if name in fields}
    for name, raw in given.items():
        if len(memoryview(raw)) > LONGEST_OPTION:
            raise errors.invalid_request(f"'{name}' has more than {LONGEST_OPTION} bytes.", name)
    try:
        options = _OPTIONS.decode(msgspec.json.encode(given))
    except msgspec.ValidationError as error:
        problem = str(error)
        shown = errors.truncate_echo(problem)
        raise errors.invalid_request(f"{shown}.", named_field(problem)) from None
    if options.previous_response_id is not None and options.conversation is not None:
        raise errors.invalid_request(
            "'previous_response_id' and 'conversation' exclude each other.", "conversation"
        )
    return options


def echoed_fields(fields: Mapping[str, msgspec.Raw], names: Collection[str]) -> JsonObject:
    """Those of the request's fields with these names, as the response repeats them."""
    echoed: JsonObject = {}
    left = MOST_ECHOED_BYTES
    for name in names:
        raw = fields.get(name)
        if raw is not None and len(bytes(raw)) <= left:
            left -= len(bytes(raw))
            echoed[name] = msgspec.json.decode(raw)
    return echoed


def body_to_run(
    fields: Mapping[str, msgspec.Raw], before: Sequence[object], most_bytes: int
) -> bytes:
    """The body that nodes get, as a stream, behind the conversation `before`.

    Raises: GatewayError (400, 413).
    """
    kept: dict[str, Any] = {name: raw for name, raw in fields.items() if name not in OWN_FIELDS}
    kept["stream"] = True
    if before:
        return body_behind(before, fields, kept, most_bytes)
    body = msgspec.json.encode(kept)
    if len(body) > most_bytes:
        raise errors.body_too_large(most_bytes)
    return body


def body_behind(
    before: Sequence[object],
    fields: Mapping[str, msgspec.Raw],
    kept: Mapping[str, Any],
    most_bytes: int,
) -> bytes:
    """A body of the fields `kept`, with its input behind the conversation `before`.

    Raises: GatewayError (400, 413).
    """
    body = msgspec.json.encode({**kept, "input": [*before, *input_items(fields)]})
    if len(body) > most_bytes:
        raise GatewayError(
            413,
            "request_too_large",
            "With the conversation of 'previous_response_id' the request has more than "
            f"{most_bytes} bytes ('limits.body_bytes'): begin a new one.",
            param="previous_response_id",
        )
    return body


class _Item(msgspec.Struct):
    """An item of an `input`, as far as a list of items tells one from another."""

    id: Any = None
    type: Any = "message"


_ITEM = msgspec.json.Decoder(_Item)


class _Object(msgspec.Struct):
    """Any object."""


_OBJECTS = msgspec.json.Decoder(list[_Object])


def input_items(fields: Mapping[str, msgspec.Raw]) -> list[msgspec.Raw]:
    """The items of a body's `input`, undecoded: there may be 100,000. Raises: GatewayError 400."""
    raw = fields.get("input", msgspec.Raw(b"null"))
    try:
        if json_values.raw_head(raw, 1) == b"[":
            _OBJECTS.decode(raw)
            return json_values.ITEMS_DECODER.decode(raw)
        part = {"type": "input_text", "text": json_values.TEXT_DECODER.decode(raw)}
    except msgspec.ValidationError:
        raise errors.invalid_request(
            "'input' must be a string or a list of items.", "input"
        ) from None
    message = {"type": "message", "role": "user", "content": [part]}
    return [msgspec.Raw(msgspec.json.encode(message))]


def conversation_of(body: bytes, response: JsonObject) -> list[Any]:
    """What was said up to the end of a stored response: its body's input, and its output.

    Raises: GatewayError 400, if no conversation can go on from it.
    """
    status = response.get("status")
    if status not in CONTINUABLE:
        why = "has not ended yet" if status in {"queued", "in_progress"} else f"has {status}"
        raise errors.invalid_request(
            f"The previous response {why}: a conversation goes on from completed ones.",
            "previous_response_id",
        )
    said = input_items(read_fields(body))
    return [*said, *(response.get("output") or [])]


def item_id(response_id: str, number: int, item: msgspec.Raw) -> str:
    """The id of an input item of a stored response: its own, or one that stays the same."""
    found = _ITEM.decode(item)
    if isinstance(found.id, str):
        return found.id
    prefix = _ITEM_PREFIXES.get(str(found.type), "item_")
    return f"{prefix}{response_id.rpartition('_')[2]}{number:06x}"


def listed_item(response_id: str, number: int, item: msgspec.Raw) -> JsonObject:
    """An input item of a stored response, with its id."""
    fields: JsonObject = msgspec.json.decode(item)
    kind = fields.get("type", "message")
    listed = {"type": kind, **fields, "id": item_id(response_id, number, item)}
    listed.setdefault("status", "completed")
    if kind == "message" and isinstance(text := listed.get("content"), str):
        part = "output_text" if listed.get("role") == "assistant" else "input_text"
        listed["content"] = [{"type": part, "text": text}]
    return listed


_ITEM_PREFIXES = {
    "message": "msg_", "reasoning": "rs_", "function_call": "fc_", "function_call_output": "fco_",
}  # fmt: skip


def previous_not_found(id_: str) -> GatewayError:
    """400: the caller has no such response."""
    return GatewayError(
        400,
        "previous_response_not_found",
        f"Previous response with id '{errors.truncate_echo(id_)}' not found.",
        param="previous_response_id",
    )


STREAM_HEADER_LINES = (
    b"content-type: text/event-stream\r\ncache-control: no-cache\r\nx-accel-buffering: no\r\n"
)

# A client that waits for a whole response is served in steps of so many seconds at most.
WAIT_SECONDS = 10.0
# How often, and how long after each other, such a client's response is looked for in a store that
# can't be used.
MOST_FAILURES, FAILURE_SECONDS = 60, 1.0


class StorableRequest(Protocol):
    """A request under way in the handler."""

    record: RequestRecord
    exchange: HttpExchange
    route: Route
    config: HandlerConfig

    def pass_on(self, *, served: bool = True) -> None:
        """Another process serves the request and tells of its end; not `served`: it does not."""

    def header_lines(self, *, early: bool = False) -> bytes:
        """The gateway's own header lines; `early`: before the outcome is known."""

    async def read_in_turn(self, context: RequestContext, body: bytes) -> Request:
        """The request that nodes would get, if it ran now. Raises: GatewayError."""


class TakesStorable(Protocol):
    """Takes requests whose responses are kept or made later."""

    async def serve(
        self, served: StorableRequest, context: RequestContext, body: bytes
    ) -> bytes | None:
        """The body to go on with, as usual; None: the response was sent. Raises: GatewayError."""


def asks_to_store(route: Route, context: RequestContext, body: bytes) -> bool:
    """Whether `Storing` may have to do with the request."""
    stored = route.path == RESPONSES_PATH and may_ask_to_store(body)
    return stored or (context.prefers_async and ROUTES.get(route.path) is route)


@dataclass(frozen=True, slots=True)
class Storing:
    """Takes requests for `requests`; None: there is no store, and nothing can be kept."""

    requests: BackgroundRequests | None
    webhooks: WebhookTargets
    queue: RequestQueue
    step_seconds: Callable[[], float] = field(default=lambda: WAIT_SECONDS)

    async def serve(
        self, served: StorableRequest, context: RequestContext, body: bytes
    ) -> bytes | None:
        """The body to go on with, as usual; None: the response was sent. Raises: GatewayError."""
        route = served.route
        if route.path == RESPONSES_PATH and may_ask_to_store(body):
            await ensure_task()
            if is_slow_to_parse(body):
                # Its fields are decoded at once: those of a body within the limits are few.
                await served.read_in_turn(context, body)
            asked = _StoringRequest(self, served, context)
            found = await asked.respond(body.removeprefix(BYTE_ORDER_MARK))
            if found is None:
                return None
            body = found
        may_defer = ROUTES.get(route.path) is route and route.takes_slot and not route.multipart
        if not (context.prefers_async and may_defer):
            return body  # Honouring it is always optional.
        await ensure_task()
        await _StoringRequest(self, served, context).defer(body)
        return None


@dataclass(frozen=True, slots=True)
class _StoringRequest:
    storing: Storing
    served: StorableRequest
    context: RequestContext

    async def respond(self, body: bytes) -> bytes | None:
        """Serve a request to `/v1/responses`: store the response if asked, then send it.

        Returns the body to go on with if nothing is stored. Raises: GatewayError.
        """
        settings, context = self.served.config.settings, self.context
        fields = read_fields(body)
        options = read_options(fields)
        previous, background = options.previous_response_id or None, options.background is True
        stored = background or (
            options.store is True
            and settings.batches.store_responses
            and self.storing.requests is not None
        )
        most_bytes = settings.limits.body_bytes
        if not stored and previous is None:
            return body
        before = [] if previous is None else await self._conversation(previous)
        if not stored:
            kept = {name: raw for name, raw in fields.items() if name != "previous_response_id"}
            return body_behind(before, fields, kept, most_bytes)
        requests = self._kept("background responses")
        owner = self._owner()
        new_body = body_to_run(fields, before, most_bytes)
        request = await self._checked(new_body)
        webhook_url = None
        if options.webhook_url is not None:
            caller = context.accounts.caller
            webhook_url = self.storing.webhooks.check(caller.id, caller.group, options.webhook_url)
        batches = settings.batches
        keep = batches.background_keep if options.store is False else batches.keep
        timing = options.background_options
        window = None if timing is None else timing.completion_window
        seconds = COMPLETION_WINDOWS.get(window or "", batches.windows.default)
        if not background and context.client_timeout is not None:
            seconds = min(seconds, context.client_timeout)
        asked = self._asked(request, RequestKind.RESPONSE, owner)
        asked = replace(asked, stream=options.stream is True, webhook_url=webhook_url)
        echoed = echoed_fields(fields, REPEATED) | {"model": request.lease_request.wanted.model}
        row = await requests.add(asked, new_body, seconds=seconds, keep_seconds=keep, echoed=echoed)
        await self._answer(requests, row, options, echoed)
        return None

    async def _conversation(self, previous: str) -> list[object]:
        """What was said up to the end of a response of the caller's. Raises: GatewayError."""
        requests = self.storing.requests
        if requests is None:
            raise previous_not_found(previous)
        try:
            row = await requests.find(self._owner(), previous, RequestKind.RESPONSE)
            response = await requests.response(row)
            body = await requests.body(row)
        except GatewayError as error:
            if error.status in {401, 404}:
                raise previous_not_found(previous) from None
            raise
        return conversation_of(body, response)

    async def _answer(
        self,
        requests: BackgroundRequests,
        row: StoredRow,
        options: StoreOptions,
        echoed: JsonObject,
    ) -> None:
        """Send what the client waits for: the events, the response as it is now, or its end."""
        waits = contextlib.nullcontext() if options.background else requests.client_waits(row)
        try:
            with waits:
                if options.stream:
                    await self._stream(requests, row, can_return=options.background is True)
                elif not options.background:
                    await self._wait(requests, row)
                else:
                    try:
                        response = await requests.response(row)
                    except GatewayError as error:
                        # It is kept, and who had an error for it would send it again.
                        errors.drop_traceback(error)
                        response = queued_response(row.id, row.created_at, echoed)
                    self._send_json(200, response)
        except asyncio.CancelledError:
            if not options.background and self.served.exchange.disconnected:
                requests.cancel_soon(row)
            raise

    async def _stream(
        self, requests: BackgroundRequests, row: StoredRow, *, can_return: bool
    ) -> None:
        served, exchange = self.served, self.served.exchange
        counts_none = self.context.counts_no_comments
        numbered = served.route.api.numbered_heartbeats() if counts_none else None
        exchange.start_response(200, STREAM_HEADER_LINES + served.header_lines(early=True))
        try:
            async with contextlib.aclosing(requests.follow(row, can_return=can_return)) as pieces:
                async for piece in pieces:
                    if exchange.write(piece if numbered is None else numbered.of_log(piece)):
                        await exchange.wait_writable()
        except (LogBroken, FolderError, FileNotFoundError):
            # Its polite end would read as that of the response.
            served.record.fail(502, "stream_broken")
            exchange.abort()
            return
        exchange.end_response()

    async def _wait(self, requests: BackgroundRequests, row: StoredRow) -> None:
        """Send the whole response once it has ended, and white space before."""
        settings, exchange = self.served.config.settings, self.served.exchange
        pads, failures = settings.heartbeat > 0 and settings.heartbeat_plain, 0
        while True:
            step = settings.heartbeat if pads else self.storing.step_seconds()
            try:
                found = await requests.wait_ended(row, step)
            except GatewayError as error:
                # It goes on while the store is away, and who had an error would send it again.
                failures += 1
                if error.status != 503 or failures > MOST_FAILURES:
                    raise
                errors.drop_traceback(error)
                await asyncio.sleep(FAILURE_SECONDS)
                found = row
            else:
                failures = 0
            if found.state.ended:
                break
            if pads and not exchange.write_paused:
                if exchange.response_started:
                    exchange.write(b" ")
                else:
                    exchange.start_response(200, self._json_head(), b" ")
        response = await requests.response(found)
        if response["status"] in {"failed", "cancelled"}:
            raise _error_of(found, response)
        if exchange.response_started:
            exchange.end_response(msgspec.json.encode(response))
        else:
            self._send_json(200, response)

    async def defer(self, body: bytes) -> None:
        """Take a request with `Prefer: respond-async`, and answer where its response will be."""
        context = self.context
        requests = self._kept("requests for later")
        owner = self._owner()
        request = await self._checked(body)
        if request.stream:
            raise errors.invalid_request(
                "With 'Prefer: respond-async' the response is fetched whole: leave out 'stream'.",
                "stream",
            )
        batches = self.served.config.settings.batches
        seconds, keep = batches.windows.default, batches.background_keep
        if context.client_timeout is not None:
            seconds = min(seconds, context.client_timeout)
        asked = self._asked(request, RequestKind.DEFERRED, owner)
        row = await requests.add(asked, body, seconds=seconds, keep_seconds=keep)
        described = await background_object(row, requests, self.storing.queue)
        headers = [*accepted(row, described), (b"preference-applied", b"respond-async")]
        self._send_json(202, described, encode_headers(headers))

    def _kept(self, what: str) -> BackgroundRequests:
        if self.storing.requests is None:
            raise no_store(what)
        return self.storing.requests

    def _owner(self) -> str:
        served = self.served
        return owner_by_head(
            served.exchange.headers, self.context.accounts.caller, served.config, "Stored responses"
        )

    async def _checked(self, body: bytes) -> Request:
        """The request, which nodes might serve now or later. Raises: GatewayError."""
        request = await self.served.read_in_turn(self.context, body)
        wanted, labels = request.lease_request.wanted, self.context.cache.node_labels
        catalog = self.served.config.rules.model_aliases.catalog
        if not any(catalog.serves(name, labels) for name in wanted.model_names):
            error = catalog.not_found_error(wanted.model, labels, wanted.model_names)
            if error.status == 404:
                raise error
        return request

    def _asked(self, request: Request, kind: RequestKind, owner: str) -> AskedRow:
        asked = request.lease_request
        return AskedRow(
            kind,
            owner,
            path=self.served.route.path,
            class_=asked.caller.priority.label,
            group_name=self.context.accounts.caller.group,
            user=self.context.accounts.user,
            model=request.model_in_body or asked.wanted.model,
            prompt_tokens=asked.size.prompt_tokens,
            max_tokens=asked.size.max_tokens or 0,
        )

    def _json_head(self, more: bytes = b"") -> bytes:
        return JSON_HEADER_LINE + more + self.served.header_lines(early=True)

    def _send_json(self, status: int, value: JsonObject, more: bytes = b"") -> None:
        head, body = self._json_head(more), msgspec.json.encode(value)
        self.served.exchange.respond(status, head, body)


def _error_of(row: StoredRow, response: JsonObject) -> GatewayError:
    if response["status"] == "cancelled":
        return GatewayError(409, "cancelled", "The response was cancelled.", retryable=False)
    if row.error_code == background_requests.SHUTTING_DOWN:
        return GatewayError(
            503,
            background_requests.SHUTTING_DOWN,
            f"The gateway is shutting down, and has ended the response '{row.id}': send the "
            "request again.",
            retry_after=RETRY_AFTER,
        )
    error = response.get("error") or {}
    return GatewayError(
        row.status if row.status is not None and row.status >= 400 else 504,
        str(error.get("code") or "server_error"),
        str(error.get("message") or "The response failed."),
        retryable=False,
    )


RETRY_SECONDS = 2  # `Retry-After` while nothing better is known
LONGEST_RETRY_SECONDS = 30  # the longest `Retry-After`
# Marks a response that was made before, so that its status is not taken for that of this path.
REPLAY = "x-gateway-replay"
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
        "url": background_requests.DEFERRED_PATH.format(id=row.id),
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
        (b"location", background_requests.DEFERRED_PATH.format(id=row.id).encode()),
        (b"retry-after", b"%d" % wait),
    ]


@dataclass(frozen=True, slots=True)
class DeferredEndpoints:
    """The endpoints."""

    requests: BackgroundRequests | None  # None: there is no store
    queue: RequestQueue
    callers: Callers

    async def show(self, request: HttpRequest) -> Response:
        """202 while it waits or runs, then its response."""
        requests, owner = self._access(request)
        row = await requests.find(owner, request.path_params["id"], RequestKind.DEFERRED)
        if not row.state.ended:
            described = await background_object(row, requests, self.queue)
            response: Response = JsonResponse(described, 202)
            response.raw_headers += accepted(row, described)
            return response
        if row.state is RequestState.EXPIRED or row.result_place is None:
            error = GatewayError(500, row.error_code or "internal_error", "The response is lost.")
            if row.state is RequestState.EXPIRED:
                message = background_requests.EXPIRED_MESSAGE
                error = GatewayError(504, "queue_timeout", message, retryable=False)
            response = error_response(error, {**request.scope, "path": row.path})
        else:
            with folder_errors_told("request"):
                head, content = background_requests.decode_result(await requests.answer(row))
            response = Response(content, head.status)
            lines = head.header_lines.split("\r\n")
            fields = [line.partition(":")[::2] for line in lines if line]
            kept = {name.lower(): value.strip() for name, value in fields}
            for name in kept.keys() - _OF_CONNECTION:
                response.headers[name] = kept[name]
            response.headers["x-request-id"] = head.x_request_id
        response.headers[REPLAY] = "true"
        # Clients would repeat the question, and have the same answer.
        response.headers["x-should-retry"] = "false"
        return response

    async def delete(self, request: HttpRequest) -> Response:
        """End it, if it has not ended, and remove all that is kept of it."""
        requests, owner = self._access(request)
        row = await requests.delete(owner, request.path_params["id"], RequestKind.DEFERRED)
        cancelled = not row.state.ended
        return JsonResponse(
            {"id": row.id, "object": "background", "deleted": True, "cancelled": cancelled}
        )

    def _access(self, request: HttpRequest) -> tuple[BackgroundRequests, str]:
        owner = self.callers.owner(request, "Background requests")
        if self.requests is None:
            raise no_store("background requests")
        id_ = request.path_params["id"]
        if len(id_) > 64:
            raise background_requests.not_found(id_, RequestKind.DEFERRED)
        return self.requests, owner


MOST_ITEMS, USUAL_ITEMS = 100, 20  # input items of a page, as OpenAI's API has it
# Bytes that take as long as one item, and those that are read in one turn of the event loop.
ITEM_WORK, STEP_WORK = 1024, 1 << 20
_ID = re.compile(r"resp_[0-9a-f]{32}")
_NUMBER = re.compile(r"[0-9]{1,12}")
_TRUE = frozenset({"true", "1"})
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


@dataclass(frozen=True, slots=True)
class StoredResponseEndpoints:
    """The endpoints."""

    requests: BackgroundRequests | None  # None: there is no store
    callers: Callers

    async def show(self, request: HttpRequest) -> Response:
        """The response as it is now, or its events."""
        after = request.query_params.get("starting_after")
        if after is not None and _NUMBER.fullmatch(after) is None:
            raise errors.invalid_request(
                "'starting_after' must be the sequence number of an event.", "starting_after"
            )
        requests, row = await self._row(request)
        if request.query_params.get("stream", "").lower() not in _TRUE:
            return JsonResponse(await requests.response(row))
        if request.method == "HEAD":
            return Response(media_type="text/event-stream", headers=_STREAM_HEADERS)
        # An error where they break off: a polite end would read as the response's.
        events = requests.follow(row, -1 if after is None else int(after))
        return _FollowedResponse(events, media_type="text/event-stream", headers=_STREAM_HEADERS)

    async def cancel(self, request: HttpRequest) -> Response:
        """End it, if it has not ended."""
        requests, row = await self._row(request)
        row = await requests.cancel(row.owner, row.id, RequestKind.RESPONSE)
        return JsonResponse(await requests.response(row))

    async def delete(self, request: HttpRequest) -> Response:
        """Remove all that is kept of it; it ends, if it has not."""
        requests, row = await self._row(request)
        await requests.delete(row.owner, row.id, RequestKind.RESPONSE)
        return JsonResponse({"id": row.id, "object": "response", "deleted": True})

    async def input_items(self, request: HttpRequest) -> Response:
        """The conversation that it was asked with."""
        query = request.query_params
        limit = page_limit(query.get("limit", str(USUAL_ITEMS)), MOST_ITEMS)
        order, after = page_order(query.get("order", "desc")), query.get("after") or None
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

    async def _row(self, request: HttpRequest) -> tuple[BackgroundRequests, StoredRow]:
        """Raises: GatewayError 401, 403, 404, 501."""
        owner = self.callers.owner(request, "Stored responses")
        if self.requests is None:
            raise no_store("responses")
        id_ = request.path_params["id"]
        if _ID.fullmatch(id_) is None:
            raise background_requests.response_not_found(id_)
        return self.requests, await self.requests.find(owner, id_, RequestKind.RESPONSE)


class _FollowedResponse(StreamingResponse):
    """Events of a stored response. Where they break off, so does the connection.

    That is no fault of the gateway's, which may just end: its client follows it again.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except (LogBroken, FileNotFoundError):
            scope["state"]["abort"]()
            while (await receive())["type"] != "http.disconnect":
                pass


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
