"""What this machine offers to this process: sockets, NUMA nodes, physical cores, caches, memory.

Read from `/sys` and `/proc` under any root; the affinity mask and the cpuset of a container are
respected, offline CPUs and nodes without CPUs left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from gateway.local.cgroup import cpu_quota, memory_room
from gateway.local.processor import (
    UNKNOWN,
    Cache,
    Processor,
    efficiency_cpus,
    read_caches,
    read_processor,
)
from gateway.local.sysfs import parse_list, read_list, read_meminfo, read_number, read_text

ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One NUMA node. Memory in bytes; a core is the group of its CPUs (SMT siblings)."""

    number: int
    cores: tuple[tuple[int, ...], ...]
    memory_total: int
    memory_available: int
    memory_allowed: bool = True  # whether this process may take memory there
    sockets: tuple[int, ...] = ()  # those its CPUs sit in; empty where nothing tells
    efficiency: frozenset[int] = frozenset()  # CPUs much weaker than the machine's strongest
    distances: tuple[int, ...] = ()  # to each online node, 10 is itself

    @property
    def fast_cores(self) -> tuple[tuple[int, ...], ...]:
        """The cores worth a thread: all, but for the weak ones of a machine that mixes them."""
        fast = tuple(core for core in self.cores if not self.efficiency.issuperset(core))
        return fast or self.cores

    @property
    def fast_cpus(self) -> tuple[int, ...]:
        """The CPUs of those cores."""
        return tuple(sorted(cpu for core in self.fast_cores for cpu in core))

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
    processor: Processor = UNKNOWN
    caches: tuple[Cache, ...] = ()

    @property
    def sockets(self) -> tuple[int, ...]:
        """The sockets that hold CPUs which this process may run on."""
        return tuple(sorted({socket for node in self.nodes for socket in node.sockets}))

    @property
    def cores(self) -> int:
        """Physical cores of all nodes."""
        return sum(len(node.cores) for node in self.nodes)

    def threads(self, node: NumaNode, sharing: int = 1) -> int:
        """Threads for each of `sharing` servers on this node: a fast physical core for each.

        Never hyperthreads: two threads on one core share its arithmetic units, and the memory that
        decoding waits for. A container's quota is shared out over all cores.
        """
        cores = len(node.fast_cores)
        if self.cpu_quota is not None:
            everything = sum(len(other.fast_cores) for other in self.nodes)
            cores = min(cores, math.floor(self.cpu_quota * cores / everything))
        return max(1, cores // sharing)


def read_topology(sysroot: Path = ROOT) -> Topology:
    """The topology under `sysroot`, which holds `sys` and `proc`."""
    cpus = _usable_cpus(sysroot)
    weak = efficiency_cpus(sysroot, cpus)
    machine = read_meminfo(sysroot / "proc/meminfo")
    available = machine.get("MemAvailable", machine.get("MemFree", 0))
    room = memory_room(sysroot)
    nodes = _nodes(sysroot, cpus, weak)
    if not nodes:  # a kernel without NUMA
        cores, total = _cores(sysroot, cpus), machine.get("MemTotal", 0)
        sockets = _sockets(sysroot, cpus)
        nodes = [NumaNode(0, cores, total, available, sockets=sockets, efficiency=weak)]
    return Topology(
        nodes=tuple(nodes),
        memory_total=machine.get("MemTotal", 0),
        memory_available=available if room is None else min(available, room),
        cpu_quota=cpu_quota(sysroot),
        processor=read_processor(sysroot),
        caches=read_caches(sysroot, cpus),
    )


def _usable_cpus(sysroot: Path) -> set[int]:
    online = read_list(sysroot / "sys/devices/system/cpu/online")
    allowed = _status(sysroot, "Cpus_allowed_list")
    if online is None or allowed is None:
        return online or allowed or {0}
    return online & allowed


def _nodes(sysroot: Path, cpus: set[int], weak: frozenset[int]) -> list[NumaNode]:
    folder = sysroot / "sys/devices/system/node"
    online = read_list(folder / "online") or set()
    allowed = _status(sysroot, "Mems_allowed_list")
    nodes: list[NumaNode] = []
    for number in sorted(online):
        home = folder / f"node{number}"
        own = (read_list(home / "cpulist") or set()) & cpus
        if own:
            memory = read_meminfo(home / "meminfo")
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
                    sockets=_sockets(sysroot, own),
                    efficiency=weak & own,
                    distances=tuple(
                        int(word)
                        for word in read_text(home / "distance").split()
                        if word.isdecimal()
                    ),
                )
            )
    return nodes


def _cores(sysroot: Path, cpus: set[int]) -> tuple[tuple[int, ...], ...]:
    cores: set[tuple[int, ...]] = set()
    for cpu in cpus:
        siblings = read_list(_of_cpu(sysroot, cpu) / "thread_siblings_list") or set()
        cores.add(tuple(sorted((siblings | {cpu}) & cpus)))
    return tuple(sorted(cores))


def _sockets(sysroot: Path, cpus: set[int]) -> tuple[int, ...]:
    found = {read_number(_of_cpu(sysroot, cpu) / "physical_package_id") for cpu in cpus}
    return tuple(sorted(number for number in found if number is not None and number >= 0))


def _of_cpu(sysroot: Path, cpu: int) -> Path:
    return sysroot / f"sys/devices/system/cpu/cpu{cpu}/topology"


def _status(sysroot: Path, key: str) -> set[int] | None:
    for line in read_text(sysroot / "proc/self/status").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return parse_list(value)
    return None
