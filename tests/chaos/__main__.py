"""`python -m tests.chaos`: many runs with different seeds, resumable."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from gateway import __version__
from tests.chaos.run import SERVERS, Outcome, a_kit, run_seed

RUNS_OF_A_KIT = 50
"""Then the servers and the gateway's process are started anew."""


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="in all, those resumed included")
    parser.add_argument("--seconds", type=float, default=10.0, help="of load in each run")
    parser.add_argument("--seed", type=int, default=1, help="the first; others follow it")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="JSON lines of runs done")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="logs of runs that broke")
    parser.add_argument("--servers", type=int, default=SERVERS, help="real ones")
    parser.add_argument("--no-machine", action="store_true", help="no descriptor and clock faults")
    return parser


def _done(file: Path | None) -> list[dict[str, Any]]:
    if file is None or not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def _tell(outcome: Outcome) -> None:
    counts = ", ".join(f"{n} {what}" for what, n in outcome.outcomes.most_common())
    print(
        f"seed {outcome.seed}: {outcome.requests} requests ({counts}), "
        f"{sum(outcome.faults.values())} faults, {outcome.rss >> 20} MiB, {outcome.took:.1f} s",
        flush=True,
    )
    for violation in outcome.violations:
        print(f"  BROKEN: {violation}", flush=True)


def vars_of(outcome: Outcome) -> dict[str, Any]:
    """For a line of JSON."""
    return {field.name: getattr(outcome, field.name) for field in fields(outcome)}


async def _main(options: argparse.Namespace) -> int:
    done = _done(options.resume)
    seeds = {outcome["seed"] for outcome in done}
    todo = [s for s in range(options.seed, options.seed + options.runs) if s not in seeds]
    broken = sum(bool(outcome["violations"]) for outcome in done)
    while todo:
        some, todo = todo[:RUNS_OF_A_KIT], todo[RUNS_OF_A_KIT:]
        async with a_kit(options.servers) as kit:
            for seed in some:
                outcome = await run_seed(
                    kit, seed, options.seconds, machine=not options.no_machine, keep=options.keep
                )
                _tell(outcome)
                broken += bool(outcome.violations)
                if options.resume is not None:
                    line = json.dumps({"version": __version__, **vars_of(outcome)})
                    with options.resume.open("a") as file:
                        file.write(line + "\n")
    print(f"{options.runs} runs, {broken} with a broken invariant")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(_main(_options().parse_args())))
