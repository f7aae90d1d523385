"""What one server that nobody else uses does: reading, writing alone, writing in all slots, stall.

Prompts are ordinary words as token ids, so that their length is exact; nothing is cached.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import httpx

from gateway.tools.tune.measurements import BenchmarkRequest, Figures, median_figures

FIGURE_REPEATS = 3  # of all figures on one start of a server ...

REPEATS_SECONDS = 15.0  # ... unless that has taken so many seconds

SHORT_PROMPT = 32  # tokens of a prompt that only begins an answer

SETTLED_TOKENS = 8  # tokens after which a stream has its pace

WARM_UP_TOKENS = 16  # tokens written first: the model's pages are read in

IDLE_TIMEOUT = 30.0  # seconds until a server has let go of streams that were left

IDLE_POLL_INTERVAL = 0.02

PROMPT_SEED = 5

PROMPT_WORDS = """
    the river ran under an old bridge where people used to meet and talk about work weather
    music trade letters from far away and what their children had learnt that year while boats
    went by with stone wood salt and wool for towns along the coast which nobody here had seen
"""


T = TypeVar("T")


class BenchmarkError(Exception):
    """The server answered with something that can't be measured; the text says what."""


@dataclass(frozen=True, slots=True)
class StreamSample:
    """When a stream had how many tokens, and its pace by the server's clock, in tokens/s."""

    at: float
    tokens: int
    tokens_per_second: float


