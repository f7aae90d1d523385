"""`python -m tests.chaos`: many runs with different seeds, resumable."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from tests.bench.machine import commit
from tests.chaos.run import RunReport, run_seed, running_testbed

RUNS_PER_TESTBED = 50
"""After this many, the servers and the gateway's process are started anew."""

MOST_PRINTED = 10
"""Violations of one run that are printed; the file of `--resume` has all of them."""


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument(
        "--runs", type=int, default=20, help="number of runs, including those of --resume"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of load in each run")
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the first run; each next run adds one"
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FILE",
        help="JSON lines: skip the runs in it, append the new ones",
    )
    parser.add_argument(
        "--again", action="store_true", help="repeat the runs of FILE that had violations"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="copy the logs of runs with violations here"
    )
    return parser


def _earlier_runs(file: Path | None) -> dict[int, dict[str, Any]]:
    """The last recorded run of each seed."""
    if file is None or not file.exists():
        return {}
    outcomes = [json.loads(line) for line in file.read_text().splitlines()]
    return {report["seed"]: report for report in outcomes}


def _print_report(report: RunReport) -> None:
    counts = ", ".join(f"{n} {what}" for what, n in report.outcomes.most_common())
    print(
        f"seed {report.seed}: {report.requests} requests ({counts}), "
        f"{sum(report.faults.values())} faults, {report.rss >> 20} MiB, {report.took:.1f} s, "
        f"waited {report.waited:.1f} s for its core",
        flush=True,
    )
    for violation in report.violations[:MOST_PRINTED]:
        print(f"  BROKEN: {violation}", flush=True)
    if (more := len(report.violations) - MOST_PRINTED) > 0:
        print(f"  BROKEN: {more} more", flush=True)


def as_json_object(report: RunReport) -> dict[str, Any]:
    """The report as an object for a line of JSON."""
    return {field.name: getattr(report, field.name) for field in fields(report)}


async def _main(options: argparse.Namespace) -> int:
    seeds = range(options.seed, options.seed + options.runs)
    earlier = _earlier_runs(options.resume)
    broken = {seed: bool(earlier[seed]["violations"]) for seed in seeds if seed in earlier}
    seeds_left = [
        seed for seed in seeds if broken.get(seed, True) and (options.again or seed not in earlier)
    ]
    revision = commit()
    while seeds_left:
        batch, seeds_left = seeds_left[:RUNS_PER_TESTBED], seeds_left[RUNS_PER_TESTBED:]
        async with running_testbed() as testbed:
            for seed in batch:
                report = await run_seed(
                    testbed, seed, options.seconds, process_faults=True, keep=options.keep
                )
                _print_report(report)
                broken[seed] = bool(report.violations)
                if options.resume is not None:
                    line = json.dumps({"revision": revision, **as_json_object(report)})
                    with options.resume.open("a") as file:
                        file.write(line + "\n")
    print(f"{len(broken)} runs, {sum(broken.values())} with a broken invariant")
    return 1 if any(broken.values()) else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(_main(_options().parse_args())))
