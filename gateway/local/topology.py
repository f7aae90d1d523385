"""What this machine offers to this process: NUMA nodes, physical cores, memory.

Read from `/sys` and `/proc`; the affinity mask and the cpuset of a container are respected,
offline CPUs and nodes without CPUs left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gateway.local.cgroup import cpu_quota, memory_room

ROOT = Path("/")
KIB = 1024


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One NUMA node. Memory in bytes; a core is the group of its CPUs (SMT siblings)."""

    number: int
    cores: tuple[tuple[int, ...], ...]
    memory_total: int
    memory_available: int
    memory_allowed: bool = True  # whether this process may take memory there

    @property
    def cpus(self) -> tuple[int, ...]:
        """The CPUs that this process may run on."""
        return tuple(sorted(cpu for core in self.cores for cpu in core))


@dataclass(frozen=True, slots=True)
class Topology:
    """The machine as far as this process may use it. Memory in bytes."""

    nodes: tuple[NumaNode, ...]
    memory_total: int
    memory_available: int  # of the machine or the container, whichever is less
    cpu_quota: float | None = None  # CPUs' worth of time that a container may use

    @property
    def cores(self) -> int:
        """Physical cores of all nodes."""
        return sum(len(node.cores) for node in self.nodes)


def read_topology(sysroot: Path = ROOT) -> Topology:
    """The topology under `sysroot`, which holds `sys` and `proc`."""
    cpus = _usable_cpus(sysroot)
    machine = _meminfo(sysroot / "proc/meminfo")
    available = machine.get("MemAvailable", machine.get("MemFree", 0))
    room = memory_room(sysroot)
    nodes = _nodes(sysroot, cpus)
    if not nodes:  # a kernel without NUMA
        nodes = [NumaNode(0, _cores(sysroot, cpus), machine.get("MemTotal", 0), available)]
    return Topology(
        nodes=tuple(nodes),
        memory_total=machine.get("MemTotal", 0),
        memory_available=available if room is None else min(available, room),
        cpu_quota=cpu_quota(sysroot),
    )


def parse_list(text: str) -> set[int]:
    """The numbers of a kernel list such as `0-3,8`."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.strip():
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def _usable_cpus(sysroot: Path) -> set[int]:
    online = _read_list(sysroot / "sys/devices/system/cpu/online")
    allowed = _status(sysroot, "Cpus_allowed_list")
    if online is None or allowed is None:
        return online or allowed or {0}
    return online & allowed


def _nodes(sysroot: Path, cpus: set[int]) -> list[NumaNode]:
    folder = sysroot / "sys/devices/system/node"
    online = _read_list(folder / "online") or set()
    allowed = _status(sysroot, "Mems_allowed_list")
    nodes: list[NumaNode] = []
    for number in sorted(online):
        home = folder / f"node{number}"
        own = (_read_list(home / "cpulist") or set()) & cpus
        if own:
            memory = _meminfo(home / "meminfo")
            nodes.append(
                NumaNode(
                    number,
                    _cores(sysroot, own),
                    memory.get("MemTotal", 0),
                    # A node has no MemAvailable: what is free and what is easily given back.
                    memory.get("MemFree", 0)
                    + memory.get("Inactive(file)", 0)
                    + memory.get("SReclaimable", 0),
                    memory_allowed=allowed is None or number in allowed,
                )
            )
    return nodes


def _cores(sysroot: Path, cpus: set[int]) -> tuple[tuple[int, ...], ...]:
    cores: set[tuple[int, ...]] = set()
    for cpu in cpus:
        folder = sysroot / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = _read_list(folder / "thread_siblings_list") or set()
        cores.add(tuple(sorted((siblings | {cpu}) & cpus)))
    return tuple(sorted(cores))


def _meminfo(path: Path) -> dict[str, int]:
    """Bytes by name. A node's file has `Node 0` in front of every name."""
    sizes: dict[str, int] = {}
    for line in _read(path).splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if name and words and words[0].isdigit():
            sizes[name.split()[-1]] = int(words[0]) * KIB
    return sizes


def _status(sysroot: Path, key: str) -> set[int] | None:
    for line in _read(sysroot / "proc/self/status").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return parse_list(value)
    return None


def _read_list(path: Path) -> set[int] | None:
    text = _read(path)
    return parse_list(text) if text.strip() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
