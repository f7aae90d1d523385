"""One attempt: one node, one lease, one exchange, up to its first content and through its end."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from gateway import errors
from gateway.config.settings import Settings
from gateway.fleet.node import Lease
from gateway.proxy import forwarded_headers, sse
from gateway.proxy.api.base import Api, StreamEventKind
from gateway.proxy.inbound import request_limits
from gateway.proxy.inbound.routes import ROUTES
from gateway.proxy.outcome import (
    context_overflow_sizes,
    error_event_to_body,
    error_message,
    error_status,
    is_context_overflow,
)
from gateway.proxy.resume.splice import SplicePoint
from gateway.proxy.sse import EventFramer
from gateway.proxy.timeouts import AttemptTimeouts, TimeoutMonitor, timeouts_for, total_timeout
from gateway.request import Headers, Request, SegmentedBody
from gateway.transport.connection import NodeConnection
from gateway.transport.errors import (
    ConnectTimedOut,
    InvalidResponse,
    NodeReportedError,
    UpstreamError,
)

MOST_ERROR_BODY_BYTES = 256 * 1024
"""Of an error's body no more is read."""

STREAM_TAIL_BYTES = 4 * 1024
"""Of a stream's end so much is looked at, and the whole of the event that reaches beyond it."""

JSON_HEADERS: Headers = [(b"content-type", b"application/json")]
"""The head's fields, where what the node said is told in our words."""

WriteToClient = Callable[[bytes], bool]
"""Sends bytes to the client, and tells whether it lags."""


def _too_long(status: int) -> bytes:
    """What stands for an error of a node's that nobody can read to its end."""
    message = (
        f"The node answered {status}, with an error of more than {MOST_ERROR_BODY_BYTES} bytes."
    )
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return msgspec.json.encode({"error": {"message": message, "type": kind, "code": status}})


