"""Several prompts in one request: each is a request of its own, and all are one reply, in order.

llama.cpp's server would queue them on one node. Here each takes slots as they come free, on any
node, in the line where all others wait. The next one enters that line when the one before it has
left it: however many prompts a request brings, it has one place there, and one more for each of
them whose node failed.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from gateway import errors
from gateway.errors import GatewayError
from gateway.events import RequestFinished
from gateway.proxy import outcome, sse
from gateway.proxy.attempt import Attempt, WriteToClient
from gateway.proxy.context import ProxyContext
from gateway.proxy.in_flight import InFlightRequest
from gateway.proxy.inbound.prompt_list import PromptList
from gateway.proxy.inbound.routes import ROUTES
from gateway.proxy.json_values import InvalidJson, parse_object
from gateway.proxy.response_stream import (
    JSON_HEADER_LINE,
    BodyStream,
    ProxyResponse,
    to_gateway_error,
)
from gateway.transport.errors import InvalidResponse, UpstreamError

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
        self._merging: ResponseMerger = MERGERS[in_flight.request.path](
            self._several.other_fields, in_flight.request.slots
        )
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
        return ROUTES[self._live.request.path].api.error_event(error, tag)

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


_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])

_CHOICES = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])

_INDEX = msgspec.json.Decoder(int)

_DONE = b"data: [DONE]\n\n"

_SHARED = ("id", "created", "model", "system_fingerprint")


class ResponseMerger(ABC):
    """What both APIs have in common."""

    def __init__(self, request_fields: Mapping[str, msgspec.Raw], answers_per_prompt: int) -> None:
        """`asked`: the request's other fields; `answers`: how many each prompt has."""
        self._asked = request_fields
        self._answers = answers_per_prompt
        self._whole: dict[int, bytes] = {}
        self.size = 0
        """Bytes of the answers that were added."""

    def add(self, index: int, answer: bytes) -> None:
        """The whole answer to one prompt. Raises: Garbage."""
        self._whole[index] = self._items(index, answer)
        self.size += len(self._whole[index])

    def merge_events(self, index: int, events: bytes) -> bytes:
        """Whole events of the answer to one prompt, as those of all. Raises: Garbage."""
        found = []
        for event in sse.split(events):
            data = sse.payload(event)
            # The end comes once, and llama.cpp begins with `null` sometimes.
            if data and data not in {b"[DONE]", b"null"}:
                found.append(self._event(index, data))
        return b"".join(found)

    @abstractmethod
    def merged_response(self) -> bytes:
        """The one answer."""

    @abstractmethod
    def stream_end(self) -> bytes:
        """What ends the stream of all."""

    @abstractmethod
    def _items(self, index: int, answer: bytes) -> bytes:
        """The answers to one prompt, without brackets around them."""

    @abstractmethod
    def _event(self, index: int, data: bytes) -> bytes:
        """One event of the answer to one prompt."""

    def _joined(self) -> bytes:
        return b"[" + b",".join(items for _, items in sorted(self._whole.items())) + b"]"

    def _numbered(
        self, index: int, items: list[dict[str, msgspec.Raw]]
    ) -> list[dict[str, msgspec.Raw]]:
        """These answers to one prompt, each with its number among all."""
        for place, item in enumerate(items):
            own = item.get("index")
            number = place if own is None else _read(_INDEX, own)
            item["index"] = msgspec.Raw(b"%d" % (index * self._answers + number))
        return items


class CompletionsMerger(ResponseMerger):
    """`/v1/completions`: choices in one object."""

    def __init__(self, request_fields: Mapping[str, msgspec.Raw], answers_per_prompt: int) -> None:
        super().__init__(request_fields, answers_per_prompt)
        self._first: dict[str, msgspec.Raw] = {}
        self._first_index: int | None = None
        self._usage: dict[str, Any] = {}

    def merged_response(self) -> bytes:
        """The one answer."""
        fields = self._first | {"choices": msgspec.Raw(self._joined())}
        if self._usage:
            fields["usage"] = msgspec.Raw(msgspec.json.encode(self._usage))
        return msgspec.json.encode(fields)

    def stream_end(self) -> bytes:
        """What ends the stream of all."""
        if not (self._usage and self._counts):
            return _DONE
        fields = {name: self._first[name] for name in _SHARED if name in self._first}
        fields |= {
            "object": msgspec.Raw(b'"text_completion"'),
            "choices": msgspec.Raw(b"[]"),
            "usage": msgspec.Raw(msgspec.json.encode(self._usage)),
        }
        return b"data: " + msgspec.json.encode(fields) + b"\n\n" + _DONE

    @property
    def _counts(self) -> bool:
        """Whether the client wants to be told the tokens."""
        try:
            options = parse_object(bytes(self._asked.get("stream_options", b"{}")))
        except InvalidJson:
            return False
        return options.get("include_usage") is True

    def _items(self, index: int, answer: bytes) -> bytes:
        fields: dict[str, msgspec.Raw] = _read(_FIELDS, answer)
        choices = _read(_CHOICES, fields.pop("choices", b"[]"))
        self._count(fields)
        if self._first_index is None or index < self._first_index:
            self._first, self._first_index = fields, index
        return msgspec.json.encode(self._numbered(index, choices))[1:-1]

    def _event(self, index: int, data: bytes) -> bytes:
        fields: dict[str, msgspec.Raw] = _read(_FIELDS, data)
        choices = _read(_CHOICES, fields.get("choices", b"[]"))
        self._count(fields)
        if not choices:
            return b""
        self._first = self._first or fields
        fields |= {name: self._first[name] for name in _SHARED if name in self._first}
        encoded = msgspec.json.encode(self._numbered(index, choices))
        fields["choices"] = msgspec.Raw(encoded)
        return b"data: " + msgspec.json.encode(fields) + b"\n\n"

    def _count(self, fields: dict[str, msgspec.Raw]) -> None:
        usage = fields.pop("usage", None)
        if usage is not None:
            try:
                _add(self._usage, parse_object(bytes(usage)))
            except InvalidJson:
                return  # `null`, as OpenAI's has it in all chunks but the last


class NativeMerger(ResponseMerger):
    """llama.cpp's `/completion`: a list of objects, or their events as they come."""

    def merged_response(self) -> bytes:
        """The one answer."""
        return self._joined()

    def stream_end(self) -> bytes:
        """What ends the stream of all."""
        return b""

    def _items(self, index: int, answer: bytes) -> bytes:
        listed = answer if answer.lstrip()[:1] == b"[" else b"[" + answer + b"]"
        return msgspec.json.encode(self._numbered(index, _read(_CHOICES, listed)))[1:-1]

    def _event(self, index: int, data: bytes) -> bytes:
        (fields,) = self._numbered(index, [_read(_FIELDS, data)])
        return b"data: " + msgspec.json.encode(fields) + b"\n\n"


MERGERS: dict[str, type[ResponseMerger]] = {
    "/v1/completions": CompletionsMerger,
    "/completion": NativeMerger,
}
"""By the path, as nodes know it."""


def _read(decoder: msgspec.json.Decoder[Any], data: bytes | msgspec.Raw) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidResponse("The node's answer is not what was expected") from None


def _add(total: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Sum the numbers of `usage`, those of its details too."""
    for name, value in more.items():
        if isinstance(value, Mapping):
            inner = total.setdefault(name, {})
            if isinstance(inner, dict):
                _add(inner, value)
        elif isinstance(value, int) and not isinstance(value, bool):
            before = total.get(name, 0)
            total[name] = before + value if isinstance(before, int) else value
        else:
            total.setdefault(name, value)
