"""The same trace through the running gateway in virtual time: only its choices count.

Gateway, nodes and clients share one process and a clock that jumps, so that neither the machine
nor its other work has a part in the figures, and a trace takes seconds. Other programs can't run
in it: a balancer of connections of a few lines, which takes no time, stands in for nginx. For
comparing two versions of the scheduler, and for more seeds than there is time for otherwise.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.bench.load import Address
from tests.bench.scheduling.fronts import EDGES, FRONTS, OURS, nodes
from tests.bench.scheduling.play import Answer, Player, ask
from tests.bench.scheduling.report import Played
from tests.bench.scheduling.rounds import PAUSE, Plan, tell
from tests.edges.edge_beside import a_brain, an_edge
from tests.emulator import EmulatedNode
from tests.gateways import running_gateway
from tests.known import known as is_known
from tests.virtual import VirtualLoop, now

MARKS = ("<!-- bench-scheduling-virtual: begin -->", "<!-- bench-scheduling-virtual: end -->")
STAND_IN = "least_conn"
TITLE = "`least_conn`, in this process"
USUAL = (*OURS, STAND_IN)  # played by default; the last one is compared with
SEEDS = 30


class LeastConn:
    """Sends each request to the node with the fewest requests, in turn among equals."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._addresses = addresses
        self._busy = [0] * len(addresses)
        self._next = 0

    async def __call__(
        self, _: Address, body: dict[str, Any], limit: float, clock: Callable[[], float]
    ) -> Answer:
        count = len(self._busy)
        turns = [(self._next + i) % count for i in range(count)]
        node = min(turns, key=lambda i: self._busy[i])
        self._next = node + 1
        self._busy[node] += 1
        try:
            return await ask(self._addresses[node], body, limit, clock)
        finally:
            self._busy[node] -= 1


def measure(plan: Plan, fronts: Sequence[str], progress: Console) -> list[Played]:
    """Play everything; one result for each load, seed and front."""
    played = []
    for seed in range(1, plan.seeds + 1):
        for load in plan.loads:
            began, runs = time.monotonic(), []
            for front in fronts:
                with asyncio.Runner(loop_factory=VirtualLoop) as runner:
                    runs.append(runner.run(_played(plan, front, load, seed)))
            played += runs
            tell(progress, runs, began)
    return played


async def _played(plan: Plan, front: str, load: str, seed: int) -> Played:
    warm_up, trace = plan.traces(load, seed)
    folder = plan.folder / f"{front}-{load}-{seed}"
    folder.mkdir()
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(nodes(scale=plan.scale, clock=now))
        if front == STAND_IN:
            player = _spread([(node.host, node.port) for node in fleet], plan.scale, known=False)
        else:
            known, edges = FRONTS[front].known, EDGES if front == "edges" else 0
            behind = behind_gateway(folder, fleet, plan.scale, seed, known=known, edges=edges)
            player = await stack.enter_async_context(behind)
        await player.play(warm_up)
        await asyncio.sleep(PAUSE / plan.scale)
        records = await player.play(trace)
    return Played(front, load, seed, records)


def _spread(addresses: Sequence[Address], scale: float, *, known: bool) -> Player:
    return Player(addresses[0], scale, known=known, clock=now, asking=LeastConn(addresses))


@asynccontextmanager
async def behind_gateway(
    folder: Path,
    fleet: Sequence[EmulatedNode],
    scale: float,
    seed: int,
    *,
    known: bool,
    edges: int = 0,
) -> AsyncIterator[Player]:
    """A player in front of a running gateway over these nodes, in virtual time.

    `edges`: of the gateway, over real links in this process; each request goes to the one with the
    fewest.
    """
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        urls = [node.url for node in fleet]
        site = await enter(running_gateway(folder, urls, rng=random.Random(seed)))
        listener = is_known(site.gateway.public_listener)
        addresses = [(listener.host, listener.port)]
        if edges:
            brain = a_brain(site.gateway)
            names = [f"edge-{number}" for number in range(1, edges + 1)]
            bases = [(await enter(an_edge(site, brain, one))).client.base_url for one in names]
            addresses = [(url.host, url.port or 80) for url in bases]
        yield _spread(addresses, scale, known=known)
