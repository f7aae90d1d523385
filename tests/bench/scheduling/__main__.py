"""`python -m tests.bench.scheduling` (`make bench-scheduling`): docs/scheduling-results.md.

Exit status: 0 measured, whatever the figures; 1 a request failed or a front did not start;
2 usage error, a front that was asked for and isn't installed among them.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tests.bench import machine
from tests.bench.machine import one_of, positive
from tests.bench.report import finish
from tests.bench.scheduling import report
from tests.bench.scheduling.fronts import FRONTS
from tests.bench.scheduling.play import LOADS, WARM_UP, Rounds
from tests.bench.scheduling.trace import Shape
from tests.bench.targets import TargetError

QUICK_SCALE = 8.0
SEEDS = 5
QUICK = Shape(sessions=8, turns=2, tenants=3)


def main(words: Sequence[str]) -> int:
    options = _parse(words)
    progress = Console(stderr=True, highlight=False, soft_wrap=True)
    targets = {name: front.target for name, front in FRONTS.items()}
    fronts = machine.installed(targets, options.only, list(FRONTS), progress)
    cores = machine.two_cores(progress)
    if not fronts or not cores:
        return 2
    folder = Path(tempfile.mkdtemp(prefix="llama-gateway-bench-"))
    command = shlex.join(["python", "-m", "tests.bench.scheduling", *words])
    facts = machine.facts(sorted({targets[one].name for one in fronts}), progress)
    quick = options.quick
    rounds = Rounds(
        [FRONTS[name] for name in fronts],
        loads=options.loads or (("capacity",) if quick else tuple(LOADS)),
        seeds=options.seeds or (1 if quick else SEEDS),
        scale=options.scale or (QUICK_SCALE if quick else 1.0),
        shape=QUICK if quick else Shape(),
        warm_up=QUICK if quick else WARM_UP,
        folder=folder,
        core=cores[0],
        progress=progress,
    )
    scale = f"{rounds.scale:g} seconds of the fleet's time in one of the clock's"
    facts |= {"seeds": str(rounds.seeds), "scale": scale}
    try:  # with this process, which has the emulated nodes, on the second core
        results = report.pooled(machine.run_beside(rounds.play(), cores))
    except TargetError as error:
        progress.print(str(error), style="red")
        return 1
    titles = {one: FRONTS[one].title for one in fronts}
    setting = {"command": command, "machine": facts}
    tables, goals = report.tables(results, titles), report.goals(results)
    return finish(options, results, goals, tables, folder, setting, report.MARKS)


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.scheduling",
        description="How soon requests are answered behind the gateway, nginx and HAProxy.",
    )
    add = parser.add_argument
    add("--only", type=one_of(list(FRONTS)), help=f"fronts, of {','.join(FRONTS)}")
    add("--loads", type=one_of(list(LOADS)), help=f"of {','.join(LOADS)}; default: all")
    add("--seeds", type=positive, help=f"default {SEEDS}, with --quick 1")
    scale = f"times as fast as life, default 1, with --quick {QUICK_SCALE:g}"
    add("--scale", type=float, help=scale)
    add("--quick", action="store_true", help="a small trace at capacity, to check the harness")
    add("--json", type=Path, help="write figures and verdicts to this file")
    add("--markdown", type=Path, help="write the tables between the markers of this page")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
