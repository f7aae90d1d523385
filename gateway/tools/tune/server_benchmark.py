"""Benchmarks one idle server: prefill, decode alone, decode with all slots busy, stall, energy.

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

FIGURE_REPEATS = 3  # of all figures, on one start of a server

REPEATS_SECONDS = 15.0  # no repeat begins after this time

SHORT_PROMPT = 32  # tokens of a prompt where only decode is measured

SETTLED_TOKENS = 8  # tokens after which a stream's speed is steady

WARM_UP_TOKENS = 16  # decoded first, so that the model's pages are in memory

IDLE_TIMEOUT = 30.0  # seconds until the slots of closed streams must be idle

IDLE_POLL_INTERVAL = 0.02

PROMPT_SEED = 5

PROMPT_WORDS = """
    the river ran under an old bridge where people used to meet and talk about work weather
    music trade letters from far away and what their children had learnt that year while boats
    went by with stone wood salt and wool for towns along the coast which nobody here had seen
"""


T = TypeVar("T")


class BenchmarkError(Exception):
    """The server's response can't be measured. The text says why."""


@dataclass(frozen=True, slots=True)
class StreamSample:
    """Tokens of a stream at a time, and its speed by the server's own clock."""

    at: float
    tokens: int
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class RequestFigures:
    """Figures of one request that is alone on its server."""

    prefill: float  # tokens/s
    decode: float
    prefill_joules: float | None  # for a token; None: not measured
    decode_joules: float | None


