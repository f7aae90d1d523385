"""Time of a scrape of a large fleet: `python -m tests.bench.scrape [--nodes 1000]`.

Prints how long `/metrics` takes in all, and the longest time for which it holds the event loop.
Three hundred combinations of model, class and tier have been seen, and four outcomes of attempts on
each node.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import statistics
import time
from itertools import islice, product

from gateway.admin.status import MetricsSource
from gateway.events import AttemptEnded, EventBus, RequestRecord
from gateway.terms import Priority
from gateway.watch.metrics import MOST_LABEL_SETS, Metrics
from tests.nodes.build import a_spec
from tests.web.bare_gateway import bare_gateway

NOWHERE = "http://127.0.0.1:9"


async def measure(nodes: int, rounds: int) -> tuple[list[float], list[float], int]:
    """Seconds of each scrape in all, the longest step of each, and the bytes of a page."""
    specs = [a_spec(f"node-{n}", NOWHERE, model="demo", slots=2) for n in range(nodes)]
    async with bare_gateway(*specs) as gateway:
        await asyncio.sleep(2.0)
        bus = EventBus()
        source = MetricsSource(
            gateway.fleet, gateway.scheduler, gateway.registry, lambda: None, lambda: 3
        )
        metrics = Metrics(bus, source)
        models = (f"model-{n}" for n in range(MOST_LABEL_SETS))
        for model, priority, tier in islice(
            product(models, Priority, ("cpu", "gpu")), MOST_LABEL_SETS
        ):
            bus.publish(
                RequestRecord(
                    "r", "/v1/chat/completions", model, priority, tier=tier, ttft=1.0, attempts=1
                )
            )
        for spec, outcome in product(specs, ("ok", "reset", "client_closed", "moved")):
            bus.publish(AttemptEnded("r", spec.name, outcome, 1.0))
        whole, longest, size = [], [], 0
        for _ in range(rounds):
            steps = metrics.steps()
            times = []
            size = 0
            while True:
                began = time.perf_counter()
                step = next(steps, None)
                times.append(time.perf_counter() - began)
                if step is None:
                    break
                size += len(step)
            whole.append(sum(times))
            longest.append(max(times))
        return whole, longest, size


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    whole, longest, size = asyncio.run(measure(arguments.nodes, arguments.rounds))
    print(f"Python {platform.python_version()} ({platform.python_build()[0]})")
    print(f"{arguments.nodes} nodes, {size} bytes, {arguments.rounds} rounds")
    for name, values in (("in all", whole), ("longest step", longest)):
        print(
            f"{name}: median {statistics.median(values) * 1000:.1f} ms, "
            f"most {max(values) * 1000:.1f} ms"
        )


if __name__ == "__main__":
    main()
