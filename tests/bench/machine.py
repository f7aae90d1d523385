"""Facts about the machine and the programs; CPU time, memory and waiting time of processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import resource
import subprocess
import time
from collections.abc import Coroutine, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import psutil
import uvloop
from rich.console import Console

from setup import python_build
from tests.bench.targets import TARGETS, Target

Found = TypeVar("Found")


def facts(targets: Sequence[str]) -> dict[str, str]:
    """The facts that a reader needs to judge the figures."""
    known = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu_model(Path("/proc/cpuinfo").read_text()),
        "cores": str(os.cpu_count()),
        "load": f"{os.getloadavg()[0]:.2f} (one minute, before the run)",
        "kernel": platform.release(),
        "python": f"{platform.python_version()}, {python_build.described()}",
        "uvloop": _installed("uvloop"),
        "gateway": " ".join(filter(None, (_installed("llama-gateway"), commit()))),
    }
    for name in targets:
        program = TARGETS[name].program()
        if name in known or not program:
            continue
        known[name] = _output_of([program, *TARGETS[name].version]).splitlines()[0]
    return known


def print_facts(known: dict[str, str], progress: Console) -> None:
    """Print the facts before a run, with a warning if this Python is not optimised."""
    for name, value in known.items():
        progress.print(f"{name}: {value}")
    if warning := python_build.warning():
        progress.print(warning, style="yellow")


def cpu_model(cpuinfo: str) -> str:
    """The model name in /proc/cpuinfo; without one, the machine's architecture."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def _installed(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def commit() -> str:
    """The checked-out commit, marked when files of the gateway have changed since."""
    commit = _output_of(["git", "rev-parse", "--short", "HEAD"])
    changed = _output_of(["git", "status", "--porcelain", "--", "gateway"])
    return f"{commit}{' with changes' if changed else ''}" if commit else ""


def _output_of(command: list[str]) -> str:
    """The output of a command; empty when it fails."""
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def tree(pid: int) -> list[psutil.Process]:
    """The process and its living descendants."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def cpu_seconds(pid: int) -> float:
    """User and system CPU time of the tree so far, children that have ended included.

    Living processes are read from their CPU clock, to the nanosecond: the clock ticks of
    /proc/PID/stat (10 ms) are too coarse for a short run. Ended ones are known in ticks only.
    """
    total = 0.0
    for process in tree(pid):
        try:
            total += time.clock_gettime(_cpu_clock(process.pid))
            ended = process.cpu_times()
        except (OSError, psutil.NoSuchProcess):  # ended meanwhile: its parent has its time
            continue
        total += ended.children_user + ended.children_system
    return total


def resident_bytes(pid: int) -> int:
    """Resident memory of the tree; pages that two of its processes share count twice."""
    return sum(process.memory_info().rss for process in tree(pid))


def waited_seconds(pid: int) -> float:
    """Seconds in which living threads of the tree were runnable and other work had their core."""
    total = 0
    for process in tree(pid):
        for thread in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # ended meanwhile
                total += int(thread.read_text().split()[1])
    return total / 1e9


def _cpu_clock(pid: int) -> int:
    """Linux's clock id of a process's CPU time, as clock_getcpuclockid(3) computes it."""
    return (~pid << 3) | 2


def installed(
    known: Mapping[str, Target], names: Sequence[str] | None, usual: Sequence[str], told: Console
) -> list[str]:
    """Those of the names, else of the usual ones, that are installed.

    None if one that was named is not.
    """
    missing = [name for name in names or usual if known[name].program() is None]
    for name in missing:
        told.print(f"{name} is not installed ({known[name].remedy})", style="yellow")
    if names and missing:
        return []
    return [name for name in names or usual if name not in missing]


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