class ServerBenchmark:
    """Benchmarks the server at `url`; `context` is that of one slot, in tokens.

    `read_joules` returns the energy of the whole machine since some moment, None where that is not
    known. `servers` of them are benchmarked at the same time, and each is taken to use its share.
    """

    def __init__(
        self,
        url: str,
        client: httpx.AsyncClient,
        request: BenchmarkRequest,
        *,
        slots: int,
        context: int,
        read_joules: Callable[[], float | None] = lambda: None,
        servers: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = url
        self._client = client
        self._request = request
        self._slots = slots
        self._context = context
        self._read_joules = read_joules
        self._servers = servers
        self._clock = clock
        self._text: list[int] = []
        self._prompts_made = 0

    async def run(self) -> Figures:
        """Measure all figures but the memory: medians of a few repeats.

        Raises BenchmarkError, and httpx.HTTPError when the server goes away.
        """
        self._text = await self._tokens()
        await self._alone(SHORT_PROMPT, WARM_UP_TOKENS)
        began, repeats = self._clock(), list[Figures]()
        while len(repeats) < FIGURE_REPEATS and (
            not repeats or self._clock() - began < REPEATS_SECONDS
        ):
            alone = await self._alone(self._request.prompt, self._request.answer)
            several = self._slots > 1
            busy, joules = (
                await self._all_busy() if several else (alone.decode, alone.decode_joules)
            )
            stall = await self._stall() if several else None
            repeats.append(
                Figures(
                    alone.prefill,
                    alone.decode,
                    busy,
                    stall,
                    None,
                    prefill_joules=alone.prefill_joules,
                    decode_joules=joules,
                )
            )
        return median_figures(repeats)

    async def _alone(self, prompt: int, answer: int) -> RequestFigures:
        """Measure one request; tokens/s by the server's own clock."""
        first: dict[str, Any] = {}
        last: dict[str, Any] = {}
        joules_at_send = self._read_joules()
        joules_at_first = None
        async with aclosing(self._stream(prompt, answer)) as chunks:
            async for chunk in chunks:
                if not first:
                    first, joules_at_first = chunk, self._read_joules()
                last = chunk
        joules_at_end = self._read_joules()
        timings = last.get("timings") or {}
        prefill, decode = timings.get("prompt_per_second"), timings.get("predicted_per_second")
        if not prefill or not decode or timings.get("prompt_n", 0) < prompt:
            raise BenchmarkError(f"{self._url}: the end of an answer has no usable `timings`")
        written = timings.get("predicted_n", 0) - (first.get("timings") or {}).get("predicted_n", 0)
        return RequestFigures(
            float(prefill),
            float(decode),
            self._joules_per_token(joules_at_send, joules_at_first, prompt),
            self._joules_per_token(joules_at_first, joules_at_end, written),
        )

    async def _all_busy(self) -> tuple[float, float | None]:
        """Return tokens/s of decode in all slots together, and joules for a token."""
        joules_at_first: list[float | None] = []

        async def one() -> list[StreamSample]:
            samples = []
            async for sample in self._samples(SHORT_PROMPT, self._request.answer):
                if not joules_at_first:
                    joules_at_first.append(self._read_joules())
                samples.append(sample)
            return samples

        streams = await run_concurrently([one() for _ in range(self._slots)])
        joules_at_end = self._read_joules()
        throughput = combined_throughput(streams)
        written = sum(stream[-1].tokens - stream[0].tokens for stream in streams)
        return throughput, self._joules_per_token(joules_at_first[0], joules_at_end, written)

    def _joules_per_token(
        self, before: float | None, after: float | None, tokens: int
    ) -> float | None:
        if before is None or after is None or tokens <= 0:
            return None
        return (after - before) / (tokens * self._servers)

    async def _stall(self) -> float:
        """Return the longest silence of a stream during another slot's prefill, in seconds."""
        neighbour: asyncio.Task[RequestFigures] | None = None
        times: list[float] = []
        sent = 0.0
        room = self._context - SHORT_PROMPT - 1
        try:
            async with aclosing(self._samples(SHORT_PROMPT, room)) as samples:
                async for sample in samples:
                    times.append(sample.at)
                    if neighbour is None and sample.tokens >= SETTLED_TOKENS:
                        sent = sample.at
                        neighbour = asyncio.create_task(self._alone(self._request.prompt, 2))
                    elif neighbour is not None and neighbour.done():
                        break
            if neighbour is None:
                raise BenchmarkError(f"{self._url}: a stream ended after {len(times)} tokens")
            await neighbour
        finally:
            if neighbour is not None and not neighbour.done():
                neighbour.cancel()
                await asyncio.gather(neighbour, return_exceptions=True)
        await self._wait_until_idle()
        return longest_silence(times, sent)

    async def _samples(self, prompt: int, answer: int) -> AsyncGenerator[StreamSample, None]:
        async with aclosing(self._stream(prompt, answer)) as chunks:
            async for chunk in chunks:
                timings = chunk.get("timings") or {}
                if not isinstance(timings.get("predicted_n"), int):
                    raise BenchmarkError(f"{self._url}: a chunk without `timings.predicted_n`")
                speed = float(timings.get("predicted_per_second") or 0.0)
                yield StreamSample(self._clock(), timings["predicted_n"], speed)

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
        async with self._client.stream("POST", f"{self._url}/completion", json=body) as response:
            if response.status_code != 200:
                text = (await response.aread())[:500].decode(errors="replace")
                raise BenchmarkError(f"{self._url}: HTTP {response.status_code}: {text}")
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                chunk = _json(self._url, line[6:])
                if "error" in chunk:
                    raise BenchmarkError(f"{self._url}: {chunk['error']}")
                yield chunk

    def _prompt(self, length: int) -> list[int]:
        """Return a prompt of this length that differs from all earlier ones."""
        self._prompts_made += 1
        at = self._prompts_made * 7 % len(self._text)
        return (self._text[at:] + self._text[:at])[:length]

    async def _tokens(self) -> list[int]:
        rng, words = random.Random(PROMPT_SEED), PROMPT_WORDS.split()
        chosen = rng.choices(words, k=self._request.prompt + SHORT_PROMPT)
        response = await self._client.post(
            f"{self._url}/tokenize", json={"content": " ".join(chosen)}
        )
        found = _json(self._url, response.text).get("tokens")
        if not isinstance(found, list) or len(found) < self._request.prompt:
            raise BenchmarkError(f"{self._url}: /tokenize answered {response.text[:200]}")
        return found

    async def _wait_until_idle(self) -> None:
        """Wait until the slots of closed streams are idle."""
        until = self._clock() + IDLE_TIMEOUT
        while self._clock() < until:
            response = await self._client.get(f"{self._url}/slots")
            if response.status_code != 200:
                return  # `/slots` is switched off: the stream's end may distort the next figure
            if not any(slot.get("is_processing") for slot in response.json()):
                return
            await asyncio.sleep(IDLE_POLL_INTERVAL)
        raise BenchmarkError(
            f"{self._url}: a slot is still busy {IDLE_TIMEOUT:.0f} s after its stream"
        )


async def run_concurrently(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results; when one fails, cancel the others and raise its error."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def combined_throughput(streams: list[list[StreamSample]]) -> float:
    """Return tokens/s of concurrent streams: all their tokens over all their time.

    Tokens that arrive in bunches make it too high, so the server's own speeds bound it.
    """
    if any(len(stream) < 2 for stream in streams):
        raise BenchmarkError("an answer came in one piece, so its speed is not known")
    took = max(stream[-1].at for stream in streams) - min(stream[0].at for stream in streams)
    tokens = sum(stream[-1].tokens - stream[0].tokens for stream in streams)
    server_speeds = sum(stream[-1].tokens_per_second for stream in streams)
    return min(tokens / took, server_speeds) if took > 0 else server_speeds


def longest_silence(times: list[float], since: float) -> float:
    """Return the longest time between two tokens of which the second came after `since`."""
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
