"""The data-plane benchmark: `python -m tests.bench.dataplane` (`make bench`).

It measures the CPU time of one request and of one chunk of a stream (user and system, the whole
process tree) as a ratio to nginx in the same run. Each round measures one target after the other;
the result is the median over the rounds. Absolute figures vary with the machine and its load;
these ratios hold.

Two cores are used: the proxy has one to itself, and this process, which is both the emulated
upstream and the load, has the other. Every answer is checked; a sample with errors is invalid.

    python -m tests.bench.dataplane --quick                          seconds; figures mean little
    python -m tests.bench.dataplane --only chunk --targets gateway --perf      for a profile
    python -m tests.bench.dataplane --markdown docs/performance.md --json bench.json

Modules: `upstream.py` is the emulated node and `node_replies.py` its responses, `load.py` the
clients, `targets.py` the proxies (its docstring says how to add one), `scenarios.py` what is
measured, `rounds.py` in which order, `measurement.py` one measurement, `results.py` medians,
ratios and goals, `report.py` the tables.

Exit status: 0 measured, whatever the figures; 1 some sample is invalid or a target did not
start; 2 usage error, or a target that was named is not installed.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import resource
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import uvloop
from rich.console import Console

from tests.bench import machine, report
from tests.bench.arguments import one_of, positive
from tests.bench.results import Results
from tests.bench.rounds import Run
from tests.bench.scenarios import QUICK, Scenario, Sizes, catalogue
from tests.bench.targets import TARGETS, Target


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    options, scenarios, sizes = _parse(words)
    progress = Console(stderr=True, highlight=False, soft_wrap=True)
    targets = _installed(options.targets, progress)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        progress.print("the benchmark needs two cores: one for the proxy, one for the load")
    if not targets or len(cores) < 2:
        return 2
    names = [target.name for target in targets]
    rounds = options.rounds or (1 if options.quick else 5)
    command = shlex.join(["python", "-m", "tests.bench.dataplane", *words])
    facts = machine.facts(names)
    machine.print_facts(facts, progress)
    setting = report.Setting(command, facts, sizes, rounds)
    folder = Path(tempfile.mkdtemp(prefix="llama-gateway-bench-"))
    run = Run(scenarios, targets, sizes, rounds, cores[0], folder, progress, perf=options.perf)
    results = _measure(run, cores)
    tables = report.tables(results, scenarios, names)
    sys.stdout.write(tables)
    if options.json:
        options.json.write_text(report.as_json(results, setting))
    if results.invalid():
        progress.print(f"invalid samples; logs and configurations: {folder}", style="red")
        return 1
    if options.markdown:
        report.write_between_markers(options.markdown, report.page(tables, setting))
    if not options.perf:
        shutil.rmtree(folder)
    return 0


def _measure(run: Run, cores: Sequence[int]) -> Results:
    """Measure with this process on the second core and the highest limit of open files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.sched_setaffinity(0, {cores[1]})
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return Results(runner.run(run.samples()))
    finally:
        os.sched_setaffinity(0, cores)


def _installed(names: Sequence[str] | None, progress: Console) -> list[Target]:
    """The targets to measure; none when one that was named is not installed."""
    wanted = [TARGETS[name] for name in names or TARGETS]
    missing = [target for target in wanted if target.program() is None]
    for target in missing:
        progress.print(f"{target.name} is not installed ({target.remedy})", style="yellow")
    return [] if names and missing else [target for target in wanted if target not in missing]


def _parse(words: Sequence[str]) -> tuple[argparse.Namespace, list[Scenario], Sizes]:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.dataplane",
        description="CPU per request and per chunk of the gateway beside nginx and HAProxy.",
    )
    add = parser.add_argument
    add(
        "--targets",
        type=one_of(list(TARGETS)),
        help=f"of {','.join(TARGETS)}; default: all that are installed",
    )
    add("--only", help=f"scenarios, of {','.join(catalogue(Sizes()))}")
    add("--rounds", type=positive, help="default 5, with --quick 1")
    add("--quick", action="store_true", help="a few seconds a target, to check the harness")
    add(
        "--streams",
        type=lambda text: tuple(positive(count) for count in text.split(",")),
        help="counts of many streams, default 2000: there is a scenario for each, streams-COUNT",
    )
    add("--json", type=Path, help="write samples, verdicts and the machine's facts to this file")
    add(
        "--markdown",
        type=Path,
        help="write the tables between the markers of this page, if every sample is valid",
    )
    add("--perf", action="store_true", help="perf record each proxy while it is measured")
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


if __name__ == "__main__":
    sys.exit(main())
