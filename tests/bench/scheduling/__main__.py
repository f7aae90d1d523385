"""`python -m tests.bench.scheduling` (`make bench-scheduling`): see the package's docstring.

    python -m tests.bench.scheduling --quick                       half a minute; means little
    python -m tests.bench.scheduling --only gateway,nginx --loads capacity --seeds 2
    python -m tests.bench.scheduling --scale 4                     ten minutes instead of forty
    python -m tests.bench.scheduling --markdown docs/scheduling-results.md --json bench.json
    python -m tests.bench.scheduling --virtual --loads capacity    30 seeds, no noise, no peers

Exit status: 0 measured, whatever the figures; 1 a request failed or a front did not start;
2 usage error, a front that was asked for and isn't installed among them.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tests.bench import machine
from tests.bench.arguments import one_of, positive
from tests.bench.report import write_between_markers
from tests.bench.scheduling import report, virtual
from tests.bench.scheduling.fronts import FRONTS, OURS, USUAL, Front
from tests.bench.scheduling.report import LOADS, Results
from tests.bench.scheduling.rounds import WARM_UP, Plan, Rounds
from tests.bench.scheduling.trace import Shape
from tests.bench.targets import TargetError

SCALE, QUICK_SCALE = 1.0, 8.0
SEEDS = 5
QUICK = Shape(sessions=8, turns=2, tenants=3)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    options = _parse(words)
    progress = Console(stderr=True, highlight=False, soft_wrap=True)
    if options.virtual:
        fronts = [FRONTS[name] for name in (*OURS, "edges")]
    else:
        targets = {name: front.target for name, front in FRONTS.items()}
        names = machine.installed(targets, options.only, USUAL, progress)
        fronts = [FRONTS[name] for name in names]
        if len(os.sched_getaffinity(0)) < 2:
            progress.print("the benchmark needs two cores: one for the fronts, one for the load")
            return 2
    if not fronts:
        return 2
    folder = Path(tempfile.mkdtemp(prefix="llama-gateway-bench-"))
    command = shlex.join(["python", "-m", "tests.bench.scheduling", *words])
    facts = machine.facts(sorted({front.target.name for front in fronts}))
    machine.print_facts(facts, progress)
    try:
        if options.virtual:
            plan = _plan(options, folder, seeds=virtual.SEEDS)
            outcome = virtual.measure(plan, options.only or virtual.USUAL, progress, command, facts)
        else:
            outcome = _emulated(fronts, options, folder, progress, command, facts)
    except TargetError as error:
        progress.print(str(error), style="red")
        return 1
    sys.stdout.write(outcome.tables)
    if options.json:
        options.json.write_text(outcome.json)
    if outcome.failed:
        progress.print(f"requests failed; logs and configurations: {folder}", style="red")
        return 1
    if options.markdown:
        write_between_markers(options.markdown, outcome.page, outcome.marks)
    shutil.rmtree(folder)
    return 0


def _plan(
    options: argparse.Namespace, folder: Path, *, seeds: int = SEEDS, quick_scale: float = SCALE
) -> Plan:
    """What to play; `seeds` and `quick_scale` are the defaults."""
    quick = options.quick
    return Plan(
        loads=options.loads or (("capacity",) if quick else tuple(LOADS)),
        seeds=options.seeds or (1 if quick else seeds),
        scale=options.scale or (quick_scale if quick else SCALE),
        folder=folder,
        shape=QUICK if quick else Shape(),
        warm_up=QUICK if quick else WARM_UP,
    )


def _emulated(
    fronts: Sequence[Front],
    options: argparse.Namespace,
    folder: Path,
    progress: Console,
    command: str,
    facts: dict[str, str],
) -> report.Outcome:
    """Play on emulated nodes, with this process on the second core."""
    cores = sorted(os.sched_getaffinity(0))
    plan = _plan(options, folder, quick_scale=QUICK_SCALE)
    rounds = Rounds(plan, fronts, cores[0], progress)
    results = Results(machine.run_beside(rounds.play(), cores))
    means = (f"{load} {sum(found) / len(found):.2f}" for load, found in rounds.rates.items())
    facts |= {
        "seeds": str(plan.seeds),
        "scale": f"{plan.scale:g} seconds of the fleet's time in one of the clock's",
        "sessions a second": ", ".join(means),
    }
    return report.outcome(results, report.Setting(command, facts), report.tables(results))


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.scheduling",
        description="How soon requests are answered behind the gateway, nginx and HAProxy.",
    )
    add = parser.add_argument
    add("--only", type=one_of(list(FRONTS)), help=f"fronts, of {','.join(FRONTS)}")
    add("--loads", type=one_of(list(LOADS)), help=f"of {','.join(LOADS)}; default: all")
    seeds = f"default {SEEDS}, with --quick 1, with --virtual {virtual.SEEDS}"
    add("--seeds", type=positive, help=seeds)
    scale = f"default {SCALE:g}, with --quick {QUICK_SCALE:g} unless --virtual"
    add("--scale", type=_factor, help=f"times as fast as life, {scale}")
    add("--quick", action="store_true", help="a small trace at capacity, to check the harness")
    add(
        "--virtual",
        action="store_true",
        help="in virtual time: the gateway and a stand-in for nginx, exact and quick",
    )
    add("--json", type=Path, help="write requests, figures and verdicts to this file")
    add("--markdown", type=Path, help="write the tables between the markers of this page")
    options = parser.parse_args(words)
    here = {*virtual.USUAL, "edges"}
    if options.virtual and not here.issuperset(options.only or ()):
        parser.error(f"with --virtual there are only {', '.join(sorted(here))}")
    return options


def _factor(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 100:
        raise argparse.ArgumentTypeError(f"not a factor above 0 and up to 100: {text}")
    return value


if __name__ == "__main__":
    sys.exit(main())
