"""`make test-all ARGS="[GROUP ...]"`: run every test, group by group.

Without names it runs all groups but those of hours (`--list` shows them). It goes on after a failed
group, and ends with a table.

Exit status: 0 all passed, 1 some failed, 2 usage error.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.ci.change import ROOT, add_since, change
from tests.ci.groups import Group, Table, commands_of, read_table, runs_of
from tests.ci.repeat import read_run, repeat_failed

PROCESSES = os.environ.get("TEST_PROCESSES", "3")
PARALLEL = ("-n", PROCESSES, "--dist", "loadfile", "--no-loadscope-reorder", "-q")
SLOWNESS = 6
"""A group is ended after so many times its usual duration, on a machine that does much else."""
LEAST_LIMIT = 600.0


@dataclass(slots=True)
class Result:
    """How a group ended."""

    group: str
    passed: bool = True
    seconds: float = 0.0
    tests: int = 0
    """Tests that ran; 0 for a group of commands."""
    failures: list[str] = field(default_factory=list)
    """Node ids of failed tests, and commands that failed."""


def run_group(group: Group, *, since: str | None, repeat: bool) -> Result:
    """Run a group's tests and commands; all of them, whichever fail."""
    began = time.monotonic()
    result = Result(group.name)
    for options in runs_of(group):
        _run_tests(options, group, result, since=since, repeat=repeat)
    for command in commands_of(group):
        if _run(command, group) != 0:
            result.failures.append(" ".join(command))
    result.seconds = round(time.monotonic() - began, 1)
    result.passed = not result.failures
    return result


def _run_tests(
    options: Sequence[str], group: Group, result: Result, *, since: str | None, repeat: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "failures.json")
        record = ("-p", "tests.ci.repeat", "--failures", str(path))
        status = _run([sys.executable, "-m", "pytest", *PARALLEL, *record, *options], group)
        broken = f"status {status}: pytest {' '.join(options)}"
        try:
            run = read_run(path)
        except (OSError, ValueError, KeyError):
            result.failures.append(broken)
            return
    result.tests += run.tests
    alone = [word for word in options if not word.startswith("tests")]
    if status == 0 or (repeat and repeat_failed(run, since, alone)):
        return
    result.failures += list(run.failed) or [broken]


def _run(command: Sequence[str], group: Group) -> int:
    """Run a command, and end it and what it started when it takes far too long."""
    print(f"== {group.name}: {' '.join(command)}", flush=True)
    limit = max(LEAST_LIMIT, SLOWNESS * group.seconds)
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True) as process:
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            print(f"== {group.name}: ended after {limit:.0f} s", flush=True)
            return 1
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)


def within(groups: Iterable[Group], seconds: float) -> tuple[list[Group], list[Group]]:
    """Split groups into those that fit into a budget of seconds, in their order, and the rest."""
    fitting: list[Group] = []
    rest: list[Group] = []
    for group in groups:
        if group.seconds <= seconds:
            seconds -= group.seconds
            fitting.append(group)
        else:
            rest.append(group)
    return fitting, rest


def table_of(results: Sequence[Result], left_out: Sequence[Group]) -> list[str]:
    """Return the lines of the table that ends a run."""
    lines = [f"{'group':<14}{'tests':>7}{'seconds':>9}  result"]
    for one in results:
        said = "passed" if one.passed else f"{len(one.failures)} FAILED"
        lines.append(f"{one.group:<14}{one.tests or '':>7}{one.seconds:>9.0f}  {said}")
    lines += [
        f"{one.name:<14}{'':>7}{'':>9}  left out: make test-all ARGS={one.name}" for one in left_out
    ]
    seconds = sum(one.seconds for one in results)
    lines.append(f"{'all':<14}{sum(one.tests for one in results):>7}{seconds:>9.0f}")
    for one in results:
        lines += [f"FAILED {one.group}: {failure}" for failure in one.failures]
    return lines


def _options(table: Table) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.ci.all",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(table.groups))
    parser.add_argument("--without", nargs="+", default=[], metavar="GROUP", help="leave these out")
    parser.add_argument(
        "--touched", action="store_true", help="only groups whose code the change touches"
    )
    add_since(parser)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="leave out what takes longer together"
    )
    parser.add_argument("--repeat", action="store_true", help="repeat failed tests once, alone")
    parser.add_argument("--list", action="store_true", help="show the groups, and run nothing")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; the exit status."""
    table = read_table()
    parser = _options(table)
    options = parser.parse_args(arguments)
    unknown = {*options.groups, *options.without} - set(table.groups)
    if unknown:
        parser.error(f"no group {', '.join(sorted(unknown))}: {', '.join(table.groups)}")
    groups = table.named(options.groups) or [
        group for group in table.groups.values() if not group.is_apart
    ]
    if options.touched:
        names = {group.name for group in groups}
        groups = [one for one in table.touched(change(options.since)) if one.name in names]
    groups = [group for group in groups if group.name not in options.without]
    groups, left_out = within(groups, options.seconds)
    if options.list:
        for group in groups:
            print(f"{group.name:<14}{group.seconds:>6} s  {group.about}")
        return 0
    results = [run_group(one, since=options.since, repeat=options.repeat) for one in groups]
    print("\n".join(table_of(results, left_out)), flush=True)
    return int(not all(one.passed for one in results))


if __name__ == "__main__":
    sys.exit(main())
