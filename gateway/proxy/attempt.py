"""One attempt: one lease on one node, one request sent, and its response up to the end."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from gateway import errors
from gateway.config.settings import Settings
from gateway.lease import GrantedLease, LeaseService
from gateway.proxy import forwarded_headers, sse
from gateway.proxy.api.base import LARGEST_ANSWER_BYTES, Api, StreamEventKind
from gateway.proxy.inbound import request_limits
from gateway.proxy.inbound.request import Request
from gateway.proxy.json_values import InvalidJson, JsonObject
from gateway.proxy.outcome import (
    context_overflow_sizes,
    error_event_to_body,
    error_message,
    error_status,
    is_context_overflow,
    is_pool_full,
)
from gateway.proxy.splice import SplicePoint
from gateway.proxy.sse import MOST_STEP_LINES, EventFilter, EventFramer
from gateway.proxy.timeouts import AttemptTimeouts, TimeoutMonitor, timeouts_for, total_timeout
from gateway.proxy.usage import UsageFilter
from gateway.request import Headers, SegmentedBody
from gateway.transport.connection import NodeConnection
from gateway.transport.eager_task import ensure_task
from gateway.transport.errors import (
    ConnectTimedOut,
    InvalidResponse,
    NodeReportedError,
    PoolFull,
    UpstreamError,
)
from gateway.transport.pool import ConnectionPool

MOST_ERROR_BODY_BYTES = 256 * 1024
"""Bytes of an error's body that are read."""

STREAM_TAIL_BYTES = 4 * 1024
"""Bytes of a stream's end that are read for `usage`; an event that reaches further back counts
whole."""

JSON_HEADERS: Headers = [(b"content-type", b"application/json")]
"""The headers of a response whose body the gateway wrote for the node."""

WriteToClient = Callable[[bytes], bool]
"""Sends bytes to the client; returns whether the client lags."""


@dataclass(slots=True)
class UpstreamRequest:
    """What an attempt sends, and how its response is read."""

    head: bytes
    body: bytes | SegmentedBody
    api: Api
    """The API of the path that is requested."""
    event_filter: EventFilter | None = None
    """Takes out of a stream the events that only the gateway asked for."""
    on_output: Callable[[bytes], None] | None = None
    """Called with all events of a stream that pass, in case it must be resumed."""
    splice_point: SplicePoint | None = None
    """Where this attempt resumes the stream of an earlier one."""
    filters_prefill_only: bool = False
    """Whether nothing is left to take out once the first content has come."""


