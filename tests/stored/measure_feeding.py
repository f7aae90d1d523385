"""How batches fill a fleet, and what clients notice: `python -m tests.stored.measure_feeding`.

Emulated nodes share their computation between prefill and decode, as llama.cpp's server does. A
whole gateway with a real SQLite store runs a batch over them, alone and beside chats, with prompts
that begin alike and without. In virtual time, which stands still while the store or a disk works.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any
from unittest.mock import patch

import httpx

from gateway.stored import line_reader
from tests.emulator import EmulatedNode
from tests.gateways import Running
from tests.stored import batch_gateway
from tests.stored.batch_gateway import (
    HEADERS,
    ended,
    gateway_over,
    output,
    submit,
    time_to_first_token,
)
from tests.stored.virtual_store import store_in_virtual_time
from tests.virtual import in_virtual_time, now

CHATS, INTERVAL = 80, 1.5
LINES, GROUPS = 1000, 12
SAMPLE_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Site:
    """A fleet, and what the lines of its batch are like."""

    nodes: int = 2
    slots: int = 4
    reserve: float = 0.25
    """`classes.batch.reserve_slots`."""
    line_words: int = 0
    """Words of a line's prompt, beside the few that tell lines apart."""

    @property
    def open_to_batch(self) -> int:
        """Slots."""
        return self.nodes * self.slots - int(self.reserve * self.nodes * self.slots)


def a_node(slots: int) -> EmulatedNode:
    speeds: dict[str, Any] = {"prefill_tps": 500.0, "decode_tps": 10.0, "decode_step": 0.005}
    return EmulatedNode(
        slots=slots, answer_tokens=5000, prefill_stalls=True, cache_ram=1 << 12, **speeds
    )


@contextlib.asynccontextmanager
async def a_fleet(site: Site) -> AsyncIterator[tuple[Running, list[EmulatedNode]]]:
    nodes = [a_node(site.slots) for _ in range(site.nodes)]
    with tempfile.TemporaryDirectory() as folder, store_in_virtual_time():
        store = {"url": f"sqlite:///{folder}/gateway.db"}
        batch = {"reserve_slots": site.reserve}
        settings: dict[str, Any] = {"store": store, "classes": {"batch": batch}}
        async with gateway_over(Path(folder), *nodes, **settings) as running:
            yield running, nodes


