"""CPU time, resident memory and waiting time of a process and its descendants."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import psutil


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
