"""Plays random scripts of a cluster: `python -m tests.cluster.scripts [--scripts N] [--first N]`.

`--mutants` breaks each rule in turn, and plays until the property fails. Exit status: 0 the
property held, or all mutants were found; 1 it did not.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence

from tests.cluster.model import Broken, Script
from tests.cluster.mutants import MUTANTS
from tests.cluster.rules import Mutant, Rules, load


def play(rules: Rules, seeds: Iterable[int], counts: Counter[str] | None = None) -> str | None:
    """Play these scripts; what broke the property in the first of them that did, or None."""
    for seed in seeds:
        script = Script(rules, seed)
        try:
            script.play(heal=seed % 10 == 0)
        except Broken as error:
            return f"script {seed}: {error}"
        if counts is not None:
            counts.update(
                scripts=1,
                starts=script.starts,
                alone=script.alone_starts,
                terms=script.wins,
                failovers=script.failovers,
                stops=script.stops,
            )
    return None


def find(mutant: Mutant, most: int) -> str | None:
    """Play scripts from the one on that is known to find the mutant; None: none of them did."""
    return play(load(mutant), range(mutant.found_by, mutant.found_by + most))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.cluster.scripts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--scripts", type=int, default=100_000, help="how many; default: 100,000")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first one")
    parser.add_argument("--mutants", action="store_true", help="find each mutant")
    options = parser.parse_args(arguments)
    began = time.process_time()
    if options.mutants:
        missed = 0
        for mutant in MUTANTS:
            found = find(mutant, options.scripts)
            missed += found is None
            print(f"{mutant.name}: {found or 'NOT FOUND'}", flush=True)
        print(f"{len(MUTANTS) - missed} of {len(MUTANTS)} mutants found")
        return int(missed > 0)
    counts: Counter[str] = Counter()
    broken = play(load(), range(options.first, options.first + options.scripts), counts)
    print(f"{dict(counts)}, {time.process_time() - began:.0f} s of CPU")
    print(broken or "the property held")
    return int(broken is not None)


if __name__ == "__main__":
    sys.exit(main())
