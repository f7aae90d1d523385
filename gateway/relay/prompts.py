"""Several prompts in one request: each is a request of its own, and all are one reply, in order.

llama.cpp's server would queue them on one node. Here each takes slots as they come free, on any
node, in the line where all others wait. The next one enters that line when the one before it has
left it: however many prompts a request brings, it has one place there, and one more for each of
them whose node failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, field
from functools import partial

import msgspec

from gateway import errors
from gateway.config.listeners import LimitSettings
from gateway.errors import GatewayError
from gateway.events import RequestFinished
from gateway.relay import sse, verdict
from gateway.relay.attempt import Attempt, Write
from gateway.relay.edits import fields_of
from gateway.relay.journey import JSON, Means
from gateway.relay.large import PARSED, Body
from gateway.relay.live import Live
from gateway.relay.merging import MERGING, Merging
from gateway.relay.reply import Remainder, Reply, as_error
from gateway.relay.routes import ROUTES
from gateway.relay.steps import Steps
from gateway.request import Request
from gateway.transport.errors import UpstreamError

MOST_PIECES = 16
"""Pieces of answers that wait for the client to take them; then the nodes are read no further."""

MOST_BYTES = PARSED
"""Of several prompts together: they are told apart in one go."""
MOST_BESIDE = 8 << 20
"""Bytes of what is sent again with each prompt, of all of them together."""

_RAWS = msgspec.json.Decoder(list[msgspec.Raw])


Make = Callable[[int, bytes], Generator[None, None, Request]]
"""Makes a request of a prompt's number and its body, a step at a time. Raises: GatewayError."""


@dataclass(frozen=True, slots=True)
class Several:
    """The prompts of one request."""

    prompts: list[msgspec.Raw]
    fields: dict[str, msgspec.Raw]
    """All else that the body says: each of them is sent with it."""
    make: Make
    """Makes the request of one of them."""

    async def part(self, index: int, steps: Steps) -> Request:
        """The request of one prompt, made in these steps. Raises: GatewayError."""
        body = msgspec.json.encode(self.fields | {"prompt": self.prompts[index]})
        return await steps.run(self.make(index, body))


def split(raw: msgspec.Raw) -> list[msgspec.Raw]:
    """The prompts that a completion's `prompt` holds, as llama.cpp counts them; empty: it is one.

    A list of numbers, or of numbers and strings mixed, is one prompt; any other list holds one
    an item.
    """
    begin = bytes(memoryview(raw)[:64])
    # Text and token ids need no second look.
    if begin[:1] != b"[" or begin[1:].lstrip()[:1] not in _SEVERAL:
        return []
    try:
        items = _RAWS.decode(raw)
    except msgspec.DecodeError:
        return []
    if len(items) < 2 or any(bytes(item)[:1] not in _SEVERAL for item in items):
        return []
    return items


_SEVERAL = frozenset({b'"', b"[", b"{", b""})
"""How an item begins that is a prompt by itself; nothing: white space stands before it."""


def several(body: Body, raw: msgspec.Raw, limits: LimitSettings, make: Make) -> Several | None:
    """The prompts of this body; None: it is one. Raises: GatewayError 400."""
    prompts: list[msgspec.Raw] = []
    if isinstance(body, bytes):
        prompts = split(raw)
        count = len(prompts)
    else:
        count = body.count_prompts()
    if count < 2:
        return None
    if count > limits.prompts:
        raise errors.invalid_request(
            f"'prompt' holds {count} prompts, the most is {limits.prompts}.", "prompt"
        )
    size = memoryview(raw).nbytes
    if size > MOST_BYTES:
        raise errors.invalid_request(
            f"'prompt' holds {size} bytes in {count} prompts, the most is {MOST_BYTES}. "
            "Send fewer at a time.",
            "prompt",
        )
    beside = len(body) - size
    if beside * count > MOST_BESIDE:
        raise errors.invalid_request(
            f"The body has {beside} bytes beside 'prompt', which are sent with each of {count} "
            f"prompts: more than {MOST_BESIDE} bytes in all. Send fewer at a time.",
            "prompt",
        )
    fields = fields_of(body)
    fields.pop("prompt")
    return Several(prompts or split(raw), fields, make)


class Refused(Exception):  # noqa: N818 - an answer
    """A node's own error is the answer to all."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(f"status {reply.status}")
        self.reply = reply

    def as_error(self) -> GatewayError:
        """The same for a stream that has begun."""
        status = self.reply.status
        message = verdict.message_of(self.reply.content)
        code = "invalid_request" if status < 500 else "node_error"
        return GatewayError(status, code, message or f"The node answered with status {status}.")


@dataclass(slots=True, eq=False)
class Part(Live):
    """One prompt on its way."""

    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has left the line."""

    def trying(self, attempt: Attempt) -> None:
        """An attempt begins: it has its slots."""
        self.begun.set()
        Live.trying(self, attempt)  # `super()` knows nothing of classes with slots


