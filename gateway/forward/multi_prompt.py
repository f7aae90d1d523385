"""Several prompts in one request: each is a request of its own; the client gets one response.

llama.cpp's server would queue all prompts on one node. Here each one takes slots of any node as
they come free, from the wait queue in which all requests wait. A prompt enters the queue when the
one before it has left it: however many prompts a request has, it has one place there, and one more
for each prompt whose node failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
from msgspec.structs import replace

from gateway import errors
from gateway.api import outcome, sse
from gateway.api.outcome import to_gateway_error
from gateway.errors import GatewayError
from gateway.events import RequestRecord
from gateway.forward.client_response import (
    JSON_HEADER_LINE,
    BodyStream,
    ClientResponse,
    node_error,
)
from gateway.forward.context import ForwardContext
from gateway.forward.event_pipeline import WriteToClient
from gateway.forward.in_flight import Attempt, InFlightRequest
from gateway.request.body import LARGE_BODY_BYTES
from gateway.request.preparation import PromptList
from gateway.request.routes import ROUTES
from gateway.transport.errors import UpstreamError

# Chunks that wait for the client to take them; then the nodes are read no further.
MOST_BUFFERED_CHUNKS = 16


class PromptRefused(Exception):  # noqa: N818 - a response
    """A node's error response to one prompt is the response to all."""

    def __init__(self, response: ClientResponse) -> None:
        super().__init__(f"status {response.status}")
        self.response = response


class SubRequest(InFlightRequest, eq=False, kw_only=True):
    """The request of one prompt."""

    dequeued: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    """Set when it has left the wait queue."""

    def begin_attempt(self, attempt: Attempt) -> None:
        """An attempt begins: it has its slots."""
        self.dequeued.set()
        super().begin_attempt(attempt)


