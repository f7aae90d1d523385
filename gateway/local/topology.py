"""Reads the machine's topology: sockets, NUMA nodes, cores, caches, memory, processor.

It is read from `/sys`, `/proc` and cgroups under any root, within the process's affinity mask and
the container's cpuset, without offline CPUs and without nodes that have no CPUs. A missing file is
empty, not an error.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

KIB = 1024
_UNITS = {"K": KIB, "M": KIB**2, "G": KIB**3}


def read_text(path: Path) -> str:
    """Return the content of a file; empty where it can't be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def read_number(path: Path) -> int | None:
    """Return the integer in a file, or None."""
    text = read_text(path).strip()
    return int(text) if text.lstrip("-").isdecimal() else None


def read_fields(path: Path) -> dict[str, str]:
    """Return the values of a file of lines such as `Name: value`; of equal names the first."""
    fields: dict[str, str] = {}
    for line in read_text(path).splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    return fields


def read_kernel_list(path: Path) -> set[int] | None:
    """Return the numbers of the kernel list in a file; None where it is missing or empty."""
    text = read_text(path)
    return parse_kernel_list(text) if text.strip() else None


def parse_kernel_list(text: str) -> set[int]:
    """Parse a kernel list such as `0-3,8`."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.strip():
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def format_kernel_list(numbers: set[int] | tuple[int, ...]) -> str:
    """Format numbers as a kernel list, which systemd's `CPUAffinity=` and taskset accept too."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def parse_kernel_size(text: str) -> int:
    """Parse a size such as `32768K` to bytes; 0 if it is none."""
    text = text.strip()
    unit = _UNITS.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    return int(digits) * unit if digits.isdecimal() else 0


def read_meminfo(path: Path) -> dict[str, int]:
    """Return the bytes of each entry by name. A NUMA node's file has `Node 0` before each name."""
    return {
        name.split()[-1]: int(words[0]) * KIB
        for name, value in read_fields(path).items()
        if name and (words := value.split()) and words[0].isdigit()
    }


UNLIMITED = 1 << 60  # bytes; version 1 writes a number near 2**63 for "no limit"


def cgroup_cpu_quota(sysroot: Path) -> float | None:
    """Return the CPUs' worth of time that this process may use; None without a limit.

    The lowest limit of its cgroup and the ancestors counts.
    """
    new, old = ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    quotas = [_quota(group, *new) for group in _groups(sysroot, "")]
    quotas += [_quota(group, *old) for group in _groups(sysroot, "cpu", "cpu,cpuacct")]
    return min((quota for quota in quotas if quota is not None), default=None)


def cgroup_memory_headroom(sysroot: Path) -> int | None:
    """Return the bytes that this process's cgroups may still allocate; None without a limit.

    Inactive page cache counts as free, since the kernel drops it first.
    """
    new = ("memory.max", "memory.current", "inactive_file")
    old = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    headrooms = [_headroom(group, *new) for group in _groups(sysroot, "")]
    headrooms += [_headroom(group, *old) for group in _groups(sysroot, "memory")]
    return min((free for free in headrooms if free is not None), default=None)


def _quota(group: Path, *files: str) -> float | None:
    """Read a quota and its period, in microseconds, from one file or two."""
    words = [word for name in files for word in read_text(group / name).split()]
    quota, period, *_ = [*words, "max", "max"]
    if not (quota.isdigit() and period.isdigit()) or int(period) == 0:
        return None  # "max" in version 2, -1 in version 1
    return int(quota) / int(period)


