"""The endpoints that can be measured, what the server is, and one request: when its events came.

Times are taken in the event loop's read callback, before anything is parsed. All that a server may
send is bounded: its head, an event, the whole response, the number of events, the time.

A prompt has a wanted length in the server's own tokens. It is random ordinary words: its first
words are those of a common prefix, the rest is its own. The same seed gives the same texts, and no
two requests of a run have a longer beginning in common than they should, so that a server's prompt
cache helps as much as is wanted, and no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import socket
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec

from gateway.api import sse
from gateway.api.outcome import retry_after
from gateway.config.errors import single_line
from gateway.nodes.server_properties import ServerProperties
from gateway.transport.connection import NodeConnection
from gateway.transport.errors import (
    ConnectFailed,
    ConnectTimedOut,
    InvalidResponse,
    StaleConnection,
    UpstreamError,
)
from gateway.transport.pool import ConnectionPool
from gateway.workshop.simulate.simulation import TracePrompt

MOST_COUNT = 100_000_000  # tokens; a larger figure of a server is nonsense
MOST_MILLISECONDS = 1e9


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One endpoint."""

    name: str
    path: bytes  # below `/v1`
    is_stream: bool
    prompt_fields: Callable[[str], dict[str, Any]]  # of a body, which hold the prompt
    has_content: Callable[[Mapping[str, Any]], bool]
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
    delta = _object(_first(event, "choices").get("delta"))
    return any(delta.get(name) for name in _DELTA_FIELDS)


_DELTA_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")


