"""Measures other work on this machine, from `/proc`, since it would distort a benchmark.

It counts the time that CPUs were not idle, including `nice` work and time stolen by a hypervisor.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from gateway.tools.local.system_files import read_text

MOST_OTHER_WORK = 0.25
"""CPUs' worth of other work that is tolerated: llama.cpp's threads wait for the slowest one."""

SAMPLE_SECONDS = 3.0  # between the two readings of a sample

MOST_NAMED_PROCESSES = 3


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Ticks since the machine booted."""

    busy: int
    total: int
    cpus: int
    processes: dict[int, tuple[str, int]]  # name and ticks by PID


@dataclass(frozen=True, slots=True)
class OtherWork:
    """CPUs' worth of other work between two readings."""

    busy_cpus: float
    cpus: int
    top_processes: tuple[tuple[int, str, float], ...]  # PID, name, CPUs

    def __str__(self) -> str:
        names = ", ".join(f"{name} ({pid}) {share:.0%}" for pid, name, share in self.top_processes)
        return f"{self.busy_cpus:.1f} of {self.cpus} CPUs are busy" + (
            f": {names}" if names else ""
        )


def read_cpu_times(cpus: Collection[int], root: Path = Path("/")) -> CpuTimes:
    """Read the times of these CPUs; zeros where the system has no `/proc/stat`."""
    busy = total = found = 0
    for line in read_text(root / "proc/stat").splitlines():
        name, *words = line.split()
        if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in cpus:
            user, nice, system, idle, iowait, irq, softirq, steal = (
                [int(word) for word in words[:8]] + [0] * 8
            )[:8]
            working = user + nice + system + irq + softirq + steal
            busy += working
            total += working + idle + iowait
            found += 1
    return CpuTimes(busy, total, found, _processes(root))


def other_work_between(before: CpuTimes, after: CpuTimes, own: Collection[int] = ()) -> OtherWork:
    """Return the work of all processes but `own`, which still ran at the second reading."""
    ticks = (after.total - before.total) / max(1, after.cpus)  # of one CPU
    if ticks <= 0:
        return OtherWork(0.0, after.cpus, ())
    spent = {
        pid: (name, used - before.processes.get(pid, (name, 0))[1])
        for pid, (name, used) in after.processes.items()
    }
    own_ticks = sum(used for pid, (_, used) in spent.items() if pid in own)
    others = sorted(
        ((pid, name, used / ticks) for pid, (name, used) in spent.items() if pid not in own),
        key=lambda one: -one[2],
    )
    return OtherWork(
        max(0.0, (after.busy - before.busy - own_ticks) / ticks),
        after.cpus,
        tuple(one for one in others[:MOST_NAMED_PROCESSES] if one[2] >= 0.05),
    )


def peak_memory(pid: int, root: Path = Path("/")) -> int | None:
    """Return the peak resident bytes of a process; None where `/proc` does not show it."""
    for line in read_text(root / f"proc/{pid}/status").splitlines():
        name, _, value = line.partition(":")
        if name == "VmHWM" and (words := value.split()):
            return int(words[0]) * 1024
    return None


def _processes(root: Path) -> dict[int, tuple[str, int]]:
    found: dict[int, tuple[str, int]] = {}
    try:
        ids = [int(entry.name) for entry in (root / "proc").iterdir() if entry.name.isdecimal()]
    except OSError:
        return found
    for pid in ids:
        # `4711 (any (name)) R ...`: the fields follow the last bracket.
        head, bracket, rest = read_text(root / f"proc/{pid}/stat").rpartition(")")
        words = rest.split()
        if bracket and len(words) > 12:
            found[pid] = (head.partition("(")[2], int(words[11]) + int(words[12]))
    return found
