"""Plays a planned traffic on emulated nodes behind the real gateway, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from gateway.workshop.plan.search import WARM_UP_SHARE, FleetPart
from gateway.workshop.simulate.report import Percentiles
from gateway.workshop.simulate.simulation import Job, SimulatedMachine, Trace
from tests.emulator import EmulatedNode
from tests.emulator.language_model import WORDS
from tests.gateways import Running, running_gateway
from tests.stored.batch_gateway import HEADERS, key, store_in_virtual_time, submit
from tests.virtual import now

NUMBER = re.compile(r"#(\d+)")
PATIENT = {"queue": {"max": 100_000, "max_wait": 86_400}, "timeouts": {"total": 86_400}}
"""The simulation refuses nothing either."""

CALM = {"interval": 30, "discover_interval": 300}
POLL_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Measured:
    """What the clients of the emulated fleet saw. Seconds."""

    requests: int
    completion: Percentiles
    ttft: Percentiles | None = None


def emulated_node(machine: SimulatedMachine, jobs: Sequence[Job]) -> EmulatedNode:
    """A node as fast as a machine of the simulation, whose answers are as long as the trace's."""

    def answer_tokens(prompt: str) -> int:
        found = NUMBER.search(prompt)
        return jobs[int(found[1])].output if found else 1

    longest = max(job.prompt.tokens + job.output for job in jobs)
    return EmulatedNode(
        slots=machine.slots,
        context=longest + 256,
        context_train=longest + 256,
        prefill_tps=machine.prefill_tps,
        decode_tps=machine.decode_tps,
        decode_step=machine.token_step,
        batch=machine.batch_tokens,
        prefill_stalls=True,
        cache_ram=machine.cache_tokens,
        answer_tokens=answer_tokens,
    )


def prompt_text(job: Job) -> str:
    """A prompt of about as many tokens as the job's, with its number behind the shared part."""
    shared = job.prompt.prefix_tokens
    common = random.Random(job.prompt.prefix)
    own = random.Random(f"own {job.id}")
    words = [common.choice(WORDS) for _ in range(shared)]
    # The number takes a few tokens of three bytes each.
    number = f" #{job.id}"
    taken = 2 + len(number) // 3
    words += [own.choice(WORDS) for _ in range(max(0, job.prompt.tokens - shared - taken))]
    head = "".join(f" {word}" for word in words[:shared])
    return head + number + "".join(f" {word}" for word in words[shared:])


@contextlib.asynccontextmanager
async def emulated_fleet(
    parts: Sequence[FleetPart], jobs: Sequence[Job], **settings: Any
) -> AsyncIterator[Running]:
    machines = [one for part in parts for one in part.node_type.machines(part.count)]
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nodes = [
            await stack.enter_async_context(emulated_node(machine, jobs)) for machine in machines
        ]
        specs = [{"name": f"n{number}", "url": node.url} for number, node in enumerate(nodes)]
        chosen = {**PATIENT, "health": CALM, **settings}
        yield await stack.enter_async_context(running_gateway(folder, specs, chosen))


async def play(parts: Sequence[FleetPart], trace: Trace) -> Measured:
    """Send each request at its time, and measure what its client sees."""
    jobs = trace.jobs
    ttft, completion = [0.0] * len(jobs), [0.0] * len(jobs)
    async with emulated_fleet(parts, jobs) as running:
        began = now() + 1.0
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
        async with httpx.AsyncClient(
            base_url=running.url, limits=limits, timeout=None, trust_env=False
        ) as client:

            async def one(job: Job) -> None:
                await asyncio.sleep(began + job.time - now())
                sent = now()
                body = {"prompt": prompt_text(job), "stream": True}
                async with client.stream("POST", "/v1/completions", json=body) as reply:
                    assert reply.status_code == 200, await reply.aread()
                    async for chunk in reply.aiter_bytes():
                        if not ttft[job.id] and b'"text":" ' in chunk:
                            ttft[job.id] = now() - sent
                completion[job.id] = now() - sent

            await asyncio.gather(*map(one, jobs))
    skipped = int(len(jobs) * WARM_UP_SHARE)
    return Measured(
        len(jobs) - skipped, Percentiles.of(completion[skipped:]), Percentiles.of(ttft[skipped:])
    )


async def play_batch(parts: Sequence[FleetPart], trace: Trace) -> Measured:
    """Submit all requests as one batch, and see when how many are done."""
    jobs = trace.jobs
    wanted: dict[str, Any] = {"method": "POST", "url": "/v1/chat/completions"}
    messages = [[{"role": "user", "content": prompt_text(job)}] for job in jobs]
    lines = [
        wanted | {"custom_id": f"line-{number}", "body": {"messages": one}}
        for number, one in enumerate(messages)
    ]
    with tempfile.TemporaryDirectory() as folder, store_in_virtual_time():
        settings = {"store": {"url": f"sqlite:///{folder}/gateway.db"}, "keys": [key()]}
        async with emulated_fleet(parts, jobs, **settings) as running:
            batch = await submit(running, lines)
            began = now()
            ends: list[float] = []
            while True:
                answer = await running.client.get(f"/v1/batches/{batch}", headers=HEADERS)
                found = json.loads(answer.text)
                done = found["request_counts"]["completed"]
                ends += [now() - began] * (done - len(ends))
                if found["status"] in {"completed", "failed", "expired", "cancelled"}:
                    break
                await asyncio.sleep(POLL_SECONDS)
    assert found["status"] == "completed", found
    assert len(ends) == len(jobs), found
    return Measured(len(ends), Percentiles.of(ends))