class ServerBenchmark:
    """Measures the server at `url`; `context` is that of one slot, in tokens."""

    def __init__(
        self,
        url: str,
        client: httpx.AsyncClient,
        request: BenchmarkRequest,
        *,
        slots: int,
        context: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = url
        self._client = client
        self._request = request
        self._slots = slots
        self._context = context
        self._clock = clock
        self._text: list[int] = []
        self._turn = 0

    async def run(self) -> Figures:
        """All figures, medians of a few repeats; the memory is left to others.

        Raises ProbeError, and httpx.HTTPError when the server goes away.
        """
        self._text = await self._tokens()
        await self._alone(SHORT_PROMPT, WARM_UP_TOKENS)
        begun, many = self._clock(), list[Figures]()
        while len(many) < FIGURE_REPEATS and (not many or self._clock() - begun < REPEATS_SECONDS):
            prefill, decode = await self._alone(self._request.prompt, self._request.answer)
            several = self._slots > 1
            busy = await self._all_busy() if several else decode
            stall = await self._stall() if several else None
            many.append(Figures(prefill, decode, busy, stall, None))
        return median_figures(many)

    async def _alone(self, prompt: int, answer: int) -> tuple[float, float]:
        """Tokens/s of reading and of writing, by the server's own clock."""
        last: dict[str, Any] = {}
        async with aclosing(self._stream(prompt, answer)) as chunks:
            async for chunk in chunks:
                last = chunk
        timings = last.get("timings") or {}
        read, wrote = timings.get("prompt_per_second"), timings.get("predicted_per_second")
        if not read or not wrote or timings.get("prompt_n", 0) < prompt:
            raise BenchmarkError(f"{self._url}: the end of an answer has no usable `timings`")
        return float(read), float(wrote)

    async def _all_busy(self) -> float:
        """Tokens/s of all slots together."""

        async def one() -> list[StreamSample]:
            return [step async for step in self._written(SHORT_PROMPT, self._request.answer)]

        return combined_throughput(await run_concurrently([one() for _ in range(self._slots)]))

    async def _stall(self) -> float:
        """Seconds of the longest silence of a stream while another slot reads a prompt."""
        reading: asyncio.Task[tuple[float, float]] | None = None
        times: list[float] = []
        sent = 0.0
        room = self._context - SHORT_PROMPT - 1
        try:
            async with aclosing(self._written(SHORT_PROMPT, room)) as steps:
                async for step in steps:
                    times.append(step.at)
                    if reading is None and step.tokens >= SETTLED_TOKENS:
                        sent = step.at
                        reading = asyncio.create_task(self._alone(self._request.prompt, 2))
                    elif reading is not None and reading.done():
                        break
            if reading is None:
                raise BenchmarkError(f"{self._url}: a stream ended after {len(times)} tokens")
            await reading
        finally:
            if reading is not None and not reading.done():
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
        await self._idle()
        return longest_silence(times, sent)

    async def _written(self, prompt: int, answer: int) -> AsyncGenerator[StreamSample, None]:
        async with aclosing(self._stream(prompt, answer)) as chunks:
            async for chunk in chunks:
                timings = chunk.get("timings") or {}
                if not isinstance(timings.get("predicted_n"), int):
                    raise BenchmarkError(f"{self._url}: a chunk without `timings.predicted_n`")
                pace = float(timings.get("predicted_per_second") or 0.0)
                yield StreamSample(self._clock(), timings["predicted_n"], pace)

    async def _stream(self, prompt: int, answer: int) -> AsyncGenerator[dict[str, Any], None]:
        body = {
            "prompt": self._prompt(prompt),
            "n_predict": answer,
            "stream": True,
            "ignore_eos": True,
            "cache_prompt": False,
            "timings_per_token": True,
            "temperature": 0,
        }
        async with self._client.stream("POST", f"{self._url}/completion", json=body) as answered:
            if answered.status_code != 200:
                text = (await answered.aread())[:500].decode(errors="replace")
                raise BenchmarkError(f"{self._url}: HTTP {answered.status_code}: {text}")
            async for line in answered.aiter_lines():
                if not line.startswith("data: "):
                    continue
                chunk = _json(self._url, line[6:])
                if "error" in chunk:
                    raise BenchmarkError(f"{self._url}: {chunk['error']}")
                yield chunk

    def _prompt(self, length: int) -> list[int]:
        """Other words each time."""
        self._turn += 1
        at = self._turn * 7 % len(self._text)
        return (self._text[at:] + self._text[:at])[:length]

    async def _tokens(self) -> list[int]:
        rng, words = random.Random(PROMPT_SEED), PROMPT_WORDS.split()
        chosen = rng.choices(words, k=self._request.prompt + SHORT_PROMPT)
        answered = await self._client.post(
            f"{self._url}/tokenize", json={"content": " ".join(chosen)}
        )
        found = _json(self._url, answered.text).get("tokens")
        if not isinstance(found, list) or len(found) < self._request.prompt:
            raise BenchmarkError(f"{self._url}: /tokenize answered {answered.text[:200]}")
        return found

    async def _idle(self) -> None:
        """Wait until no slot works on a stream that was left."""
        until = self._clock() + IDLE_TIMEOUT
        while self._clock() < until:
            answered = await self._client.get(f"{self._url}/slots")
            if answered.status_code != 200:
                return  # switched off: what is left of the stream counts into the next figure
            if not any(slot.get("is_processing") for slot in answered.json()):
                return
            await asyncio.sleep(IDLE_POLL_INTERVAL)
        raise BenchmarkError(
            f"{self._url}: a slot is still busy {IDLE_TIMEOUT:.0f} s after its stream"
        )


async def run_concurrently(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results; when one fails the others are ended first, and its error is raised."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def combined_throughput(streams: list[list[StreamSample]]) -> float:
    """Tokens/s of streams that ran side by side: all their tokens over all their time.

    Where they came to us in bunches that is too much; the server's own paces bound it.
    """
    if any(len(stream) < 2 for stream in streams):
        raise BenchmarkError("an answer came in one piece, so its pace is not known")
    took = max(stream[-1].at for stream in streams) - min(stream[0].at for stream in streams)
    tokens = sum(stream[-1].tokens - stream[0].tokens for stream in streams)
    paces = sum(stream[-1].tokens_per_second for stream in streams)
    return min(tokens / took, paces) if took > 0 else paces


def longest_silence(times: list[float], since: float) -> float:
    """The longest time between two tokens, of which the second came after `since`."""
    return max(
        (after - before for before, after in pairwise(times) if after > since),
        default=0.0,
    )


def _json(url: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise BenchmarkError(f"{url}: not JSON: {text[:200]}") from error
    if not isinstance(found, dict):
        raise BenchmarkError(f"{url}: not an object: {text[:200]}")
    return found
