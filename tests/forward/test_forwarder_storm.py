"""Random faults in random order: nothing leaks, and no node gets more requests than slots."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import httpx
import pytest

from tests.emulator import EmulatedNode
from tests.forward.proxy_over_nodes import (
    GENERATION_PATHS,
    ProxyOverNodes,
    prompt_field,
    proxy_over,
)
from tests.gateways import until
from tests.virtual import in_virtual_time

KINDS = [
    ("reset", {}),
    ("close", {"after_events": 3}),
    ("cut", {"after_events": 2}),
    ("hang", {"seconds": 0.05}),
    ("hang", {"after_events": 2, "seconds": 0.6}),
    ("end", {"after_events": 4}),
    ("error_event", {"after_events": 0}),
    ("error_event", {"after_events": 5}),
    ("garbage", {}),
    ("status", {"status": 500}),
    ("status", {"status": 503}),
    ("status", {"status": 429}),
    ("status", {"status": 404}),
    ("split", {}),
    ("comments", {}),
]


async def a_client(proxy: ProxyOverNodes, rng: random.Random, counts: dict[str, int]) -> None:
    """One client that sends requests, and sometimes does not wait for the response."""
    for _ in range(8):
        await asyncio.sleep(rng.uniform(0, 0.05))
        path = rng.choice(GENERATION_PATHS)
        body = prompt_field(path, "word " * rng.randint(1, 30))
        if rng.random() < 0.2 and path.endswith("completions"):
            body["n"] = 2
        stream = rng.random() < 0.7
        task = asyncio.create_task(proxy.ask(path, stream=stream, max_tokens=8, **body))
        timeout = rng.choice([0.02, 0.1, 20.0, 20.0])
        done, _ = await asyncio.wait([task], timeout=timeout)
        if not done:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            counts["left"] += 1
            continue
        with contextlib.suppress(httpx.TransportError):
            counts["ok" if task.result().status_code == 200 else "refused"] += 1


async def inject_faults(
    servers: list[EmulatedNode], rng: random.Random, proxy: ProxyOverNodes
) -> None:
    """Injects faults, kills nodes and drains them, one after another."""
    while True:
        await asyncio.sleep(rng.uniform(0, 0.03))
        server = rng.choice(servers)
        chance = rng.random()
        if chance < 0.8:
            kind, options = rng.choice(KINDS)
            server.faults.next(kind, **options)  # type: ignore[arg-type]
        elif chance < 0.9:
            await server.kill()
            await asyncio.sleep(rng.uniform(0, 0.05))
            await server.revive()
        else:
            fleet = proxy.app.fleet
            name = rng.choice("abc")
            fleet.drain(name)
            await asyncio.sleep(rng.uniform(0, 0.05))
            fleet.resume(name)


def tasks() -> list[str]:
    return [task.get_name() for task in asyncio.all_tasks()]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(2))
@in_virtual_time
async def test_after_a_storm_no_lease_or_task_is_left(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    servers = [
        EmulatedNode(slots=2, answer_tokens=8, decode_tps=400, prefill_tps=2000) for _ in range(3)
    ]
    counts = {"ok": 0, "refused": 0, "left": 0}
    timeouts = {"first_byte": 0.5, "silence": 0.4}
    async with proxy_over(tmp_path, *servers, timeouts=timeouts, queue={"max": 16}) as proxy:
        faults = asyncio.create_task(inject_faults(servers, rng, proxy))
        await asyncio.gather(*(a_client(proxy, rng, counts) for _ in range(24)))
        faults.cancel()
        await asyncio.gather(faults, return_exceptions=True)
        for server in servers:
            await server.revive()
            server.faults.clear()
        await proxy.settled()
        for server in servers:
            assert server.peak_busy <= 2
            assert server.queued == 0
        assert len(proxy.attempts) >= counts["ok"] > 24
        assert (await proxy.ask()).status_code == 200
        await until(lambda: not any(name.startswith("reclaim") for name in tasks()))
        assert len(proxy.app.proxy_context.timeout_monitor) == 0