def _headroom(group: Path, limit_file: str, usage_file: str, cache_key: str) -> int | None:
    limit = read_number(group / limit_file)
    if limit is None or not 0 <= limit < UNLIMITED:
        return None
    usage = read_number(group / usage_file) or 0
    cache = 0
    for line in read_text(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == cache_key and value.strip().isdigit():
            cache = int(value)
    return max(0, limit - max(0, usage - cache))


def _groups(sysroot: Path, controller: str, other_mount: str = "") -> Iterator[Path]:
    """Yield the folders of this process's cgroup and its ancestors, up to the mount.

    Without a `controller` those of version 2. Some may not exist: in a container the path may be
    the host's, while the mount's root is the container's own cgroup.
    """
    mounts = [controller, other_mount] if other_mount else [controller]
    for line in read_text(sysroot / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            inner = PurePosixPath(path.strip().lstrip("/"))
            for group in (inner, *inner.parents):
                if ".." not in group.parts:
                    yield from (sysroot / "sys/fs/cgroup" / mount / group for mount in mounts)


# The instruction sets that llama.cpp's CPU code is built for (ggml's GGML_AVX512_VNNI and so on):
# the kernel's flags, and the usual names. Later ones are faster.
X86_INSTRUCTIONS = {
    "avx": "AVX",
    "f16c": "F16C",
    "fma": "FMA",
    "avx2": "AVX2",
    "avx_vnni": "AVX-VNNI",
    "avx512f": "AVX-512",
    "avx512vbmi": "AVX-512 VBMI",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "amx_tile": "AMX",
    "amx_int8": "AMX INT8",
    "amx_bf16": "AMX BF16",
}

ARM_INSTRUCTIONS = {
    "asimd": "NEON",
    "asimdhp": "FP16",
    "asimddp": "dot product",
    "i8mm": "i8mm",
    "bf16": "BF16",
    "sve": "SVE",
    "sve2": "SVE2",
    "sme": "SME",
}

# A core with less than this share of the highest capacity is an efficiency core.
EFFICIENCY_CAPACITY = 0.8


@dataclass(frozen=True, slots=True)
class Processor:
    """The processor; all of a machine are alike."""

    architecture: str  # `x86_64`, `aarch64`, or empty for unknown
    name: str
    instructions: tuple[str, ...]
    """The instruction sets that llama.cpp can use, by their usual names."""
    flags: frozenset[str]  # the kernel's names of all its features


@dataclass(frozen=True, slots=True)
class CpuCache:
    """One cache: its size in bytes, and the CPUs that share it."""

    level: int
    kind: str
    size: int
    cpus: tuple[int, ...]


def read_processor(sysroot: Path) -> Processor:
    """Read the processor from `/proc/cpuinfo` under `sysroot`."""
    names = {key.lower(): value for key, value in read_fields(sysroot / "proc/cpuinfo").items()}
    is_arm = "features" in names
    flags = frozenset(names.get("features" if is_arm else "flags", "").split())
    if is_arm:
        known, wide = ARM_INSTRUCTIONS, names.get("cpu architecture", "") >= "8"
        architecture = "aarch64" if wide or "asimd" in flags else "arm"
        other = f"maker {names.get('cpu implementer', '?')} part {names.get('cpu part', '?')}"
    else:
        known, other = X86_INSTRUCTIONS, ""
        architecture = "x86_64" if "lm" in flags else "x86" if flags else ""
    instructions = tuple(name for flag, name in known.items() if flag in flags)
    return Processor(architecture, names.get("model name", other), instructions, flags)


def read_caches(sysroot: Path, cpus: set[int]) -> tuple[CpuCache, ...]:
    """Return each data or unified cache of these CPUs once, L1 first."""
    found: set[CpuCache] = set()
    for cpu in cpus:
        folder = sysroot / f"sys/devices/system/cpu/cpu{cpu}/cache"
        for index in range(8):
            entry = folder / f"index{index}"
            level = read_number(entry / "level")
            kind = read_text(entry / "type").strip()
            if level is None or kind == "Instruction":
                continue
            shared = (parse_kernel_list(read_text(entry / "shared_cpu_list")) | {cpu}) & cpus
            size = parse_kernel_size(read_text(entry / "size"))
            found.add(CpuCache(level, kind.lower(), size, tuple(sorted(shared))))
    return tuple(sorted(found, key=lambda cache: (cache.level, cache.cpus)))


def efficiency_cpus(sysroot: Path, cpus: set[int]) -> frozenset[int]:
    """Return the CPUs that are much slower than the fastest, on machines that mix them.

    llama.cpp divides its work evenly, so all threads wait for the slowest one.
    """
    atoms = read_kernel_list(sysroot / "sys/devices/cpu_atom/cpus")
    if atoms and read_kernel_list(sysroot / "sys/devices/cpu_core/cpus"):
        return frozenset(atoms & cpus)
    capacities = {
        cpu: capacity
        for cpu in cpus
        if (capacity := read_number(sysroot / f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity"))
    }
    highest = max(capacities.values(), default=0)
    return frozenset(cpu for cpu, own in capacities.items() if own < EFFICIENCY_CAPACITY * highest)


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
    cpu_quota: float | None  # CPUs' worth of time; None: no limit
    processor: Processor
    caches: tuple[CpuCache, ...]

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
    online = read_kernel_list(sysroot / "sys/devices/system/cpu/online")
    allowed = _status(sysroot, "Cpus_allowed_list")
    cpus = (online or allowed or {0}) & (allowed or online or {0})
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
    text = read_fields(sysroot / "proc/self/status").get(key)
    return None if text is None else parse_kernel_list(text)


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
            asdict(node) | {"efficiency_cpus": sorted(node.efficiency_cpus)}
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
