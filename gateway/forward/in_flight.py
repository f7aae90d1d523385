"""Requests that wait or run, each with its attempt: a request sent to a node under a lease.

Bytes of a stream go to the client in one of three ways:

    1. The node's connection hands a chunk of HTTP to `EventPipeline.pass_chunk`, which writes it
       as it is if it holds one event like the last: nearly every token.
    2. It has any other bytes fed to the pipeline, and what comes out written, by
       `Attempt._write_through`, while the reader still waits in `Attempt.read`.
    3. `Attempt.read` returns them to its reader: those that had come before it waited, and the last
       ones, when the stream ends or fails, the client lags, or a turn of the event loop is spent.

llama.cpp reports prefill progress in events of the stream, if asked; they are removed, and the
client gets its stream as it would have been. For all other nodes the progress is estimated.
"""

from __future__ import annotations

import asyncio
import io
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from gateway import errors
from gateway.api import sse
from gateway.api.base import Api, StreamEventKind
from gateway.api.json_values import InvalidJson, JsonObject, parse_object
from gateway.api.outcome import (
    LeaseTooOld,
    RequestCancelled,
    RequestEvicted,
    RequestYielded,
    context_overflow_sizes,
    error_event_to_body,
    error_message,
    error_status,
    is_context_overflow,
    is_cut_by_router,
    is_pool_full,
    router_failure,
)
from gateway.api.sse import MOST_STEP_LINES
from gateway.api.transcript import SplicePoint
from gateway.config.scheduling import TimeoutSettings
from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.events import RequestRecord
from gateway.forward.event_pipeline import EventFilter, EventPipeline, WriteToClient
from gateway.forward.header_fields import headers_for_client
from gateway.lease import GrantedLease, LeaseService
from gateway.request.body import Body, without_large_fields
from gateway.request.preparation import Request
from gateway.request.routes import ROUTES
from gateway.terms import Headers, SegmentedBody
from gateway.transport.connection import NodeConnection
from gateway.transport.eager_task import ensure_task
from gateway.transport.errors import (
    ConnectionReset,
    ConnectTimedOut,
    InvalidResponse,
    NodeReportedError,
    PoolFull,
    UpstreamError,
    UpstreamTimeout,
)
from gateway.transport.pool import ConnectionPool


