"""Plays a trace against one front: sessions side by side, turns one after the other."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from tests.bench.load import Address, LoadConnection
from tests.bench.scenarios import post
from tests.bench.scheduling.fronts import MODEL
from tests.bench.scheduling.trace import Trace, Turn
from tests.emulator import expected_chat_text

TOKEN = b'"content":"'


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


class _Exchange(LoadConnection):
    """One connection for one request, which notes when its text begins."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(self._finish, 0, 0)
        self.done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.clock = clock
        self.body = bytearray()
        self.first = 0.0

    def on_body(self, body: bytes) -> None:
        self.length += len(body)
        self.body += body
        if not self.first and TOKEN in self.body:
            self.first = self.clock()

    def problem(self) -> str:
        status = self.parser.get_status_code()
        reply = bytes(self.body[:300]).decode(errors="replace")
        return "" if status == 200 else f"status {status}: {reply}"

    def _finish(self, _: LoadConnection, problem: str) -> None:
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
    exchange = _Exchange(clock)
    transport: asyncio.Transport | None = None
    answer = Answer(sent=clock())
    try:
        async with asyncio.timeout(limit):
            transport, _ = await loop.create_connection(lambda: exchange, *address)
            exchange.send(post("/v1/chat/completions", json.dumps(body).encode()))
            answer.problem = await exchange.done
    except TimeoutError:
        answer.problem = f"no end after {limit:.0f} s"
    except OSError as error:
        answer.problem = str(error)
    finally:
        answer.done = clock()
        exchange.busy = False
        if transport is not None:
            transport.abort()
    answer.first = exchange.first
    if not answer.problem:
        answer.problem = _read(bytes(exchange.body), answer)
    return answer


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


UNKNOWN = 4096  # `max_tokens` of a client that doesn't know how long its answer will be

Asking = Callable[[Address, dict[str, Any], float, Callable[[], float]], Awaitable[Answer]]
"""Sends one request to an address, within a limit of seconds by that clock."""


@dataclass(frozen=True, slots=True)
class Record:
    """One request. Seconds of the fleet's time; `sent` counts from the beginning of the trace."""

    session: int
    turn: int
    sent: float
    ttft: float
    took: float
    prompt: int
    cached: int
    completion: int
    problem: str


@dataclass(frozen=True, slots=True)
class Player:
    """How a trace is played: `scale` seconds of the fleet's time pass in one of the clock's.

    `limit` is the longest a request may take, in seconds of the fleet's time.
    """

    address: Address
    scale: float
    known: bool  # whether `max_tokens` is the answer's real length
    limit: float = 600.0
    clock: Callable[[], float] = time.monotonic
    asking: Asking = ask

    async def play(self, trace: Trace) -> list[Record]:
        """Play the whole trace. A session ends with the first request that fails."""
        begin, count = self.clock(), len(trace.sessions)
        played = await asyncio.gather(*(self._session(trace, n, begin) for n in range(count)))
        return [record for session in played for record in session]

    async def _session(self, trace: Trace, which: int, begin: float) -> list[Record]:
        session = trace.sessions[which]
        messages = [{"role": "system", "content": trace.systems[session.tenant]}]
        records: list[Record] = []
        await asyncio.sleep(begin + session.at / self.scale - self.clock())
        for number, turn in enumerate(session.turns):
            await asyncio.sleep(turn.think / self.scale)
            messages.append({"role": "user", "content": turn.question})
            body = chat_body(messages, turn.answer_tokens if self.known else UNKNOWN)
            limit = self.limit / self.scale
            answer = await self.asking(self.address, body, limit, self.clock)
            problem = answer.problem or as_emulated(messages, turn, answer)
            ttft = answer.first - answer.sent if answer.first else 0.0
            times = ((answer.sent - begin) * self.scale, ttft * self.scale)
            took = (answer.done - answer.sent) * self.scale
            tokens = (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens)
            records.append(Record(which, number, *times, took, *tokens, problem))
            if problem:
                break
            messages.append({"role": "assistant", "content": answer.text})
        return records


def chat_body(messages: list[dict[str, str]], max_tokens: int) -> dict[str, Any]:
    """The body of a request of a trace."""
    options = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    return {"model": MODEL, "messages": messages, "max_tokens": max_tokens, **options}


def as_emulated(messages: list[dict[str, Any]], turn: Turn, answer: Answer) -> str:
    """Check the emulated model's answer, which is known to the last word."""
    if answer.completion_tokens != turn.answer_tokens:
        return f"{answer.completion_tokens} tokens, not {turn.answer_tokens}"
    if answer.text != expected_chat_text(messages, turn.answer_tokens):
        return "another text"
    return ""
