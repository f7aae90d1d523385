"""Mutation tests: puts small faults into the gateway, one at a time, and counts those found.

    make test ARGS="--cov=gateway/proxy --cov-context=test --cov-report= --junitxml=runs.xml"
    python -m tests.mutants gateway/proxy --coverage .coverage --runs runs.xml --json mutants.json

For each mutant the tests that reach its line run, the fastest first, until one fails. A test that
takes longer than `--longest` is left out. The same seed gives the same mutants of the same code.
`--again FILE` uses the mutants of an earlier run's `--json` instead, so that two test suites can
be compared, and `--tests FILE` names the tests that may run.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

from coverage import CoverageData
from rich.progress import Progress

from tests.mutants.mutation import Mutant, find_again, sample

ROOT = Path(__file__).resolve().parents[2]
MEMORY = 16 << 30
"""Bytes of address space for a run, since a fault may allocate without limit."""
TEST_LIMIT = 60
"""Seconds for one test, since a fault may make it wait forever."""
RUN_LIMIT = 3
"""A run may take so many times as long as its tests took before, plus half a minute."""


def durations(runs: Path) -> dict[str, float]:
    """Return the seconds that each test took, by its key."""
    found: dict[str, float] = {}
    for case in ET.parse(runs).getroot().iter("testcase"):
        found[_key(f"{case.get('classname')}.{case.get('name')}")] = float(case.get("time") or 0)
    return found


def _key(test: str) -> str:
    """Return the same key for a node id and for a name in JUnit's form."""
    return test.replace(".py::", ".").replace("::", ".").replace("/", ".")


class ReachingTests:
    """Finds the tests that reach a line, with their durations."""

    def __init__(self, coverage: Path, runs: Path, allowed: set[str] | None) -> None:
        self._data = CoverageData(str(coverage))
        self._data.read()
        self._seconds = durations(runs)
        self._allowed = allowed

    def tests(self, mutant: Mutant, longest: float, most: float) -> tuple[list[str], float]:
        """Return the tests that reach a mutant, the fastest first, and their total seconds."""
        measured = self._data.measured_files()
        name = next((name for name in measured if name.endswith(f"/{mutant.path}")), None)
        if name is None:
            return [], 0.0
        contexts = self._data.contexts_by_lineno(name).get(mutant.line, [])
        reaching = {context.rsplit("|", 1)[0] for context in contexts} - {""}
        if self._allowed is not None:
            reaching &= self._allowed
        timed = sorted((self._seconds.get(_key(test), longest), test) for test in reaching)
        chosen: list[str] = []
        total = 0.0
        for seconds, test in timed:
            if seconds > longest or total + seconds > most:
                break
            chosen.append(test)
            total += seconds
        return chosen, total


@contextmanager
def checkouts(count: int) -> Iterator[SimpleQueue[Path]]:
    """Make `count` copies of the tracked files, for parallel runs."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    free: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for number in range(count):
            copy = Path(folder, str(number))
            for name in filter(None, names):
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
            free.put(copy)
        yield free


def run_mutant(
    mutant: Mutant, tests: Sequence[str], seconds: float, free: SimpleQueue[Path]
) -> str:
    """Run the tests against a mutant. Return how it was killed, or "alive"."""
    if not tests:
        return "not reached"
    checkout = free.get()
    original = (checkout / mutant.path).read_bytes()
    chosen = checkout / "chosen-tests"
    try:
        chosen.write_text("\n".join(tests))
        (checkout / mutant.path).write_bytes(mutant.source(checkout))
        return _run(checkout, chosen, RUN_LIMIT * seconds + 30)
    finally:
        (checkout / mutant.path).write_bytes(original)
        free.put(checkout)


def _run(checkout: Path, chosen: Path, limit: float) -> str:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    command += ["--tb=no", f"--timeout={TEST_LIMIT}", f"@{chosen}"]
    environment = os.environ | {"PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        command,
        cwd=checkout,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY)),  # noqa: PLW1509
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return "killed: no end"
    if process.returncode == 0:
        return "alive"
    failed = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return f"killed: {failed[0]}" if failed else f"killed: pytest ended with {process.returncode}"


def main() -> int:
    """Make the mutants, run the tests, and print the counts."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folders", nargs="+", help="folders to put faults into: gateway/proxy …")
    parser.add_argument(
        "--coverage", type=Path, required=True, help="coverage data with contexts of tests"
    )
    parser.add_argument("--runs", type=Path, required=True, help="pytest's --junitxml, for times")
    parser.add_argument("--tests", type=Path, help="node ids that may run, a line each")
    parser.add_argument("--again", type=Path, help="the mutants of this file, which --json wrote")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--longest", type=float, default=5.0, help="limit of one test, in seconds")
    parser.add_argument(
        "--most", type=float, default=60.0, help="limit of all tests of a mutant, in seconds"
    )
    parser.add_argument("--json", type=Path, help="write the result of each mutant")
    options = parser.parse_args()
    allowed = set(options.tests.read_text().splitlines()) if options.tests else None
    reach = ReachingTests(options.coverage, options.runs, allowed)
    if options.again:
        drawn = find_again(ROOT, options.folders, json.loads(options.again.read_text()))
    else:
        drawn = sample(ROOT, options.folders, options.count, options.seed)
    found: dict[str, str] = {}
    with (
        Progress() as progress,
        checkouts(options.jobs) as free,
        ThreadPoolExecutor(options.jobs) as pool,
    ):
        bar = progress.add_task("mutants", total=len(drawn))

        def one(mutant: Mutant) -> None:
            tests, seconds = reach.tests(mutant, options.longest, options.most)
            how = found[str(mutant)] = run_mutant(mutant, tests, seconds, free)
            line = f"{how}: {mutant}"
            progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
            progress.advance(bar)

        list(pool.map(one, drawn))
    print_counts(found, options.json)
    return 0


def print_counts(found: Mapping[str, str], path: Path | None) -> None:
    """Print the counts; write the result of each mutant to `path`, if there is one."""
    counts = Counter(how.split(":", maxsplit=1)[0] for how in found.values())
    print(", ".join(f"{count} {how}" for how, count in counts.most_common()))
    if path is not None:
        path.write_text(json.dumps(dict(sorted(found.items())), indent=1))


if __name__ == "__main__":
    sys.exit(main())
