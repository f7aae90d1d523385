"""`POST /admin/chat`: a chat for the dashboard's playground, streamed, and how it came about.

The body is that of `/v1/chat/completions`. It takes the way of every request: limits, queue, node,
ledger. Its caller is `playground:NAME`, of the admin key with that name. Between the events of the
chat API there are events of the gateway's own: `waiting` and `reading` each second until the answer
begins, then `node`, and `done` at the end, with the figures.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from gateway import errors
from gateway.admin.guard import identity_of
from gateway.admin.live import EventStream, encode_event
from gateway.api.json_values import JsonObject
from gateway.api.outcome import to_gateway_error
from gateway.callers.callers import cache_policy_of
from gateway.callers.keys import AdminIdentity
from gateway.callers.limits import Accounts, Reservation
from gateway.errors import CLIENT_CLOSED_STATUS, GatewayError
from gateway.events import RequestRecord
from gateway.forward.client_response import ClientResponse, node_error
from gateway.forward.header_fields import headers_for_node
from gateway.forward.in_flight import InFlightRequest, PrefillProgress
from gateway.http.heads import class_of
from gateway.request.preparation import IncomingRequest, Sender, read_in_turn
from gateway.request.routes import ROUTES
from gateway.terms import Caller, Headers, Priority
from gateway.transport.errors import UpstreamError
from gateway.web.asgi import read_fields
from gateway.web.handler import RequestHandler

PATH = "/v1/chat/completions"
MOST_BODY_BYTES = 256 * 1024  # most bytes of a chat
# Seconds between two events that say how far a request is that waits; what fails within the first
# of them gets an error response instead of an event.
PROGRESS_SECONDS = 1.0
HEADERS: Headers = [(b"content-type", b"application/json")]  # the header fields that nodes get
CHAT_STALL_SECONDS = 60.0  # seconds after which a page that reads nothing is cut off


@dataclass(frozen=True, slots=True)
class Playground:
    """The endpoint of the playground. It serves by the handler's settings, meter and forwarder."""

    handler: RequestHandler

    async def chat(self, request: HttpRequest) -> Response:
        """Stream a chat. Raises: GatewayError."""
        seconds = self.handler.config.settings.limits.body_timeout
        fields = await read_fields(request, MOST_BODY_BYTES, seconds)
        chat = _Chat(self.handler, identity_of(request))
        try:
            events = await chat.begin(fields)
        except BaseException:
            await chat.close()
            raise
        return EventStream(events, CHAT_STALL_SECONDS, on_end=chat.close)


