"""One attempt: one node, one lease, one exchange, up to its first content and through its end."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from gateway import errors
from gateway.config.settings import Settings
from gateway.fleet.lease import Lease
from gateway.relay import fields, sampling, sse
from gateway.relay.continuation.seam import Seam
from gateway.relay.dialects import Dialect, Part
from gateway.relay.promised import check_plain, is_event_stream
from gateway.relay.routes import ROUTES
from gateway.relay.sse import EventGate
from gateway.relay.verdict import as_body, is_overflow, message_of, overflow_sizes, status_of
from gateway.relay.watch import Limits, Watch, limits_of, out_of_time
from gateway.request import Headers, Pieces, Request
from gateway.transport.connection import Connection
from gateway.transport.errors import ConnectTimedOut, Errored, Garbage, Stale, UpstreamError
from gateway.transport.pool import Pool

ERROR_BYTES = 256 * 1024
"""Of an error's body no more is read."""

ENDING_BYTES = 4 * 1024
"""Of a stream's end so much is looked at, and the whole of the event that reaches beyond it."""

JSON_ALONE: Headers = [(b"content-type", b"application/json")]
"""The head's fields, where what the node said is told in our words."""

Write = Callable[[bytes], bool]
"""Sends bytes to the client, and tells whether it lags."""


