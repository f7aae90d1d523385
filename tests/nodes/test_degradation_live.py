"""A node that becomes slow under load is `degraded` soon, behind a running gateway."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gateway.nodes.node import Node, NodeState
from tests.bench.scheduling.play import ask
from tests.emulator import EmulatedNode
from tests.gateways import running_gateway
from tests.virtual import VirtualLoop, in_virtual_time, now

USUAL = 200.0
"""Seconds of work at the usual speed."""
SOON = 30.0


@dataclass(slots=True)
class Load:
    """Clients that ask one chat after the other, about a second after its answer."""

    clients: int
    tokens_per_second: float
    answer: int
    prompt: int = 200
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    address: tuple[str, int] = ("", 0)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def client(self) -> None:
        """Ask until cancelled."""
        while True:
            await asyncio.sleep(self.rng.uniform(0.0, 2.0))
            words = " ".join(str(self.rng.randrange(10**6)) for _ in range(self.prompt // 2))
            length = round(self.answer * self.rng.uniform(0.5, 1.5))
            messages = [{"role": "user", "content": words}]
            body = {"model": "demo", "stream": True, "max_tokens": length, "messages": messages}
            await ask(self.address, body, 3600.0, now)

    def add_client(self) -> None:
        """Begin one more client."""
        self.tasks.append(asyncio.create_task(self.client()))

    @asynccontextmanager
    async def running(self, folder: Path) -> AsyncIterator[tuple[EmulatedNode, Node]]:
        """The node under load: as it is, and as the gateway knows it."""
        usual = self.tokens_per_second
        async with AsyncExitStack() as stack:
            server = EmulatedNode(
                slots=4,
                context=16384,
                prefill_tps=20 * usual,
                decode_tps=usual,
                decode_step=0.15 / usual,
                prefill_stalls=True,
                cache_ram=64_000,
                answer_tokens=self.answer,
                remember=1,
                clock=now,
            )
            await stack.enter_async_context(server)
            site = await stack.enter_async_context(
                running_gateway(folder, [server.url], rng=random.Random(2))
            )
            listener = site.gateway.public_listener
            assert listener is not None
            self.address = listener.host, listener.port
            for _ in range(self.clients):
                self.add_client()
            try:
                yield server, site.gateway.fleet.nodes["node-0"]
            finally:
                for task in self.tasks:
                    task.cancel()
                await asyncio.gather(*self.tasks, return_exceptions=True)
                self.tasks.clear()

    async def until_degraded(self, folder: Path, factor: float) -> float:
        """Seconds until a node is `degraded` that becomes so many times slower; 600 at most."""
        async with self.running(folder) as (server, node):
            await asyncio.sleep(USUAL)
            assert node.state.value == "ready", node.reason
            slow_down(server, factor)
            for tick in range(1200):
                if node.state is NodeState.DEGRADED:
                    return tick / 2
                await asyncio.sleep(0.5)
        return 600.0


def slow_down(server: EmulatedNode, factor: float) -> None:
    """Let it read and write so many times slower from now on."""
    compute = server.engine.compute
    assert compute is not None
    compute.decode_tps /= factor
    compute.prefill_tps /= factor
    compute.step *= factor


@pytest.mark.slow
@pytest.mark.parametrize(
    "load",
    [Load(1, 25.0, 300), Load(4, 112.0, 300), Load(2, 25.0, 30)],
    ids=["long answers, one at a time", "four at a time", "short answers"],
)
def test_a_node_that_becomes_five_times_slower_under_load_is_degraded_soon(
    tmp_path: Path, load: Load
) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(load.until_degraded(tmp_path, 5.0)) <= SOON


@pytest.mark.slow
@in_virtual_time
async def test_more_clients_and_longer_prompts_do_not_make_it_degraded(tmp_path: Path) -> None:
    load = Load(1, 50.0, 150)
    async with load.running(tmp_path) as (_, node):
        await asyncio.sleep(USUAL)
        load.prompt = 3000
        for _ in range(7):
            load.add_client()
            for _ in range(60):
                await asyncio.sleep(1.0)
                assert node.state is NodeState.READY, node.reason
