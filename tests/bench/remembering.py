"""What it costs to know which node remembers a prompt: `python -m tests.bench.remembering`.

Microseconds of one core, the best of several rounds; megabytes of the index of 1,000 full nodes.
"""

from __future__ import annotations

import gc
import json
import random
import time
from collections.abc import Callable

import psutil

from gateway.fleet.prompt_cache import FleetPromptCache
from gateway.fleet.prompt_tree import PromptKey
from gateway.proxy.inbound.prompt_key import (
    BLOCK_BYTES,
    BUILT_IN_PATTERNS,
    BYTES_PER_TOKEN,
    VolatileLines,
    build_prompt_key,
)
from gateway.proxy.inbound.routes import ROUTES

NODES, SLOTS, CONVERSATIONS = 1000, 2, 60
CHAT = ROUTES["/v1/chat/completions"]
TOKENS = BLOCK_BYTES / BYTES_PER_TOKEN


def best(call: Callable[[], object], times: int) -> float:
    """Microseconds of one call."""

    def once() -> float:
        began = time.process_time()
        for _ in range(times):
            call()
        return (time.process_time() - began) / times

    return 1e6 * min(once() for _ in range(7))


def a_body(size: int, messages: int, rng: random.Random) -> bytes:
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(400)]
    text = " ".join(rng.choices(words, k=size // 6 + 8))[: size // messages]
    turns = [{"role": "user", "content": text} for _ in range(messages)]
    return json.dumps({"model": "m", "messages": turns, "stream": True}).encode()


def grown(blocks: tuple[int, ...], count: int, rng: random.Random) -> tuple[int, ...]:
    for _ in range(count):
        blocks = (*blocks, hash((blocks[-1] if blocks else 0, rng.random())))
    return blocks


def served(memory: FleetPromptCache, row: int, blocks: tuple[int, ...]) -> PromptKey:
    """One request as the gateway tells of it."""
    prompt = PromptKey(blocks, len(blocks) * TOKENS)
    cached = memory.lookup(prompt).cached.get(row, 0.0)
    memory.request_placed(row, prompt)
    memory.request_finished(row, prompt, prompt.tokens, cached, 150)
    return prompt


def a_fleet(rng: random.Random) -> tuple[FleetPromptCache, PromptKey, int]:
    """A thousand nodes full of conversations behind 20 system prompts of 12 blocks.

    Also a prompt of 30 blocks that goes on after one of them, and the requests it took.
    """
    memory = FleetPromptCache()
    systems = [grown((), 12, rng) for _ in range(20)]
    count = 0
    blocks: tuple[int, ...] = ()
    for row in range(NODES):
        memory.resize(row, SLOTS)
        for _ in range(CONVERSATIONS):
            blocks = rng.choice(systems)
            for _ in range(rng.choice((1, 3, 5))):
                blocks = grown(blocks, rng.randrange(2, 6), rng)
                served(memory, row, blocks)
                count += 1
    blocks = grown(blocks, 30 - len(blocks), rng)
    return memory, PromptKey(blocks, len(blocks) * TOKENS), count


def main() -> None:
    rng = random.Random(1)
    for name, volatile in (
        ("", VolatileLines()),
        (", stripping", VolatileLines(strip=BUILT_IN_PATTERNS)),
    ):
        for size, messages in ((300, 1), (8_000, 8), (120_000, 60)):
            body = a_body(size, messages, rng)

            def prepare(body: bytes = body, volatile: VolatileLines = volatile) -> None:
                volatile.strip_edit(body)
                build_prompt_key(body, CHAT, "m", volatile)

            cost = best(prepare, 2_000_000 // (size + 1000))
            print(f"fingerprint of {size:7,} bytes in {messages:2} messages{name}: {cost:6.1f} us")
    gc.collect()
    process = psutil.Process()
    resident = process.memory_info().rss
    began = time.process_time()
    memory, prompt, count = a_fleet(rng)
    cost = 1e6 * (time.process_time() - began) / count
    gc.collect()
    grew = (process.memory_info().rss - resident) / 1e6
    print(f"one request, asked, placed and finished, fleet of {NODES:,}: {cost:6.1f} us")
    print(f"index of {NODES:,} full nodes: {grew:6.1f} MB")
    known = len(memory.lookup(prompt).cached)
    cost = best(lambda: memory.lookup(prompt), 500)
    print(f"asking for 30 blocks, of which {known} nodes know some: {cost:6.1f} us")
    cold = PromptKey(grown((), 30, rng), 30 * TOKENS)
    print(
        f"asking for 30 blocks that nobody knows: {best(lambda: memory.lookup(cold), 5000):6.1f} us"
    )
    small = FleetPromptCache()
    for row in range(4):
        small.resize(row, SLOTS)
    short = grown((), 2, rng)
    served(small, 1, short)
    cost = best(lambda: served(small, 1, short), 5000)
    print(f"one request of 2 blocks, asked, placed and finished, fleet of 4: {cost:6.1f} us")


if __name__ == "__main__":
    main()
