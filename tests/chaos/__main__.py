"""`python -m tests.chaos`: many runs with different seeds, resumable."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import fields
from pathlib import Path

from tests.bench.machine import commit
from tests.chaos.run import RunReport, run_seed, running_testbed

RUNS_PER_TESTBED = 50  # after this many, the servers and the gateway's process are started anew
MOST_PRINTED = 10  # violations of one run that are printed; the file of `--resume` has all of them


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    add = parser.add_argument
    add("--runs", type=int, default=20, help="number of runs, including those of --resume")
    add("--seconds", type=float, default=10.0, help="seconds of load in each run")
    add("--seed", type=int, default=1, help="seed of the first run; each next run adds one")
    resume = "JSON lines: skip the runs in it, append the new ones"
    add("--resume", type=Path, metavar="FILE", help=resume)
    add("--again", action="store_true", help="repeat the runs of FILE that had violations")
    add("--keep", type=Path, metavar="DIR", help="copy the logs of runs with violations here")
    return parser.parse_args()


def _print(report: RunReport) -> None:
    counts = ", ".join(f"{n} {what}" for what, n in report.outcomes.most_common())
    print(
        f"seed {report.seed}: {report.requests} requests ({counts}), "
        f"{report.faults.total()} faults, {report.rss >> 20} MiB, {report.took:.1f} s, "
        f"waited {report.waited:.1f} s for its core"
    )
    for violation in report.violations[:MOST_PRINTED]:
        print(f"  BROKEN: {violation}")
    if (more := len(report.violations) - MOST_PRINTED) > 0:
        print(f"  BROKEN: {more} more")
    sys.stdout.flush()


async def _main(options: argparse.Namespace) -> int:
    seeds = range(options.seed, options.seed + options.runs)
    known = options.resume is not None and options.resume.exists()
    lines = options.resume.read_text().splitlines() if known else []
    runs = {run["seed"]: run for run in map(json.loads, lines)}
    broken = {seed: bool(runs[seed]["violations"]) for seed in seeds if seed in runs}
    left = [seed for seed in seeds if seed not in runs or (options.again and broken[seed])]
    revision = commit()
    for begin in range(0, len(left), RUNS_PER_TESTBED):
        async with running_testbed() as testbed:
            for seed in left[begin : begin + RUNS_PER_TESTBED]:
                report = await run_seed(
                    testbed, seed, options.seconds, process_faults=True, keep=options.keep
                )
                _print(report)
                broken[seed] = bool(report.violations)
                if options.resume is not None:
                    values = {one.name: getattr(report, one.name) for one in fields(report)}
                    line = json.dumps({"revision": revision, **values})
                    with options.resume.open("a") as file:
                        file.write(line + "\n")
    print(f"{len(broken)} runs, {sum(broken.values())} with a broken invariant")
    return 1 if any(broken.values()) else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(_main(_options())))