class MultiPromptForwarder(BodyStream):
    """Forwards the prompts of one request, and is the body stream of their one response.

    Owns their tasks: call `close` when the response has a body stream.
    """

    def __init__(
        self,
        in_flight: InFlightRequest,
        forward: Callable[[InFlightRequest], Awaitable[ClientResponse]],
        context: ForwardContext,
    ) -> None:
        self._in_flight = in_flight
        self._forward = forward
        self._context = context
        self._max_bytes = context.settings.limits.response_bytes
        """Bytes that a plain response may have."""
        assert in_flight.request.prompt_list is not None
        self._prompts: PromptList = in_flight.request.prompt_list
        self._api = ROUTES[in_flight.request.path].api
        assert self._api.merger is not None
        self._merger = self._api.merger(
            self._prompts.other_fields, in_flight.request.lease_request.size.slots
        )
        self._chunks: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue(MOST_BUFFERED_CHUNKS)
        """Chunks with their prompt's index; None: the end, or a failure."""
        self._error: Exception | None = None
        self._task: asyncio.Task[None] | None = None  # runs the sub-requests
        self._sub_requests: dict[str, InFlightRequest] = {}
        self._header_lines = b""
        self._closed = False
        self._last_content_at = 0.0
        self._on_fail: Callable[[], None] | None = None
        in_flight.begin_sub_requests(self._sub_requests, self._fail)

    async def run(self) -> ClientResponse:
        """The plain response, or the stream from its first content on. Raises: GatewayError."""
        in_flight = self._in_flight
        try:
            if in_flight.cancel_error is not None:
                raise in_flight.cancel_error  # noqa: TRY301
            self._task = asyncio.create_task(self._run_all())
            if in_flight.request.stream:
                first = await self._next_events()
                age = self._context.clock() - in_flight.request.received_at
                in_flight.record.first_content_sent(age)
                return ClientResponse(200, self._header_lines, first, self)
            while (chunk := await self._next_chunk()) is not None:
                self._merger.add(*chunk)
                if len(chunk[1]) >= LARGE_BODY_BYTES:
                    await asyncio.sleep(0)
                if self._merger.size > self._max_bytes:
                    most = self._max_bytes
                    raise errors.node_failed(f"The answer is too long ({most} bytes).")  # noqa: TRY301
            self.close()
            return ClientResponse(200, JSON_HEADER_LINE, self._merger.merged_response())
        except PromptRefused as refused:
            self.close()
            return refused.response
        except UpstreamError as error:
            self.close()
            raise to_gateway_error(error) from error
        except BaseException:
            self.close()
            raise

    # The body stream.

    @property
    def failure(self) -> UpstreamError | None:
        """The failure that ended it, so that nobody waits for the client to take more."""
        return None if self._error is None else UpstreamError(str(self._error))

    def notify_failure(self, callback: Callable[[], None]) -> None:
        """Call `callback` on failure: the reader may be waiting for something else."""
        self._on_fail = callback

    @property
    def is_open(self) -> bool:
        """Whether more events will come."""
        return not self._closed

    @property
    def last_content_at(self) -> float:
        """When a chunk last came; monotonic."""
        return self._last_content_at

    async def next_chunk(self, write: WriteToClient | None = None) -> bytes | None:
        """The next events, empty at the end; a failure ends them with the API's error event."""
        if self._closed:
            return b""
        try:
            return await self._next_events()
        except GatewayError as failure:
            error = failure
        except UpstreamError as failure:
            error = to_gateway_error(failure)
        except PromptRefused as refused:
            error = node_error(refused.response)
        self.close()
        self._in_flight.record.fail(error.status, error.code)
        return self._api.error_event(error, self._in_flight.request.x_request_id)

    def close(self) -> None:
        """End all sub-requests."""
        self._closed = True
        self._in_flight.end_sub_requests()
        if self._error is not None:
            errors.drop_traceback(self._error)
        # Each sub-request ends with its task, when its attempt has been accounted for.
        if self._task is not None:
            self._task.cancel()

    async def _next_events(self) -> bytes:
        """The next events of the merged stream; at last, its end."""
        while (chunk := await self._next_chunk()) is not None:
            if events := self._merger.merge_events(*chunk):
                return events
        self.close()
        return self._merger.stream_end()

    async def _next_chunk(self) -> tuple[int, bytes] | None:
        """The next chunk and its prompt's index; None: the end. Raises the failure."""
        chunk = await self._chunks.get()
        if self._error is not None:
            raise self._error
        self._last_content_at = self._context.clock()
        return chunk

    # The sub-requests.

    async def _run_all(self) -> None:
        """Run the sub-requests, and put the end behind their chunks; the first error ends all."""
        try:
            async with asyncio.TaskGroup() as group:
                await self._start_sub_requests(group)
            await self._chunks.put(None)
        except ExceptionGroup as errors_of_tasks:
            self._fail(errors_of_tasks.exceptions[0])
            errors.drop_traceback(errors_of_tasks)

    async def _start_sub_requests(self, group: asyncio.TaskGroup) -> None:
        """Start each sub-request when the one before it has its slots."""
        parent = self._in_flight.record
        for index in range(len(self._prompts.prompts)):
            request = await self._context.time_slicer.run(self._prompts.sub_request(index))
            if index:
                caller = replace(request.lease_request.caller, admitted=True)
                lease_request = replace(request.lease_request, caller=caller)
                request = replace(request, lease_request=lease_request)
            record = RequestRecord(
                request.x_request_id,
                request.path,
                parent.model,
                request.lease_request.caller.priority,
                parent.caller,
                stream=request.stream,
                trace=parent.trace,
            )
            sub_request = SubRequest(request, record)
            self._sub_requests[request.id] = sub_request
            parent.sub_request_began()
            task = group.create_task(self._run_sub_request(index, sub_request))
            # Also if it is cancelled before it begins.
            task.add_done_callback(partial(self._end, sub_request))
            await sub_request.dequeued.wait()

    async def _run_sub_request(self, index: int, sub_request: SubRequest) -> None:
        """Forward one prompt, and queue its response's chunks."""
        body_stream = None
        try:
            response = await self._forward(sub_request)
            body_stream = response.body_stream
            if response.status >= 300:
                raise PromptRefused(response)
            self._in_flight.record.sub_request_answered(sub_request.record)
            if not sub_request.request.stream:
                await self._chunks.put((index, await response.whole_content(self._max_bytes)))
            elif body_stream is None:
                raise errors.node_failed("The node did not stream its answer.")
            else:
                self._header_lines = self._header_lines or response.header_lines
                chunk: bytes | None = response.content
                while chunk:
                    if sub_request.record.status >= 400:
                        raise _stream_error(sub_request.record, chunk)
                    await self._chunks.put((index, chunk))
                    chunk = await body_stream.next_chunk()
        except GatewayError as error:
            if error.status == 400:
                count = len(self._prompts.prompts)
                error.append(f" (This is prompt {index + 1} of {count}.)")
            raise
        finally:
            sub_request.dequeued.set()
            if body_stream is not None:
                body_stream.close()
            self._end(sub_request)

    def _end(self, sub_request: InFlightRequest, _: object = None) -> None:
        """Count a sub-request into the request once its usage is known."""
        if self._sub_requests.pop(sub_request.request.id, None) is not None:
            self._context.bus.defer(self._in_flight.record.sub_request_ended, sub_request.record)

    def _fail(self, error: Exception) -> None:
        """End all sub-requests; the reader gets this error next."""
        if self._error is not None or self._closed:
            return
        self._error = error
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        while not self._chunks.empty():
            self._chunks.get_nowait()
        self._chunks.put_nowait(None)
        if self._on_fail is not None:
            self._on_fail()


def _stream_error(record: RequestRecord, events: bytes) -> GatewayError:
    """The error of a stream that has ended with its API's error event."""
    message = outcome.error_message(sse.payload(sse.last_events(events, 1)))
    return GatewayError(
        record.status, record.reason or "node_failed", message or "The node failed."
    )
