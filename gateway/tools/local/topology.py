"""Reads the machine's topology: sockets, NUMA nodes, physical cores, caches, memory.

It is read from `/sys` and `/proc` under any root, within the process's affinity mask and the
container's cpuset, without offline CPUs and without nodes that have no CPUs.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.tools.local.processor import (
    UNKNOWN_PROCESSOR,
    CpuCache,
    Processor,
    efficiency_cpus,
    read_caches,
    read_processor,
)
from gateway.tools.local.system_files import (
    cgroup_cpu_quota,
    cgroup_memory_headroom,
    format_kernel_list,
    parse_kernel_list,
    read_kernel_list,
    read_meminfo,
    read_number,
    read_text,
)

ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One NUMA node. Memory in bytes; a core is the group of its CPUs (SMT siblings)."""

    number: int
    cores: tuple[tuple[int, ...], ...]
    memory_total: int
    memory_available: int
    memory_allowed: bool = True  # whether this process may allocate memory there
    sockets: tuple[int, ...] = ()  # of its CPUs; empty: unknown
    efficiency_cpus: frozenset[int] = frozenset()  # much slower than the machine's fastest CPUs
    distances: tuple[int, ...] = ()  # to each online node; 10 is itself

    @property
    def performance_cores(self) -> tuple[tuple[int, ...], ...]:
        """All cores but the efficiency cores of a machine that mixes them."""
        cores = tuple(core for core in self.cores if not self.efficiency_cpus.issuperset(core))
        return cores or self.cores

    @property
    def performance_cpus(self) -> tuple[int, ...]:
        """The CPUs of the performance cores."""
        return tuple(sorted(cpu for core in self.performance_cores for cpu in core))

    @property
    def cpus(self) -> tuple[int, ...]:
        """The CPUs that this process may run on."""
        return tuple(sorted(cpu for core in self.cores for cpu in core))