def lines(number: int, groups: int = 0, words: int = 0) -> list[dict[str, Any]]:
    """Lines of 30 to 90 tokens each; of so many groups whose prompts begin alike, in turn.

    `words`: more of them in each prompt.
    """
    found: list[dict[str, Any]] = []
    for index in range(number):
        group = index % groups if groups else 0
        head = f"Group {group}. " + f"These are the rules of group {group}. " * 60
        text = (head if groups else "") + f"write text number {index}" + " about it" * (words // 2)
        messages = [{"role": "user", "content": text}]
        tokens = 30 + (index * 37) % 61
        found += batch_gateway.lines(1, index, messages=messages, max_tokens=tokens)
    return found


async def sampled(
    running: Running, nodes: list[EmulatedNode], samples: list[tuple[float, int, int]]
) -> None:
    """Time, busy slots, and lines that have not been offered yet; for ever."""
    feeder = running.gateway.background.feeder
    assert feeder is not None
    while True:
        left = feeder.claimed + sum(feeder.counts.waiting.values())
        samples.append((now(), sum(node.slots.busy for node in nodes), left))
        await asyncio.sleep(SAMPLE_SECONDS)


async def run_batch(running: Running, items: list[dict[str, Any]]) -> dict[str, Any]:
    """Run a batch to its end."""
    return await ended(running, await submit(running, items), 86_400.0)


async def chats_of(client: httpx.AsyncClient, words: int, number: int) -> list[float]:
    """Seconds until the first content of so many chats, which come whether or not others ended."""

    async def one(number: int) -> float:
        await asyncio.sleep(number * INTERVAL)
        text = f"chat {number}: say something" + " more" * words
        body = {"messages": [{"role": "user", "content": text}], "temperature": 0}
        return await time_to_first_token(client, body, HEADERS)

    return await asyncio.gather(*(one(index) for index in range(number)))


async def measure_alone(site: Site) -> None:
    """The share of slots that are busy."""
    async with a_fleet(site) as (running, nodes):
        samples: list[tuple[float, int, int]] = []
        task = asyncio.create_task(sampled(running, nodes, samples))
        began = now()
        found = await run_batch(running, lines(LINES, words=site.line_words))
        took = now() - began
        task.cancel()
    allowed = site.open_to_batch
    first = next(index for index, (_, busy, _) in enumerate(samples) if busy)
    last = max(index for index, (_, busy, _) in enumerate(samples) if busy)
    fed = max(index for index, (_, _, left) in enumerate(samples) if left)
    whole = fmean(min(busy, allowed) for _, busy, _ in samples[first : last + 1]) / allowed
    share = fmean(min(busy, allowed) for _, busy, _ in samples[first : fed + 1]) / allowed
    print(
        f"batch alone: {found['request_counts']}, {took:.1f} s; {allowed} of "
        f"{site.nodes * site.slots} slots "
        f"for batch; busy {share:.1%} while lines waited, {whole:.1%} with the tail of "
        f"{samples[last][0] - samples[fed][0]:.1f} s; most busy {max(b for _, b, _ in samples)}"
    )


async def chats_beside(
    site: Site, number: int, words: int, chats: int = CHATS
) -> tuple[list[float], float]:
    """Chats with prompts of about so many words, beside a batch of so many lines; 0: none.

    Returns the seconds of each until its first token, and the busy slots on average.
    """
    async with a_fleet(site) as (running, nodes):
        samples: list[tuple[float, int, int]] = []
        tasks: list[asyncio.Task[Any]] = []
        if number:
            items = lines(number, words=site.line_words)
            tasks.append(asyncio.create_task(run_batch(running, items)))
            await asyncio.sleep(20.0)
        tasks.append(asyncio.create_task(sampled(running, nodes, samples)))
        found = await chats_of(running.client, words, chats)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return found, fmean(busy for _, busy, _ in samples)


async def measure_beside(site: Site, words: int) -> None:
    """What chats notice."""
    p95 = []
    for name, count in (("alone", 0), ("beside the batch", LINES)):
        seconds, busy = await chats_beside(site, count, words)
        p95.append(quantiles(seconds, n=20)[-1])
        print(
            f"chats of {words} words {name}: time to first token p50 {median(seconds):.3f} s, "
            f"p95 {p95[-1]:.3f} s, longest {max(seconds):.3f} s; {busy:.2f} slots busy"
        )
    print(f"chats of {words} words: p95 {p95[1] / p95[0]:.2f} times as long", flush=True)


async def measure_prefixes(site: Site, number: int = 480) -> None:
    """What grouping gains."""
    for grouped in (True, False):
        # Without a prefix that is long enough, all lines are one group.
        shortest = line_reader.PREFIX_BYTES if grouped else 1 << 30
        with patch.object(line_reader, "PREFIX_BYTES", shortest):
            async with a_fleet(site) as (running, _):
                began = now()
                found = await run_batch(running, lines(number, GROUPS))
                took = now() - began
                results = await output(running, found["output_file_id"])
        prompt = cached = 0
        for one in results:
            usage = one["response"]["body"]["usage"]
            prompt += usage["prompt_tokens"]
            cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        name = "with" if grouped else "without"
        print(
            f"{number} lines of {GROUPS} prefixes {name} grouping: {took:.1f} s, "
            f"{prompt} prompt tokens, {cached} cached ({cached / prompt:.1%})"
        )


@in_virtual_time
async def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["alone", "beside", "prefixes"])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--slots", type=int, default=4, help="of each node")
    parser.add_argument("--reserve", type=float, default=0.25, help="`reserve_slots`")
    parser.add_argument("--line-words", type=int, default=0, help="of a line's prompt")
    given = parser.parse_args()
    site = Site(given.nodes, given.slots, given.reserve, given.line_words)
    for part in given.parts:
        began = time.monotonic()
        if part == "alone":
            await measure_alone(site)
        elif part == "beside":
            for words in (0, 100, 300):
                await measure_beside(site, words)
        else:
            await measure_prefixes(site)
        print(f"({part}: {time.monotonic() - began:.0f} s of real time)", flush=True)


if __name__ == "__main__":
    main()
