"""One chat request over HTTP: streamed, timed and compared with the answer it must have."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import httptools
import msgspec

from tests.bench.load import Address

TOKEN = b'"content":"'
PATH = "/v1/chat/completions"


@dataclass(slots=True)
class Answer:
    """The response. Times are monotonic seconds; `first` is 0 if no text came."""

    text: str = ""
    finish: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    sent: float = 0.0
    first: float = 0.0
    done: float = 0.0
    problem: str = ""


@dataclass(slots=True, eq=False)
class _Exchange(asyncio.Protocol):
    """One connection for one request."""

    done: asyncio.Future[str]
    clock: Callable[[], float]
    body: bytearray = field(default_factory=bytearray)
    first: float = 0.0
    transport: asyncio.Transport | None = None
    parser: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"not HTTP: {error}")

    def on_body(self, body: bytes) -> None:
        self.body += body
        if not self.first and TOKEN in self.body:
            self.first = self.clock()

    def on_message_complete(self) -> None:
        status = self.parser.get_status_code()
        reply = bytes(self.body[:300]).decode(errors="replace")
        self._end("" if status == 200 else f"status {status}: {reply}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"connection lost after {len(self.body)} bytes: {exc}")

    def _end(self, problem: str) -> None:
        if not self.done.done():
            self.done.set_result(problem)


async def ask(
    address: Address,
    body: dict[str, Any],
    limit: float,
    clock: Callable[[], float] = time.monotonic,
) -> Answer:
    """Send a chat request and read its answer to the end, for `limit` seconds at most."""
    loop = asyncio.get_running_loop()
    exchange = _Exchange(loop.create_future(), clock)
    answer = Answer(sent=clock())
    try:
        async with asyncio.timeout(limit):
            transport, _ = await loop.create_connection(lambda: exchange, *address)
            transport.write(_request(address, body))
            answer.problem = await exchange.done
    except TimeoutError:
        answer.problem = f"no end after {limit:.0f} s"
    except OSError as error:
        answer.problem = str(error)
    finally:
        answer.done = clock()
        if exchange.transport is not None:
            exchange.transport.abort()
    answer.first = exchange.first
    if not answer.problem:
        answer.problem = _read(bytes(exchange.body), answer)
    return answer


def _request(address: Address, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def _read(body: bytes, answer: Answer) -> str:
    """Fill in `answer` from the events; returns what is wrong with them, or an empty text."""
    events = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    if not events or events.pop() != b"[DONE]":
        return "a stream without [DONE]"
    try:
        for event in map(msgspec.json.decode, events):
            for choice in event.get("choices", ()):
                answer.text += choice["delta"].get("content") or ""
                answer.finish = choice["finish_reason"] or answer.finish
            if usage := event.get("usage"):
                answer.prompt_tokens = usage["prompt_tokens"]
                answer.completion_tokens = usage["completion_tokens"]
                answer.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    except (msgspec.DecodeError, LookupError, TypeError, AttributeError) as error:
        return f"not a chat stream: {error!r}"
    if not answer.prompt_tokens:
        return "a stream without usage"
    return "" if answer.first else "a stream without text"
