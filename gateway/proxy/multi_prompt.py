"""Several prompts in one request: each is a request of its own, and all are one reply, in order.

llama.cpp's server would queue them on one node. Here each takes slots as they come free, on any
node, in the line where all others wait. The next one enters that line when the one before it has
left it: however many prompts a request brings, it has one place there, and one more for each of
them whose node failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from gateway import errors
from gateway.errors import GatewayError
from gateway.events import RequestFinished
from gateway.proxy import outcome, sse
from gateway.proxy.attempt import Attempt, WriteToClient
from gateway.proxy.context import ProxyContext
from gateway.proxy.in_flight import InFlightRequest
from gateway.proxy.inbound.prompt_list import PromptList
from gateway.proxy.inbound.routes import ROUTES
from gateway.proxy.response_stream import (
    JSON_HEADER_LINE,
    BodyStream,
    ProxyResponse,
    to_gateway_error,
)
from gateway.transport.errors import UpstreamError

MOST_BUFFERED_CHUNKS = 16
"""Pieces of answers that wait for the client to take them; then the nodes are read no further."""


class PromptRefused(Exception):  # noqa: N818 - an answer
    """A node's own error is the answer to all."""

    def __init__(self, response: ProxyResponse) -> None:
        super().__init__(f"status {response.status}")
        self.response = response

    def to_gateway_error(self) -> GatewayError:
        """The same for a stream that has begun."""
        status = self.response.status
        message = outcome.error_message(self.response.content)
        code = "invalid_request" if status < 500 else "node_error"
        return GatewayError(status, code, message or f"The node answered with status {status}.")


