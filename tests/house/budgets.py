"""Holds the checkout to the budgets of `tests/budgets.toml`: `python -m tests.house.budgets`.

Without an option it measures in seconds: lines, modules, and those that a streaming chat enters.
`--instructions` counts those of requests under valgrind, which takes some two minutes.
`--cpu NAME -- COMMAND...` runs a command and takes the CPU time of all its processes, in seconds of
the reference: a loop, timed every 20 seconds, tells how much work a second of this machine is now.

A budget whose `python` is not the one that runs is reported only. `--lower` writes what is clearly
below its limit into the file.

Exit status: 0 within; 1 a budget is passed; 2 usage error, the file breaks its rules, or nothing
could be measured. With `--cpu`, that of the command if it failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from itertools import pairwise
from pathlib import Path

from tests.bench import instructions
from tests.bench.machine import cpu_seconds
from tests.house.source import ROOT, modules

FILE = ROOT / "tests/budgets.toml"
PYTHON = (
    f"{platform.python_implementation()} {platform.python_version()}, "
    f"{platform.python_compiler()}, {platform.machine()}"
)
REFERENCE_PAUSE = 20.0
"""Seconds between two runs of the reference loop."""
PR_SET_CHILD_SUBREAPER = 36
"""Of prctl(2): processes whose parent has ended become children of this one."""


@dataclass(frozen=True, slots=True)
class Limit:
    """One line of a budget's history."""

    value: int
    date: date
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Budget:
    """What must not become more. Its last limit holds; without one it is reported only."""

    means: str
    limits: list[Limit] = field(default_factory=list)
    tolerance: float = 0.0
    """The share of the limit by which a measurement may differ from it."""
    python: str | None = None
    """The build that the limits hold for, if they depend on it."""

    @property
    def limit(self) -> int | None:
        """The limit that holds."""
        return self.limits[-1].value if self.limits else None

    def verdict(self, measured: int) -> str:
        """`within`, `passed`, `below` or `reported`."""
        if self.limit is None or self.python not in {None, PYTHON}:
            return "reported"
        margin = self.limit * self.tolerance
        if measured > self.limit + margin:
            return "passed"
        return "below" if measured < self.limit - margin else "within"

    def lower(self, measured: int) -> None:
        """Make the measured value the limit."""
        if len(self.limits) > 1 and not self.limits[-1].reason:
            self.limits.pop()  # it was lowered too: the history is about raises
        self.limits.append(Limit(measured, datetime.now(UTC).date()))


@dataclass(frozen=True, slots=True)
class BudgetFile:
    """The budgets by their names, and what stands above them."""

    path: Path
    head: str
    reference_seconds: float
    budgets: dict[str, Budget]

    @classmethod
    def read(cls, path: Path) -> BudgetFile:
        """Read and check. Raises: ValueError."""
        text = path.read_text()
        tables = tomllib.loads(text)
        reference_seconds = tables.pop("reference_seconds", None)
        if not isinstance(reference_seconds, float) or "\n[" not in text:
            raise ValueError(f"{path}: reference_seconds = 0.1 must stand above the budgets")
        budgets = {}
        for name, table in tables.items():
            try:
                limits = [Limit(**limit) for limit in table.pop("limits")]
                budgets[name] = Budget(limits=limits, **table)
            except (AttributeError, KeyError, TypeError) as error:
                raise ValueError(f"{path}: {name}: {error}") from None
            for old, new in pairwise(limits):
                if new.value > old.value and not new.reason.strip():
                    raise ValueError(
                        f"{path}: {name}: from {old.value:,} to {new.value:,} without a reason: "
                        "write one into the line"
                    )
        return cls(path, text[: text.index("\n[")], reference_seconds, budgets)

    def write(self) -> None:
        """Write all of it anew."""
        parts = [self.head]
        for name, budget in self.budgets.items():
            lines = [f"[{name}]", f"means = {json.dumps(budget.means)}"]
            if budget.tolerance:
                lines.append(f"tolerance = {budget.tolerance}")
            if budget.python is not None:
                lines.append(f"python = {json.dumps(budget.python)}")
            lines += ["limits = [", *(f"  {line_of(limit)}," for limit in budget.limits), "]", ""]
            parts.append("\n".join(lines))
        self.path.write_text("\n".join(parts))


def line_of(limit: Limit) -> str:
    """The limit as it stands in the file."""
    reason = f", reason = {json.dumps(limit.reason)}" if limit.reason else ""
    return f"{{ value = {limit.value}, date = {limit.date}{reason} }}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and judge; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.house.budgets",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--instructions", action="store_true", help="count instructions")
    which.add_argument("--cpu", metavar="NAME", help="budget of the command's CPU seconds")
    parser.add_argument("command", nargs="*", help="behind --: what --cpu runs")
    parser.add_argument("--lower", action="store_true", help="lower limits to what is measured")
    parser.add_argument("--file", type=Path, default=FILE, help="default: tests/budgets.toml")
    options = parser.parse_args(arguments)
    if bool(options.cpu) != bool(options.command):
        parser.error("--cpu NAME and -- COMMAND belong together")
    try:
        file = BudgetFile.read(options.file)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if options.cpu:
        if options.cpu not in file.budgets:
            parser.error(f"{options.file} has no budget {options.cpu}")
        try:
            used = run_counted(options.command)
        except OSError as error:
            parser.error(f"{options.command[0]}: {error.strerror}")
        print(used.described(file.reference_seconds), file=sys.stderr)
        if used.status:
            return used.status
        measured = {options.cpu: used.scaled(file.reference_seconds)}
    else:
        if options.instructions and shutil.which("valgrind") is None:
            parser.error("valgrind is not installed (apt-get install valgrind)")
        try:
            measured = instructions_of_requests() if options.instructions else quick()
        except (RuntimeError, subprocess.CalledProcessError) as error:
            print(f"nothing was measured: {error}", file=sys.stderr)
            return 2
    if options.lower:
        lower(file, measured)
    return judge(file, measured)