def _first(event: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    listed = event.get(name)
    return _object(listed[0]) if isinstance(listed, list) and listed else {}


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


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
CONNECT_SECONDS = 10.0
# Events with content that a stream may have beyond two for each token that it may write.
SPARE_EVENTS = 16
LONGEST_DETAIL = 200  # characters of a server's own words that are kept


@dataclass(slots=True)
class RequestResult:
    """One request's result. Times are seconds of the monotonic clock; None: never came."""

    number: int
    intended: float  # when it should have started: latencies count from here
    started: float = 0.0  # when this program turned to it
    connect_seconds: float = 0.0
    first: float | None = None  # the first event with content
    last: float | None = None  # the last event with content
    ended: float = 0.0
    events: int = 0  # events with content
    longest_gap: float = 0.0  # longest time between two of them
    error: str | None = None  # why it failed, in one word; None: it did not
    detail: str = ""  # more of it
    retry_after: float | None = None
    queue_seconds: float | None = None  # what `X-Gateway-Queue-Ms` says
    # What the server itself says of it; None: it does not.
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    prefill_seconds: float | None = None
    """llama.cpp's `timings`: of the slot's prefill, without the wait for the slot."""

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
        return self.events if self.completion_tokens is None else self.completion_tokens

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

    def learn(self, event: Mapping[str, Any]) -> None:
        """Take what an event or a plain response says; the last word counts."""
        usage = _object(event.get("usage"))
        self.prompt_tokens = _count(usage.get("prompt_tokens"), self.prompt_tokens)
        self.completion_tokens = _count(usage.get("completion_tokens"), self.completion_tokens)
        details = _object(usage.get("prompt_tokens_details"))
        self.cached_tokens = _count(details.get("cached_tokens"), self.cached_tokens)
        milliseconds = _object(event.get("timings")).get("prompt_ms")
        if isinstance(milliseconds, int | float) and 0 <= milliseconds <= MOST_MILLISECONDS:
            self.prefill_seconds = milliseconds / 1000


class ExchangeError(Exception):
    """The response is not what was asked for."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


class StreamReader:
    """Reads a stream of server-sent events, whose bytes come in any pieces."""

    def __init__(self, endpoint: Endpoint, result: RequestResult, most_events: int) -> None:
        self._endpoint, self.result, self._most_events = endpoint, result, most_events
        self._framer = sse.EventFramer(MOST_EVENT_BYTES, keep_comments=False)
        self._received = 0
        self.is_done = False  # whether `[DONE]` has come, or why the answer has ended

    def feed(self, data: bytes, now: float) -> None:
        """Take bytes that came at this time. Raises ExchangeError."""
        self._received += len(data)
        if self._received > MOST_RESPONSE_BYTES:
            raise ExchangeError("too_large", f"more than {MOST_RESPONSE_BYTES} bytes")
        try:
            events = self._framer.feed(data)
        except InvalidResponse as error:
            raise ExchangeError("too_large", str(error)) from None
        for event in sse.split(events):
            content = sse.payload(event)
            if content == b"[DONE]":
                self.is_done = True
            elif content:
                self._take(read_object(content), now)

    def _take(self, event: dict[str, object], now: float) -> None:
        if event.get("error"):
            raise ExchangeError("error_event", message_of(event))
        result = self.result
        result.learn(event)
        self.is_done = self.is_done or is_finished(event)
        if not self._endpoint.has_content(event):
            return
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
    timeout: float  # seconds for a whole request, from its start
    clock: Callable[[], float] = time.monotonic

    async def send(self, result: RequestResult, body: bytes, max_tokens: int) -> None:
        """Send one request, and fill in its result: its failure too. Never raises for a server."""
        result.started = self.clock()
        reader = StreamReader(self.endpoint, result, 2 * max_tokens + SPARE_EVENTS)
        path = b"/v1" + self.endpoint.path
        head = self.pool.address.request_head(b"POST", path, _HEADERS, len(body))
        connection: NodeConnection | None = None
        try:
            async with asyncio.timeout(self.timeout):
                while True:
                    connection = self.pool.take_idle()
                    if connection is None:
                        began = self.clock()
                        connection = await self.pool.connect(CONNECT_SECONDS)
                        result.connect_seconds += self.clock() - began
                    try:
                        connection.send(head, body)
                        await self._read(connection, reader)
                        break
                    except StaleConnection:
                        connection.close()
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
                self.pool.release(connection)  # closed, if it was not read to its end
            result.ended = self.clock()

    async def _read(self, connection: NodeConnection, reader: StreamReader) -> None:
        result = reader.result
        failure: list[ExchangeError] = []

        def take() -> bool:
            """Read what has come. Whether to go on waiting; called as soon as it comes."""
            if not is_stream(connection, self.endpoint):
                return False
            try:
                reader.feed(connection.read_nowait(), self.clock())
            except ExchangeError as error:
                failure.append(error)
                return False
            return not connection.complete

        while True:
            await connection.wait_for_data(take)
            if not failure and connection.status:
                if not is_stream(connection, self.endpoint):
                    await self._plain(connection, result)
                    return
                take()
            if failure:
                raise failure[0]
            if connection.complete:
                break
        _note_head(connection, result)
        if result.events == 0:
            raise ExchangeError("empty", "the stream ended without a token")
        if not reader.is_done:
            raise ExchangeError("cut", "the stream ended without [DONE] or a finish_reason")

    async def _plain(self, connection: NodeConnection, result: RequestResult) -> None:
        """Read a response that is no stream."""
        _note_head(connection, result)
        if connection.status != 200:
            result.retry_after = retry_after(connection.headers, time.time())
            detail = ""
            with contextlib.suppress(TimeoutError, UpstreamError, ExchangeError):
                async with asyncio.timeout(ERROR_BODY_SECONDS):
                    content = await connection.read_all(MOST_ERROR_BYTES)
                detail = message_of(read_object(content))
            raise ExchangeError(f"http_{connection.status}", detail)
        if self.endpoint.is_stream:
            kind = _header(connection, b"content-type") or "none"
            raise ExchangeError("no_stream", f"content type {kind}")
        reply = read_object(await connection.read_all(MOST_RESPONSE_BYTES))
        result.learn(reply)
        if not self.endpoint.has_content(reply):
            raise ExchangeError("empty", "the response holds nothing of what was asked for")


def _note_head(connection: NodeConnection, result: RequestResult) -> None:
    with contextlib.suppress(ValueError):
        waited = float(_header(connection, b"x-gateway-queue-ms"))
        result.queue_seconds = waited / 1000 if 0 <= waited < math.inf else None


_HEADERS = (
    b"content-type: application/json\r\naccept: text/event-stream, application/json\r\n"
    b"accept-encoding: identity\r\nuser-agent: llama-gateway bench\r\n"
)


def is_stream(connection: NodeConnection, endpoint: Endpoint) -> bool:
    """Whether the response is the stream that was asked for."""
    if connection.status != 200 or not endpoint.is_stream:
        return False
    kind = _header(connection, b"content-type")
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


def _header(connection: NodeConnection, name: bytes) -> str:
    return next((value.decode("latin-1") for one, value in connection.headers if one == name), "")


_TEXT = """
    the river ran under an old bridge where people used to meet and talk about work weather music
    trade letters from far away what their children had learnt that year while boats went by with
    stone wood salt wool for towns along coast which nobody here seen before one day some of them
    would go there find small house near water then come back home tell how long it was light rain
    fell over green fields every morning men women walked down into city market bread fish were sold
    new road made travel easy but many still took slow way because they liked open sky high hill
"""

WORDS = tuple(dict.fromkeys(_TEXT.split()))
KEPT_PREFIXES = 64  # texts of prefixes that are kept; others are made again
# Tokens of a prompt: about a megabyte of text, for each request that is under way.
MOST_PROMPT_TOKENS = 200_000


@dataclass(frozen=True, slots=True)
class Calibration:
    """How many tokens the server counts for words: `overhead + words * tokens_per_word`."""

    tokens_per_word: float = 1.0
    overhead: float = 0.0  # tokens of a prompt without words: of the chat template
    source: str = "guessed: one token a word"

    @classmethod
    def of(cls, few: int | None, many: int | None) -> Calibration:
        """By the tokens that the server counted of `PROBE_WORDS` words, and of twice as many."""
        if few is None or many is None or many <= few:
            return cls()
        return cls((many - few) / PROBE_WORDS, 2 * few - many, "the server's usage")

    def words(self, tokens: int) -> int:
        """Words of a prompt of so many tokens; at least one."""
        return max(1, round((tokens - self.overhead) / self.tokens_per_word))


@dataclass(frozen=True, slots=True)
class PromptWriter:
    """Writes prompts."""

    seed: int
    calibration: Calibration

    def write(self, text: TracePrompt) -> str:
        """Write a prompt."""
        whole, shared, words = self.calibration.words(text.tokens), 0, []
        if text.prefix:
            shared = min(whole, round(text.prefix_tokens / self.calibration.tokens_per_word))
        if shared:
            words.append(_prefix_words(f"{self.seed} prefix {text.prefix}", shared))
        if shared < whole:
            words.append(random_words(f"{self.seed} stream {text.stream}", whole - shared))
        return " ".join(words)


def random_words(seed: str, count: int) -> str:
    """So many words; the same seed and a larger count only add words.

    Each run of `len(WORDS)` words has each word once, so that two texts of a length hardly differ
    in tokens.
    """
    rng = random.Random(seed)
    words: list[str] = []
    while len(words) < count:
        words += rng.sample(WORDS, len(WORDS))
    return " ".join(words[:count])


_prefix_words = lru_cache(maxsize=KEPT_PREFIXES)(random_words)


QUESTION_SECONDS = 15.0  # limit of a question that costs the server nothing
MOST_ANSWER_BYTES = 4 << 20
ROUND_TRIPS = 5  # questions by which the distance is measured
# Words of the shorter prompt of a calibration, in which each word is once; the longer one has each
# twice.
PROBE_WORDS = len(WORDS)
PROBE_TOKENS = 4  # tokens asked for by a calibration: a first one may be special and empty
MOST_ADDRESSES = 8


class TargetError(Exception):
    """The server can't be measured. The text says why, and the remedy."""


@dataclass(slots=True)
class ServerDescription:
    """What the server says of itself. None: it does not."""

    model: str | None = None
    slots: int | None = None
    context: int | None = None  # tokens of one slot
    round_trip: float | None = None
    """Seconds of the fastest of a few trivial requests, while the server was idle."""
    ignores_eos: bool = False  # whether it knows `ignore_eos`, as llama.cpp and vLLM do
    notes: list[str] = field(default_factory=list)


def is_this_machine(host: str) -> bool:
    """Whether an address of this name is one of this machine."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, _, _, address in found[:MOST_ADDRESSES]:
        # Only an address of its own can be bound.
        with contextlib.suppress(OSError), socket.socket(family, kind) as one:
            one.bind(address)
            return True
    return False


async def describe_server(sender: RequestSender, model: str | None) -> ServerDescription:
    """Ask the server for its models and its slots. Raises TargetError if there is none."""
    found = ServerDescription(model=model)
    try:
        status, models, first_trip = await _ask_json(sender, b"/v1/models")
    except (ConnectFailed, ConnectTimedOut) as error:
        raise TargetError(f"can't be reached: {error}. Is the server running?") from None
    except (UpstreamError, TimeoutError, ExchangeError) as error:
        limit = min(sender.timeout, QUESTION_SECONDS)
        reason = str(error) or f"no answer within {limit:g} s"
        found.notes.append(f"/v1/models does not answer ({reason}).")
        return found
    if status in {401, 403}:
        raise TargetError(
            f"it refuses us ({status}). Remedy: --key-file FILE, or the key in LLAMA_GATEWAY_KEY"
        )
    data = models.get("data")
    listed = [one for one in data if isinstance(one, dict)] if isinstance(data, list) else []
    names = [one["id"] for one in listed if isinstance(one.get("id"), str)]
    if model is not None:
        if names and model not in names:
            found.notes.append(f"/v1/models does not list {model}.")
    elif not names:
        note = f"/v1/models names no model (status {status}): requests name none. --model NAME"
        found.notes.append(note)
    else:
        found.model = names[0]
        if len(names) > 1:
            found.notes.append(f"Of {len(names)} models the first, {names[0]}: --model chooses.")
    found.round_trip = first_trip
    try:
        for _ in range(ROUND_TRIPS - 1):
            found.round_trip = min(found.round_trip, (await _ask_json(sender, b"/v1/models"))[2])
        status, props, _ = await _ask_json(sender, b"/props")
    except (UpstreamError, TimeoutError, ExchangeError):
        status, props = 0, {}
    if status == 200:
        told = ServerProperties()
        told.read_props(props)
        found.slots, found.context = told.slots, told.context
    owners = {str(one.get("owned_by")) for one in listed}
    found.ignores_eos = found.slots is not None or bool(owners & {"llamacpp", "vllm"})
    return found


async def probe_server(
    sender: RequestSender,
    server: ServerDescription,
    extra: dict[str, Any],
    ignore_eos: bool,  # noqa: FBT001 - one of the settings
    seed: int,
) -> tuple[Calibration, dict[str, Any]]:
    """Find by a few short requests how the server counts tokens, and the fields of every body.

    `extra`: fields that the user wants in every body; they are never left out. What was found wrong
    is noted in `server`. Raises TargetError where the server takes no such request at all.
    """
    endpoint = sender.endpoint

    async def ask(words: int, fields: dict[str, Any]) -> RequestResult:
        prompt = random_words(f"{seed} calibration {words}", words)
        body = endpoint.body(server.model, prompt, PROBE_TOKENS, fields)
        result = RequestResult(-1, sender.clock())
        await sender.send(result, json.dumps(body).encode(), PROBE_TOKENS)
        return result

    # Fields that help are tried, and left out where they are refused.
    variants: list[dict[str, Any]] = [{}]
    if endpoint.is_stream:
        variants.insert(0, {"stream_options": {"include_usage": True}})
        if ignore_eos:
            variants.insert(0, {**variants[0], "ignore_eos": True})
    short, accepted = RequestResult(0, 0.0), extra
    for fields in variants:
        accepted = {**fields, **extra}
        short = await ask(PROBE_WORDS, accepted)
        if short.error not in {"http_400", "http_422"}:
            break
    if short.error in {"connect_failed", "connect_timeout"}:
        raise TargetError(f"can't be reached: {short.detail}")
    if short.error in {"http_401", "http_403", "http_404", "http_405", "http_501"}:
        raise TargetError(
            f"it refuses POST /v1{endpoint.path.decode()} ({_shown(short)}). Remedy: --key-file "
            "FILE, or the key in LLAMA_GATEWAY_KEY; --endpoint and --model name others"
        )
    if short.error not in {None, "empty"}:
        note = f"The server fails from the first request on ({_shown(short)})"
        server.notes.append(f"{note}: prompts are not calibrated.")
        return Calibration(), accepted
    if endpoint.is_stream and short.completion_tokens is None:
        server.notes.append("The server sends no usage: each event is counted as one token.")
    few, many = short.prompt_tokens, None
    if few is not None:
        many = (await ask(2 * PROBE_WORDS, accepted)).prompt_tokens
    found = Calibration.of(few, many)
    if found == Calibration():
        server.notes.append(
            "The server tells no token counts: prompts are taken to have one token a word."
        )
    return found, accepted


@dataclass(frozen=True, slots=True)
class Baseline:
    """A request that is alone on the server; medians, in seconds. None: not measured."""

    ttft: float | None = None
    inter_token: float | None = None
    requests: int = 0

    @classmethod
    def of(cls, results: list[RequestResult]) -> Baseline:
        """Of requests sent one after the other; the first of several has only warmed up."""
        sound = [one for one in results if one.error is None]
        counted = sound[1:] or sound
        ttft = [one.ttft for one in counted if one.ttft is not None]
        gaps = [one.inter_token for one in counted if one.inter_token is not None]
        return cls(
            statistics.median(ttft) if ttft else None,
            statistics.median(gaps) if gaps else None,
            len(counted),
        )


async def _ask_json(sender: RequestSender, path: bytes) -> tuple[int, dict[str, Any], float]:
    """Status, object (empty if it is none), and seconds from sending to the head."""
    sent = [0.0]
    async with (
        asyncio.timeout(min(sender.timeout, QUESTION_SECONDS)),
        sender.pool.response(
            sender.pool.address.request_head(b"GET", path, _QUESTION_HEADERS, None),
            b"",
            connect_timeout=CONNECT_SECONDS,
            on_connected=lambda _: sent.__setitem__(0, sender.clock()),
        ) as connection,
    ):
        trip = sender.clock() - sent[0]
        content = await connection.read_all(MOST_ANSWER_BYTES)
    try:
        return connection.status, read_object(content), trip
    except ExchangeError:
        return connection.status, {}, trip


_QUESTION_HEADERS = b"accept: application/json\r\naccept-encoding: identity\r\n"


def _shown(result: RequestResult) -> str:
    return f"{result.error}: {result.detail}" if result.detail else str(result.error)
