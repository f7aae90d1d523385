"""Requests to routed paths whose responses are kept or made later: the store runs them.

`Prefer: respond-async` makes a deferred request (`deferred.py`); `background` and `store` of
`/v1/responses` make stored responses (`stored_responses.py`), and `previous_response_id` puts a
stored conversation before the input.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from gateway import errors
from gateway.batches.background_requests import (
    SHUTTING_DOWN,
    BackgroundRequests,
    NewRequest,
)
from gateway.batches.folder import FolderError
from gateway.batches.log_file import LogBroken
from gateway.batches.request_rows import StoredRow
from gateway.batches.response_events import REPEATED, queued_response
from gateway.batches.states import RequestKind
from gateway.batches.storage_errors import RETRY_AFTER
from gateway.batches.stored_responses import (
    RESPONSES_PATH,
    StoreOptions,
    body_to_run,
    conversation_of,
    echoed_fields,
    may_ask_to_store,
    plain_body,
    previous_not_found,
    read_fields,
    read_options,
)
from gateway.batches.webhook_targets import WebhookTargets
from gateway.catalog import RequestQueue, ServedModels
from gateway.errors import GatewayError
from gateway.events import RequestFinished
from gateway.proxy.client_response import JSON_HEADER_LINE
from gateway.proxy.inbound.large_body import BYTE_ORDER_MARK, is_slow_to_parse
from gateway.proxy.inbound.request import Request
from gateway.proxy.inbound.routes import ROUTES, Route
from gateway.proxy.json_values import JsonObject
from gateway.transport.eager_task import ensure_task
from gateway.web.deferred import accepted, background_object
from gateway.web.http_exchange import HttpExchange
from gateway.web.owners import no_store, owner_by_head
from gateway.web.request_context import HandlerConfig, RequestContext
from gateway.web.response_heads import encode_headers

STREAM_HEADER_LINES = (
    b"content-type: text/event-stream\r\ncache-control: no-cache\r\nx-accel-buffering: no\r\n"
)

WAIT_SECONDS = 10.0
"""A client that waits for a whole response is served in steps of so many seconds at most."""

MOST_FAILURES, FAILURE_SECONDS = 60, 1.0
"""How often, and how long after each other, such a client's response is looked for in a store that
can't be used."""


class StorableRequest(Protocol):
    """A request under way in the handler."""

    record: RequestFinished

    @property
    def exchange(self) -> HttpExchange:
        """Where its response goes."""

    @property
    def route(self) -> Route:
        """What its client asked for."""

    @property
    def config(self) -> HandlerConfig:
        """What was in force when it came."""

    def early_header_lines(self) -> bytes:
        """The gateway's own header lines before the outcome is known."""

    async def check(self, context: RequestContext, body: bytes) -> Request:
        """The request that nodes would get, if it ran now. Raises: GatewayError."""