class Attempt:
    """Ends exactly once, by `end`: the connection goes back or is closed, the lease likewise."""

    __slots__ = (
        "_clock",
        "_connection",
        "_gate",
        "_held",
        "_limits",
        "_over",
        "_sent",
        "_settings",
        "_watch",
        "_write",
        "api",
        "content",
        "excused_at",
        "failure",
        "filter_events",
        "filtered_count",
        "headers",
        "is_sse",
        "lease",
        "on_fail",
        "on_output",
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
        lease: Lease,
        request: Request,
        api: Api,
        settings: Settings,
        timeout_monitor: TimeoutMonitor,
        clock: Callable[[], float],
    ) -> None:
        self.lease = lease
        self.request = request
        self.api = api
        self._settings = settings
        self._limits: AttemptTimeouts | None = None
        self._watch = timeout_monitor
        self._clock = clock
        self._connection: NodeConnection | None = None
        self.failure: UpstreamError | None = None
        """Set from outside, perhaps before there is a connection."""
        self._gate: EventFramer | None = None
        self.stream_ended = False
        """Whether the end of its stream has passed."""
        self._held: bytes | None = None
        """What the reader is to return next; empty: that the client lags."""
        self._write: WriteToClient | None = None
        self._over = False
        self._sent = False
        self.started_at = clock()
        self.excused_at = -math.inf
        self.sent_at = 0.0
        """When the request was first sent; 0 before."""
        self.status = 0
        self.headers: Headers = []
        self.is_sse = False
        """Whether what comes is a stream of events."""
        self.content = b""
        """What had come when `open` returned: the first events, or all of a plain answer."""
        self.recent_chunks: tuple[bytes, bytes, bytes] = (b"", b"", b"")
        """The last three pieces of a stream."""
        self.on_output: Callable[[bytes], None] | None = None
        """Gets all that goes out after `content`, in case it must go on elsewhere."""
        self.filter_events: Callable[[bytes], bytes] | None = None
        """Takes out of a stream what only we have asked for."""
        self.filtered_count = 0
        """Events that `strip` has taken out whole."""
        self.on_fail: Callable[[], None] | None = None
        """Called when it is failed from outside: who reads it may wait for something else."""
        self.splice_point: SplicePoint | None = None
        """Where it goes on with what another attempt began."""

    @property
    def timeouts(self) -> AttemptTimeouts:
        """How long it may take; made when it is first asked for, which few attempts live to see."""
        if self._limits is None:
            self._limits = timeouts_for(self.lease, self.request, self._settings.timeouts)
        return self._limits

    @property
    def complete(self) -> bool:
        """Whether the node's reply has come to its end."""
        return self._connection is not None and self._connection.complete

    @property
    def client_lagging(self) -> bool:
        """Whether what has come is yet to be read."""
        return self._connection is not None and self._connection.has_unread

    @property
    def event_count(self) -> int:
        """Events that have passed."""
        return self._gate.event_count - self.filtered_count if self._gate is not None else 0

    @property
    def ends_mid_event(self) -> bool:
        """Whether the stream ended within an event."""
        return self._gate is not None and self._gate.has_partial

    @property
    def last_events(self) -> bytes:
        """The last events of a stream, whole."""
        last = self.recent_chunks[2]
        data = last if len(last) > STREAM_TAIL_BYTES else b"".join(self.recent_chunks)
        return sse.last_events(data, STREAM_TAIL_BYTES)

    @property
    def header_lines(self) -> bytes:
        """The lines of the reply's head that go on to the client."""
        connection, settings = self._connection, self._settings
        if connection is None or connection.headers is not self.headers:
            return forwarded_headers.headers_for_client(self.headers, settings.headers.to_clients)
        if connection.head_cache is None or connection.head_cache_key is not settings:
            connection.head_cache = forwarded_headers.headers_for_client(
                self.headers, settings.headers.to_clients
            )
            connection.head_cache_key = settings
        return connection.head_cache

    async def open(self, head: bytes, body: bytes | SegmentedBody) -> None:
        """Send, and wait for the outcome: the first content of a stream, else the whole answer.

        A plain answer longer than may be held back is left to `read`. Raises: UpstreamError.
        """
        connection = await self.lease.upstream.pool.exchange(
            head, body, dial=self._dial, on_connected=self._send_on
        )
        limits = self._settings.limits
        self.status = connection.status
        self.headers = connection.headers
        if self.status >= 300:
            self.content = await self._all(MOST_ERROR_BODY_BYTES)
            if not connection.complete:
                self.headers = JSON_HEADERS
                self.content = _too_long(self.status)
        elif self.lease.stream and is_event_stream(self.headers):
            self.lease.head_received(self._clock())
            self.is_sse = True
            most = request_limits.max_event_bytes(len(body), limits, logprobs=self.request.logprobs)
            self._gate = EventFramer(
                most,
                self.api.ordinary_events,
                keep_comments=self._settings.heartbeat > 0,
                ceiling=limits.response_bytes,
            )
            self.content = await self._first_content(most)
        elif connection.complete:
            self.content = connection.read_nowait()
        else:
            self.content = await self._all(limits.response_bytes)
        if self.status < 300 and not self.is_sse:
            check_json_body(self.headers, self.content)

    async def read(self, write: WriteToClient | None = None) -> bytes | None:
        """The next bytes that may pass, empty at the end. Raises: UpstreamError.

        Pieces of a stream that come while this waits go straight to `write`, and nobody is woken
        for them. If it says that the client lags, None is returned: more should be asked for when
        the client has caught up.
        """
        connection, gate = self._connection, self._gate
        assert connection is not None
        if gate is None:
            return await connection.read()
        self._write = write
        while True:
            chunk = connection.read_nowait()
            if chunk:
                passed = self._passed(chunk)
                if passed:
                    return passed
            elif self.failure is not None:
                raise self.failure
            elif connection.complete:
                return b""
            else:
                await connection.wait_for_data(None if write is None else self._pass_on)
                if self._held is not None:
                    held, self._held = self._held, None
                    return held or None

    def _pass_on(self) -> bool:
        """Hand on what has come; False if the reader must see to it."""
        connection, write = self._connection, self._write
        assert connection is not None
        assert write is not None
        try:
            passed = self._passed(connection.read_nowait())
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

    def _passed(self, chunk: bytes) -> bytes:
        """What of a piece of a stream goes out; possibly nothing yet. Raises: UpstreamError."""
        gate = self._gate
        assert gate is not None
        if self.stream_ended:
            return b""
        before = gate.event_count
        passed = self._looked_at(self._fed(chunk), gate.special_bytes)
        if self.on_output is not None and passed:
            self.on_output(passed)
        if gate.event_count != before:
            self.lease.last_content_at = self._clock()
            _, second, third = self.recent_chunks
            self.recent_chunks = (second, third, passed)
        return passed

    def _fed(self, chunk: bytes) -> bytes:
        """The whole events that have come, as the client would have had them unasked."""
        gate = self._gate
        assert gate is not None
        passed = gate.feed(chunk)
        if self.filter_events is not None:
            passed = self.filter_events(passed)
            gate.special_bytes = gate.special_bytes_in(passed)
        return passed

    def _looked_at(self, passed: bytes, unusual: int) -> bytes:
        """What of these events goes out; only the last so many bytes need a closer look.

        Raises: UpstreamError.
        """
        dialect = self.api
        if dialect.terminal_mark_nested and passed.find(dialect.terminal_mark) >= 0:
            unusual = len(passed)
        if unusual:
            at = len(passed) - unusual
            seen = passed[at:] if at else passed
            if seen == dialect.stream_end:
                self.stream_ended = True
            else:
                left = sse.validated(self._to_the_end(seen))
                if len(left) != len(seen):
                    passed = passed[:at] + left
        sse.check_utf8(passed)
        return passed

    def _to_the_end(self, passed: bytes) -> bytes:
        """What of it goes out: nothing behind the end, and no error event of the node's own form.

        That one ends the stream, in the form that this API's clients know.
        """
        dialect = self.api
        mark, end_mark = dialect.error_mark, dialect.terminal_mark
        if end_mark not in passed and not (mark and mark in passed):
            return passed
        ends = dialect.single_terminal_event or self.request.slots < 2
        kept = []
        for event in sse.split(passed):
            if mark and mark in event:
                self.fail(self._errored(sse.payload(event)))
                break
            kept.append(event)
            if ends and dialect.is_terminal_event(event):
                self.stream_ended = True
                break
        return b"".join(kept)

    def _errored(self, data: bytes) -> NodeReportedError:
        """What the node's error event tells."""
        said = error_message(data) or "The node failed in the middle of it"
        failure = NodeReportedError(said, error_status(data))
        if is_context_overflow(failure.status, data, self.request):
            tokens, context = context_overflow_sizes(data)
            context = context or self.lease.node.context
            param = ROUTES[self.request.path].prompt_field
            failure.client_error = errors.context_length_exceeded(tokens, context, param)
        return failure

    def fail(self, error: UpstreamError) -> None:
        """End it from outside: whoever waits gets `error`."""
        self.failure = error
        if self._connection is not None:
            self._connection.fail(error)
        if self.on_fail is not None:
            self.on_fail()

    def release(self) -> None:
        """Leave the node. Its slot is free when its answer was complete, else when it says so."""
        if self._over:
            return
        self._over = True
        self._watch.remove(self)
        connection = self._connection
        if connection is not None and connection.complete:
            self.lease.upstream.pool.release(connection)
            self.lease.release()
            return
        if connection is not None:
            connection.close()
        if self._sent:
            self.lease.abandon()
        else:
            self.lease.release()

    @property
    def connect_timeout(self) -> float:
        """Seconds to wait for a connection."""
        own = self.lease.node.spec.timeouts.connect
        return own or self._settings.timeouts.connect

    def _send_on(self, connection: NodeConnection) -> None:
        """The request is about to be sent on this connection. Raises: UpstreamError."""
        if self.failure is not None:
            raise self.failure
        self._connection = connection
        if not self.sent_at:
            self.sent_at = self._clock()
            self._watch.add(self)
            deadline = self.request.deadline
            if deadline is not None and not self.request.client_has_timer:
                self._watch.add_deadline(self, deadline)
        self._sent = True

    async def _dial(self) -> NodeConnection:
        """A new connection. Raises: UpstreamError, and blames no node for a client's deadline."""
        # A stale connection before this one never reached the node.
        self._connection = None
        self._sent = False
        pool = self.lease.upstream.pool
        patience, deadline = self.connect_timeout, self.request.deadline
        if deadline is None:
            return await pool.connect(patience)
        left = max(0.0, deadline - self._clock())
        try:
            return await pool.connect(min(patience, left))
        except ConnectTimedOut:
            if left < patience:
                raise total_timeout() from None
            raise

    async def _first_content(self, most: int) -> bytes:
        """All events up to the first with content. Raises: UpstreamError."""
        connection, gate = self._connection, self._gate
        assert connection is not None
        assert gate is not None
        held = b""
        while True:
            chunk = await connection.read()
            if not chunk:
                raise InvalidResponse("The node's stream ended before it said anything")
            passed = self._fed(chunk)
            held = held + passed if held else passed
            for event in sse.split(passed):
                part = self.api.classify_event(event)
                if part is StreamEventKind.NO_CONTENT:
                    continue
                if part is StreamEventKind.ERROR:
                    return self._refused(sse.payload(event))
                self.lease.content_received(self._clock())
                unusual = gate.special_bytes if held is passed else gate.special_bytes_in(held)
                held = self._looked_at(held, unusual)
                self.recent_chunks = (b"", b"", held)
                return held
            if len(held) > most:
                raise InvalidResponse(f"{most} bytes of events came without any content")

    def _refused(self, error: bytes) -> bytes:
        """An error in place of the first content: the same as a reply with its status."""
        self.status = error_status(error)
        self.is_sse = False
        self.headers = JSON_HEADERS
        return error_event_to_body(error)

    async def _all(self, most: int) -> bytes:
        """The body, up to about `most` bytes."""
        connection = self._connection
        assert connection is not None
        first = await connection.read()
        if connection.complete and not connection.has_unread:
            return first
        parts = [first]
        size = len(first)
        while size < most and (part := await connection.read()):
            self.lease.last_content_at = self._clock()
            parts.append(part)
            size += len(part)
        return b"".join(parts)


_JSON_BEGINS = (b"{", b"[")


def check_json_body(headers: Headers, content: bytes) -> None:
    """A plain answer that says it is JSON must begin like it. Raises: Garbage."""
    if content[:1] in _JSON_BEGINS or content.lstrip()[:1] in _JSON_BEGINS:
        return
    for name, value in headers:
        if name == b"content-type" and value.startswith(b"application/json"):
            raise InvalidResponse("The node's answer is not JSON")


def is_event_stream(headers: Headers) -> bool:
    """Whether the head promises events that can be read. Raises: Garbage."""
    kind = encoding = b""
    for name, value in headers:
        if name == b"content-type":
            kind = value
        elif name == b"content-encoding":
            encoding = value.lower()
    if encoding not in {b"", b"identity"}:
        raise InvalidResponse("The node compressed its stream though it was asked not to")
    return kind.startswith(b"text/event-stream")
