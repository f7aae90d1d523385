"""How soon a node that becomes slow under load is `degraded`, behind a running gateway."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

from gateway.fleet.node import NodeState
from tests.bench.scheduling.client import ask
from tests.emulator import EmulatedNode
from tests.gateways import running_gateway
from tests.virtual import VirtualLoop, now


@dataclass(frozen=True, slots=True)
class Load:
    """Clients that ask one chat after the other, with a pause before each."""

    clients: int
    usual_tps: float
    answer: int
    prompt: int = 200
    pause: float = 1.0
    slots: int = 4

    async def until_degraded(
        self, folder: Path, factor: float, *, usual: float = 600.0, limit: float = 600.0
    ) -> float:
        """Seconds from when the node becomes so many times slower until it is `degraded`."""
        rng = random.Random(1)
        async with (
            EmulatedNode(
                slots=self.slots,
                context=16384,
                prefill_tps=20 * self.usual_tps,
                decode_tps=self.usual_tps,
                decode_step=0.15 / self.usual_tps,
                prefill_stalls=True,
                cache_ram=64_000,
                answer_tokens=self.answer,
                remember=1,
                clock=now,
            ) as node,
            running_gateway(folder, [node.url], rng=random.Random(2)) as site,
        ):
            listener = site.gateway.public_listener
            assert listener is not None
            address = listener.host, listener.port
            known = site.gateway.fleet.nodes["node-0"]

            async def client(number: int) -> None:
                while True:
                    await asyncio.sleep(rng.uniform(0, 2 * self.pause))
                    words = " ".join(str(rng.random()) for _ in range(self.prompt // 8))
                    length = round(self.answer * rng.uniform(0.5, 1.5))
                    body = {
                        "model": "demo",
                        "stream": True,
                        "max_tokens": length,
                        "messages": [{"role": "user", "content": words}],
                    }
                    await ask(address, body, 3600.0, now)

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(client(number)) for number in range(self.clients)]
                try:
                    await asyncio.sleep(usual)
                    assert known.state is NodeState.READY, known.reason
                    compute = node.engine.compute
                    assert compute is not None
                    compute.decode_tps /= factor
                    compute.prefill_tps /= factor
                    compute.step *= factor
                    began = now()
                    while known.state is not NodeState.DEGRADED and now() < began + limit:
                        await asyncio.sleep(0.5)
                    self_seconds = now() - began
                    print(self, factor, self_seconds, known.reason, flush=True)
                    return self_seconds
                finally:
                    for task in tasks:
                        task.cancel()


if __name__ == "__main__":
    import tempfile

    for load in (
        Load(1, 25.0, 300),
        Load(4, 25.0, 300),
        Load(1, 112.0, 300),
        Load(2, 112, 300),
        Load(4, 112.0, 300),
        Load(8, 112.0, 300),
        Load(3, 112.0, 100, pause=5.0),
        Load(2, 25.0, 30),
        Load(8, 60.0, 150, pause=10.0),
    ):
        with (
            tempfile.TemporaryDirectory() as folder,
            asyncio.Runner(loop_factory=VirtualLoop) as runner,
        ):
            runner.run(load.until_degraded(Path(folder), 5.0))