class Attempt:
    """Made with a lease, then opened. `close` ends it, once; the accounting reports its end."""

    __slots__ = (
        "_clock",
        "_closed",
        "_connection",
        "_dropped_events",
        "_event_filter",
        "_framer",
        "_held",
        "_leases",
        "_on_fail",
        "_on_output",
        "_opening_events",
        "_reported_content_at",
        "_sent",
        "_settings",
        "_timeout_monitor",
        "_timeouts",
        "_write_to_client",
        "api",
        "content",
        "failure",
        "headers",
        "is_sse",
        "last_content_at",
        "lease",
        "node_done",
        "pool",
        "recent_chunks",
        "request",
        "sent_at",
        "splice_point",
        "started_at",
        "status",
        "stream_ended",
    )

    def __init__(
        self,
        lease: GrantedLease,
        request: Request,
        settings: Settings,
        leases: LeaseService,
        timeout_monitor: TimeoutMonitor,
        clock: Callable[[], float],
    ) -> None:
        self.lease = lease
        pool = lease.node.connections
        assert isinstance(pool, ConnectionPool)
        self.pool = pool
        """The connections to the node."""
        self.request = request
        self._leases = leases
        self._settings = settings
        self._timeout_monitor = timeout_monitor
        self._clock = clock
        self._timeouts: AttemptTimeouts | None = None
        self._connection: NodeConnection | None = None
        self.failure: UpstreamError | None = None
        """Why the attempt was failed from outside; may be set before there is a connection."""
        self._on_fail: Callable[[], None] | None = None
        self.api: Api
        """The API of the path that was requested; set by `open`, as the next three of a stream."""
        self.splice_point: SplicePoint | None = None
        """Where this attempt resumes the stream of an earlier one."""
        self._event_filter: EventFilter | None = None
        self._on_output: Callable[[bytes], None] | None = None
        self._framer: EventFramer | None = None
        self._dropped_events = 0
        """Whole events that the filter took out."""
        self._opening_events = 0
        """Events before the first one with content."""
        self.stream_ended = False
        """Whether the stream's terminal event has passed."""
        self._held: bytes | None = None
        """What `read` returns next; empty: the client lags."""
        self._write_to_client: WriteToClient | None = None
        self._closed = False
        self.node_done = False
        """Once it is closed: whether the node has nothing left to do for it."""
        self._sent = False
        self.started_at = clock()
        self.sent_at = 0.0
        """When the request was first sent; 0 before."""
        self.status = 0
        self.headers: Headers = []
        self.is_sse = False
        """Whether the response is a stream of events."""
        self.last_content_at: float | None = None
        """When content last came from the node; None: none has."""
        self._reported_content_at: float | None = None
        """That of which the scheduler was told last."""
        self.content = b""
        """What had come when `open` returned: the first events, or a whole plain response."""
        self.recent_chunks: tuple[bytes, bytes, bytes] = (b"", b"", b"")
        """The last three chunks of a stream."""

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
    def unread_bytes(self) -> int:
        """Bytes that have come from the node and wait for the client."""
        return 0 if self._connection is None else self._connection.unread_bytes

    @property
    def event_count(self) -> int:
        """Events that have passed."""
        return self._framer.event_count - self._dropped_events if self._framer is not None else 0

    @property
    def content_events(self) -> int:
        """Events that have passed, from the first one with content on: about one for each token."""
        return 0 if self.last_content_at is None else self.event_count - self._opening_events

    @property
    def slot_seconds(self) -> float:
        """Seconds for which it has held its slots by now, times their number."""
        return self.lease.slots * self.elapsed

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return self._clock() - self.started_at

    @property
    def ends_mid_event(self) -> bool:
        """Whether the stream ended within an event."""
        return self._framer is not None and self._framer.has_partial

    @property
    def last_events(self) -> bytes:
        """The last events of a stream, whole."""
        last = self.recent_chunks[2]
        data = last if len(last) > STREAM_TAIL_BYTES else b"".join(self.recent_chunks)
        return sse.last_events(data, STREAM_TAIL_BYTES)

    @property
    def usage_event(self) -> bytes:
        """The event with usage that only the gateway asked for; empty: none has come."""
        event_filter = self._event_filter
        return event_filter.event if isinstance(event_filter, UsageFilter) else b""

    @property
    def header_lines(self) -> bytes:
        """The header lines of the response that are forwarded to the client."""
        connection, extra = self._connection, self._settings.headers.to_clients
        if connection is None or connection.headers is not self.headers:
            return forwarded_headers.headers_for_client(self.headers, extra)
        return connection.made_of_head(forwarded_headers.headers_for_client, extra)

    async def open(self, upstream: UpstreamRequest) -> None:
        """Send the request; wait for the first content of a stream, else the whole response.

        A plain response longer than may be buffered is left to `read`. Raises: UpstreamError.
        """
        self.api = upstream.api
        connection = await self.pool.exchange(
            upstream.head, upstream.body, dial=self._dial, on_connected=self._send_on
        )
        limits = self._settings.limits
        self.status = connection.status
        self.headers = connection.headers
        if self.status >= 300:
            self.content = await self._read_all(MOST_ERROR_BODY_BYTES)
            if not connection.complete:
                self.headers = JSON_HEADERS
                self.content = _oversized_error(self.status)
        elif self.lease.stream and is_event_stream(self.headers):
            self._leases.reading_began(self.lease.id)
            self.is_sse = True
            self.splice_point = upstream.splice_point
            self._event_filter = upstream.event_filter
            self._on_output = upstream.on_output
            most = request_limits.max_event_bytes(
                len(upstream.body), limits, logprobs=self.request.logprobs
            )
            self._framer = EventFramer(
                most,
                self.api.ordinary_events,
                keep_comments=self._settings.heartbeat > 0,
                ceiling=limits.response_bytes,
            )
            self.content = await self._read_first_content(most)
            if upstream.filters_prefill_only:
                self._event_filter = None
        elif connection.complete:
            self.content = connection.read_nowait()
        else:
            self.content = await self._read_all(limits.response_bytes)
        if self.status < 300 and not self.is_sse:
            self.api.check_answer(self.content, whole=connection.complete)

    @property
    def came_plain(self) -> bool:
        """Whether the response is plain though a stream was asked for."""
        return self.lease.stream and not self.is_sse

    def answer_as_events(self, request_fields: JsonObject) -> bytes:
        """A plain response as the stream that the client asked for. Raises: InvalidResponse."""
        if not self.complete or len(self.content) > LARGEST_ANSWER_BYTES:
            raise InvalidResponse("The node's answer is too long for one that is not streamed")
        try:
            return self.api.answer_events(self.content, request_fields)
        except (InvalidJson, AttributeError, KeyError, RecursionError, TypeError):
            raise InvalidResponse("The node's answer has another form than expected") from None

    async def open_again(self, upstream: UpstreamRequest) -> None:
        """Send the request in another form, after an error response. Raises: UpstreamError."""
        connection, self._connection, self._sent = self._connection, None, False
        assert connection is not None
        self.pool.release(connection)
        self._framer, self._opening_events, self.status = None, 0, 0
        await self.open(upstream)

    async def read(self, write: WriteToClient | None = None) -> bytes | None:
        """The next bytes for the client, empty at the end. Raises: UpstreamError.

        Chunks of a stream that arrive during the wait go straight to `write`, without a switch of
        tasks. If `write` reports that the client lags, None is returned: call again when the
        client has caught up.
        """
        connection, framer = self._connection, self._framer
        assert connection is not None
        if framer is None:
            return await connection.read()
        self._write_to_client = write
        while True:
            chunk = connection.read_nowait()
            if chunk:
                if len(chunk) > MOST_STEP_LINES:
                    chunk = await self._step(chunk)
                passed = self._pass(chunk)
                if passed:
                    return passed
            elif self.failure is not None:
                raise self.failure
            elif connection.complete:
                return b""
            else:
                await connection.wait_for_data(None if write is None else self._write_through)
                if self._held is not None:
                    held, self._held = self._held, None
                    return held or None

    def read_unclosed(self) -> bytes:
        """The last event of a stream that has ended, if only the blank line behind it is missing.

        If that is the node's error event, `failure` is set.
        """
        framer = self._framer
        if framer is None or self.stream_ended or not framer.lacks_blank_line:
            return b""
        try:
            return self._pass(b"\n\n")
        except InvalidResponse:
            return b""

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

    def drop_content(self) -> None:
        """Forget the response's content, which is on its way: the accounts may come much later."""
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

    def is_silence_excused(self) -> bool:
        """Whether the node has a reason to be silent: it reads another prompt."""
        return self._leases.is_silence_excused(self.lease.id)

    def close(self) -> None:
        """Release the connection. Calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
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
        self._connection = connection
        if not self.sent_at:
            self.sent_at = self._clock()
            self._timeout_monitor.add(self)
            deadline = self.request.deadline
            if deadline is not None and not self.request.client_has_timer:
                self._timeout_monitor.add_deadline(self, deadline)
        self._sent = True

    async def _dial(self) -> NodeConnection:
        """A new connection. Raises: UpstreamError, and blames no node for a client's deadline."""
        # A stale connection before this one never reached the node.
        self._connection = None
        self._sent = False
        timeout, deadline = self.connect_timeout, self.request.deadline
        if deadline is None:
            return await self.pool.connect(timeout)
        left = max(0.0, deadline - self._clock())
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
            self.last_content_at = self._clock()
            size += whole.write(part)
        return whole.getvalue()

    async def _read_first_content(self, most: int) -> bytes:
        """All events up to the first with content; else the node's error, or a plain response.

        Raises: UpstreamError.
        """
        connection, framer = self._connection, self._framer
        assert connection is not None
        assert framer is not None
        held, size = b"", 0
        while True:
            try:
                chunk = await connection.read()
            except UpstreamError:
                if not framer.lacks_blank_line:
                    raise
                chunk = b""
            if not chunk:
                if not size and framer.tail.startswith((b"{", b"[")):
                    self.is_sse = False  # It is plain, whatever its head says.
                    return framer.tail
                if not framer.lacks_blank_line:
                    raise InvalidResponse("The node's stream ended before its first content")
                chunk = b"\n\n"
            if len(chunk) > MOST_STEP_LINES:
                chunk = await self._step(chunk)
            passed, special = framer.feed(chunk), framer.special_bytes
            if self._event_filter is not None:
                passed, special = self._filter(self._event_filter, passed)
            size += len(passed)
            for event in sse.split(passed):
                kind = self.api.classify_event(event)
                if kind is StreamEventKind.NO_CONTENT:
                    self._opening_events += 1
                    continue
                if kind is StreamEventKind.ERROR:
                    return self._error_instead(sse.payload(event))
                self.last_content_at = self._clock()
                self._leases.content_began(self.lease.id)
                held += self._check_opening(passed, special)
                self.recent_chunks = (b"", b"", held)
                return held
            held += self._check_opening(passed, special)
            if size > most:
                raise InvalidResponse(f"{most} bytes of events came without any content")

    def _check_opening(self, events: bytes, special: int) -> bytes:
        """The part of a stream's first events that may pass. Raises: UpstreamError."""
        passed = self._check(events, special)
        if self._on_output is not None and passed:
            self._on_output(passed)
        return passed

    def _error_instead(self, error: bytes) -> bytes:
        """An error event in place of content: the same as a response with the error's status."""
        self.status = error_status(error)
        self.is_sse = False
        self.headers = JSON_HEADERS
        return error_event_to_body(error)

    # Passing the events of a stream.

    def _write_through(self) -> bool:
        """Write what has come to the client; False if the reader must wake up."""
        connection, write = self._connection, self._write_to_client
        assert connection is not None
        assert write is not None
        chunk = connection.read_nowait()
        if len(chunk) > MOST_STEP_LINES and sse.step_size(chunk) < len(chunk):
            connection.unread(chunk)
            return False
        try:
            passed = self._pass(chunk)
        except UpstreamError as error:
            self.failure = error
            return False
        if self.stream_ended or self.failure is not None:
            self._held = passed or None
            return False
        if passed and write(passed):
            self._held = b""
            return False
        return not connection.complete

    def _pass(self, chunk: bytes) -> bytes:
        """The part of a chunk that goes to the client, possibly none. Raises: UpstreamError."""
        framer = self._framer
        assert framer is not None
        if self.stream_ended:
            return b""
        before = framer.event_count
        passed, special = framer.feed(chunk), framer.special_bytes
        if self._event_filter is not None:
            passed, special = self._filter(self._event_filter, passed)
        if special or self.api.terminal_mark_nested or not passed.isascii():
            passed = self._check(passed, special)
        if self._on_output is not None and passed:
            self._on_output(passed)
        if framer.event_count != before:
            self.last_content_at = self._clock()
            _, second, third = self.recent_chunks
            self.recent_chunks = (second, third, passed)
        return passed

    def _filter(self, event_filter: EventFilter, events: bytes) -> tuple[bytes, int]:
        """These events as the client would have had them, and how many bytes of them are special.

        Raises: UpstreamError.
        """
        assert self._framer is not None
        passed = event_filter(events)
        if passed is not events:
            self._dropped_events += sse.count_events(events) - sse.count_events(passed)
        return passed, self._framer.special_bytes_in(passed)

    def _check(self, passed: bytes, special: int) -> bytes:
        """The part of these events that may pass; only the last `special` bytes are looked at.

        Raises: UpstreamError.
        """
        api = self.api
        if api.terminal_mark_nested and passed.find(api.terminal_mark) >= 0:
            special = len(passed)
        if special:
            at = len(passed) - special
            unchecked = passed[at:] if at else passed
            if unchecked == api.stream_end:
                self.stream_ended = True
            else:
                valid = self._valid_part(self._cut_at_end(unchecked), may_be_empty=at > 0)
                if len(valid) != len(unchecked):
                    passed = passed[:at] + valid
        sse.check_utf8(passed)
        return passed

    def _valid_part(self, events: bytes, *, may_be_empty: bool) -> bytes:
        """These events up to the first broken one, which fails the attempt behind them.

        Raises: InvalidResponse, if none comes before it, unless that `may_be_empty`.
        """
        try:
            return sse.validated(events)
        except InvalidResponse as failure:
            kept: list[bytes] = []
            with suppress(InvalidResponse):
                kept += map(sse.validated, sse.split(events))
            if not (kept or may_be_empty):
                raise
            self.fail(failure)
            return b"".join(kept)

    def _cut_at_end(self, events: bytes) -> bytes:
        """These events without all behind the terminal one, and without the node's error event.

        An error event fails the attempt; the client gets an error in its API's form.
        """
        api = self.api
        marks = (api.terminal_mark, api.error_mark, sse.ERROR_LINE, b"event: error")
        if not any(mark in events for mark in marks):
            return events
        ends = api.single_terminal_event or self.request.lease_request.size.slots < 2
        kept = []
        for event in sse.split(events):
            if api.error_mark in event or sse.event_name(event) == b"error":
                self.fail(self._reported_error(sse.payload(event)))
                break
            kept.append(event)
            if ends and api.is_terminal_event(event):
                self.stream_ended = True
                break
        return b"".join(kept)

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
