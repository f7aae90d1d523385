"""The data-plane benchmark: `python -m tests.bench.dataplane` (`make bench`).

What is measured, and how: docs/performance.md. Two cores are used: the proxy has one to itself, and
this process, which is both the emulated upstream and the load, has the other. While many streams
run, the turns of the gateway's event loop are measured, too (`tests/loop_watch`): the longest, and
how many take more than 50 ms of CPU. The functions in which those were are printed.

Modules: `upstream.py` is the emulated node and `node_replies.py` its responses, `load.py` the
clients, `targets.py` the proxies (its docstring says how to add one), `scenarios.py` what is
measured, and `report.py` medians, ratios, goals and the tables.

Exit status: 0 measured, whatever the figures; 1 some sample is invalid or a target did not
start; 2 usage error, or a target that was named is not installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tests.bench import machine, report
from tests.bench.machine import one_of, positive
from tests.bench.report import Results, Sample, number
from tests.bench.scenarios import QUICK, RunningTarget, Scenario, Sizes, catalogue
from tests.bench.targets import TARGETS, Plan, Target, TargetError, running
from tests.bench.upstream import Upstream
from tests.loop_watch.plugin import Children, environment

NODES = 4
SLOTS = 512  # slots of each node, at least: enough that no request waits in the gateway's queue


def main(words: Sequence[str]) -> int:
    options, scenarios, sizes = _parse(words)
    progress = Console(stderr=True, highlight=False, soft_wrap=True)
    names = machine.installed(TARGETS, options.targets, list(TARGETS), progress)
    cores = machine.two_cores(progress)
    if not names or not cores:
        return 2
    rounds = options.rounds or (1 if options.quick else 5)
    command = shlex.join(["python", "-m", "tests.bench.dataplane", *words])
    facts = machine.facts(names, progress)
    folder = Path(tempfile.mkdtemp(prefix="llama-gateway-bench-"))
    targets = [TARGETS[name] for name in names]
    run = Run(scenarios, targets, sizes, rounds, cores[0], folder, progress)
    results = Results(machine.run_beside(run.samples(), cores))
    tables = report.tables(results, scenarios, names)
    facts |= {"rounds": str(rounds)}
    setting = {"command": command, "machine": facts, "sizes": dataclasses.asdict(sizes)}
    return report.finish(options, results, report.GOALS, tables, folder, setting)


def _parse(words: Sequence[str]) -> tuple[argparse.Namespace, list[Scenario], Sizes]:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.dataplane",
        description="CPU per request and per chunk of the gateway beside nginx and HAProxy.",
    )
    add = parser.add_argument
    targets = f"of {','.join(TARGETS)}; default: all that are installed"
    add("--targets", type=one_of(list(TARGETS)), help=targets)
    add("--only", help=f"scenarios, of {','.join(catalogue(Sizes()))}")
    add("--rounds", type=positive, help="default 5, with --quick 1")
    add("--quick", action="store_true", help="a few seconds a target, to check the harness")
    streams = "counts of many streams, default 2000: there is a scenario for each, streams-COUNT"
    add("--streams", type=lambda text: tuple(map(positive, text.split(","))), help=streams)
    add("--json", type=Path, help="write samples, verdicts and the machine's facts to this file")
    page = "write the tables between the markers of this page, if every sample is valid"
    add("--markdown", type=Path, help=page)
    options = parser.parse_args(words)
    sizes = QUICK if options.quick else Sizes()
    if options.streams:
        sizes = dataclasses.replace(sizes, many=options.streams)
    known = catalogue(sizes)
    try:
        chosen = one_of(list(known))(options.only) if options.only else known
    except argparse.ArgumentTypeError as error:
        parser.error(f"argument --only: {error}")
    return options, [known[name] for name in chosen], sizes


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    scenarios: Sequence[Scenario]
    targets: Sequence[Target]
    sizes: Sizes
    rounds: int
    core: int
    folder: Path
    progress: Console

    async def samples(self) -> list[Sample]:
        taken: list[Sample] = []
        slots = max(SLOTS, *(2 * count // NODES for count in self.sizes.many))
        gc.disable()  # a collection in this process would count as a delay
        try:
            async with Upstream(NODES, slots) as upstream:
                for round_ in range(1, self.rounds + 1):
                    for scenario in self.scenarios:
                        fitting = [t for t in self.targets if scenario.fits(t.name)]
                        first = (round_ - 1) % max(1, len(fitting))
                        for target in fitting[first:] + fitting[:first]:
                            sample = await self._sample(scenario, target, round_, upstream)
                            taken.append(sample)
                            self._print_sample(scenario, sample)
                            gc.collect()
        finally:
            gc.enable()
        return taken

    async def _sample(
        self, scenario: Scenario, target: Target, round_: int, upstream: Upstream
    ) -> Sample:
        place = (scenario.name, target.name, round_)
        folder = self.folder / "-".join(map(str, place))
        folder.mkdir()
        turns = None
        if scenario.watches_turns and target.name == report.OURS:
            turns = Children(folder / "turns")
            turns.folder.mkdir()
            target = _watched(target, turns.folder)
        try:
            async with running(target, folder, upstream.ports, self.core) as proxy:
                subject = RunningTarget(proxy.address, proxy.pid, upstream, turns)
                figures, outcome = await scenario.run(subject, self.sizes)
        except (TargetError, OSError) as error:
            return Sample(*place, {}, 1, str(error))
        return Sample(*place, figures, outcome.errors, outcome.first_error)

    def _print_sample(self, scenario: Scenario, sample: Sample) -> None:
        line = f"{sample.round}/{self.rounds}  {scenario.name:12} {sample.target:8}"
        seen = sample.figures
        if sample.errors:
            line += f" INVALID, {sample.errors} errors: {sample.first_error}"
        else:
            line += f" {scenario.figure} {number(seen[scenario.figure])}"
        if "rate" in seen:
            line += f", {seen['rate']:.0f}/s, proxy {seen['proxy_busy']:.0%}"
            line += f", load {seen['load_busy']:.0%}, disturbed {seen['disturbed']:.0%}"
        self.progress.print(line, style="red" if sample.errors else None, markup=False)


def _watched(target: Target, folder: Path) -> Target:
    """The target with its event loop watched: its turns above 5 ms are reported to the folder."""
    variables = environment(folder) | {"LOOP_WATCH_ONLY": "turns", "LOOP_WATCH_SECONDS": "0.005"}

    def command(binary: str, plan: Plan) -> list[str]:
        words = [f"{name}={value}" for name, value in variables.items()]
        return ["env", *words, *target.command(binary, plan)]

    return dataclasses.replace(target, command=command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