class InFlightRequest(msgspec.Struct, eq=False):
    """A request on its way: its value, its record, and the attempt under way."""

    request: Request
    record: RequestRecord
    attempt: Attempt | None = None
    cancel_error: GatewayError | None = None
    prefill_progress: PrefillProgress | None = None
    """How much of the prompt has been read, for a client that asked for it."""
    sub_requests: dict[str, InFlightRequest] | None = None
    """The requests that a request of several prompts runs in, by id; None: it has one prompt."""
    on_cancel: Callable[[GatewayError], None] | None = None
    """Called on cancellation, by what runs the sub-requests."""
    response_started: bool = False
    """Whether its client has the head of a response, so that no other should displace it."""
    _yieldable: tuple[Attempt, Callable[[], bool]] | None = None
    """The attempt that may be cut for another request, and whether it could be resumed now."""

    def header_lines(self, lease_id: int) -> bytes:
        """The client's header lines for the node of this attempt, within the request's trace."""
        lines, trace = self.request.header_lines, self.record.trace
        return lines if trace is None else trace.header_lines(lines, lease_id)

    def note_response_started(self) -> None:
        """Its client has the head of a response."""
        self.response_started = True

    def cancel(self, error: GatewayError) -> None:
        """End the request; its client gets `error`, as an event if the response has begun."""
        if self.cancel_error is None:
            self.cancel_error = error
            if self.attempt is not None:
                self.attempt.fail(RequestCancelled(error))
            if self.on_cancel is not None:
                self.on_cancel(error)

    def evict(self, error: GatewayError) -> None:
        """Make it leave its node; its client gets `error` if no other node takes it."""
        if self.attempt is not None:
            self.attempt.fail(RequestEvicted(error))

    def allow_yield(self, attempt: Attempt, can_resume: Callable[[], bool]) -> None:
        """While `can_resume` says so, this attempt may be cut for another request."""
        self._yieldable = attempt, can_resume

    def yield_slot(self) -> bool:
        """Give up its slot, and wait for another to go on; whether it does.

        It does not if its response can't be resumed, or has just ended.
        """
        attempt = self.attempt
        if attempt is None or self._yieldable is None or self.cancel_error is not None:
            return False
        yieldable, can_resume = self._yieldable
        is_over = attempt.failure is not None or attempt.stream_ended or attempt.complete
        if yieldable is not attempt or is_over or not can_resume():
            return False
        attempt.fail(RequestYielded("It gave up its slot"))
        return True

    def follow_prefill(self) -> PrefillProgress:
        """How much of the prompt has been read, from now on."""
        if self.prefill_progress is None:
            self.prefill_progress = PrefillProgress()
        return self.prefill_progress

    def prefill_status(self, now: float) -> PrefillStatus | None:
        """How far its prompt is read, for its client; None: unknown, or none is being read."""
        progress, attempt = self.prefill_progress, self.attempt
        return None if progress is None or attempt is None else progress.status(attempt, now)

    def tokens_so_far(self) -> tuple[int, int]:
        """Tokens of its prompt that were read, and of its response, as far as is known."""
        record, attempt = self.record, self.attempt
        prompt, completion = record.prompt_tokens, record.completion_tokens
        if attempt is not None:
            if attempt.splice_point is not None:
                splice_point = attempt.splice_point
                prompt = splice_point.prompt_tokens
                completion = splice_point.prefix_tokens + attempt.content_events
            else:
                completion += attempt.content_events
                known = attempt.prompt_read()
                if known is not None:
                    prompt += known[0]
                elif attempt.last_content_at is not None:
                    prompt += attempt.lease.reading.prompt_tokens
        for one in (self.sub_requests or {}).values():
            part = one.tokens_so_far()
            prompt, completion = prompt + part[0], completion + part[1]
        return prompt, completion

    def slot_seconds_so_far(self) -> float:
        """Seconds for which it has held slots by now, times their number."""
        seconds = self.record.slot_seconds
        if self.attempt is not None:
            seconds += self.attempt.slot_seconds
        parts = (self.sub_requests or {}).values()
        return seconds + sum(one.slot_seconds_so_far() for one in parts)

    def begin_attempt(self, attempt: Attempt) -> None:
        """An attempt begins; it fails at once if the request was cancelled meanwhile."""
        self.attempt = attempt
        if self.cancel_error is not None:
            attempt.fail(RequestCancelled(self.cancel_error))

    def end_attempt(self) -> None:
        """The attempt is over."""
        self.attempt = None

    def begin_sub_requests(
        self, sub_requests: dict[str, InFlightRequest], on_cancel: Callable[[GatewayError], None]
    ) -> None:
        """The request runs in these from now on; `on_cancel` cancels them."""
        self.sub_requests, self.on_cancel = sub_requests, on_cancel

    def end_sub_requests(self) -> None:
        """The sub-requests are over."""
        self.on_cancel = None


MOST_ERROR_BODY_BYTES = 256 * 1024  # Bytes of an error's body that are read
# The headers of a response whose body the gateway wrote for the node.
JSON_HEADERS: Headers = [(b"content-type", b"application/json")]


