"""One run of the benchmark: every scenario with every target, round by round."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tests.bench.measurement import RunningTarget
from tests.bench.report import number
from tests.bench.results import Sample
from tests.bench.scenarios import Scenario, Sizes
from tests.bench.targets import Target, TargetError, running
from tests.bench.upstream import Upstream

NODES = 4
SLOTS = 512  # slots of each node, at least: enough that no request waits in the gateway's queue


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """What is measured, how often, and on which core the proxy runs."""

    scenarios: Sequence[Scenario]
    targets: Sequence[Target]
    sizes: Sizes
    rounds: int
    core: int
    folder: Path
    progress: Console
    perf: bool = False

    async def samples(self) -> list[Sample]:
        """Measure. Each sample starts its target anew; no other target runs meanwhile."""
        taken: list[Sample] = []
        slots = max(SLOTS, *(2 * count // NODES for count in self.sizes.many))
        gc.disable()  # a collection in this process would count as a delay
        try:
            async with Upstream(NODES, slots) as upstream:
                for round_ in range(1, self.rounds + 1):
                    for scenario in self.scenarios:
                        for target in self._order(scenario, round_):
                            sample = await self._sample(scenario, target, round_, upstream)
                            taken.append(sample)
                            self._print_sample(scenario, sample)
                            gc.collect()
        finally:
            gc.enable()
        return taken

    def _order(self, scenario: Scenario, round_: int) -> list[Target]:
        """The targets in their order; each round begins with another one."""
        fitting = [t for t in self.targets if scenario.fits(t.name)]
        first = (round_ - 1) % max(1, len(fitting))
        return fitting[first:] + fitting[:first]

    async def _sample(
        self, scenario: Scenario, target: Target, round_: int, upstream: Upstream
    ) -> Sample:
        folder = self.folder / f"{scenario.name}-{target.name}-{round_}"
        folder.mkdir()
        perf = folder / "perf.data" if self.perf else None
        try:
            async with running(target, folder, upstream.ports, self.core) as proxy:
                subject = RunningTarget(proxy.address, proxy.pid, upstream, perf)
                figures, outcome = await scenario.run(subject, self.sizes)
        except (TargetError, OSError) as error:
            return Sample(scenario.name, target.name, round_, {}, 1, str(error))
        figures["reconnects"] = outcome.reconnects
        return Sample(
            scenario.name, target.name, round_, figures, outcome.errors, outcome.first_error
        )

    def _print_sample(self, scenario: Scenario, sample: Sample) -> None:
        place = f"{sample.round}/{self.rounds}  {scenario.name:12} {sample.target:8}"
        if sample.errors:
            self.progress.print(
                f"{place} INVALID, {sample.errors} errors: {sample.first_error}",
                style="red",
                markup=False,
            )
            return
        seen = sample.figures
        line = f"{place} {scenario.figure} {number(seen[scenario.figure])}"
        if "rate" in seen:
            line += f", {seen['rate']:.0f}/s, proxy {seen['proxy_busy']:.0%}"
            line += f", load {seen['load_busy']:.0%} ({number(seen['load_us'])} us)"
            line += f", disturbed {seen['disturbed']:.0%}"
        if self.perf:
            line += f", {self.folder / f'{scenario.name}-{sample.target}-{sample.round}'}"
        self.progress.print(line, markup=False)