def lower(file: BudgetFile, measured: Mapping[str, int]) -> None:
    """Write what is clearly below its limit into the file."""
    for name, value in measured.items():
        if (budget := file.budgets[name]).verdict(value) == "below":
            budget.lower(value)
    file.write()


def judge(file: BudgetFile, measured: Mapping[str, int]) -> int:
    """Print each figure beside its limit; the exit status."""
    verdicts = {name: file.budgets[name].verdict(value) for name, value in measured.items()}
    for name, value in measured.items():
        budget = file.budgets[name]
        limit = "none" if budget.limit is None else f"{budget.limit:,}"
        shown = {"passed": "PASSED", "below": "lower it"}.get(verdicts[name], verdicts[name])
        print(f"{value:>11,}  limit {limit:>11}  {shown:8}  {name}: {budget.means}")
    if "below" in verdicts.values():
        print("Below their limits: the same command with --lower writes what was measured.")
    for name, value in measured.items():
        if verdicts[name] == "passed":
            line = line_of(Limit(value, datetime.now(UTC).date(), "..."))
            print(
                f"{name} is passed: make it less, or say why, in a line of {file.path}:\n  {line},"
            )
    return int("passed" in verdicts.values())


def quick() -> dict[str, int]:
    """What is measured in seconds."""
    found = modules(ROOT)
    page = (ROOT / "gateway/admin").rglob("*.js")
    return {
        "gateway_lines": sum(module.lines for module in found),
        "gateway_modules": len(found),
        "page_lines": sum(
            len(path.read_text().splitlines()) for path in page if "vendor" not in path.parts
        ),
        "tests_lines": sum(module.lines for module in modules(ROOT, "tests")),
        "stream_modules": len(entered_modules()),
    }


def entered_modules() -> list[str]:
    """The modules that a streaming chat enters. Raises: CalledProcessError, RuntimeError."""
    command = [sys.executable, "-m", "tests.house.request_trace"]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found = [line for line in run.stdout.splitlines() if line.startswith("gateway.")]
    if not found:
        raise RuntimeError("a chat entered no module")
    return found


def instructions_of_requests() -> dict[str, int]:
    """Instructions of the scenarios and of a chunk, of the event loop's thread and of all."""
    counts = asyncio.run(instructions.count(sys.executable))
    return {
        f"{name}_instructions{suffix}": number
        for name, one in counts.items()
        for suffix, number in (("_of_loop", one.loop), ("", one.threads))
    }


@dataclass(frozen=True, slots=True)
class Used:
    """What a command has used."""

    status: int
    cpu: float
    wall: float
    reference: float
    """CPU seconds of the reference loop, the mean over the time that the command ran."""

    def scaled(self, reference: float) -> int:
        """CPU seconds where the loop takes `reference` seconds."""
        return round(self.cpu * reference / self.reference)

    def described(self, reference: float) -> str:
        return (
            f"{self.cpu:.1f} s of CPU time, {self.scaled(reference)} s scaled (the reference loop "
            f"took {self.reference:.4f} s, not {reference} s); {self.wall:.1f} s on the clock"
        )


def run_counted(command: Sequence[str]) -> Used:
    """Run a command, its input and output being this process's. Raises: OSError.

    Linux adds a process's CPU time to the parent that waits for it. So this process adopts and
    waits for all whose parents have ended, and adds what those have used that still run.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    loops = [reference_loop()]
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(REFERENCE_PAUSE):
            loops.append(reference_loop())

    began = time.monotonic()
    child = os.posix_spawnp(command[0], list(command), os.environ)
    # Ctrl-C reaches the command too, which ends by it as it likes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    repeating = threading.Thread(target=repeat)
    repeating.start()
    while (ended := os.wait())[0] != child:
        pass
    wall = time.monotonic() - began
    over.set()
    repeating.join()
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    loops.append(reference_loop())
    cpu = cpu_seconds(os.getpid()) - time.process_time()
    code = os.waitstatus_to_exitcode(ended[1])
    return Used(code if code >= 0 else 128 - code, cpu, wall, statistics.fmean(loops))


def reference_loop() -> float:
    """CPU seconds of always the same work, of what Python code mostly does."""
    began = time.thread_time()
    seen: dict[str, int] = {}
    for number in range(1_000_000):
        name = f"name {number % 1000}"
        seen[name] = (seen.get(name, 0) * 31 + number) % 65_537
    return time.thread_time() - began


if __name__ == "__main__":
    sys.exit(main())
