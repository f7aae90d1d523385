"""The endpoints that can be measured, and one request: when each event of its response came.

Times are taken in the event loop's read callback, before anything is parsed. All that a server may
send is bounded: its head, an event, the whole response, the number of events, the time.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.config.errors import single_line
from gateway.transport.connection import NodeConnection
from gateway.transport.errors import StaleConnection, UpstreamError
from gateway.transport.pool import ConnectionPool

MOST_COUNT = 100_000_000  # tokens; a larger figure of a server is nonsense
MOST_MILLISECONDS = 1e9


@dataclass(slots=True)
class ServerReport:
    """What the server itself says of a request. None: it does not."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    prefill_seconds: float | None = None
    """llama.cpp's `timings`: of the slot's prefill, without the wait for the slot."""

    def learn(self, event: Mapping[str, Any]) -> None:
        """Take what an event or a plain response says; the last word counts."""
        usage = event.get("usage")
        if isinstance(usage, dict):
            self.prompt_tokens = _count(usage.get("prompt_tokens"), self.prompt_tokens)
            self.completion_tokens = _count(usage.get("completion_tokens"), self.completion_tokens)
            details = usage.get("prompt_tokens_details")
            if isinstance(details, dict):
                self.cached_tokens = _count(details.get("cached_tokens"), self.cached_tokens)
        timings = event.get("timings")
        if isinstance(timings, dict):
            milliseconds = timings.get("prompt_ms")
            if isinstance(milliseconds, int | float) and 0 <= milliseconds <= MOST_MILLISECONDS:
                self.prefill_seconds = milliseconds / 1000


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One endpoint."""

    name: str
    path: bytes  # below `/v1`
    is_stream: bool
    prompt_fields: Callable[[str], dict[str, Any]] = field(repr=False)
    """A body's fields that hold the prompt."""
    has_content: Callable[[Mapping[str, Any]], bool] = field(repr=False)
    """Whether an event, or a plain response, holds some of what was asked for."""

    def body(
        self, model: str | None, prompt: str, max_tokens: int, extra: dict[str, Any]
    ) -> dict[str, Any]:
        """The body of a request. A field that `extra` sets to None is left out."""
        fields: dict[str, Any] = {"model": model, **self.prompt_fields(prompt)}
        if self.is_stream:
            fields |= {"stream": True, "max_tokens": max_tokens, "temperature": 0}
        return {name: value for name, value in (fields | extra).items() if value is not None}


def _chat_content(event: Mapping[str, Any]) -> bool:
    delta = _first(event, "choices").get("delta")
    if not isinstance(delta, dict):
        return False
    return any(delta.get(name) for name in _DELTA_FIELDS)


_DELTA_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")