@dataclass(frozen=True, slots=True)
class Storing:
    """Takes requests for `requests`; None: there is no store, and nothing can be kept."""

    requests: BackgroundRequests | None
    webhooks: WebhookTargets
    catalog: ServedModels
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
                await served.check(context, body)
            found = await self._respond(served, context, body.removeprefix(BYTE_ORDER_MARK))
            if found is None:
                return None
            body = found
        if not context.prefers_async or ROUTES.get(route.path) is not route:
            return body
        if route.multipart or not route.takes_slot:
            return body  # Honouring it is always optional.
        await ensure_task()
        await self._defer(served, context, body)
        return None

    # Responses.

    async def _respond(
        self, served: StorableRequest, context: RequestContext, body: bytes
    ) -> bytes | None:
        """As `serve`, for a request to `/v1/responses`."""
        settings = served.config.settings
        fields = read_fields(body)
        options = read_options(fields)
        stored = options.background or (
            options.store is True and settings.batches.store_responses and self.requests is not None
        )
        most_bytes = settings.limits.body_bytes
        if not stored and options.previous is None:
            return body
        before = [] if options.previous is None else await self._conversation(
            served, context, options.previous
        )  # fmt: skip
        if not stored:
            return plain_body(fields, before, most_bytes)
        requests = self._kept("background responses")
        owner = _owner(served, context)
        new_body = body_to_run(fields, before, most_bytes)
        request = await self._checked(served, context, new_body)
        webhook_url = None
        if options.webhook_url is not None:
            group = context.caller.group
            webhook_url = self.webhooks.check(context.caller.id, group, options.webhook_url)
        batches = settings.batches
        keep = batches.background_keep if options.store is False else batches.keep
        seconds = options.seconds or batches.windows.default
        if not options.background and context.client_timeout is not None:
            seconds = min(seconds, context.client_timeout)
        new = _new_request(
            served, context, request, RequestKind.RESPONSE, owner, new_body, seconds, keep
        )
        echoed = echoed_fields(fields, REPEATED) | {"model": request.lease_request.model}
        row = await requests.add(
            replace(new, stream=options.stream, webhook_url=webhook_url, echoed=echoed)
        )
        await self._answer(served, context, requests, row, options, echoed)
        return None

    async def _conversation(
        self, served: StorableRequest, context: RequestContext, previous: str
    ) -> list[object]:
        """What was said up to the end of a response of the caller's. Raises: GatewayError."""
        if self.requests is None:
            raise previous_not_found(previous)
        try:
            owner = _owner(served, context)
            row = await self.requests.find(owner, previous, RequestKind.RESPONSE)
            response = await self.requests.response(row)
            body = await self.requests.body(row)
        except GatewayError as error:
            if error.status in {401, 404}:
                raise previous_not_found(previous) from None
            raise
        return conversation_of(body, response)

    async def _answer(
        self,
        served: StorableRequest,
        context: RequestContext,
        requests: BackgroundRequests,
        row: StoredRow,
        options: StoreOptions,
        echoed: JsonObject,
    ) -> None:
        """Send what the client waits for: the events, the response as it is now, or its end."""
        waits = contextlib.nullcontext() if options.background else requests.client_waits(row)
        try:
            with waits:
                await self._send(served, context, requests, row, options, echoed)
        except asyncio.CancelledError:
            if not options.background and served.exchange.disconnected:
                requests.cancel_soon(row)
            raise

    async def _send(
        self,
        served: StorableRequest,
        context: RequestContext,
        requests: BackgroundRequests,
        row: StoredRow,
        options: StoreOptions,
        echoed: JsonObject,
    ) -> None:
        if options.stream:
            can_return = options.background
            await self._stream(served, context, requests, row, can_return=can_return)
        elif options.background:
            try:
                response = await requests.response(row)
            except GatewayError as error:
                # It is kept, and who had an error for it would send it again.
                errors.drop_traceback(error)
                response = queued_response(row.id, row.created_at, echoed)
            _send_json(served, 200, response)
        else:
            await self._wait(served, requests, row)

    async def _stream(
        self,
        served: StorableRequest,
        context: RequestContext,
        requests: BackgroundRequests,
        row: StoredRow,
        *,
        can_return: bool,
    ) -> None:
        exchange = served.exchange
        numbered = served.route.api.numbered_heartbeats() if context.counts_no_comments else None
        head = STREAM_HEADER_LINES + served.early_header_lines()
        exchange.start_response(200, head)
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

    async def _wait(
        self, served: StorableRequest, requests: BackgroundRequests, row: StoredRow
    ) -> None:
        """Send the whole response once it has ended, and white space before."""
        settings, exchange = served.config.settings, served.exchange
        pads, failures = settings.heartbeat > 0 and settings.heartbeat_plain, 0
        while True:
            step = settings.heartbeat if pads else self.step_seconds()
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
                    exchange.start_response(
                        200, JSON_HEADER_LINE + served.early_header_lines(), b" "
                    )
        response = await requests.response(found)
        if response["status"] in {"failed", "cancelled"}:
            raise _error_of(found, response)
        if exchange.response_started:
            exchange.end_response(msgspec.json.encode(response))
        else:
            _send_json(served, 200, response)

    # Deferred requests.

    async def _defer(self, served: StorableRequest, context: RequestContext, body: bytes) -> None:
        requests = self._kept("requests for later")
        owner = _owner(served, context)
        request = await self._checked(served, context, body)
        if request.stream:
            raise errors.invalid_request(
                "With 'Prefer: respond-async' the response is fetched whole: leave out 'stream'.",
                "stream",
            )
        batches = served.config.settings.batches
        seconds = batches.windows.default
        if context.client_timeout is not None:
            seconds = min(seconds, context.client_timeout)
        row = await requests.add(
            _new_request(
                served, context, request, RequestKind.DEFERRED, owner, body, seconds,
                batches.background_keep,
            )
        )  # fmt: skip
        described = await background_object(row, requests, self.queue)
        headers = [*accepted(row, described), (b"preference-applied", b"respond-async")]
        lines = JSON_HEADER_LINE + encode_headers(headers) + served.early_header_lines()
        served.exchange.respond(202, lines, msgspec.json.encode(described))

    # Both.

    def _kept(self, what: str) -> BackgroundRequests:
        if self.requests is None:
            raise no_store(what)
        return self.requests

    async def _checked(
        self, served: StorableRequest, context: RequestContext, body: bytes
    ) -> Request:
        """The request, which nodes might serve now or later. Raises: GatewayError."""
        request = await served.check(context, body)
        wanted, labels = request.lease_request, context.cache.node_labels
        if not any(self.catalog.serves(name, labels) for name in wanted.model_names):
            error = self.catalog.not_found_error(wanted.model, labels, wanted.model_names)
            if error.status == 404:
                raise error
        return request


def _owner(served: StorableRequest, context: RequestContext) -> str:
    return owner_by_head(served.exchange.headers, context.caller, served.config, "Stored responses")


def _new_request(
    served: StorableRequest,
    context: RequestContext,
    request: Request,
    kind: RequestKind,
    owner: str,
    body: bytes,
    seconds: float,
    keep_seconds: float,
) -> NewRequest:
    wanted = request.lease_request
    return NewRequest(
        kind=kind,
        owner=owner,
        path=served.route.path,
        body=body,
        class_=wanted.priority.label,
        seconds=seconds,
        keep_seconds=keep_seconds,
        group_name=context.caller.group,
        user=context.accounts.user,
        model=request.model_in_body or wanted.model,
        prompt_tokens=wanted.prompt_tokens,
        max_tokens=wanted.max_tokens or 0,
    )


def _send_json(served: StorableRequest, status: int, value: JsonObject) -> None:
    lines = JSON_HEADER_LINE + served.early_header_lines()
    served.exchange.respond(status, lines, msgspec.json.encode(value))


def _error_of(row: StoredRow, response: JsonObject) -> GatewayError:
    """The error of a response that a client has waited for."""
    if response["status"] == "cancelled":
        return GatewayError(409, "cancelled", "The response was cancelled.", retryable=False)
    if row.error_code == SHUTTING_DOWN:
        return GatewayError(
            503,
            SHUTTING_DOWN,
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
