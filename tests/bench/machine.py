"""Facts about the machine and the programs; CPU time, memory and waiting time of processes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import re
import resource
import subprocess
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import psutil
import uvloop
from rich.console import Console

from setup import python_build
from tests.bench.targets import TARGETS, Target

Found = TypeVar("Found")


def facts(targets: Sequence[str], progress: Console) -> dict[str, str]:
    """The facts that a reader needs to judge the figures, which are printed, too."""
    model = re.search(r"^model name\s*: (.+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    known = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": model[1].strip() if model else platform.machine(),
        "cores": str(os.cpu_count()),
        "load": f"{os.getloadavg()[0]:.2f} (one minute, before the run)",
        "kernel": platform.release(),
        "python": f"{platform.python_version()}, {python_build.described()}",
        "uvloop": version("uvloop"),
        "gateway": f"{version('llama-gateway')} {commit()}".rstrip(),
    }
    for name in targets:
        program = TARGETS[name].program()
        if program and name not in known:
            known[name] = _output_of([program, *TARGETS[name].version]).splitlines()[0]
    for name, value in known.items():
        progress.print(f"{name}: {value}")
    if warning := python_build.warning():
        progress.print(warning, style="yellow")
    return known


def commit() -> str:
    """The checked-out commit, marked when files of the gateway have changed since."""
    commit = _output_of(["git", "rev-parse", "--short", "HEAD"])
    changed = _output_of(["git", "status", "--porcelain", "--", "gateway"])
    return f"{commit}{' with changes' if changed else ''}" if commit else ""


def _output_of(command: list[str]) -> str:
    """The output of a command; empty when it fails."""
    try:
        output = subprocess.check_output(command, stderr=subprocess.STDOUT, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return str(output).strip()


def _tree(pid: int) -> list[psutil.Process]:
    """The process and its living descendants."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def cpu_seconds(pid: int) -> float:
    """User and system CPU time of the tree so far, children that have ended included.

    Living processes are read from their CPU clock, to the nanosecond: the clock ticks of
    /proc/PID/stat (10 ms) are too coarse for a short run. Ended ones are known in ticks only.
    """
    total = 0.0
    for process in _tree(pid):
        with contextlib.suppress(OSError, psutil.NoSuchProcess):  # ended: its parent has its time
            total += time.clock_gettime((~process.pid << 3) | 2)  # as clock_getcpuclockid(3) says
            ended = process.cpu_times()
            total += ended.children_user + ended.children_system
    return total


def resident_bytes(pid: int) -> int:
    """Resident memory of the tree; pages that two of its processes share count twice."""
    return sum(process.memory_info().rss for process in _tree(pid))


def waited_seconds(pid: int) -> float:
    """Seconds in which living threads of the tree were runnable and other work had their core."""
    total = 0
    for process in _tree(pid):
        for thread in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # ended meanwhile
                total += int(thread.read_text().split()[1])
    return total / 1e9


# What the benches' command lines share.


def one_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a parser of comma-separated names, each of which must be `known`."""

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := [name for name in chosen if name not in known]:
            words = f"unknown: {', '.join(unknown)} (there are {', '.join(known)})"
            raise argparse.ArgumentTypeError(words)
        return chosen

    return parse


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"not a positive whole number: {text}")
    return int(text)


def two_cores(progress: Console) -> list[int]:
    """The cores that this process may use; none where there is only one."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= 2:
        return cores
    progress.print("the benchmark needs two cores: one for the proxy, one for the load")
    return []


def installed(
    known: Mapping[str, Target], names: Sequence[str] | None, usual: Sequence[str], told: Console
) -> list[str]:
    """Those of the usual ones that are installed; or all named ones, none if one is missing."""
    missing = [name for name in names or usual if known[name].program() is None]
    for name in missing:
        told.print(f"{name} is not installed ({known[name].remedy})", style="yellow")
    if names:
        return [] if missing else list(names)
    return [name for name in usual if name not in missing]


def run_beside(work: Coroutine[Any, Any, Found], cores: Sequence[int]) -> Found:
    """Run on the second core, with the highest limit of open files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.sched_setaffinity(0, {cores[1]})
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(work)
    finally:
        os.sched_setaffinity(0, cores)