@dataclass(frozen=True, slots=True)
class Topology:
    """The part of the machine that this process may use. Memory in bytes."""

    nodes: tuple[NumaNode, ...]
    memory_total: int
    memory_available: int  # of the machine or the container, the lower one
    cpu_quota: float | None = None  # CPUs' worth of time; None: no limit
    processor: Processor = UNKNOWN_PROCESSOR
    caches: tuple[CpuCache, ...] = ()

    @property
    def sockets(self) -> tuple[int, ...]:
        """The sockets of the CPUs that this process may run on."""
        return tuple(sorted({socket for node in self.nodes for socket in node.sockets}))

    @property
    def core_count(self) -> int:
        """The number of physical cores of all nodes."""
        return sum(len(node.cores) for node in self.nodes)

    def threads_per_server(self, node: NumaNode, servers: int = 1) -> int:
        """Return the threads of each of `servers` servers on this node: one for each core.

        Hyperthreads do not count: two threads on one core share its arithmetic units, and the
        memory bandwidth that decoding waits for. A container's quota is divided among all cores.
        """
        cores = len(node.performance_cores)
        if self.cpu_quota is not None:
            all_cores = sum(len(other.performance_cores) for other in self.nodes)
            cores = min(cores, math.floor(self.cpu_quota * cores / all_cores))
        return max(1, cores // servers)


def read_topology(sysroot: Path = ROOT) -> Topology:
    """Read the topology under `sysroot`, which holds `sys` and `proc`."""
    cpus = _usable_cpus(sysroot)
    slow = efficiency_cpus(sysroot, cpus)
    machine = read_meminfo(sysroot / "proc/meminfo")
    available = machine.get("MemAvailable", machine.get("MemFree", 0))
    headroom = cgroup_memory_headroom(sysroot)
    nodes = _nodes(sysroot, cpus, slow)
    if not nodes:  # a kernel without NUMA
        cores, total = _cores(sysroot, cpus), machine.get("MemTotal", 0)
        sockets = _sockets(sysroot, cpus)
        nodes = [NumaNode(0, cores, total, available, sockets=sockets, efficiency_cpus=slow)]
    return Topology(
        nodes=tuple(nodes),
        memory_total=machine.get("MemTotal", 0),
        memory_available=available if headroom is None else min(available, headroom),
        cpu_quota=cgroup_cpu_quota(sysroot),
        processor=read_processor(sysroot),
        caches=read_caches(sysroot, cpus),
    )


def _usable_cpus(sysroot: Path) -> set[int]:
    online = read_kernel_list(sysroot / "sys/devices/system/cpu/online")
    allowed = _status(sysroot, "Cpus_allowed_list")
    if online is None or allowed is None:
        return online or allowed or {0}
    return online & allowed


def _nodes(sysroot: Path, cpus: set[int], slow: frozenset[int]) -> list[NumaNode]:
    folder = sysroot / "sys/devices/system/node"
    online = read_kernel_list(folder / "online") or set()
    allowed = _status(sysroot, "Mems_allowed_list")
    nodes: list[NumaNode] = []
    for number in sorted(online):
        node = folder / f"node{number}"
        own = (read_kernel_list(node / "cpulist") or set()) & cpus
        if own:
            memory = read_meminfo(node / "meminfo")
            nodes.append(
                NumaNode(
                    number,
                    _cores(sysroot, own),
                    memory.get("MemTotal", 0),
                    # A node has no MemAvailable: count free memory and what is easily reclaimed.
                    memory.get("MemFree", 0)
                    + memory.get("Inactive(file)", 0)
                    + memory.get("SReclaimable", 0),
                    memory_allowed=allowed is None or number in allowed,
                    sockets=_sockets(sysroot, own),
                    efficiency_cpus=slow & own,
                    distances=tuple(
                        int(word)
                        for word in read_text(node / "distance").split()
                        if word.isdecimal()
                    ),
                )
            )
    return nodes


def _cores(sysroot: Path, cpus: set[int]) -> tuple[tuple[int, ...], ...]:
    cores: set[tuple[int, ...]] = set()
    for cpu in cpus:
        siblings = read_kernel_list(_cpu_topology(sysroot, cpu) / "thread_siblings_list") or set()
        cores.add(tuple(sorted((siblings | {cpu}) & cpus)))
    return tuple(sorted(cores))


def _sockets(sysroot: Path, cpus: set[int]) -> tuple[int, ...]:
    found = {read_number(_cpu_topology(sysroot, cpu) / "physical_package_id") for cpu in cpus}
    return tuple(sorted(number for number in found if number is not None and number >= 0))


def _cpu_topology(sysroot: Path, cpu: int) -> Path:
    return sysroot / f"sys/devices/system/cpu/cpu{cpu}/topology"


def _status(sysroot: Path, key: str) -> set[int] | None:
    for line in read_text(sysroot / "proc/self/status").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return parse_kernel_list(value)
    return None


def topology_as_dict(topology: Topology) -> dict[str, Any]:
    """Return the topology as JSON values: sizes in bytes, CPUs by the kernel's numbers."""
    return {
        "architecture": topology.processor.architecture,
        "processor": topology.processor.name,
        "instructions": topology.processor.instructions,
        "flags": sorted(topology.processor.flags),
        "sockets": len(topology.sockets),
        "cores": topology.core_count,
        "cpus": sum(len(node.cpus) for node in topology.nodes),
        "cpu_quota": topology.cpu_quota,
        "memory_total": topology.memory_total,
        "memory_available": topology.memory_available,
        "caches": [
            {"level": one.level, "type": one.kind, "size": one.size, "cpus": list(one.cpus)}
            for one in topology.caches
        ],
        "numa_nodes": [
            {
                "number": node.number,
                "sockets": list(node.sockets),
                "cores": [list(core) for core in node.cores],
                "efficiency_cpus": sorted(node.efficiency_cpus),
                "memory_total": node.memory_total,
                "memory_available": node.memory_available,
                "memory_allowed": node.memory_allowed,
                "distances": list(node.distances),
            }
            for node in topology.nodes
        ],
        "servers": [server_placement(topology, node) for node in topology.nodes],
    }


def server_placement(topology: Topology, node: NumaNode) -> dict[str, Any]:
    """Return the threads, CPUs and memory options of a server on this node, as JSON values."""
    several = len(topology.nodes) > 1
    return {
        "numa": node.number,
        "threads": topology.threads_per_server(node),
        "cpus": format_kernel_list(node.performance_cpus),
        "pin": several or bool(node.efficiency_cpus),
        "bind_memory": several and node.memory_allowed,
        "no_mmap": several,
    }


if __name__ == "__main__":
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    sys.stdout.write(json.dumps(topology_as_dict(read_topology(root))) + "\n")
