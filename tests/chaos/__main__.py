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
from tests.chaos.run import SERVERS, Outcome, a_kit, run_seed

RUNS_OF_A_KIT = 50
"""Then the servers and the gateway's process are started anew."""

MOST_TOLD = 10
"""Broken promises of one run that are printed; the file has all."""


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="in all, those resumed included")
    parser.add_argument("--seconds", type=float, default=10.0, help="of load in each run")
    parser.add_argument("--seed", type=int, default=1, help="the first; others follow it")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="JSON lines of runs done")
    parser.add_argument("--again", action="store_true", help="run once more what broke in it")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="logs of runs that broke")
    parser.add_argument("--servers", type=int, default=SERVERS, help="real ones")
    parser.add_argument("--no-machine", action="store_true", help="no descriptor and clock faults")
    return parser


def _done(file: Path | None) -> dict[int, dict[str, Any]]:
    """The last run of each seed."""
    if file is None or not file.exists():
        return {}
    outcomes = [json.loads(line) for line in file.read_text().splitlines()]
    return {outcome["seed"]: outcome for outcome in outcomes}


def _tell(outcome: Outcome) -> None:
    counts = ", ".join(f"{n} {what}" for what, n in outcome.outcomes.most_common())
    print(
        f"seed {outcome.seed}: {outcome.requests} requests ({counts}), "
        f"{sum(outcome.faults.values())} faults, {outcome.rss >> 20} MiB, {outcome.took:.1f} s, "
        f"waited {outcome.waited:.1f} s for its core",
        flush=True,
    )
    for violation in outcome.violations[:MOST_TOLD]:
        print(f"  BROKEN: {violation}", flush=True)
    if (more := len(outcome.violations) - MOST_TOLD) > 0:
        print(f"  BROKEN: {more} more", flush=True)


def vars_of(outcome: Outcome) -> dict[str, Any]:
    """For a line of JSON."""
    return {field.name: getattr(outcome, field.name) for field in fields(outcome)}


async def _main(options: argparse.Namespace) -> int:
    seeds = range(options.seed, options.seed + options.runs)
    known = _done(options.resume)
    broken = {seed: bool(known[seed]["violations"]) for seed in seeds if seed in known}
    todo = [
        seed for seed in seeds if broken.get(seed, True) and (options.again or seed not in known)
    ]
    revision = commit()
    while todo:
        some, todo = todo[:RUNS_OF_A_KIT], todo[RUNS_OF_A_KIT:]
        async with a_kit(options.servers) as kit:
            for seed in some:
                outcome = await run_seed(
                    kit, seed, options.seconds, machine=not options.no_machine, keep=options.keep
                )
                _tell(outcome)
                broken[seed] = bool(outcome.violations)
                if options.resume is not None:
                    line = json.dumps({"revision": revision, **vars_of(outcome)})
                    with options.resume.open("a") as file:
                        file.write(line + "\n")
    print(f"{len(broken)} runs, {sum(broken.values())} with a broken invariant")
    return 1 if any(broken.values()) else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(_main(_options().parse_args())))