class _Chat:
    """One chat, from its body to the last event; `close` must be called."""

    def __init__(self, handler: RequestHandler, identity: AdminIdentity) -> None:
        self._handler = handler
        self._id = handler.next_id()
        self._received_at = handler.clock()
        self._record = RequestRecord(self._id, PATH, request_id=self._id)
        self._caller = Caller(
            id=f"playground:{identity.name}", name="playground", max_priority=Priority.URGENT
        )
        self._record.identify(self._caller.id)
        self._reservation: Reservation | None = None
        self._in_flight: InFlightRequest | None = None
        self._forwarding: asyncio.Task[ClientResponse] | None = None
        self._response: ClientResponse | None = None
        if handler.tracing is not None and handler.tracing.active:
            handler.tracing.begin(self._id, self._record, [], self._received_at)

    async def begin(self, fields: JsonObject) -> AsyncGenerator[bytes, None]:
        """Send it on; its events. Raises: GatewayError, for what fails before it must wait."""
        handler = self._handler
        if handler.rejecting:
            raise errors.shutting_down()
        try:
            body = msgspec.json.encode({**fields, "stream": True})
            caller, config, record = self._caller, handler.config, self._record
            sender = Sender(
                Accounts(caller),
                headers_for_node(HEADERS, config.settings.headers.to_nodes),
                cache=cache_policy_of(caller, config.settings),
            )
            request = await read_in_turn(
                IncomingRequest(self._id, self._id, ROUTES[PATH], body, sender, self._received_at),
                record,
                config.rules,
                lambda parsed: class_of(parsed, caller),
                handler.time_slicer,
            )
            accounts = handler.meter.book.accounts(caller, None)
            self._reservation = handler.meter.admit(accounts, request.lease_request, record)
            in_flight = InFlightRequest(request, record, prefill_progress=PrefillProgress())
            self._in_flight = in_flight
            handler.registry.add(in_flight)
            self._forwarding = asyncio.create_task(handler.forwarder.forward(in_flight))
            await asyncio.wait({self._forwarding}, timeout=PROGRESS_SECONDS)
            if self._forwarding.done():
                self._response = _successful(self._forwarding.result())
        except GatewayError as error:
            self._fail(error)
            raise
        return self._events()

    async def _events(self) -> AsyncGenerator[bytes, None]:
        record = self._record
        try:
            while self._response is None:
                assert self._forwarding is not None
                yield self._progress()
                await asyncio.wait({self._forwarding}, timeout=PROGRESS_SECONDS)
                if self._forwarding.done():
                    self._response = _successful(self._forwarding.result())
            response = self._response
            yield encode_event("node", self._route())
            yield response.content
            if response.body_stream is not None:
                while chunk := await response.body_stream.next_chunk():
                    yield chunk
        except (GatewayError, UpstreamError) as failure:
            error = failure if isinstance(failure, GatewayError) else to_gateway_error(failure)
            self._fail(error)
            yield ROUTES[PATH].api.error_event(error, record.x_request_id)
        # Tokens and cost are counted together with those of other requests.
        self._handler.bus.flush()
        yield encode_event("done", self._figures())

    def _progress(self) -> bytes:
        """Where the request stands while no answer has begun."""
        assert self._in_flight is not None
        place = self._handler.queue.queue_position(self._id)
        if place is not None:
            waited = round(place.waited_seconds, 1)
            where = {"position": place.position, "expected_start": place.expected_seconds}
            return encode_event("waiting", {"seconds": waited, **where})
        status = self._in_flight.prefill_status(self._handler.clock())
        percent = None if status is None else status.percent
        return encode_event("reading", {"node": self._record.node, "percent": percent})

    def _route(self) -> dict[str, Any]:
        record = self._record
        return {
            "id": self._id,
            "node": record.node,
            "tier": record.tier,
            "class": record.priority.label,
            "attempts": record.attempts,
            "queue_seconds": round(record.queue_seconds, 3),
            "ttft": None if record.ttft is None else round(record.ttft, 3),
        }

    def _figures(self) -> dict[str, Any]:
        record = self._record
        seconds = self._handler.clock() - self._received_at
        writing = seconds - (record.ttft or 0.0)
        tokens = record.completion_tokens
        return {
            **self._route(),
            "status": record.status,
            "reason": record.reason,
            "seconds": round(seconds, 3),
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "completion_tokens": tokens,
            "tokens_per_second": round(tokens / writing, 2) if tokens and writing > 0 else None,
            "cost": record.cost,
        }

    def _fail(self, error: GatewayError) -> None:
        self._record.fail(error.status, error.code)
        error.reveal_nodes()
        errors.drop_traceback(error)

    async def close(self) -> None:
        """Release everything, whether it has ended or its page has left."""
        handler, record = self._handler, self._record
        try:
            forwarding, response = self._forwarding, self._response
            if forwarding is not None and response is None:
                forwarding.cancel()
                ended = await asyncio.gather(forwarding, return_exceptions=True)
                if isinstance(ended[0], ClientResponse):
                    response = ended[0]
                if record.status < 400:
                    record.fail(CLIENT_CLOSED_STATUS, "client_closed")
            if response is not None and response.body_stream is not None:
                response.body_stream.close()
        finally:
            if self._in_flight is not None:
                handler.registry.remove(self._in_flight)
            handler.ended(record, [], self._received_at, self._reservation)


def _successful(response: ClientResponse) -> ClientResponse:
    """The response, if it is one. Raises: GatewayError, for a node's error."""
    if response.status >= 400:
        raise node_error(response)
    return response