@dataclass(slots=True, eq=False, repr=False)
class Attempt:
    """One lease of a request in flight: made with it, then opened. `close` ends it, once.

    `AttemptEnds` does that, and reports how it ended.
    """

    in_flight: InFlightRequest
    lease: GrantedLease
    _settings: Settings
    _leases: LeaseService
    _timeout_monitor: TimeoutMonitor
    clock: Callable[[], float]
    pool: ConnectionPool = field(init=False)  # The connections to the node
    api: Api = field(init=False)  # The API of the path that was requested; set by `open`
    _timeouts: AttemptTimeouts | None = None
    _connection: NodeConnection | None = None
    failure: UpstreamError | None = None
    """Why the attempt was failed from outside; may be set before there is a connection."""
    _on_fail: Callable[[], None] | None = None
    splice_point: SplicePoint | None = None
    """Where this attempt resumes the stream of an earlier one."""
    events: EventPipeline | None = None
    """What the events of a stream pass through; None: the response is no stream."""
    _held: bytes | None = None  # What `read` returns next; empty: the client lags
    _write_to_client: WriteToClient | None = None
    _closed: bool = False
    node_done: bool = False  # Once it is closed: whether the node has nothing left to do for it
    _sent: bool = False
    _may_send: bool = False  # Whether its lease still holds, or the node has had the request
    started_at: float = 0.0
    sent_at: float = 0.0  # When the request was first sent; 0 before
    status: int = 0
    headers: Headers = field(default_factory=list)
    is_sse: bool = False  # Whether the response is a stream of events
    _whole_at: float | None = None  # When bytes of a plain response last came
    _reported_content_at: float | None = None
    """The time of the content of which the scheduler was told last."""
    content: bytes = b""
    """What had come when `open` returned: the first events, or a whole plain response."""

    def __post_init__(self) -> None:
        pool = self.lease.node.connections
        assert isinstance(pool, ConnectionPool)
        self.pool, self.started_at = pool, self.clock()
        self.in_flight.begin_attempt(self)

    @property
    def request(self) -> Request:
        """What its client asked for."""
        return self.in_flight.request

    @property
    def timeouts(self) -> AttemptTimeouts:
        """The attempt's limits; made on first use, since most attempts end before that."""
        if self._timeouts is None:
            self._timeouts = timeouts_for(self.lease, self.request, self._settings.timeouts)
        return self._timeouts

    @property
    def connect_timeout(self) -> float:
        """Seconds to wait for a connection."""
        return self.lease.node.connect_timeout or self._settings.timeouts.connect

    @property
    def complete(self) -> bool:
        """Whether the node has sent its whole response."""
        return self._connection is not None and self._connection.complete

    @property
    def is_reading(self) -> bool:
        """Whether the node reads the prompt of a stream, as far as is known."""
        return self.is_sse and self.last_content_at is None and not self._closed

    @property
    def client_lagging(self) -> bool:
        """Whether received bytes are still unread, since the client lags."""
        return self._connection is not None and self._connection.has_unread

    @property
    def last_content_at(self) -> float | None:
        """When content last came from the node; None: none has."""
        return self._whole_at if self.events is None else self.events.last_content_at

    @property
    def content_events(self) -> int:
        """Events of a stream that have passed, from the first one with content on."""
        return 0 if self.events is None else self.events.content_events

    @property
    def stream_ended(self) -> bool:
        """Whether the stream's terminal event has passed."""
        return self.events is not None and self.events.ended

    @property
    def slot_seconds(self) -> float:
        """Seconds for which it has held its slots by now, times their number."""
        return self.lease.slots * self.elapsed

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return self.clock() - self.started_at

    @property
    def header_lines(self) -> bytes:
        """The header lines of the response that are forwarded to the client."""
        connection, extra = self._connection, self._settings.headers.to_clients
        if connection is None or connection.headers is not self.headers:
            return headers_for_client(self.headers, extra)
        return connection.made_of_head(headers_for_client, extra)

    async def open(
        self,
        api: Api,
        head: bytes,
        body: bytes | SegmentedBody,
        events: EventPipeline | None,
        splice_point: SplicePoint | None = None,
    ) -> None:
        """Send the request; wait for the first content of a stream, else the whole response.

        `api`: that of the path. `events`: what a stream is to pass through. `splice_point`: where
        it resumes an earlier one. A plain response longer than may be buffered is left to `read`.
        Raises: UpstreamError.
        """
        self.api = api
        connection = await self.pool.exchange(
            head, body, dial=self._dial, on_connected=self._send_on
        )
        self.status = connection.status
        self.headers = connection.headers
        if self.status >= 300:
            self.content = await self._read_all(MOST_ERROR_BODY_BYTES)
            if not connection.complete:
                self.headers = JSON_HEADERS
                self.content = _oversized_error(self.status)
            elif self.lease.node.query:
                failure = router_failure(self.status, self.content)
                if failure is not None:
                    raise failure
        elif events is not None and is_event_stream(self.headers):
            self._leases.reading_began(self.lease.id)
            self.is_sse = True
            self.events, self.splice_point = events, splice_point
            self.content = await self._read_first_content(events)
        elif connection.complete:
            self.content = connection.read_nowait()
        else:
            self.content = await self._read_all(self._settings.limits.response_bytes)
        if self.status < 300 and not self.is_sse:
            api.check_answer(self.content, whole=connection.complete)

    async def open_again(
        self, api: Api, head: bytes, body: bytes | SegmentedBody, events: EventPipeline | None
    ) -> None:
        """Send the request in another form, after an error response. Raises: UpstreamError."""
        connection, self._connection, self._sent = self._connection, None, False
        assert connection is not None
        self.pool.release(connection)
        self.events, self.status = None, 0
        await self.open(api, head, body, events)

    async def read(self, write: WriteToClient | None = None) -> bytes | None:
        """The next bytes for the client, empty at the end. Raises: UpstreamError.

        Chunks of a stream that arrive during the wait go straight to `write`, without a switch of
        tasks. If `write` reports that the client lags, None is returned: call again when the
        client has caught up.
        """
        connection, events = self._connection, self.events
        assert connection is not None
        if events is None:
            return await connection.read()
        self._write_to_client = write
        while True:
            chunk = connection.read_nowait()
            if chunk:
                if len(chunk) > MOST_STEP_LINES:
                    chunk = await self._step(chunk)
                passed = events.feed(chunk)
                if events.is_over:
                    self._end_stream(events)
                if passed:
                    return passed
            elif self.failure is not None:
                raise self.failure
            elif connection.complete:
                return b""
            else:
                if write is None:
                    await connection.wait_for_data()
                else:
                    pass_chunk = events.passing_to(write)
                    await connection.wait_for_data(self._write_through, pass_chunk)
                if self._held is not None:
                    held, self._held = self._held, None
                    return held or None

    def read_unclosed(self) -> bytes:
        """The last event of a stream that has ended, if only the blank line behind it is missing.

        If that is the node's error event, `failure` is set.
        """
        events = self.events
        if events is None or events.ended or not events.framer.lacks_blank_line:
            return b""
        try:
            passed = events.feed(b"\n\n")
        except InvalidResponse:
            return b""
        if events.is_over:
            self._end_stream(events)
        return passed

    def cut_by_router(self) -> ConnectionReset | None:
        """The failure of a stream that its router has ended as if it were whole."""
        events = self.events
        if not self.lease.node.query or events is None or not is_cut_by_router(events.framer.tail):
            return None
        return ConnectionReset("The model's server on the node was lost")

    def _write_through(self) -> bool:
        """Write what has come to the client; False if the reader must wake up."""
        connection, write, events = self._connection, self._write_to_client, self.events
        assert connection is not None
        assert write is not None
        assert events is not None
        chunk = connection.read_nowait()
        if len(chunk) > MOST_STEP_LINES and sse.step_size(chunk) < len(chunk):
            connection.unread(chunk)
            return False
        try:
            passed = events.feed(chunk)
        except UpstreamError as error:
            self.failure = error
            return False
        if events.is_over or self.failure is not None:
            self._end_stream(events)
            self._held = passed or None
            return False
        if passed and write(passed):
            self._held = b""
            return False
        return not connection.complete

    def _end_stream(self, events: EventPipeline) -> None:
        """Fail if the stream ended by a broken event, or by the node's error event."""
        if self.failure is None and events.failure is not None:
            self.fail(events.failure)
        elif self.failure is None and events.error_data is not None:
            self.fail(self._reported_error(events.error_data))

    async def _step(self, chunk: bytes) -> bytes:
        """As much of a chunk as is worked on in one turn of the event loop; the rest is put back.

        A node may send a hundred thousand events in one chunk.
        """
        size = sse.step_size(chunk)
        if size == len(chunk):
            return chunk
        assert self._connection is not None
        self._connection.unread(chunk[size:])
        await ensure_task()
        await asyncio.sleep(0)
        return chunk[:size]

    def fail(self, error: UpstreamError) -> None:
        """End the attempt from outside: its reader gets `error`."""
        self.failure = error
        if self._connection is not None:
            self._connection.fail(error)
        if self._on_fail is not None:
            self._on_fail()

    def notify_failure(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the attempt is failed: its reader may wait for something else."""
        self._on_fail = callback

    def prompt_read(self) -> tuple[int, int] | None:
        """Tokens of the prompt that its node says it had read or cached, and cached; or None."""
        progress = self.in_flight.prefill_progress
        return None if progress is None else progress.read_by(self)

    def drop_content(self) -> None:
        """Forget the response's content, which is on its way: the end is written up much later."""
        self.content = b""

    def report_progress(self) -> None:
        """Tell the scheduler if content has come since the last call."""
        if self.last_content_at != self._reported_content_at:
            self._reported_content_at = self.last_content_at
            tokens = 0 if self.client_lagging else self.content_events
            self._leases.content_went_on(self.lease.id, tokens)

    def report_received(self) -> None:
        """Tell the scheduler that the whole response has come, though the client still reads it."""
        self._leases.response_received(self.lease.id)

    def is_silence_excused(self) -> bool | None:
        """Whether the node has a reason to be silent: it reads another prompt. None: not known."""
        return self._leases.is_silence_excused(self.lease.id)

    def close(self) -> None:
        """Release the connection; another attempt may follow. Calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        self.in_flight.end_attempt()
        self._timeout_monitor.remove(self)
        connection = self._connection
        if connection is not None and connection.complete:
            self.node_done = True
            self.pool.release(connection)
            return
        self.node_done = not self._sent
        if connection is not None:
            connection.close()

    # Sending the request.

    def _send_on(self, connection: NodeConnection) -> None:
        """The request is about to be sent on this connection. Raises: UpstreamError."""
        if self.failure is not None:
            raise self.failure
        if not self._may_send:
            if not self._leases.may_start(self.lease.id):
                # For the next lease, which would be too old as well if it took as long to connect.
                connection.keep_unused()
                raise LeaseTooOld("Its lease was too old")
            self._may_send = True
        self._connection = connection
        if not self.sent_at:
            self.sent_at = self.clock()
            self._timeout_monitor.add(self)
            request = self.in_flight.request
            deadline = request.deadline
            if deadline is not None and not request.client_has_timer:
                self._timeout_monitor.add_deadline(self, deadline)
        self._sent = True

    async def _dial(self) -> NodeConnection:
        """A new connection. Raises: UpstreamError, and blames no node for a client's deadline."""
        # A stale connection before this one never reached the node.
        self._connection = None
        self._sent = self._may_send = False
        timeout, deadline = self.connect_timeout, self.request.deadline
        if deadline is None:
            return await self.pool.connect(timeout)
        left = max(0.0, deadline - self.clock())
        try:
            return await self.pool.connect(min(timeout, left))
        except ConnectTimedOut:
            if left < timeout:
                raise total_timeout() from None
            raise

    async def _read_all(self, most: int) -> bytes:
        """The body, up to about `most` bytes."""
        connection = self._connection
        assert connection is not None
        first = await connection.read()
        if connection.complete and not connection.has_unread:
            return first
        if self.status < 300 and first.strip():
            self.api.check_answer(first, whole=False)
        whole = io.BytesIO()  # It grows in place and returns its bytes without a copy.
        size = whole.write(first)
        while size < most and (part := await connection.read()):
            self._whole_at = self.clock()
            size += whole.write(part)
        return whole.getvalue()

    async def _read_first_content(self, events: EventPipeline) -> bytes:
        """All events up to the first with content; else the node's error, or a plain response.

        Raises: UpstreamError.
        """
        connection = self._connection
        assert connection is not None
        framer = events.framer
        while True:
            try:
                chunk = await connection.read()
            except UpstreamError:
                if not framer.lacks_blank_line:
                    raise
                chunk = b""
            if not chunk:
                if events.is_plain:
                    self.is_sse, self.events = False, None
                    return framer.tail
                if (cut := self.cut_by_router()) is not None:
                    raise cut
                if not framer.lacks_blank_line:
                    raise InvalidResponse("The node's stream ended before its first content")
                chunk = b"\n\n"
            if len(chunk) > MOST_STEP_LINES:
                chunk = await self._step(chunk)
            kind = events.feed_opening(chunk)
            if kind is StreamEventKind.ERROR:
                return self._error_instead(events.error_data or b"")
            if events.is_over:
                self._end_stream(events)
            if kind is StreamEventKind.CONTENT:
                self._leases.content_began(self.lease.id)
                return events.opening

    def _error_instead(self, error: bytes) -> bytes:
        """An error event in place of content: the same as a response with the error's status."""
        self.status = error_status(error)
        self.is_sse, self.events = False, None
        self.headers = JSON_HEADERS
        return error_event_to_body(error)

    def ended_by_full_pool(self, status: int, content: bytes) -> bool:
        """Whether this error of the node's is that of a pool that its slots are known to share.

        To be asked before the attempt is reported as ended: the node may show its pool by this.
        """
        return is_pool_full(status, content) and self._leases.pool_overflowed(self.lease.id)

    def _reported_error(self, data: bytes) -> NodeReportedError:
        """The failure that the node's error event reports."""
        request = self.request.lease_request
        message, status = error_message(data), error_status(data)
        if message is not None and self.ended_by_full_pool(status, data):
            return PoolFull(message)
        failure = NodeReportedError(message or "The node failed in the middle of it", status)
        if is_context_overflow(failure.status, data, request.wanted.endpoint):
            tokens, context, answer = context_overflow_sizes(data)
            node = self.lease.node
            failure.client_error = errors.context_length_exceeded(
                tokens,
                context or node.context,
                request.wanted.prompt_field,
                answer,
                started_by_up=node.started_by_up,
            )
        return failure


def _oversized_error(status: int) -> bytes:
    """The body that stands for an error of a node's that is too long to read."""
    message = (
        f"The node answered {status}, with an error of more than {MOST_ERROR_BODY_BYTES} bytes."
    )
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return msgspec.json.encode({"error": {"message": message, "type": kind, "code": status}})


def is_event_stream(headers: Headers) -> bool:
    """Whether the headers announce readable events. Raises: InvalidResponse."""
    kind = encoding = b""
    for name, value in headers:
        if name == b"content-type":
            kind = value
        elif name == b"content-encoding":
            encoding = value.lower()
    if encoding not in {b"", b"identity"}:
        raise InvalidResponse("The node compressed its stream though it was asked not to")
    return kind.startswith(b"text/event-stream")


class InFlightRegistry:
    """All requests in flight by the gateway's own id."""

    def __init__(self) -> None:
        self._requests: dict[str, InFlightRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[InFlightRequest]:
        """Each request, followed by its sub-requests."""
        found: list[InFlightRequest] = []
        for one in self._requests.values():
            found.append(one)
            if one.sub_requests is not None:
                found += one.sub_requests.values()
        return iter(found)

    def top_level(self) -> list[InFlightRequest]:
        """Each request, without its sub-requests."""
        return list(self._requests.values())

    def add(self, in_flight: InFlightRequest) -> None:
        """A request was admitted. See `remove`."""
        self._requests[in_flight.request.id] = in_flight

    def remove(self, in_flight: InFlightRequest) -> None:
        """A request is over."""
        self._requests.pop(in_flight.request.id, None)

    def tokens_so_far(self, request_id: str) -> tuple[int, int]:
        """`InFlightRequest.tokens_so_far` of the request with the gateway's own id."""
        found = self._requests.get(request_id)
        return (0, 0) if found is None else found.tokens_so_far()

    def slot_seconds_so_far(self, request_id: str) -> float:
        """`InFlightRequest.slot_seconds_so_far` of the request with the gateway's own id."""
        found = self._requests.get(request_id)
        return 0.0 if found is None else found.slot_seconds_so_far()

    def yield_slot(self, request_id: str) -> bool:
        """`InFlightRequest.yield_slot` of the request with the gateway's own id."""
        found = self._requests.get(request_id)
        return found is not None and found.yield_slot()

    def find(self, name: str) -> InFlightRequest | None:
        """The request of this id, or with this `X-Request-ID` if only one has it."""
        found = self._requests.get(name)
        if found is None:
            named = [one for one in self if name in {one.request.x_request_id, one.request.id}]
            found = named[0] if len(named) == 1 else None
        return found

    def cancel_where(
        self, predicate: Callable[[InFlightRequest], bool], error: GatewayError
    ) -> int:
        """Cancel all requests that `predicate` accepts; returns how many."""
        cancelled = [one for one in self if predicate(one)]
        for one in cancelled:
            one.cancel(error)
        return len(cancelled)


# Estimated tokens of a prompt from which on the gateway asks for its progress without being asked,
# to know what was read when a client leaves. The server reports it once a batch, of 2048 tokens by
# default; what was read of shorter prompts is estimated by the time.
PROGRESS_TOKENS = 1024
_REQUEST_FIELD = b'"return_progress"'
_EVENT_FIELD = b'"prompt_progress"'


class PrefillStatus(NamedTuple):
    """How far a prompt is read."""

    percent: int
    tokens: tuple[int, int] | None
    """Tokens that were read or cached, and all tokens; None: the percentage is an estimate."""


@dataclass(slots=True, eq=False)
class PrefillProgress:
    """The prefill of one request, on one node after the other."""

    hidden: bool = False
    """The client may not know how much of its prompt was cached; the ledger does."""
    _lease: GrantedLease | None = None  # That of the attempt; None: there was none yet
    _last: tuple[int, int] | None = None
    """The tokens that its node said last it had read or cached, and all; None: it said nothing."""
    _cached: int = 0  # Tokens that the node had cached
    _client_asked: bool = False  # Whether the client itself asks for progress events
    _keep_next: bool = False
    """Whether the next progress event stands for an event that the client must get."""

    def begin_attempt(
        self, attempt: Attempt, api: Api, body: Body
    ) -> tuple[JsonObject, EventFilter | None]:
        """Begin an attempt; return the fields that make its node report progress, if it can.

        Also return the filter that removes the progress events; None: there are none.
        """
        # It does not keep the attempt, whose request refers to this object.
        self._lease, self._last, self._cached = attempt.lease, None, 0
        fields = api.progress_fields
        if (
            attempt.lease.node.kind != "llama.cpp"
            or fields is None
            or attempt.request.lease_request.size.slots != 1
        ):
            return {}, None
        small_fields = without_large_fields(body)
        self._client_asked = (
            _REQUEST_FIELD in small_fields
            and parse_object(small_fields).get("return_progress") is True
        )
        self._keep_next = api.progress_replaces_event
        return {} if self._client_asked else fields, self.strip_progress

    def strip_progress(self, events: bytes) -> bytes:
        """Take the progress out of whole events. Raises: InvalidResponse."""
        return sse.edit_matching(events, _EVENT_FIELD, self._stripped)

    def _stripped(self, event: bytes) -> bytes:
        try:
            value = parse_object(sse.payload(event))
        except InvalidJson:
            raise InvalidResponse("An event of the node's stream can't be read") from None
        progress = value.pop("prompt_progress", None)
        if isinstance(progress, dict):
            done, total = progress.get("processed"), progress.get("total")
            if isinstance(done, int) and isinstance(total, int) and 0 <= done <= total:
                self._last = done, total
                cached = progress.get("cache")
                self._cached = min(cached, done) if isinstance(cached, int) and cached > 0 else 0
        if self._client_asked:
            return event
        if self._keep_next:
            self._keep_next = False
            name = sse.event_name(event)
            return b"event: %b\ndata: %b\n\n" % (name, msgspec.json.encode(value))
        return b""

    def read_by(self, attempt: Attempt) -> tuple[int, int] | None:
        """Tokens that this attempt's node has read or cached, as it said last, and cached.

        None: it has not said that it has read any. Once content has come, it has read all.
        """
        if self._last is None or self._lease is not attempt.lease:
            return None
        done, total = self._last
        if attempt.last_content_at is not None:
            return total, self._cached
        return (done, self._cached) if done > self._cached else None

    def status(self, attempt: Attempt, now: float) -> PrefillStatus | None:
        """How far the prompt is read; None: unknown, hidden, or no prompt is being read."""
        if self.hidden or self._lease is not attempt.lease or not attempt.is_reading:
            return None
        if self._last is not None:
            done, total = self._last
            return PrefillStatus(100 * done // max(1, total), (done, total))
        elapsed, expected = now - attempt.started_at, attempt.lease.reading.seconds
        # A prefill that takes longer than expected may take any time.
        if expected is None or not 0.0 <= elapsed < expected:
            return None
        return PrefillStatus(int(100 * elapsed / expected), None)


# Seconds that a silent stream still has when the excuse for its silence has ended.
SILENCE_GRACE = 5.0
CHECK_INTERVAL = 0.2  # Seconds between two checks, and so the precision of every timeout
REPORT_INTERVAL = 1.0  # Seconds between two reports to the scheduler on streams that move
# Seconds by which a client's own deadline is kept late, so that it is never kept early.
DEADLINE_SLACK = 0.001


@dataclass(frozen=True, slots=True)
class AttemptTimeouts:
    """Seconds. `first_byte` None: the response comes in one piece, bounded by `deadline` alone."""

    first_byte: float | None
    silence: float
    deadline: float  # When the whole request must be over; monotonic


class TimeoutMonitor:
    """Fails attempts whose nodes are overdue; each attempt knows when content last came.

    One timer checks all attempts several times a second: a timer for each attempt would cost a
    short request more than the checks cost a long one.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._attempts: dict[Attempt, float] = {}
        """Each attempt, and until when none of its timeouts can pass."""
        self._deadlines: dict[Attempt, asyncio.TimerHandle] = {}
        """Timers of attempts whose client must get the error in that very moment."""
        self._excused_at: dict[Attempt, float] = {}
        """When an attempt was last silent through no fault of its node."""
        self._timer: asyncio.TimerHandle | None = None
        self._skipped_check = False
        self._next_report = 0.0

    def __len__(self) -> int:
        return len(self._attempts)

    def add(self, attempt: Attempt) -> None:
        """Monitor `attempt` from now on."""
        self._attempts[attempt] = 0.0
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(CHECK_INTERVAL, self.check)

    def add_deadline(self, attempt: Attempt, deadline: float) -> None:
        """Fail a monitored attempt at `deadline` (monotonic) exactly, not at the next check."""
        self._deadlines[attempt] = asyncio.get_running_loop().call_later(
            max(0.0, deadline - self._clock()) + DEADLINE_SLACK, self._deadline_passed, attempt
        )

    def remove(self, attempt: Attempt) -> None:
        """The attempt is over."""
        self._attempts.pop(attempt, None)
        if self._excused_at:
            self._excused_at.pop(attempt, None)
        if self._deadlines and (timer := self._deadlines.pop(attempt, None)) is not None:
            timer.cancel()

    def close(self) -> None:
        """Stop the timers."""
        for deadline in self._deadlines.values():
            deadline.cancel()
        self._deadlines.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def check(self) -> None:
        """Fail the attempts that are overdue, and set the timer for the next check."""
        timer, self._timer = self._timer, None
        # An event loop that was held up must read what the nodes have sent before the next check.
        now = asyncio.get_running_loop().time()
        is_late = timer is not None and now > timer.when() + CHECK_INTERVAL
        self._skipped_check = is_late and not self._skipped_check
        if not self._skipped_check:
            self._fail_overdue()
        if self._attempts:
            self._timer = asyncio.get_running_loop().call_later(CHECK_INTERVAL, self.check)

    def _fail_overdue(self) -> None:
        now = self._clock()
        reports = now >= self._next_report
        if reports:
            self._next_report = now + REPORT_INTERVAL
        for attempt in list(self._attempts):
            due_at = self._attempts.get(attempt)
            if due_at is None:
                continue  # It has ended with another one.
            if attempt.complete:
                # Only the client has yet to read it: the slot is free.
                attempt.report_received()
            elif reports:
                attempt.report_progress()
            if now < due_at:
                continue
            due = passed_timeout(attempt.timeouts, attempt.sent_at, attempt.last_content_at, now)
            if not isinstance(due, UpstreamTimeout):
                self._attempts[attempt] = due
            elif not self._is_excused(attempt, due, now):
                self._attempts.pop(attempt, None)
                attempt.fail(due)

    def _is_excused(self, attempt: Attempt, failure: UpstreamTimeout, now: float) -> bool:
        """Whether the silence is not the node's fault: another prefill, or the client lags."""
        if failure.limit == "total":
            return False
        excused = attempt.client_lagging or attempt.is_silence_excused()
        if excused:
            self._excused_at[attempt] = now
        if excused is not False:
            return True  # or it is known at one of the next checks
        excused_at = self._excused_at.get(attempt)
        grace = min(SILENCE_GRACE, attempt.timeouts.silence)
        return excused_at is not None and now < excused_at + grace

    def _deadline_passed(self, attempt: Attempt) -> None:
        if attempt in self._attempts and not attempt.complete:
            self._attempts.pop(attempt, None)
            attempt.fail(total_timeout())


def total_timeout() -> UpstreamTimeout:
    """The failure of a request that takes too long as a whole."""
    return UpstreamTimeout("total", "The request took longer than it may")


def passed_timeout(
    timeouts: AttemptTimeouts, sent_at: float, last_content_at: float | None, now: float
) -> UpstreamTimeout | float:
    """The timeout that has passed for a request sent at `sent_at`.

    Else until when none can pass, whatever the node sends from `now` on.
    """
    if now >= timeouts.deadline:
        return total_timeout()
    if last_content_at is not None:
        due = max(sent_at, last_content_at) + timeouts.silence
        if now >= due:
            return UpstreamTimeout("silence", f"The node was silent for {timeouts.silence:.0f} s")
        return min(timeouts.deadline, due)
    due = math.inf if timeouts.first_byte is None else sent_at + timeouts.first_byte
    if now >= due:
        return UpstreamTimeout("first_byte", f"Nothing came for {timeouts.first_byte:.0f} s")
    return min(timeouts.deadline, due, now + timeouts.silence)


def timeouts_for(
    lease: GrantedLease, request: Request, timeouts: TimeoutSettings
) -> AttemptTimeouts:
    """The timeouts of this request under this lease; the node's own override the settings'."""
    node = lease.node
    deadline = request.received_at + (node.total_timeout or timeouts.total)
    if request.deadline is not None:
        deadline = min(deadline, request.deadline)
    first_byte = None
    route = ROUTES[request.path]
    if lease.stream or not (route.generates or route.multipart):
        # Any other response comes in one piece, after its last token.
        # A node is not failed here while its state (`mute`) excuses it.
        first_byte = max(node.first_byte_timeout or timeouts.first_byte, lease.reading.grace)
        first_byte += lease.reading.wake
    return AttemptTimeouts(first_byte, node.silence_timeout or timeouts.silence, deadline)