class Prompts:
    """Runs them, and is what the edge reads the rest of their stream from.

    Owns their tasks: `close` must be called once a reply has a rest.
    """

    def __init__(
        self,
        live: Live,
        relay: Callable[[Live], Awaitable[Reply]],
        means: Means,
    ) -> None:
        self._live = live
        self._relay = relay
        self._bus = means.bus
        self._clock = means.clock
        self._steps = means.steps
        self._most = means.settings.limits.response_bytes
        """Bytes that a plain answer may have."""
        self._several: Several = live.request.several
        self._left = len(self._several.prompts)
        self._merging: Merging = MERGING[live.request.path](
            self._several.fields, live.request.slots
        )
        self._pieces: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue(MOST_PIECES)
        self._failed: Exception | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._parts: dict[str, Live] = {}
        self._open: dict[str, Remainder] = {}
        self._fields = b""
        self._over = False
        self.moved = 0.0
        """When anything came last; monotonic."""
        self.on_fail: Callable[[], None] | None = None
        """Called when it is failed: who reads it may wait for something else."""
        live.parts = self._parts
        live.on_end = self._fail

    async def reply(self) -> Reply:
        """All their answers, or their stream from its first content on. Raises: GatewayError."""
        streams = self._live.request.stream
        try:
            if self._live.ended_by is not None:
                raise self._live.ended_by  # noqa: TRY301
            self._run(self._start)
            if streams:
                first = await self._next()
                self._live.record.ttft = self._clock() - self._live.request.received
                return Reply(200, self._fields, first, self)
            while (piece := await self._piece()) is not None:
                self._merging.add(*piece)
                if self._merging.size > self._most:
                    raise errors.node_failed(f"The answer is too long ({self._most} bytes).")  # noqa: TRY301
            self.close()
            return Reply(200, JSON, self._merging.whole())
        except Refused as refused:
            self.close()
            return refused.reply
        except UpstreamError as error:
            self.close()
            raise as_error(error) from error
        except BaseException:
            self.close()
            raise

    # What the edge reads a stream from.

    @property
    def attempt(self) -> Prompts:
        """Itself: there is no single attempt."""
        return self

    @property
    def streams(self) -> bool:
        """Whether what comes is a stream of events."""
        return True

    @property
    def failure(self) -> UpstreamError | None:
        """What has ended it, so that nobody waits for the client to take more."""
        return None if self._failed is None else UpstreamError(str(self._failed))

    @property
    def waits(self) -> bool:
        """Whether more is to come."""
        return not self._over

    async def next(self, _: Write | None = None) -> bytes:
        """The next events, empty at the end; a failure ends them with the dialect's error event."""
        if self._over:
            return b""
        try:
            return await self._next()
        except GatewayError as failure:
            error = failure
        except UpstreamError as failure:
            error = as_error(failure)
        except Refused as refused:
            error = refused.as_error()
        self.close()
        record, tag = self._live.record, self._live.request.tag
        record.code, record.reason = error.status, error.code
        return ROUTES[self._live.request.path].dialect.error_event(error, tag)

    def close(self) -> None:
        """End all that still runs."""
        self._over = True
        self._live.on_end = None
        if self._failed is not None:
            errors.forget_trace(self._failed)
        for task in self._tasks:
            task.cancel()
        for part in list(self._parts.values()):
            self._ended(part)

    # Running them.

    async def _start(self) -> None:
        """Start each when the one before it has its slots."""
        parent = self._live.record
        for index in range(len(self._several.prompts)):
            request = await self._several.part(index, self._steps)
            request.admitted = index > 0
            record = RequestFinished(request.tag, request.path, parent.model, request.priority)
            record.caller, record.stream = parent.caller, request.stream
            part = Part(request, record)
            self._parts[request.id] = part
            self._run(partial(self._answered, index, part))
            await part.begun.wait()

    def _run(self, work: Callable[[], Awaitable[None]]) -> None:
        async def guarded() -> None:
            try:
                await work()
            except Exception as error:  # noqa: BLE001 - whoever reads raises it
                self._fail(error)

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answered(self, index: int, part: Part) -> None:
        """One prompt's answer, into the pieces."""
        try:
            reply = await self._relay(part)
            if reply.status >= 300:
                raise Refused(reply)
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
            part.begun.set()
            self._ended(part)
        self._left -= 1
        if not self._left:
            await self._pieces.put(None)

    async def _whole(self, index: int, part: Part, reply: Reply) -> None:
        parts = [reply.content]
        if (rest := reply.rest) is not None:
            self._open[part.request.id] = rest
            size = len(reply.content)
            while chunk := await rest.next():
                parts.append(chunk)
                size += len(chunk)
                if size > self._most:
                    raise errors.node_failed(f"The answer is too long ({self._most} bytes).")
        await self._pieces.put((index, b"".join(parts)))

    async def _stream(self, index: int, part: Part, reply: Reply) -> None:
        rest = reply.rest
        if rest is None:
            raise errors.node_failed("The node did not stream its answer.")
        self._open[part.request.id] = rest
        self._fields = self._fields or reply.fields
        chunk: bytes | None = reply.content
        while chunk:
            if part.record.code >= 400:
                # It has ended with the error, in this API's form.
                message = verdict.message_of(sse.payload(sse.last_events(chunk, 1)))
                code = part.record.reason or "node_failed"
                raise GatewayError(part.record.code, code, message or "The node failed.")
            await self._pieces.put((index, chunk))
            chunk = await rest.next()

    def _ended(self, part: Live) -> None:
        """One is over: once its account is written, it is part of the whole's."""
        rest = self._open.pop(part.request.id, None)
        if rest is not None:
            rest.close()
        if self._parts.pop(part.request.id, None) is not None:
            self._bus.soon(self._count, part.record)

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
            record.queue, record.overhead = part.queue, part.overhead

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
        if self.on_fail is not None:
            self.on_fail()

    # Reading them.

    async def _piece(self) -> tuple[int, bytes] | None:
        """What came next, and of which prompt; None: that was all. Raises what failed."""
        piece = await self._pieces.get()
        if self._failed is not None:
            raise self._failed
        self.moved = self._clock()
        return piece

    async def _next(self) -> bytes:
        """The next events of the stream of all of them; at its end what ends it."""
        while (piece := await self._piece()) is not None:
            if events := self._merging.events(*piece):
                return events
        self.close()
        return self._merging.end()
