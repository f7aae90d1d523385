"""One GPU beside ten CPU nodes: `python -m tests.hybrid.one_gpu`, figures of docs/one-gpu.md.

The gateway itself, over emulated nodes, in virtual time: six minutes of chats with a rush in the
middle, first without the GPU, then with it under several settings. Every run gets the same chats.
"""

from __future__ import annotations

import asyncio
import random
import re
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, quantiles
from typing import Any

import httpx

from tests.emulator import EmulatedNode
from tests.gateways import NO_TLS, Running, running_gateway
from tests.virtual import in_virtual_time, now

CPUS = 10
CPU: dict[str, Any] = {
    "slots": 2, "prefill_tps": 80.0, "decode_tps": 10.0, "decode_step": 0.02,
}  # fmt: skip
GPU: dict[str, Any] = {
    "slots": 8, "prefill_tps": 3000.0, "decode_tps": 60.0, "decode_step": 0.002, "batch": 2048,
}  # fmt: skip
GPU_HOUR = 1.2

PROMPT, ANSWER = 300, 150
"""Mean tokens."""
LONGEST = 600
MINUTES, RUSH = 6.0, (0.3, 0.5)
"""Of the fleet's time, and the part of it in which more arrives."""
CALM_RATE, RUSH_RATE = 0.55, 2.0
"""Requests a second; ten nodes do some 0.9."""
PREMIUM = 0.1
SEED = 1

SPILL = {"after": "10s", "classes": ["normal"], "share": 1}
RUNS: dict[str, tuple[bool, dict[str, Any]]] = {
    "ten CPUs alone": (False, {}),
    "GPU for premium": (True, {}),
    "and spill, share 0.1": (True, {"spill": {**SPILL, "share": 0.1}}),
    "and spill, 0.05 an hour": (True, {"spill": {**SPILL, "money_per_hour": 0.05}}),
    "and spill, no limit": (True, {"spill": SPILL}),
}


@dataclass(frozen=True, slots=True)
class Chat:
    """One request to come: seconds from the beginning, and tokens."""

    at: float
    priority: str
    prompt: int
    answer: int


@dataclass(frozen=True, slots=True)
class Served:
    """What became of it, in seconds from its arrival."""

    chat: Chat
    status: int
    tier: str
    fallback: str
    first: float
    whole: float


def chats() -> Iterator[Chat]:
    """Poisson arrivals of exponential lengths."""
    rng, at = random.Random(SEED), 0.0
    while True:
        rush = RUSH[0] <= at / 60 / MINUTES < RUSH[1]
        at += rng.expovariate(RUSH_RATE if rush else CALM_RATE)
        if at >= MINUTES * 60:
            return
        priority = "premium" if rng.random() < PREMIUM else "normal"
        prompt = 20 + int(rng.expovariate(1 / (PROMPT - 20)))
        answer = min(LONGEST, 10 + int(rng.expovariate(1 / (ANSWER - 10))))
        yield Chat(at, priority, prompt, answer)


def answer_tokens(prompt: str) -> int:
    found = re.findall(r"answer of (\d+)", prompt)
    return int(found[-1]) if found else ANSWER


def emulated(speeds: dict[str, Any]) -> EmulatedNode:
    usual: dict[str, Any] = {
        "prefill_stalls": True,
        "cache_ram": 1 << 16,
        "answer_tokens": answer_tokens,
    }
    return EmulatedNode(**usual, **speeds)


async def ask(client: httpx.AsyncClient, number: int, chat: Chat) -> Served:
    await asyncio.sleep(chat.at)
    began, first = now(), 0.0
    text = f"{number} " + "word " * chat.prompt + f"an answer of {chat.answer}"
    messages = [{"role": "user", "content": text}]
    body = {"model": "demo", "messages": messages, "max_tokens": LONGEST, "stream": True}
    headers = {"X-Priority": chat.priority}
    async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as reply:
        async for chunk in reply.aiter_raw():
            if not first and b'"content":"' in chunk:
                first = now() - began
    tier, fallback = (reply.headers.get(f"x-gateway-{name}", "") for name in ("tier", "fallback"))
    return Served(chat, reply.status_code, tier, fallback, first, now() - began)


async def play(
    folder: Path, arrivals: list[Chat], *, gpu: bool, hybrid: dict[str, Any]
) -> tuple[list[Served], dict[str, Any]]:
    """All of them over a fleet of its own, and the tiers' status at the end."""
    async with AsyncExitStack() as stack:
        specs: list[dict[str, Any]] = []
        for number in range(CPUS):
            node = await stack.enter_async_context(emulated(CPU))
            specs.append({"name": f"cpu-{number}", "url": node.url, "host": f"cpu-{number}"})
        if gpu:
            node = await stack.enter_async_context(emulated(GPU))
            specs.append(
                {
                    "name": "gpu", "url": node.url, "host": "gpu", "kind": "openai", "tier": "gpu",
                    "slots": GPU["slots"], "model": "demo", "context": 4096,
                    "cost_per_hour": GPU_HOUR,
                }
            )  # fmt: skip
        settings = {"hybrid": hybrid, "queue": {"max_wait": "15m", "max": 5000}}
        running: Running = await stack.enter_async_context(running_gateway(folder, specs, settings))
        client = await stack.enter_async_context(
            httpx.AsyncClient(
                base_url=running.url,
                timeout=None,
                trust_env=False,
                verify=NO_TLS,
                limits=httpx.Limits(max_connections=None),
            )
        )
        # The fleet learns its speeds before the clock of the figures starts.
        warm = [Chat(0.0, "normal", 100, 40)] * (CPUS * 2) + [Chat(0.0, "premium", 100, 40)] * 4
        await asyncio.gather(*(ask(client, -n, chat) for n, chat in enumerate(warm, 1)))
        served = await asyncio.gather(
            *(ask(client, number, chat) for number, chat in enumerate(arrivals))
        )
        view: dict[str, Any] = running.gateway.scheduler.tier_policy.view(now())
        return list(served), view


def p95(values: list[float]) -> float:
    return quantiles(values, n=20)[-1] if len(values) > 1 else values[0]


def row(name: str, served: list[Served], view: dict[str, Any]) -> str:
    """One line of the table for each class."""
    lines = []
    on_gpu = [one for one in served if one.tier == "gpu"]
    tokens = sum(one.chat.answer for one in on_gpu)
    for priority in ("premium", "normal"):
        mine = [one for one in served if one.chat.priority == priority]
        done = [one for one in mine if one.status == 200]
        share = sum(one.tier == "gpu" for one in mine) / len(mine)
        lines.append(
            f"| {name} | {priority} | {len(mine)} | {p95([one.first for one in done]):.1f} | "
            f"{mean(one.whole for one in done):.1f} | {p95([one.whole for one in done]):.1f} | "
            f"{share:.0%} | {len(mine) - len(done)} |"
        )
    spill = view.get("spill") or {}
    spilled = sum(one.fallback in {"cpu_wait", "cpu_down"} for one in served)
    lines.append(
        f"{name}: {spilled} spilled, for {spill.get('paid', 0):.4f}; the GPU wrote "
        f"{tokens / MINUTES / 60:.1f} tokens/s"
    )
    return "\n".join(lines)


@in_virtual_time
async def main() -> None:
    arrivals = list(chats())
    print("| setting | class | requests | TTFT p95 | completion | p95 | on the GPU | failed |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, (gpu, hybrid) in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            served, view = await play(Path(folder), arrivals, gpu=gpu, hybrid=hybrid)
        print(row(name, served, view), flush=True)


if __name__ == "__main__":
    main()