def _first(event: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    listed = event.get(name)
    first = listed[0] if isinstance(listed, list) and listed else None
    return first if isinstance(first, dict) else {}


def is_finished(event: Mapping[str, Any]) -> bool:
    """Whether an event of a stream says why the answer has ended."""
    return _first(event, "choices").get("finish_reason") is not None


def _count(value: object, otherwise: int | None) -> int | None:
    sound = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_COUNT
    return value if sound else otherwise  # type: ignore[return-value]


CHAT = Endpoint(
    "chat",
    b"/chat/completions",
    True,
    lambda prompt: {"messages": [{"role": "user", "content": prompt}]},
    _chat_content,
)

ENDPOINTS = {
    one.name: one
    for one in (
        CHAT,
        Endpoint(
            "completions",
            b"/completions",
            True,
            lambda prompt: {"prompt": prompt},
            lambda event: bool(_first(event, "choices").get("text")),
        ),
        Endpoint(
            "embeddings",
            b"/embeddings",
            False,
            lambda prompt: {"input": prompt},
            lambda reply: bool(_first(reply, "data").get("embedding")),
        ),
    )
}


MOST_EVENT_BYTES = 1 << 20
MOST_RESPONSE_BYTES = 64 << 20
MOST_ERROR_BYTES = 64 * 1024  # of an error's body that are read
ERROR_BODY_SECONDS = 5.0
# Events with content that a stream may have beyond two for each token that it may write.
SPARE_EVENTS = 16
LONGEST_DETAIL = 200  # characters of a server's own words that are kept
LONGEST_RETRY_AFTER = 3600.0


@dataclass(slots=True)
class RequestResult:
    """One request's result. Times are seconds of the monotonic clock; None: never came."""

    number: int
    intended: float  # when it should have started: latencies count from here
    started: float = 0.0  # when this program turned to it
    connect_seconds: float = 0.0
    sent: float | None = None
    first: float | None = None  # the first event with content
    last: float | None = None  # the last event with content
    ended: float = 0.0
    events: int = 0  # events with content
    longest_gap: float = 0.0  # longest time between two of them
    error: str | None = None  # why it failed, in one word; None: it did not
    detail: str = ""  # more of it
    retry_after: float | None = None
    queue_seconds: float | None = None  # what `X-Gateway-Queue-Ms` says
    server: ServerReport = field(default_factory=ServerReport)

    @property
    def ttft(self) -> float | None:
        """Seconds to the first event with content."""
        return None if self.first is None else self.first - self.intended

    @property
    def completion(self) -> float:
        """Seconds to the end."""
        return self.ended - self.intended

    @property
    def tokens(self) -> int:
        """Tokens written: what the server counts, else one for each event."""
        counted = self.server.completion_tokens
        return self.events if counted is None else counted

    @property
    def inter_token(self) -> float | None:
        """Mean seconds between tokens; None with less than two events.

        The first event holds tokens too: where each has `k`, the gaps between `n` events brought
        `k * (n - 1)` tokens.
        """
        if self.first is None or self.last is None or self.events < 2:
            return None
        each = max(1.0, self.tokens / self.events)
        return (self.last - self.first) / (each * (self.events - 1))


class ExchangeError(Exception):
    """The response is not what was asked for."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


class StreamReader:
    """Reads a stream of server-sent events, whose bytes come in any pieces."""

    def __init__(self, endpoint: Endpoint, result: RequestResult, most_events: int) -> None:
        self._endpoint = endpoint
        self._result = result
        self._most_events = most_events
        self._rest = bytearray()
        self._data: list[bytes] = []
        self._event_bytes = 0
        self._received = 0
        self.is_finished = False  # whether an event has said why the answer ended
        self.is_done = False  # whether `[DONE]` has come

    def feed(self, data: bytes, now: float) -> None:
        """Take bytes that came at this time. Raises ExchangeError."""
        self._received += len(data)
        if self._received > MOST_RESPONSE_BYTES:
            raise ExchangeError("too_large", f"more than {MOST_RESPONSE_BYTES} bytes")
        if b"\n" not in data:
            self._rest += data
        else:
            *lines, rest = (bytes(self._rest) + data).split(b"\n")
            self._rest = bytearray(rest)
            for line in lines:
                self._line(line.removesuffix(b"\r"), now)
        if self._event_bytes + len(self._rest) > MOST_EVENT_BYTES:
            raise ExchangeError("too_large", f"an event of more than {MOST_EVENT_BYTES} bytes")

    def _line(self, line: bytes, now: float) -> None:
        if line:
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip())
                self._event_bytes += len(line)
                if self._event_bytes > MOST_EVENT_BYTES:
                    raise ExchangeError(
                        "too_large", f"an event of more than {MOST_EVENT_BYTES} bytes"
                    )
            return
        if self._data:
            event = b"\n".join(self._data)
            self._data, self._event_bytes = [], 0
            self._event(event, now)

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.is_done = True
            return
        event = read_object(data)
        if event.get("error"):
            raise ExchangeError("error_event", message_of(event))
        self._result.server.learn(event)
        self.is_finished = self.is_finished or is_finished(event)
        if not self._endpoint.has_content(event):
            return
        result = self._result
        if result.last is None:
            result.first = now
        else:
            result.longest_gap = max(result.longest_gap, now - result.last)
        result.last = now
        result.events += 1
        if result.events > self._most_events:
            raise ExchangeError("endless", f"more than {self._most_events} events with content")


@dataclass(slots=True)
class RequestSender:
    """Sends requests over the connections of a pool."""

    pool: ConnectionPool
    endpoint: Endpoint
    connect_timeout: float
    timeout: float  # seconds for a whole request, from its start
    clock: Callable[[], float] = time.monotonic

    async def send(self, result: RequestResult, body: bytes, max_tokens: int) -> None:
        """Send one request, and fill in its result: its failure too. Never raises for a server."""
        result.started = self.clock()
        connection: NodeConnection | None = None
        try:
            async with asyncio.timeout(self.timeout):
                head = self.pool.address.request_head(
                    b"POST", b"/v1" + self.endpoint.path, _HEADERS, len(body)
                )
                while True:
                    connection = self.pool.take_idle()
                    if connection is None:
                        began = self.clock()
                        connection = await self.pool.connect(self.connect_timeout)
                        result.connect_seconds += self.clock() - began
                    try:
                        await self._exchange(connection, head, body, result, max_tokens)
                    except StaleConnection:
                        connection.close()
                        continue
                    break
            self.pool.release(connection)
            connection = None
        except TimeoutError:
            reason = "no_answer" if result.first is None else "too_slow"
            result.error, result.detail = reason, f"not done within {self.timeout:g} s"
        except UpstreamError as error:
            broken_off = error.outcome == "reset" and result.first is not None
            result.error = "cut" if broken_off else error.outcome
            result.detail = str(error)
        except ExchangeError as error:
            result.error = error.reason
            result.detail = single_line(error.detail[:LONGEST_DETAIL])
        finally:
            if connection is not None:
                connection.close()
            result.ended = self.clock()

    async def _exchange(
        self,
        connection: NodeConnection,
        head: bytes,
        body: bytes,
        result: RequestResult,
        max_tokens: int,
    ) -> None:
        reader = StreamReader(self.endpoint, result, 2 * max_tokens + SPARE_EVENTS)
        failure: list[ExchangeError] = []

        def take() -> bool:
            """Read what has come. Whether to go on waiting; called as soon as it comes."""
            if not is_stream(connection, self.endpoint):
                return False
            now = self.clock()
            try:
                reader.feed(connection.read_nowait(), now)
            except ExchangeError as error:
                failure.append(error)
                return False
            return not connection.complete

        result.sent = self.clock()
        connection.send(head, body)
        while True:
            await connection.wait_for_data(take)
            if failure:
                raise failure[0]
            if not connection.status:
                continue
            if not is_stream(connection, self.endpoint):
                await self._plain(connection, result)
                return
            take()
            if failure:
                raise failure[0]
            if connection.complete:
                break
        self._note_head(connection, result)
        if result.events == 0:
            raise ExchangeError("empty", "the stream ended without a token")
        if not reader.is_done and not reader.is_finished:
            raise ExchangeError("cut", "the stream ended without [DONE] or a finish_reason")

    async def _plain(self, connection: NodeConnection, result: RequestResult) -> None:
        """Read a response that is no stream."""
        self._note_head(connection, result)
        if connection.status != 200:
            raise await self._refused(connection, result)
        if self.endpoint.is_stream:
            kind = _header(connection, b"content-type") or "none"
            raise ExchangeError("no_stream", f"content type {kind}")
        content = await connection.read_all(MOST_RESPONSE_BYTES)
        reply = read_object(content)
        result.server.learn(reply)
        if not self.endpoint.has_content(reply):
            raise ExchangeError("empty", "the response holds nothing of what was asked for")

    async def _refused(self, connection: NodeConnection, result: RequestResult) -> ExchangeError:
        reason = f"http_{connection.status}"
        result.retry_after = _seconds(_header(connection, b"retry-after"))
        try:
            async with asyncio.timeout(ERROR_BODY_SECONDS):
                content = await connection.read_all(MOST_ERROR_BYTES)
            detail = message_of(read_object(content))
        except (TimeoutError, UpstreamError, ExchangeError):
            detail = ""
        if not connection.complete:
            connection.close()
        return ExchangeError(reason, detail)

    def _note_head(self, connection: NodeConnection, result: RequestResult) -> None:
        waited = _seconds(_header(connection, b"x-gateway-queue-ms"), most=math.inf)
        result.queue_seconds = None if waited is None else waited / 1000


_HEADERS = (
    b"content-type: application/json\r\naccept: text/event-stream, application/json\r\n"
    b"accept-encoding: identity\r\nuser-agent: llama-gateway bench\r\n"
)


def is_stream(connection: NodeConnection, endpoint: Endpoint) -> bool:
    """Whether the response is the stream that was asked for."""
    if connection.status != 200 or not endpoint.is_stream:
        return False
    kind = _header(connection, b"content-type") or ""
    return kind.partition(";")[0].strip().lower() == "text/event-stream"


def read_object(content: bytes) -> dict[str, object]:
    """The JSON object of an event or a response. Raises ExchangeError."""
    try:
        value = msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise ExchangeError("not_json", content[:60].decode(errors="replace")) from None
    if not isinstance(value, dict):
        raise ExchangeError("not_json", "no JSON object")
    return value


def message_of(reply: dict[str, object]) -> str:
    """An error's own words; empty: none."""
    error = reply.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return message[:LONGEST_DETAIL] if isinstance(message, str) else ""


def _header(connection: NodeConnection, name: bytes) -> str | None:
    for one, value in connection.headers:
        if one == name:
            return value.decode("latin-1")
    return None


def _seconds(value: str | None, most: float = LONGEST_RETRY_AFTER) -> float | None:
    try:
        seconds = float(value or "")
    except ValueError:
        return None
    return min(seconds, most) if seconds >= 0 and not math.isinf(seconds) else None
