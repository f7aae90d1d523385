"""The order of the runs: every load and seed, all fronts at once.

Each front has a fleet of its own. The fleets sleep rather than compute, so that all fronts can be
compared under the very same disturbances of the machine, with both cores mostly idle (the report
tells how busy they were).

Before each measured trace a warm-up is played against every front alike: shorter, with other
words, other tenants and the same lengths. So learnt speeds and lengths are there, as in a gateway
that has run for a while; nothing of the measured prompts is in any cache.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from tests.bench.machine import cpu_seconds, waited_seconds
from tests.bench.scheduling.fronts import FLEET, Front, nodes
from tests.bench.scheduling.play import Player
from tests.bench.scheduling.report import LOADS, Played, mean
from tests.bench.scheduling.trace import Shape, Trace, make, session_rate
from tests.bench.targets import Running, running

WARM_UP = Shape(sessions=18, turns=2)
PAUSE = 5.0  # seconds of the fleet's time between the warm-up's last answer and the trace


@dataclass(frozen=True, slots=True)
class Plan:
    """What is played, by a real or a virtual clock."""

    loads: Sequence[str]
    seeds: int
    scale: float
    folder: Path
    shape: Shape
    warm_up: Shape

    def traces(self, load: str, seed: int) -> tuple[Trace, Trace]:
        """The warm-up and the measured trace."""
        full = session_rate(make(f"{seed}", 1.0, self.shape), FLEET)
        trace = make(f"{seed}", full * LOADS[load], self.shape)
        return make(f"warm-up {seed}", full, self.warm_up), trace


@dataclass(slots=True)
class Rounds:
    """Plays a plan against fronts that are processes."""

    plan: Plan
    fronts: Sequence[Front]
    core: int
    progress: Console

    async def play(self) -> list[Played]:
        """Play everything; one result for each load, seed and front."""
        played = []
        for seed in range(1, self.plan.seeds + 1):
            for load in self.plan.loads:
                turn = seed % len(self.fronts)
                order = [*self.fronts[turn:], *self.fronts[:turn]]
                played += await self._group(order, load, seed)
        order_of = [front.name for front in self.fronts]
        return sorted(played, key=lambda p: (order_of.index(p.front), p.seed))

    async def _group(self, fronts: Sequence[Front], load: str, seed: int) -> list[Played]:
        began, plan = time.monotonic(), self.plan
        warm_up, trace = plan.traces(load, seed)
        async with AsyncExitStack() as stack:
            runs = [await self._started(stack, front, load, seed) for front in fronts]
            pairs = zip(runs, fronts, strict=True)
            players = [Player([run.address], plan.scale, front.known) for run, front in pairs]
            await asyncio.gather(*(player.play(warm_up) for player in players))
            await asyncio.sleep(PAUSE / plan.scale)
            wall, load_cpu = time.perf_counter(), time.process_time()
            waited = waited_seconds(os.getpid())
            cpu = [cpu_seconds(run.pid) if run.pid else 0.0 for run in runs]
            records = await asyncio.gather(*(player.play(trace) for player in players))
            wall = time.perf_counter() - wall
            played = [
                Played(
                    front=front.name,
                    load=load,
                    seed=seed,
                    records=found,
                    front_busy=(cpu_seconds(run.pid) - before) / wall if run.pid else 0.0,
                    load_busy=(time.process_time() - load_cpu) / wall,
                    disturbed=(waited_seconds(os.getpid()) - waited) / wall / (len(runs) + 1),
                )
                for front, run, before, found in zip(fronts, runs, cpu, records, strict=True)
            ]
        tell(self.progress, played, began)
        return played

    async def _started(self, stack: AsyncExitStack, front: Front, load: str, seed: int) -> Running:
        fleet = await stack.enter_async_context(nodes(scale=self.plan.scale))
        folder = self.plan.folder / f"{front.name}-{load}-{seed}"
        folder.mkdir()
        ports = tuple(node.port for node in fleet)
        return await stack.enter_async_context(running(front.target, folder, ports, self.core))


def tell(progress: Console, played: Sequence[Played], began: float) -> None:
    """Print the mean completion of each front that has played a trace."""
    means = ", ".join(f"{one.front} {mean(one.records):.2f}" for one in played)
    failed = sum(bool(record.problem) for one in played for record in one.records)
    problems = f", {failed} requests FAILED" if failed else ""
    where, took = f"seed {played[0].seed}, {played[0].load}", time.monotonic() - began
    progress.print(f"{where}: mean completion {means}{problems}  [{took:.0f} s]")
