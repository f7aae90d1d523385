"""Cost of knowing which node has cached a prompt: `python -m tests.bench.prompt_cache_cost`.

Prints microseconds of one core, the best of several rounds, and megabytes of the index of 1,000
full nodes.
"""

from __future__ import annotations

import gc
import json
import random
import time
from collections.abc import Callable

import psutil

from gateway.fleet.prompt_cache import FleetPromptCache
from gateway.lease import KeyedHash, PromptKey
from gateway.proxy.inbound.body import BYTES_PER_TOKEN
from gateway.proxy.inbound.prompt_key import (
    BLOCK_BYTES,
    BUILT_IN_PATTERNS,
    VolatileLines,
    build_prompt_key,
)
from gateway.proxy.inbound.routes import ROUTES

NODES, SLOTS, CONVERSATIONS = 1000, 2, 60
CHAT = ROUTES["/v1/chat/completions"]
TOKENS = BLOCK_BYTES / BYTES_PER_TOKEN


def best_microseconds(call: Callable[[], object], times: int) -> float:
    """Microseconds of one call: the best of seven rounds of `times` calls."""

    def once() -> float:
        began = time.process_time()
        for _ in range(times):
            call()
        return (time.process_time() - began) / times

    return 1e6 * min(once() for _ in range(7))


def chat_body(size: int, messages: int, rng: random.Random) -> bytes:
    """A chat request of about `size` bytes in `messages` messages."""
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(400)]
    text = " ".join(rng.choices(words, k=size // 6 + 8))[: size // messages]
    conversation = [{"role": "user", "content": text} for _ in range(messages)]
    return json.dumps({"model": "m", "messages": conversation, "stream": True}).encode()


def extended(blocks: tuple[int, ...], count: int, rng: random.Random) -> tuple[int, ...]:
    """`blocks` with `count` new blocks at their end."""
    for _ in range(count):
        blocks = (*blocks, hash((blocks[-1] if blocks else 0, rng.random())))
    return blocks


def serve(cache: FleetPromptCache, row: int, blocks: tuple[int, ...]) -> PromptKey:
    """Serve one request: look it up, place it on a node's row and finish it."""
    prompt = PromptKey(blocks, len(blocks) * TOKENS)
    cached = cache.lookup(prompt).cached.get(row, 0.0)
    cache.request_placed(row, prompt)
    cache.request_finished(row, prompt, prompt.tokens, cached, 150)
    return prompt


def full_fleet(rng: random.Random) -> tuple[FleetPromptCache, PromptKey, int]:
    """The cache of 1,000 nodes full of conversations that begin with 20 system prompts.

    Also returns a prompt of 30 blocks that continues one of them, and the number of requests.
    """
    cache = FleetPromptCache()
    systems = [extended((), 12, rng) for _ in range(20)]
    count = 0
    blocks: tuple[int, ...] = ()
    for row in range(NODES):
        cache.resize(row, SLOTS)
        for _ in range(CONVERSATIONS):
            blocks = rng.choice(systems)
            for _ in range(rng.choice((1, 3, 5))):
                blocks = extended(blocks, rng.randrange(2, 6), rng)
                serve(cache, row, blocks)
                count += 1
    blocks = extended(blocks, 30 - len(blocks), rng)
    return cache, PromptKey(blocks, len(blocks) * TOKENS), count


def main() -> None:
    """Print the figures."""
    rng, keyed_hash = random.Random(1), KeyedHash()
    for name, volatile in (
        ("", VolatileLines()),
        (", stripping", VolatileLines(strip=BUILT_IN_PATTERNS)),
    ):
        for size, messages in ((300, 1), (8_000, 8), (120_000, 60)):
            body = chat_body(size, messages, rng)

            def prepare(body: bytes = body, volatile: VolatileLines = volatile) -> None:
                volatile.strip_edit(body)
                build_prompt_key(body, CHAT, "m", volatile, keyed_hash)

            cost = best_microseconds(prepare, 2_000_000 // (size + 1000))
            print(f"prompt key of {size:7,} bytes in {messages:2} messages{name}: {cost:6.1f} us")
    gc.collect()
    process = psutil.Process()
    resident = process.memory_info().rss
    began = time.process_time()
    cache, prompt, count = full_fleet(rng)
    cost = 1e6 * (time.process_time() - began) / count
    gc.collect()
    grew = (process.memory_info().rss - resident) / 1e6
    print(f"one request, looked up, placed and finished, fleet of {NODES:,}: {cost:6.1f} us")
    print(f"index of {NODES:,} full nodes: {grew:6.1f} MB")
    known = len(cache.lookup(prompt).cached)
    cost = best_microseconds(lambda: cache.lookup(prompt), 500)
    print(f"lookup of 30 blocks, some of them cached by {known} nodes: {cost:6.1f} us")
    cold = PromptKey(extended((), 30, rng), 30 * TOKENS)
    cost = best_microseconds(lambda: cache.lookup(cold), 5000)
    print(f"lookup of 30 blocks that no node has cached: {cost:6.1f} us")
    small = FleetPromptCache()
    for row in range(4):
        small.resize(row, SLOTS)
    short = extended((), 2, rng)
    serve(small, 1, short)
    cost = best_microseconds(lambda: serve(small, 1, short), 5000)
    print(f"one request of 2 blocks, looked up, placed and finished, fleet of 4: {cost:6.1f} us")


if __name__ == "__main__":
    main()
