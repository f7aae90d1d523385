"""Plays a trace against one front: sessions side by side, turns one after the other."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.bench.load import Address
from tests.bench.scheduling.fronts import MODEL
from tests.bench.scheduling.trace import Trace, Turn
from tests.emulator import expected_chat_text
from tests.gateways import NO_TLS


@dataclass(slots=True)
class Answer:
    """The response. Times are monotonic seconds; `first` is 0 if no text came."""

    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    sent: float = 0.0
    first: float = 0.0
    done: float = 0.0
    problem: str = ""


async def ask(
    address: Address,
    body: dict[str, Any],
    limit: float,
    clock: Callable[[], float] = time.monotonic,
) -> Answer:
    """Send a chat request and read its answer to the end, for `limit` seconds at most."""
    answer = Answer(sent=clock())
    url = "http://{}:{}/v1/chat/completions".format(*address)
    try:
        async with (
            asyncio.timeout(limit),
            httpx.AsyncClient(verify=NO_TLS, trust_env=False, timeout=None) as client,
            client.stream("POST", url, json=body) as reply,
        ):
            if reply.status_code == 200:
                answer.problem = await _read(reply, answer, clock)
            else:
                answer.problem = f"status {reply.status_code}: {(await reply.aread())[:300]!r}"
    except TimeoutError:
        answer.problem = f"no end after {limit:.0f} s"
    except httpx.TransportError as error:
        answer.problem = repr(error)
    answer.done = clock()
    return answer


async def _read(reply: httpx.Response, answer: Answer, clock: Callable[[], float]) -> str:
    """Fill in `answer` from the events; returns what is wrong with them, or an empty text."""
    last = ""
    try:
        async for line in reply.aiter_lines():
            last = line.removeprefix("data: ") or last
            if not line.startswith("data: {"):
                continue
            event = json.loads(last)
            for choice in event.get("choices", ()):
                answer.text += choice["delta"].get("content") or ""
            if answer.text and not answer.first:
                answer.first = clock()
            if usage := event.get("usage"):
                answer.prompt_tokens = usage["prompt_tokens"]
                answer.completion_tokens = usage["completion_tokens"]
                answer.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        return f"not a chat stream: {error!r}"
    if last != "[DONE]":
        return "a stream without [DONE]"
    if not answer.prompt_tokens:
        return "a stream without usage"
    return "" if answer.first else "a stream without text"


UNKNOWN = 4096  # `max_tokens` of a client that doesn't know how long its answer will be


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

    addresses: Sequence[Address]  # each request goes to the one with the fewest
    scale: float
    known: bool  # whether `max_tokens` is the answer's real length
    limit: float = 600.0
    clock: Callable[[], float] = time.monotonic
    busy: Counter[Address] = field(default_factory=Counter)

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
            address = min(self.addresses, key=self.busy.__getitem__)
            self.busy[address] += 1
            answer = await ask(address, body, limit, self.clock)
            self.busy[address] -= 1
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
