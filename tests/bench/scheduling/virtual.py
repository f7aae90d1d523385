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
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench.load import Address
from tests.bench.scheduling.fronts import EDGES, FRONTS, OURS, nodes
from tests.bench.scheduling.play import Answer, Player, ask
from tests.bench.scheduling.report import (
    Figure,
    Outcome,
    Played,
    Results,
    Setting,
    failures,
    figures,
    outcome,
)
from tests.bench.scheduling.rounds import PAUSE, Plan, bounds, tell
from tests.bench.targets import HOST
from tests.edges.edge_beside import a_brain, an_edge
from tests.emulator import EmulatedNode
from tests.gateways import running_gateway
from tests.virtual import VirtualLoop, now

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rich.console import Console

MARKS = ("<!-- bench-scheduling-virtual: begin -->", "<!-- bench-scheduling-virtual: end -->")
STAND_IN = "least_conn"
USUAL = (*OURS, STAND_IN)  # played by default; the last one is compared with
SEEDS = 30


@dataclass(slots=True)
class LeastConn:
    """Sends each request to the node with the fewest requests, in turn among equals."""

    addresses: Sequence[Address]
    _busy: list[int] = field(init=False)
    _next: int = 0

    def __post_init__(self) -> None:
        self._busy = [0] * len(self.addresses)

    async def __call__(
        self, _: Address, body: dict[str, Any], limit: float, clock: Callable[[], float]
    ) -> Answer:
        count = len(self._busy)
        turns = [(self._next + i) % count for i in range(count)]
        node = min(turns, key=lambda i: self._busy[i])
        self._next = node + 1
        self._busy[node] += 1
        try:
            return await ask(self.addresses[node], body, limit, clock)
        finally:
            self._busy[node] -= 1


def measure(
    plan: Plan, fronts: Sequence[str], progress: Console, command: str, facts: dict[str, str]
) -> Outcome:
    """Play every load, seed and front of these, one after the other."""
    played = []
    for seed in range(1, plan.seeds + 1):
        for load in plan.loads:
            began = time.monotonic()
            runs = [_played(plan, front, load, seed) for front in fronts]
            played += runs
            tell(progress, runs, time.monotonic() - began)
    results = Results(played)
    parts = [*(_table(results, fronts, load) for load in plan.loads), *failures(results)]
    setting = Setting(command, facts | {"seeds": str(plan.seeds)})
    return outcome(results, setting, "\n\n".join(parts) + "\n", MARKS)


def _played(plan: Plan, front: str, load: str, seed: int) -> Played:
    folder = plan.folder / f"{front}-{load}-{seed}"
    folder.mkdir()
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(_asked(plan, front, load, seed, folder))


async def _asked(plan: Plan, front: str, load: str, seed: int, folder: Path) -> Played:
    warm_up, trace, _ = plan.traces(load, seed)
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(nodes(plan.fleet, plan.scale, now))
        if front == STAND_IN:
            addresses = [(HOST, node.port) for node in fleet]
            player = _spread(addresses, plan.scale, known=False)
        else:
            known = FRONTS[front].known
            edges = EDGES if front == "edges" else 0
            behind = behind_gateway(folder, fleet, plan.scale, seed, known=known, edges=edges)
            player = await stack.enter_async_context(behind)
        await player.play(warm_up)
        await asyncio.sleep(PAUSE / plan.scale)
        records = await player.play(trace)
    return Played(front, load, seed, records, bounds(trace, records, plan.fleet))


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
    urls = [node.url for node in fleet]
    async with AsyncExitStack() as stack:
        running = running_gateway(folder, urls, rng=random.Random(seed))
        site = await stack.enter_async_context(running)
        if edges:
            brain = a_brain(site.gateway)
            names = [f"edge-{number}" for number in range(1, edges + 1)]
            begun = [await stack.enter_async_context(an_edge(site, brain, one)) for one in names]
            bases = [edge.client.base_url for edge in begun]
            addresses = [(url.host, url.port or 80) for url in bases]
            yield _spread(addresses, scale, known=known)
        else:
            assert site.gateway.public_listener is not None
            address = site.gateway.public_listener.host, site.gateway.public_listener.port
            yield Player(address, scale, known=known, clock=now)


def _table(results: Results, fronts: Sequence[str], load: str) -> str:
    def cell(front: str, figure: Figure) -> str:
        value = results.value(front, load, figure)
        if value is None:
            return "-"
        ratio = results.ratio(front, fronts[-1], load, figure)
        shown = f"{value:.1%}" if figure.name == "cached" else f"{value:.2f}"
        return f"{shown} ({ratio:.3f})" if ratio and front != fronts[-1] else shown

    titles = {front: FRONTS[front].title for front in fronts if front != STAND_IN}
    if STAND_IN in fronts:
        titles[STAND_IN] = "`least_conn`, in this process"
    return figures(f"virtual time, load: {load}", titles, cell)
