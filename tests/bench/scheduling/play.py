"""Plays a trace against one front: sessions side by side, turns one after the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from tests.bench.load import Address
from tests.bench.scheduling.client import Answer, ask
from tests.bench.scheduling.fleet import MODEL
from tests.bench.scheduling.trace import Trace, Turn
from tests.emulator import expected_chat_text

UNKNOWN = 4096  # `max_tokens` of a client that doesn't know how long its answer will be

Check = Callable[[list[dict[str, Any]], Turn, Answer], str]
"""What is wrong with an answer, or an empty text."""

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
    check: Check
    limit: float = 600.0
    clock: Callable[[], float] = time.monotonic
    asking: Asking = ask

    async def play(self, trace: Trace) -> list[Record]:
        """Play the whole trace. A session ends with the first request that fails."""
        begin = self.clock()
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._session(trace, which, begin))
                for which in range(len(trace.sessions))
            ]
        return [record for task in tasks for record in task.result()]

    async def _session(self, trace: Trace, which: int, begin: float) -> list[Record]:
        session = trace.sessions[which]
        messages = [{"role": "system", "content": trace.systems[session.tenant]}]
        records: list[Record] = []
        await asyncio.sleep(begin + session.at / self.scale - self.clock())
        for number, turn in enumerate(session.turns):
            await asyncio.sleep(turn.think / self.scale)
            messages.append({"role": "user", "content": turn.question})
            limit = self.limit / self.scale
            answer = await self.asking(self.address, self._body(messages, turn), limit, self.clock)
            problem = answer.problem or self.check(messages, turn, answer)
            records.append(
                Record(
                    session=which,
                    turn=number,
                    sent=(answer.sent - begin) * self.scale,
                    ttft=(answer.first - answer.sent) * self.scale if answer.first else 0.0,
                    took=(answer.done - answer.sent) * self.scale,
                    prompt=answer.prompt_tokens,
                    cached=answer.cached_tokens,
                    completion=answer.completion_tokens,
                    problem=problem,
                )
            )
            if problem:
                break
            messages.append({"role": "assistant", "content": answer.text})
        return records

    def _body(self, messages: list[dict[str, str]], turn: Turn) -> dict[str, Any]:
        return {
            "model": MODEL,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "max_tokens": turn.answer_tokens if self.known else UNKNOWN,
        }


def as_emulated(messages: list[dict[str, Any]], turn: Turn, answer: Answer) -> str:
    """Check the emulated model's answer, which is known to the last word."""
    if answer.completion_tokens != turn.answer_tokens:
        return f"{answer.completion_tokens} tokens, not {turn.answer_tokens}"
    if answer.text != expected_chat_text(messages, turn.answer_tokens):
        return "another text"
    return ""
