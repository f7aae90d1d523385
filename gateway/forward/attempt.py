"""One attempt: a lease on a node, a request sent, its response up to the end, and its timeouts.

Bytes of a stream go to the client in one of three ways:

    1. The node's connection hands a chunk of HTTP to `EventPipeline.pass_chunk`, which writes it
       as it is if it holds one event like the last: nearly every token.
    2. It has any other bytes fed to the pipeline, and what comes out written, by
       `Attempt._write_through`, while the reader still waits in `Attempt.read`.
    3. `Attempt.read` returns them to its reader: those that had come before it waited, and the last
       ones, when the stream ends or fails, the client lags, or a turn of the event loop is spent.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from gateway import errors
from gateway.api import sse
from gateway.api.base import Api, StreamEventKind
from gateway.api.outcome import (
    context_overflow_sizes,
    error_event_to_body,
    error_message,
    error_status,
    is_context_overflow,
    is_pool_full,
)
from gateway.api.sse import MOST_STEP_LINES
from gateway.api.transcript import SplicePoint
from gateway.config.routing import TimeoutSettings
from gateway.config.settings import Settings
from gateway.forward.event_pipeline import EventPipeline, WriteToClient
from gateway.forward.header_fields import headers_for_client
from gateway.lease import GrantedLease, LeaseService
from gateway.request.preparation import Request
from gateway.request.routes import ROUTES
from gateway.terms import Headers, SegmentedBody
from gateway.transport.connection import NodeConnection
from gateway.transport.eager_task import ensure_task
from gateway.transport.errors import (
    ConnectTimedOut,
    InvalidResponse,
    NodeReportedError,
    PoolFull,
    UpstreamError,
    UpstreamTimeout,
)
from gateway.transport.pool import ConnectionPool

MOST_ERROR_BODY_BYTES = 256 * 1024  # Bytes of an error's body that are read
# The headers of a response whose body the gateway wrote for the node.
JSON_HEADERS: Headers = [(b"content-type", b"application/json")]


class Attempt:
    """Made with a lease, then opened. `close` ends it, once; `AttemptEnds` reports how it ended."""

    __slots__ = (
        "_clock", "_closed", "_connection", "_held", "_leases", "_on_fail", "_reported_content_at",
        "_sent", "_settings", "_timeout_monitor", "_timeouts", "_whole_at", "_write_to_client",
        "api", "content", "events", "failure", "headers", "is_sse", "lease", "node_done", "pool",
        "request", "sent_at", "splice_point", "started_at", "status",
    )  # fmt: skip

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
        self.pool = pool  # The connections to the node
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
        self.api: Api  # The API of the path that was requested; set by `open`
        self.splice_point: SplicePoint | None = None
        """Where this attempt resumes the stream of an earlier one."""
        self.events: EventPipeline | None = None
        """What the events of a stream pass through; None: the response is no stream."""
        self._held: bytes | None = None  # What `read` returns next; empty: the client lags
        self._write_to_client: WriteToClient | None = None
        self._closed = False
        self.node_done = False  # Once it is closed: whether the node has nothing left to do for it
        self._sent = False
        self.started_at = clock()
        self.sent_at = 0.0  # When the request was first sent; 0 before
        self.status = 0
        self.headers: Headers = []
        self.is_sse = False  # Whether the response is a stream of events
        self._whole_at: float | None = None  # When bytes of a plain response last came
        self._reported_content_at: float | None = None
        """The time of the content of which the scheduler was told last."""
        self.content = b""
        """What had come when `open` returned: the first events, or a whole plain response."""

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
        return self._clock() - self.started_at

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
            self._whole_at = self._clock()
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
            timeouts, sent_at = attempt.timeouts, attempt.sent_at
            failure = passed_timeout(timeouts, sent_at, attempt.last_content_at, now)
            if failure is None:
                until = earliest_timeout(timeouts, sent_at, attempt.last_content_at, now)
                self._attempts[attempt] = until
            elif not self._is_excused(attempt, failure, now):
                self._attempts.pop(attempt, None)
                attempt.fail(failure)

    def _is_excused(self, attempt: Attempt, failure: UpstreamTimeout, now: float) -> bool:
        """Whether the silence is not the node's fault: another prefill, or the client lags."""
        if failure.limit == "total":
            return False
        if attempt.client_lagging or attempt.is_silence_excused():
            self._excused_at[attempt] = now
            return True
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
) -> UpstreamTimeout | None:
    """The timeout that has passed for a request sent at `sent_at`, if any has."""
    if now >= timeouts.deadline:
        return total_timeout()
    if last_content_at is not None:
        if now < max(sent_at, last_content_at) + timeouts.silence:
            return None
        return UpstreamTimeout("silence", f"The node was silent for {timeouts.silence:.0f} s")
    if timeouts.first_byte is None or now < sent_at + timeouts.first_byte:
        return None
    return UpstreamTimeout("first_byte", f"Nothing came for {timeouts.first_byte:.0f} s")


def earliest_timeout(
    timeouts: AttemptTimeouts, sent_at: float, last_content_at: float | None, now: float
) -> float:
    """No timeout passes before this moment, whatever the node sends from `now` on."""
    if last_content_at is not None:
        return min(timeouts.deadline, max(sent_at, last_content_at) + timeouts.silence)
    earliest = min(timeouts.deadline, now + timeouts.silence)
    if timeouts.first_byte is None:
        return earliest
    return min(earliest, sent_at + timeouts.first_byte)


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