@dataclass(slots=True, eq=False)
class SubRequest(InFlightRequest):
    """One prompt on its way."""

    dequeued: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has left the line."""

    def begin_attempt(self, attempt: Attempt) -> None:
        """An attempt begins: it has its slots."""
        self.dequeued.set()
        InFlightRequest.begin_attempt(
            self, attempt
        )  # `super()` knows nothing of classes with slots


class MultiPromptForwarder:
    """Runs them, and is what the edge reads the rest of their stream from.

    Owns their tasks: `close` must be called once a reply has a rest.
    """

    def __init__(
        self,
        in_flight: InFlightRequest,
        forward: Callable[[InFlightRequest], Awaitable[ProxyResponse]],
        context: ProxyContext,
    ) -> None:
        self._live = in_flight
        self._relay = forward
        self._bus = context.bus
        self._clock = context.clock
        self._steps = context.time_slicer
        self._most = context.settings.limits.response_bytes
        """Bytes that a plain answer may have."""
        self._several: PromptList = in_flight.request.prompt_list
        self._left = len(self._several.prompts)
        self._api = ROUTES[in_flight.request.path].api
        assert self._api.merger is not None
        self._merging = self._api.merger(self._several.other_fields, in_flight.request.slots)
        self._pieces: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue(MOST_BUFFERED_CHUNKS)
        self._failed: Exception | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._parts: dict[str, InFlightRequest] = {}
        self._open: dict[str, BodyStream] = {}
        self._fields = b""
        self._over = False
        self.last_content_at = 0.0
        """When anything came last; monotonic."""
        self._on_fail: Callable[[], None] | None = None
        in_flight.sub_requests = self._parts
        in_flight.on_cancel = self._fail

    async def run(self) -> ProxyResponse:
        """All their answers, or their stream from its first content on. Raises: GatewayError."""
        streams = self._live.request.stream
        try:
            if self._live.cancel_error is not None:
                raise self._live.cancel_error  # noqa: TRY301
            self._run(self._start)
            if streams:
                first = await self._next()
                self._live.record.ttft = self._clock() - self._live.request.received_at
                return ProxyResponse(200, self._fields, first, self)
            while (piece := await self._piece()) is not None:
                self._merging.add(*piece)
                if self._merging.size > self._most:
                    raise errors.node_failed(f"The answer is too long ({self._most} bytes).")  # noqa: TRY301
            self.close()
            return ProxyResponse(200, JSON_HEADER_LINE, self._merging.merged_response())
        except PromptRefused as refused:
            self.close()
            return refused.response
        except UpstreamError as error:
            self.close()
            raise to_gateway_error(error) from error
        except BaseException:
            self.close()
            raise

    # What the edge reads a stream from.

    @property
    def source(self) -> MultiPromptForwarder:
        """Itself: there is no single attempt."""
        return self

    @property
    def is_sse(self) -> bool:
        """Whether what comes is a stream of events."""
        return True

    @property
    def failure(self) -> UpstreamError | None:
        """What has ended it, so that nobody waits for the client to take more."""
        return None if self._failed is None else UpstreamError(str(self._failed))

    def notify_failure(self, callback: Callable[[], None]) -> None:
        """Call `callback` when it is failed: its reader may wait for something else."""
        self._on_fail = callback

    @property
    def is_open(self) -> bool:
        """Whether more is to come."""
        return not self._over

    async def next_chunk(self, _: WriteToClient | None = None) -> bytes:
        """The next events, empty at the end; a failure ends them with the dialect's error event."""
        if self._over:
            return b""
        try:
            return await self._next()
        except GatewayError as failure:
            error = failure
        except UpstreamError as failure:
            error = to_gateway_error(failure)
        except PromptRefused as refused:
            error = refused.to_gateway_error()
        self.close()
        record, tag = self._live.record, self._live.request.x_request_id
        record.status, record.reason = error.status, error.code
        return self._api.error_event(error, tag)

    def close(self) -> None:
        """End all that still runs."""
        self._over = True
        self._live.on_cancel = None
        if self._failed is not None:
            errors.drop_traceback(self._failed)
        for task in self._tasks:
            task.cancel()
        for part in list(self._parts.values()):
            self._ended(part)

    # Running them.

    async def _start(self) -> None:
        """Start each when the one before it has its slots."""
        parent = self._live.record
        for index in range(len(self._several.prompts)):
            request = await self._several.sub_request(index, self._steps)
            request.admitted = index > 0
            record = RequestFinished(
                request.x_request_id, request.path, parent.model, request.priority
            )
            record.caller, record.stream = parent.caller, request.stream
            part = SubRequest(request, record)
            self._parts[request.id] = part
            self._run(partial(self._answered, index, part))
            await part.dequeued.wait()

    def _run(self, work: Callable[[], Awaitable[None]]) -> None:
        async def guarded() -> None:
            try:
                await work()
            except Exception as error:  # noqa: BLE001 - whoever reads raises it
                self._fail(error)

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answered(self, index: int, part: SubRequest) -> None:
        """One prompt's answer, into the pieces."""
        try:
            reply = await self._relay(part)
            if reply.status >= 300:
                raise PromptRefused(reply)
            self._note(part.record)
            if part.request.stream:
                await self._stream(index, part, reply)
            else:
                await self._whole(index, part, reply)
        except GatewayError as error:
            if error.status == 400:
                count = len(self._several.prompts)
                error.message += f" (This is prompt {index + 1} of {count}.)"
            raise
        finally:
            part.dequeued.set()
            self._ended(part)
        self._left -= 1
        if not self._left:
            await self._pieces.put(None)

    async def _whole(self, index: int, part: SubRequest, reply: ProxyResponse) -> None:
        parts = [reply.content]
        if (rest := reply.body_stream) is not None:
            self._open[part.request.id] = rest
            size = len(reply.content)
            while chunk := await rest.next_chunk():
                parts.append(chunk)
                size += len(chunk)
                if size > self._most:
                    raise errors.node_failed(f"The answer is too long ({self._most} bytes).")
        await self._pieces.put((index, b"".join(parts)))

    async def _stream(self, index: int, part: SubRequest, reply: ProxyResponse) -> None:
        rest = reply.body_stream
        if rest is None:
            raise errors.node_failed("The node did not stream its answer.")
        self._open[part.request.id] = rest
        self._fields = self._fields or reply.header_lines
        chunk: bytes | None = reply.content
        while chunk:
            if part.record.status >= 400:
                # It has ended with the error, in this API's form.
                message = outcome.error_message(sse.payload(sse.last_events(chunk, 1)))
                code = part.record.reason or "node_failed"
                raise GatewayError(part.record.status, code, message or "The node failed.")
            await self._pieces.put((index, chunk))
            chunk = await rest.next_chunk()

    def _ended(self, part: InFlightRequest) -> None:
        """One is over: once its account is written, it is part of the whole's."""
        rest = self._open.pop(part.request.id, None)
        if rest is not None:
            rest.close()
        if self._parts.pop(part.request.id, None) is not None:
            self._bus.defer(self._count, part.record)

    def _count(self, part: RequestFinished) -> None:
        record = self._live.record
        record.prompt_tokens += part.prompt_tokens
        record.cached_tokens += part.cached_tokens
        record.completion_tokens += part.completion_tokens
        record.cost += part.cost

    def _note(self, part: RequestFinished) -> None:
        """How the first of them fared is what is told of all; attempts are the most of any."""
        record = self._live.record
        record.attempts = max(record.attempts, part.attempts)
        if record.node is None:
            record.node, record.tier, record.fallback = part.node, part.tier, part.fallback
            record.queue_seconds, record.overhead_seconds = (
                part.queue_seconds,
                part.overhead_seconds,
            )

    def _fail(self, error: Exception) -> None:
        """End all: the next piece that is asked for is this error."""
        if self._failed is not None or self._over:
            return
        self._failed = error
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()
        while not self._pieces.empty():
            self._pieces.get_nowait()
        self._pieces.put_nowait(None)
        if self._on_fail is not None:
            self._on_fail()

    # Reading them.

    async def _piece(self) -> tuple[int, bytes] | None:
        """What came next, and of which prompt; None: that was all. Raises what failed."""
        piece = await self._pieces.get()
        if self._failed is not None:
            raise self._failed
        self.last_content_at = self._clock()
        return piece

    async def _next(self) -> bytes:
        """The next events of the stream of all of them; at its end what ends it."""
        while (piece := await self._piece()) is not None:
            if events := self._merging.merge_events(*piece):
                return events
        self.close()
        return self._merging.stream_end()
