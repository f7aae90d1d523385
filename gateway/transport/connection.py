"""One connection to a node: HTTP/1.1 by httptools, with the body parts of a socket read merged.

A connection has no timer: its user sets the limits and calls `fail` when one has passed, so that a
stream of a thousand tokens costs no timer per token. `LoopTimeout` is for users that wait for one
thing at a time.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from types import TracebackType
from typing import Any, Self, cast

import httptools

from gateway.terms import Headers, SegmentedBody
from gateway.transport.errors import (
    ConnectionReset,
    InvalidResponse,
    StaleConnection,
    UpstreamError,
)

# Largest head of a response, interim ones included; llama.cpp's has some 500 bytes.
MOST_HEAD_BYTES = 64 * 1024
BODY_HIGH_WATER = 256 * 1024  # unread bytes of body at which the socket is no longer read
# If a reused connection breaks later than this after sending, the request reached the node.
STALE_SECONDS = 1.0
MOST_PASSED_BYTES = 1024  # larger chunks are parsed; one with a token has some 300 bytes
# Work on what has come, up to twice as much in one turn of the event loop; once on what waited.
TURN_SECONDS = 0.01
# Gets what came where a chunk begins, and where the size line ends that fits all of it. It is one
# chunk if it ends in CRLF, too. Returns whether it has dealt with it. It must not raise.
PassChunk = Callable[[bytes, int], bool]
# Parts of a limit that pass one after the other. However long the event loop is held up, one or two
# of them pass, and the data that has come meanwhile is read before the next one ends.
TIMEOUT_STEPS = 10


class TurnLimit:
    """Bounds the work on what sockets bring in one turn of the event loop; all of them share one.

    uvloop reads all sockets that are ready in one turn, a thousand in a burst. What one of them
    brings behind the limit waits for the next turn, unparsed, and the socket is not read meanwhile.
    """

    def __init__(
        self, *, seconds: float = TURN_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds = seconds
        self._clock = clock
        self._since = -math.inf
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_scheduled = False
        """Whether the next turn, which will begin with `_go_on`, has not begun."""
        self.is_spent = False  # whether `look` has found that this turn has no time left

    def look(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Look whether this turn of the one `loop` has no time left: then `wait`."""
        if not self.is_spent:
            now = self._clock()
            if now - self._since > self._seconds:
                # Many turns may have passed, unless the next one still waits to be told of.
                self._loop, self._since, self.is_spent = loop, now, self._is_scheduled
                self._schedule()
        return self.is_spent

    def wait(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` in one of the next turns, when those that wait longer have been called."""
        self._waiting.append(go_on)
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled and self._loop is not None:
            self._is_scheduled = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self.is_spent = self._is_scheduled = False
        began = self._clock()
        try:
            while self._waiting:
                self._waiting.popleft()()
                if self._clock() - began >= self._seconds:
                    break
        finally:
            self._since = self._clock()
            if self._waiting:
                self._schedule()


class TurnBoundProtocol(asyncio.Protocol):
    """A connection that leaves what comes behind its turn's limit to a later turn."""

    __slots__ = ("_unreceived", "transport", "turn")

    def __init__(self, turn: TurnLimit) -> None:
        self.turn = turn
        self.transport: Any = None
        self._unreceived = b""  # has come, and waits for another turn

    @property
    def read_paused(self) -> bool:
        """Whether its user has paused reading."""
        raise NotImplementedError

    def _receive(self, data: bytes) -> None:
        """Work on what has come."""
        raise NotImplementedError

    def _hold(self, data: bytes) -> None:
        """Leave `data` to a later turn, and read no more until then."""
        if not self._unreceived:
            self.turn.wait(self._receive_late)
        # Each time, as its user may have resumed it meanwhile.
        self.transport.pause_reading()
        self._unreceived += data

    def _receive_late(self) -> None:
        """Receive what had to wait."""
        data, self._unreceived = self._unreceived, b""
        if not data:
            return
        transport = self.transport
        try:
            self._receive(data)
        except BaseException:
            transport.abort()  # As event loops do if `data_received` raises.
            raise
        if not (self.read_paused or transport.is_closing()):
            transport.resume_reading()


class NodeConnection(TurnBoundProtocol):
    """Sends one request at a time and reads its response, part by part.

    If it breaks in reuse, before the first byte and within `stale_seconds` of sending, it is a
    `StaleConnection`: the request never reached the node.
    """

    __slots__ = (
        "_between_chunks", "_bodyless", "_error", "_framed", "_known", "_known_headers", "_loop",
        "_made", "_made_for", "_parser", "_parts", "_pass_chunk", "_paused", "_pending", "_sent_at",
        "_sink", "_stale_seconds", "_waiter", "_whole_headers", "alive", "complete", "headers",
        "on_body", "on_wake", "received_bytes", "requests_sent", "reusable", "status",
    )  # fmt: skip

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        stale_seconds: float = STALE_SECONDS,
        turn: TurnLimit | None = None,
    ) -> None:
        super().__init__(turn or TurnLimit())
        self._loop = loop
        self._stale_seconds = stale_seconds
        self.transport: asyncio.Transport | None = None
        self.alive = False
        self.requests_sent = 0
        self._waiter: asyncio.Future[None] | None = None
        self.on_wake: Callable[[bool], None] | None = None
        """Called instead of a future when no task waits (`eager_task.Wakeable`)."""
        self._sink: Callable[[], bool] | None = None
        self._pass_chunk: PassChunk | None = None
        self._parts: list[bytes] = []
        # The parser calls this for every piece of a body: a C function is fastest.
        self.on_body = self._parts.append
        self._parser = httptools.HttpResponseParser(self)
        # State that outlasts a reply, all of it of the head that was parsed last.
        self._known: KnownHead | None = None
        """That head, if its reply had status 200 and came in one read."""
        self._known_headers: Headers = []  # its headers, all but the length
        self._whole_headers: tuple[int, Headers] = -1, []  # with a body of so many bytes
        self._made: bytes | None = None  # what `made_of_head` has made of it
        self._made_for: object = None
        self._clear()

    def made_of_head(
        self, make: Callable[[Headers, tuple[str, ...]], bytes], key: tuple[str, ...]
    ) -> bytes:
        """`make(headers, key)`, made once while the same head repeats and `key` is the same."""
        if self._made is None or self._made_for is not key:
            self._made, self._made_for = make(self.headers, key), key
        return self._made

    def _clear(self) -> None:
        self.status = 0
        self.headers: Headers = []
        self.complete = False
        self.reusable = False
        self.received_bytes = 0
        self._framed = False
        self._bodyless = False
        self._between_chunks = False  # whether the parser expects the size line of a chunk
        self._error: UpstreamError | None = None
        self._parts.clear()
        self._pending = 0  # bytes that have come since the reader last took some, framing included
        self._paused = False
        self._sent_at = 0.0

    # For the user of the connection.

    def send(
        self, data: bytes, body: bytes | SegmentedBody = b"", *, bodyless: bool = False
    ) -> None:
        """Start an exchange. `bodyless`: a HEAD request, whose response has no body."""
        if self.requests_sent:
            self._clear()
        self.requests_sent += 1
        self._bodyless = bodyless
        self._sent_at = self._loop.time()
        transport = self.transport
        if transport is None or transport.is_closing():
            self._break(self._reset("The node had closed the connection"))
            return
        if isinstance(body, bytes) and len(body) < MOST_HEAD_BYTES:
            transport.write(data + body)
        else:
            transport.write(data)
            for piece in (body,) if isinstance(body, bytes) else body.pieces():
                transport.write(piece)

    def keep_unused(self) -> None:
        """Nothing is sent on it: a new one may serve another exchange, as one that was used may."""
        if not self.requests_sent:
            self.requests_sent = 1
            self.complete = self.reusable = True

    async def read_status(self) -> int:
        """Wait for the response's head; `headers` is set then. Returns the status.

        Raises: UpstreamError.
        """
        while not self.status:
            await self.wait_for_data()
        return self.status

    async def read(self) -> bytes:
        """All body bytes that have come since the last call; empty at the end.

        Raises: UpstreamError, after all bytes before the failure have been read.
        """
        while not self._parts or self._bodyless:
            if self.complete:
                return b""
            await self.wait_for_data()
        return self.read_nowait()

    def read_nowait(self) -> bytes:
        """The body bytes that have come since the last call; empty if there are none."""
        parts = self._parts
        if not parts:
            return b""
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        self._pending = 0
        if self._paused:
            self._paused = False
            if self.transport is not None and not self.transport.is_closing():
                self.transport.resume_reading()
        return data

    def unread(self, data: bytes) -> None:
        """Put back bytes that were read: they are the next, and no more is received before."""
        self._parts.insert(0, data)
        self._pending += len(data)
        if self.transport is not None and not self.complete and not self.transport.is_closing():
            self._paused = True
            self.transport.pause_reading()

    async def read_all(self, most_bytes: int) -> bytes:
        """The whole body. Raises: UpstreamError; InvalidResponse if it is larger than that."""
        parts = []
        size = 0
        while part := await self.read():
            parts.append(part)
            size += len(part)
            if size > most_bytes:
                raise InvalidResponse(f"The node's answer is larger than {most_bytes} bytes")
        return b"".join(parts)

    @property
    def has_unread(self) -> bool:
        """Whether body bytes have come that `read` has not returned yet."""
        return bool(self._parts)

    def fail(self, error: UpstreamError) -> None:
        """End the exchange from this side: the reader gets `error`, the socket is closed."""
        self._break(error)
        self.close()

    def close(self) -> None:
        """Close at once; unsent bytes are lost."""
        self.alive = False
        self._unreceived = b""
        self._sink = self._pass_chunk = None
        if self.transport is not None:
            self.transport.abort()

    def wait_for_data(
        self, sink: Callable[[], bool] | None = None, pass_chunk: PassChunk | None = None
    ) -> Awaitable[object]:
        """Done when more has come, or the end. Raises: UpstreamError, if nothing more can come.

        `sink` is called first when more has come, from within the event loop. While it returns
        True it has dealt with the data, and the waiter is not woken. At the end it must return
        False. It must not raise. `pass_chunk` may take a chunk before it is parsed.
        """
        if self._error is not None:
            raise self._error
        self._sink, self._pass_chunk = sink, pass_chunk
        if asyncio.current_task() is None:
            return self
        waiter = self._waiter = self._loop.create_future()
        return waiter

    def __await__(self) -> Generator[Self, None, None]:
        yield self

    def _wake(self) -> None:
        self._sink = self._pass_chunk = None
        on_wake = self.on_wake
        if on_wake is not None:
            self.on_wake = None
            on_wake(self.complete and self._error is None)
            return
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _break(self, error: UpstreamError) -> None:
        if not self.complete and self._error is None:
            self._error = error
        self._wake()

    def _reset(self, message: str) -> ConnectionReset:
        stale = (
            self.requests_sent > 1
            and not self.received_bytes
            and self._loop.time() - self._sent_at < self._stale_seconds
        )
        return StaleConnection(message) if stale else ConnectionReset(message)

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self.transport = cast("asyncio.Transport", transport)
        self.alive = True

    def data_received(self, data: bytes) -> None:
        if self._between_chunks and self._pass_chunk is not None and not self.turn.is_spent:
            size = len(data)
            if size < MOST_PASSED_BYTES:
                line = _SIZE_LINES[size]
                if data.startswith(line) and self._pass_chunk(data, len(line)):
                    return  # the parser would be where it was
        if self.complete or not self.requests_sent:
            # A response without a request: the connection can't be trusted.
            self.reusable = False
            self.close()
        elif self._unreceived or self.turn.look(self._loop):
            self._hold(data)
            self._between_chunks = False  # no chunk overtakes these bytes
        else:
            self._receive(data)

    @property
    def read_paused(self) -> bool:
        """Whether too much of the body is unread."""
        return self._paused

    def _receive(self, data: bytes) -> None:
        if self._known is not None and not self.received_bytes and not self._bodyless:
            body = self._known.match_body(data)
            if body is not None:
                # A whole response with the known head has come.
                size, headers = self._whole_headers
                if size != len(body):
                    size = len(body)
                    headers = [(b"content-length", b"%d" % size), *self._known_headers]
                    self._whole_headers = size, headers
                self.received_bytes = len(data)
                self.headers = headers
                self.status = 200
                self.complete = self.reusable = self._framed = True
                if body:
                    self._parts.append(body)
                self._wake()
                return
        self.received_bytes += len(data)
        self._pending += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raised_here = error.__context__
            self._break(
                raised_here
                if isinstance(raised_here, InvalidResponse)
                else InvalidResponse("The node's reply is not HTTP")
            )
            self.close()
            return
        except httptools.HttpParserUpgrade:
            self._break(InvalidResponse("The node wants to change the protocol"))
            self.close()
            return
        if self.status:
            if self.received_bytes == len(data):
                self._learn_head(data)
            # The last line end is the chunk's, as the parser has not taken it for the body's.
            parts = self._parts
            self._between_chunks = (
                data.endswith(b"\n\n\r\n") and bool(parts) and not parts[-1].endswith(b"\r\n")
            )
            sink = self._sink
            if sink is None or not sink():
                self._wake()
            if self._pending > BODY_HIGH_WATER and not self._paused and not self.complete:
                self._paused = True
                assert self.transport is not None
                self.transport.pause_reading()
        elif self.received_bytes > MOST_HEAD_BYTES:
            self._break(_head_too_large())
            self.close()

    def _learn_head(self, data: bytes) -> None:
        """Recognise the head of this response when it is repeated; not that of an interim one."""
        whole = self.complete and self.reusable and not self._bodyless
        if whole and self.status == 200 and data.startswith(b" 200 ", len(b"HTTP/1.1")):
            self._known = KnownHead.from_message(data)
            self._known_headers = [f for f in self.headers if f[0] != b"content-length"]
            self._whole_headers = -1, []

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._receive_late()
        del self._parser  # it refers to this object: only the garbage collector would free both
        self.alive = False
        self.reusable = False
        if not self.requests_sent or self.complete:
            return
        if self.status and not self._framed and exc is None and self._error is None:
            # A body without a length ends with its connection, unless that was reset or failed.
            self.complete = True
            self._wake()
        elif self.status:
            self._break(self._reset("The node broke off in the middle of its reply"))
        else:
            self._break(self._reset("The node closed the connection without a reply"))

    # Called by the parser.

    def on_message_begin(self) -> None:
        if self.status:
            raise InvalidResponse("The node sent more than one response")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # else it is a trailer, which the request did not ask for
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        # A reply with the head before this one is parsed again: it must get nothing of this one.
        self._known = self._made = None
        status = self._parser.get_status_code()
        if status < 200:
            self.headers = []
            return
        if self.received_bytes > MOST_HEAD_BYTES and _head_size(self.headers) > MOST_HEAD_BYTES:
            raise _head_too_large()
        for name, value in self.headers:
            if name == b"content-length" or (
                name == b"transfer-encoding" and value.lower().endswith(b"chunked")
            ):
                self._framed = True
        if status in {204, 304}:
            self._framed = True
        self.status = status
        if self._bodyless:
            # llhttp can't know that no body follows, so this connection is not used again.
            self.complete = True

    def on_message_complete(self) -> None:
        if not self.status:
            return
        self.complete = True
        # llhttp knows this only within this callback.
        self.reusable = self._parser.should_keep_alive()


def _size_lines() -> list[bytes]:
    """By the bytes of a whole chunk, the line that it begins with; `-` if there is none."""
    lines = [b"-"] * MOST_PASSED_BYTES
    for size in range(1, MOST_PASSED_BYTES):
        line = b"%x\r\n" % size
        whole = len(line) + size + len(b"\r\n")
        if whole < MOST_PASSED_BYTES:
            lines[whole] = line
    return lines


_SIZE_LINES = _size_lines()


def _head_too_large() -> InvalidResponse:
    return InvalidResponse(f"The head of the node's reply is larger than {MOST_HEAD_BYTES} bytes")


def _head_size(headers: Headers) -> int:
    return sum(len(name) + len(value) for name, value in headers)


class LoopTimeout:
    """`asyncio.timeout` that counts only time in which the event loop ran.

    A gateway that was held up itself blames no node for it. Like `asyncio.timeout` it cancels the
    task in it, and raises TimeoutError on the way out.
    """

    __slots__ = ("_loop", "_step_seconds", "_steps_left", "_timeout", "_timer")

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)
        self._step_seconds = seconds / TIMEOUT_STEPS
        self._steps_left = TIMEOUT_STEPS
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._timer = self._loop.call_later(self._step_seconds, self._step)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._timeout.__aexit__(kind, error, trace)

    def _step(self) -> None:
        self._steps_left -= 1
        if self._steps_left:
            self._timer = self._loop.call_later(self._step_seconds, self._step)
        else:
            self._timeout.reschedule(self._loop.time())


_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length:[ ]?([0-9]{1,9})(?=\r\n)", re.IGNORECASE)
_HEAD_END = b"\r\n\r\n"
# Digits of a Content-Length; a body that needs more does not come in one read.
MOST_LENGTH_DIGITS = 9


class KnownHead:
    """The bytes of a head, before and after the digits of its Content-Length."""

    __slots__ = ("_after", "_before", "_begin", "_size", "_start", "_whole")

    def __init__(self, before: bytes, digits: bytes, after: bytes) -> None:
        self._before = before
        self._after = after
        self._start = len(before)
        # As it came the first time: most messages that repeat a head repeat the length, too.
        self._whole = before + digits + after
        self._begin = len(self._whole)
        self._size = self._begin + int(digits)

    @classmethod
    def from_message(cls, data: bytes) -> KnownHead | None:
        """The head of `data`, which is one message; None if its head can't be recognised.

        The parsed headers hold for every message of which `match_body` returns the body.
        """
        end = data.find(_HEAD_END) + len(_HEAD_END)
        found = _CONTENT_LENGTH.findall(data, 0, end)
        if len(found) != 1 or len(data) - end != int(found[0]):
            # Also when the parser saw an earlier end of the head.
            return None
        length = _CONTENT_LENGTH.search(data, 0, end)
        assert length is not None
        return cls(data[: length.start(1)], length[1], data[length.end(1) : end])

    def match_body(self, data: bytes) -> bytes | None:
        """The body, if `data` is exactly one message with this head; else None."""
        if len(data) == self._size and data.startswith(self._whole):
            return data[self._begin :]
        start = self._start
        if not data.startswith(self._before):
            return None
        end = data.find(b"\r", start, start + MOST_LENGTH_DIGITS + 1)
        if end <= start or not data.startswith(self._after, end):
            return None
        digits = data[start:end]
        begin = end + len(self._after)
        if digits.isdigit() and int(digits) == len(data) - begin:
            return data[begin:]
        return None
