"""What this machine offers to this process: sockets, NUMA nodes, physical cores, caches, memory.

Read from `/sys` and `/proc` under any root; the affinity mask and the cpuset of a container are
respected, offline CPUs and nodes without CPUs left out.
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
    memory_allowed: bool = True  # whether this process may take memory there
    sockets: tuple[int, ...] = ()  # those its CPUs sit in; empty where nothing tells
    efficiency_cpus: frozenset[int] = frozenset()  # CPUs much weaker than the machine's strongest
    distances: tuple[int, ...] = ()  # to each online node, 10 is itself

    @property
    def performance_cores(self) -> tuple[tuple[int, ...], ...]:
        """The cores worth a thread: all, but for the weak ones of a machine that mixes them."""
        fast = tuple(core for core in self.cores if not self.efficiency_cpus.issuperset(core))
        return fast or self.cores

    @property
    def performance_cpus(self) -> tuple[int, ...]:
        """The CPUs of those cores."""
        return tuple(sorted(cpu for core in self.performance_cores for cpu in core))

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
    processor: Processor = UNKNOWN_PROCESSOR
    caches: tuple[CpuCache, ...] = ()

    @property
    def sockets(self) -> tuple[int, ...]:
        """The sockets that hold CPUs which this process may run on."""
        return tuple(sorted({socket for node in self.nodes for socket in node.sockets}))

    @property
    def core_count(self) -> int:
        """Physical cores of all nodes."""
        return sum(len(node.cores) for node in self.nodes)

    def threads_per_server(self, node: NumaNode, servers: int = 1) -> int:
        """Threads for each of `sharing` servers on this node: a fast physical core for each.

        Never hyperthreads: two threads on one core share its arithmetic units, and the memory that
        decoding waits for. A container's quota is shared out over all cores.
        """
        cores = len(node.performance_cores)
        if self.cpu_quota is not None:
            everything = sum(len(other.performance_cores) for other in self.nodes)
            cores = min(cores, math.floor(self.cpu_quota * cores / everything))
        return max(1, cores // servers)


def read_topology(sysroot: Path = ROOT) -> Topology:
    """The topology under `sysroot`, which holds `sys` and `proc`."""
    cpus = _usable_cpus(sysroot)
    weak = efficiency_cpus(sysroot, cpus)
    machine = read_meminfo(sysroot / "proc/meminfo")
    available = machine.get("MemAvailable", machine.get("MemFree", 0))
    room = cgroup_memory_headroom(sysroot)
    nodes = _nodes(sysroot, cpus, weak)
    if not nodes:  # a kernel without NUMA
        cores, total = _cores(sysroot, cpus), machine.get("MemTotal", 0)
        sockets = _sockets(sysroot, cpus)
        nodes = [NumaNode(0, cores, total, available, sockets=sockets, efficiency_cpus=weak)]
    return Topology(
        nodes=tuple(nodes),
        memory_total=machine.get("MemTotal", 0),
        memory_available=available if room is None else min(available, room),
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


def _nodes(sysroot: Path, cpus: set[int], weak: frozenset[int]) -> list[NumaNode]:
    folder = sysroot / "sys/devices/system/node"
    online = read_kernel_list(folder / "online") or set()
    allowed = _status(sysroot, "Mems_allowed_list")
    nodes: list[NumaNode] = []
    for number in sorted(online):
        home = folder / f"node{number}"
        own = (read_kernel_list(home / "cpulist") or set()) & cpus
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
                    efficiency_cpus=weak & own,
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
        siblings = read_kernel_list(_of_cpu(sysroot, cpu) / "thread_siblings_list") or set()
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
            return parse_kernel_list(value)
    return None


def topology_as_dict(topology: Topology) -> dict[str, Any]:
    """Everything for a script: sizes in bytes, CPUs by the kernel's numbers."""
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
    """How a server sits on this node: one thread for each physical core, never a hyperthread."""
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
