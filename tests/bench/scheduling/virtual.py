"""The same trace through the running gateway in virtual time: what its choices are worth.

Gateway, nodes and clients share one process and a clock that jumps, so that neither the machine
nor its other work has a part in the figures, and a trace takes seconds. Other programs can't run
in it: a balancer of connections of a few lines, which takes no time, stands in for nginx. For
comparing two versions of the scheduler, and for more seeds than there is time for otherwise.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench.load import Address
from tests.bench.scheduling import capacity
from tests.bench.scheduling.client import Answer, ask
from tests.bench.scheduling.fleet import FLEET, nodes
from tests.bench.scheduling.fronts import FRONTS, OURS
from tests.bench.scheduling.play import Player, as_emulated
from tests.bench.scheduling.report import Outcome, table
from tests.bench.scheduling.results import FIGURES, LOADS, Played, Results
from tests.bench.scheduling.rounds import PAUSE, WARM_UP, bounds
from tests.bench.scheduling.trace import Shape, make
from tests.bench.targets import HOST
from tests.emulator import EmulatedNode
from tests.gateways import running_gateway
from tests.virtual import VirtualLoop

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rich.console import Console

MARKS = ("<!-- bench-scheduling-virtual: begin -->", "<!-- bench-scheduling-virtual: end -->")
STAND_IN = "least_conn"
SEEDS = 30


@dataclass(slots=True)
class LeastConn:
    """Sends each request to the node with the fewest under way, in turns among equals."""

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


@dataclass(frozen=True, slots=True)
class Plan:
    """What is played."""

    loads: Sequence[str]
    seeds: int
    scale: float
    folder: Path
    shape: Shape = field(default_factory=Shape)
    warm_up: Shape = WARM_UP


def measure(plan: Plan, progress: Console, command: str, facts: dict[str, str]) -> Outcome:
    """Play every load, seed and front, one after the other."""
    played = []
    for seed in range(1, plan.seeds + 1):
        for load in plan.loads:
            began = time.monotonic()
            runs = [_played(plan, front, load, seed) for front in (*OURS, STAND_IN)]
            played += runs
            means = ", ".join(f"{run.front} {FIGURES[0].of([run.records]):.2f}" for run in runs)
            seconds = time.monotonic() - began
            progress.print(f"seed {seed}, {load}: mean completion {means}  [{seconds:.0f} s]")
    results = Results(played)
    tables = "\n\n".join(_table(results, load) for load in plan.loads) + "\n"
    told = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    page = f"```console\n$ {command}\n```\n\n{told}\n- seeds: {plan.seeds}\n\n{tables}"
    as_json = json.dumps(
        {"command": command, "machine": facts, "played": [asdict(one) for one in played]}
    )
    return Outcome(tables, page, as_json, MARKS, any(one.problems for one in played))


def _played(plan: Plan, front: str, load: str, seed: int) -> Played:
    folder = plan.folder / f"{front}-{load}-{seed}"
    folder.mkdir()
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        return runner.run(_asked(plan, front, load, seed, folder, loop))


async def _asked(
    plan: Plan, front: str, load: str, seed: int, folder: Path, loop: VirtualLoop
) -> Played:
    full = capacity.session_rate(make(f"{seed}", 1.0, plan.shape), FLEET)
    trace = make(f"{seed}", full * LOADS[load], plan.shape)
    async with (
        nodes(FLEET, plan.scale, loop.time) as fleet,
        _player(plan, front, seed, folder, fleet, loop) as player,
    ):
        await player.play(make(f"warm-up {seed}", full, plan.warm_up))
        await asyncio.sleep(PAUSE / plan.scale)
        records = await player.play(trace)
    return Played(front, load, seed, records, bounds(trace, records, FLEET))


@asynccontextmanager
async def _player(
    plan: Plan,
    front: str,
    seed: int,
    folder: Path,
    fleet: Sequence[EmulatedNode],
    loop: VirtualLoop,
) -> AsyncIterator[Player]:
    if front == STAND_IN:
        addresses = [(HOST, node.port) for node in fleet]
        yield Player(
            addresses[0],
            plan.scale,
            known=False,
            check=as_emulated,
            clock=loop.time,
            asking=LeastConn(addresses),
        )
        return
    urls = [node.url for node in fleet]
    rng = random.Random(seed)
    async with running_gateway(folder, urls, clock=loop.time, rng=rng) as site:
        assert site.gateway.public is not None
        address = site.gateway.public.host, site.gateway.public.port
        known = FRONTS[front].known
        yield Player(address, plan.scale, known=known, check=as_emulated, clock=loop.time)


def _table(results: Results, load: str) -> str:
    rows = []
    for front in results.fronts():
        row = [FRONTS[front].title if front in FRONTS else "`least_conn`, in this process"]
        for figure in FIGURES:
            value = results.value(front, load, figure)
            if value is None:
                row.append("-")
                continue
            ratio = results.ratio(front, STAND_IN, load, figure)
            shown = f"{value:.1%}" if figure.name == "cached" else f"{value:.2f}"
            row.append(f"{shown} ({ratio:.3f})" if ratio and front != STAND_IN else shown)
        rows.append(row)
    head = f"virtual time, load: {load}"
    parts = [table([head, *(figure.title for figure in FIGURES)], rows)]
    parts += [
        f"{one.front}, {load}, seed {one.seed}: {len(one.problems)} failed, the first: "
        f"{one.problems[0]}"
        for one in results.played
        if one.load == load and one.problems
    ]
    return "\n\n".join(parts)