def _too_long(status: int) -> bytes:
    """What stands for an error of a node's that nobody can read to its end."""
    message = f"The node answered {status}, with an error of more than {ERROR_BYTES} bytes."
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
        "began",
        "content",
        "dialect",
        "excused",
        "failure",
        "headers",
        "keep",
        "lease",
        "on_fail",
        "request",
        "said_all",
        "seam",
        "sent",
        "status",
        "streams",
        "strip",
        "tail",
        "unsaid",
    )

    def __init__(
        self,
        lease: Lease,
        request: Request,
        dialect: Dialect,
        settings: Settings,
        watch: Watch,
        clock: Callable[[], float],
    ) -> None:
        self.lease = lease
        self.request = request
        self.dialect = dialect
        self._settings = settings
        self._limits: Limits | None = None
        self._watch = watch
        self._clock = clock
        self._connection: Connection | None = None
        self.failure: UpstreamError | None = None
        """Set from outside, perhaps before there is a connection."""
        self._gate: EventGate | None = None
        self.said_all = False
        """Whether the end of its stream has passed."""
        self._held: bytes | None = None
        """What the reader is to return next; empty: that the client lags."""
        self._write: Write | None = None
        self._over = False
        self._sent = False
        self.began = clock()
        self.excused = -math.inf
        self.sent = 0.0
        """When the request was first sent; 0 before."""
        self.status = 0
        self.headers: Headers = []
        self.streams = False
        """Whether what comes is a stream of events."""
        self.content = b""
        """What had come when `open` returned: the first events, or all of a plain answer."""
        self.tail: tuple[bytes, bytes, bytes] = (b"", b"", b"")
        """The last three pieces of a stream."""
        self.keep: Callable[[bytes], None] | None = None
        """Gets all that goes out after `content`, in case it must go on elsewhere."""
        self.strip: Callable[[bytes], bytes] | None = None
        """Takes out of a stream what only we have asked for."""
        self.unsaid = 0
        """Events that `strip` has taken out whole."""
        self.on_fail: Callable[[], None] | None = None
        """Called when it is failed from outside: who reads it may wait for something else."""
        self.seam: Seam | None = None
        """Where it goes on with what another attempt began."""

    @property
    def limits(self) -> Limits:
        """How long it may take; made when it is first asked for, which few attempts live to see."""
        if self._limits is None:
            self._limits = limits_of(self.lease, self.request, self._settings.timeouts)
        return self._limits

    @property
    def complete(self) -> bool:
        """Whether the node's reply has come to its end."""
        return self._connection is not None and self._connection.complete

    @property
    def lagging(self) -> bool:
        """Whether what has come is yet to be read."""
        return self._connection is not None and self._connection.unread

    @property
    def events(self) -> int:
        """Events that have passed."""
        return self._gate.events - self.unsaid if self._gate is not None else 0

    @property
    def cut(self) -> bool:
        """Whether the stream ended within an event."""
        return self._gate is not None and self._gate.partial

    @property
    def ending(self) -> bytes:
        """The last events of a stream, whole."""
        last = self.tail[2]
        data = last if len(last) > ENDING_BYTES else b"".join(self.tail)
        return sse.last_events(data, ENDING_BYTES)

    @property
    def fields(self) -> bytes:
        """The lines of the reply's head that go on to the client."""
        connection, settings = self._connection, self._settings
        if connection is None or connection.headers is not self.headers:
            return fields.to_client(self.headers, settings.headers.to_clients)
        if connection.digest is None or connection.digest_of is not settings:
            connection.digest = fields.to_client(self.headers, settings.headers.to_clients)
            connection.digest_of = settings
        return connection.digest

    async def open(self, head: bytes, body: bytes | Pieces) -> None:
        """Send, and wait for the outcome: the first content of a stream, else the whole answer.

        A plain answer longer than may be held back is left to `read`. Raises: UpstreamError.
        """
        connection = await self._exchange(head, body)
        limits = self._settings.limits
        self.status = connection.status
        self.headers = connection.headers
        if self.status >= 300:
            self.content = await self._all(ERROR_BYTES)
            if not connection.complete:
                self.headers = JSON_ALONE
                self.content = _too_long(self.status)
        elif self.lease.stream and is_event_stream(self.headers):
            self.lease.head_came(self._clock())
            self.streams = True
            most = sampling.largest_event(
                len(body), limits, probabilities=self.request.probabilities
            )
            self._gate = EventGate(
                most,
                self.dialect.usual,
                comments=self._settings.heartbeat > 0,
                ceiling=limits.response_bytes,
            )
            self.content = await self._first_content(most)
        elif connection.complete:
            self.content = connection.take()
        else:
            self.content = await self._all(limits.response_bytes)
        if self.status < 300 and not self.streams:
            check_plain(self.headers, self.content)

    async def read(self, write: Write | None = None) -> bytes | None:
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
            chunk = connection.take()
            if chunk:
                passed = self._passed(chunk)
                if passed:
                    return passed
            elif self.failure is not None:
                raise self.failure
            elif connection.complete:
                return b""
            else:
                await connection.arrival(None if write is None else self._pass_on)
                if self._held is not None:
                    held, self._held = self._held, None
                    return held or None

    def _pass_on(self) -> bool:
        """Hand on what has come; False if the reader must see to it."""
        connection, write = self._connection, self._write
        assert connection is not None
        assert write is not None
        try:
            passed = self._passed(connection.take())
        except UpstreamError as error:
            self.failure = error
            return False
        if self.said_all or self.failure is not None:
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
        if self.said_all:
            return b""
        before = gate.events
        passed = self._looked_at(self._fed(chunk), gate.unusual)
        if self.keep is not None and passed:
            self.keep(passed)
        if gate.events != before:
            self.lease.last_moved = self._clock()
            _, second, third = self.tail
            self.tail = (second, third, passed)
        return passed

    def _fed(self, chunk: bytes) -> bytes:
        """The whole events that have come, as the client would have had them unasked."""
        gate = self._gate
        assert gate is not None
        passed = gate.feed(chunk)
        if self.strip is not None:
            passed = self.strip(passed)
            gate.unusual = gate.unusual_in(passed)
        return passed

    def _looked_at(self, passed: bytes, unusual: int) -> bytes:
        """What of these events goes out; only the last so many bytes need a closer look.

        Raises: UpstreamError.
        """
        dialect = self.dialect
        if dialect.inner_end and passed.find(dialect.end_mark) >= 0:
            unusual = len(passed)
        if unusual:
            at = len(passed) - unusual
            seen = passed[at:] if at else passed
            if seen == dialect.end:
                self.said_all = True
            else:
                left = sse.checked(self._to_the_end(seen))
                if len(left) != len(seen):
                    passed = passed[:at] + left
        sse.check_text(passed)
        return passed

    def _to_the_end(self, passed: bytes) -> bytes:
        """What of it goes out: nothing behind the end, and no error event of the node's own form.

        That one ends the stream, in the form that this API's clients know.
        """
        dialect = self.dialect
        mark, end_mark = dialect.error_mark, dialect.end_mark
        if end_mark not in passed and not (mark and mark in passed):
            return passed
        ends = dialect.ends_once or self.request.slots < 2
        kept = []
        for event in sse.split(passed):
            if mark and mark in event:
                self.fail(self._errored(sse.payload(event)))
                break
            kept.append(event)
            if ends and dialect.is_end(event):
                self.said_all = True
                break
        return b"".join(kept)

    def _errored(self, data: bytes) -> Errored:
        """What the node's error event tells."""
        said = message_of(data) or "The node failed in the middle of it"
        failure = Errored(said, status_of(data))
        if is_overflow(failure.status, data, self.request):
            tokens, context = overflow_sizes(data)
            context = context or self.lease.node.context
            param = ROUTES[self.request.path].prompt
            failure.told = errors.context_length_exceeded(tokens, context, param)
        return failure

    def fail(self, error: UpstreamError) -> None:
        """End it from outside: whoever waits gets `error`."""
        self.failure = error
        if self._connection is not None:
            self._connection.fail(error)
        if self.on_fail is not None:
            self.on_fail()

    def end(self) -> None:
        """Leave the node. Its slot is free when its answer was complete, else when it says so."""
        if self._over:
            return
        self._over = True
        self._watch.remove(self)
        connection = self._connection
        if connection is not None and connection.complete:
            self.lease.upstream.pool.give(connection)
            self.lease.give_back()
            return
        if connection is not None:
            connection.close()
        if self._sent:
            self.lease.abandon()
        else:
            self.lease.give_back()

    @property
    def patience(self) -> float:
        """Seconds to wait for a connection."""
        own = self.lease.node.spec.timeouts.connect
        return own or self._settings.timeouts.connect

    async def _exchange(self, data: bytes, body: bytes | Pieces) -> Connection:
        """Send on an idle connection if there is one; one that was stale is no attempt."""
        pool = self.lease.upstream.pool
        while True:
            connection = pool.idle() or await self._connected(pool)
            if self.failure is not None:
                connection.close()
                raise self.failure
            self._connection = connection
            if not self.sent:
                self.sent = self._clock()
                self._watch.add(self)
                deadline = self.request.deadline
                if deadline is not None and not self.request.own_timer:
                    self._watch.add_deadline(self, deadline)
            self._sent = True
            connection.send(data, body)
            try:
                while not connection.status:
                    await connection.arrival()
            except Stale as error:
                errors.forget_trace(error)
                connection.close()
                self._connection = None
                self._sent = False
            else:
                return connection

    async def _connected(self, pool: Pool) -> Connection:
        """A new connection. Raises: UpstreamError, and blames no node for a client's deadline."""
        patience, deadline = self.patience, self.request.deadline
        if deadline is None:
            return await pool.connect(patience)
        left = max(0.0, deadline - self._clock())
        try:
            return await pool.connect(min(patience, left))
        except ConnectTimedOut:
            if left < patience:
                raise out_of_time() from None
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
                raise Garbage("The node's stream ended before it said anything")
            passed = self._fed(chunk)
            held = held + passed if held else passed
            for event in sse.split(passed):
                part = self.dialect.part(event)
                if part is Part.OPENING:
                    continue
                if part is Part.ERROR:
                    return self._refused(sse.payload(event))
                self.lease.moved(self._clock())
                unusual = gate.unusual if held is passed else gate.unusual_in(held)
                held = self._looked_at(held, unusual)
                self.tail = (b"", b"", held)
                return held
            if len(held) > most:
                raise Garbage(f"{most} bytes of events came without any content")

    def _refused(self, error: bytes) -> bytes:
        """An error in place of the first content: the same as a reply with its status."""
        self.status = status_of(error)
        self.streams = False
        self.headers = JSON_ALONE
        return as_body(error)

    async def _all(self, most: int) -> bytes:
        """The body, up to about `most` bytes."""
        connection = self._connection
        assert connection is not None
        first = await connection.read()
        if connection.complete and not connection.unread:
            return first
        parts = [first]
        size = len(first)
        while size < most and (part := await connection.read()):
            self.lease.last_moved = self._clock()
            parts.append(part)
            size += len(part)
        return b"".join(parts)
