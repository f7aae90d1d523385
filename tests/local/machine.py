"""Builds the parts of `/sys` and `/proc` of machines that the tests don't have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

GIB_IN_KIB = 1 << 20


def make_machine(
    root: Path,
    nodes: Sequence[Sequence[Sequence[int]]],
    *,
    memory_gib: int = 64,
    offline: Iterable[int] = (),
    cpus_allowed: str | None = None,
    memory_nodes_allowed: str | None = None,
) -> Path:
    """A machine whose NUMA nodes are lists of cores, which are lists of CPUs.

    Each node has an equal share of the memory, three quarters of it free.
    """
    everything = [cpu for node in nodes for core in node for cpu in core]
    online = sorted(set(everything) - set(offline))
    write(root, "sys/devices/system/cpu/online", listed(online))
    write(root, "sys/devices/system/node/online", f"0-{len(nodes) - 1}")
    share = memory_gib * GIB_IN_KIB // len(nodes)
    for number, cores in enumerate(nodes):
        home = f"sys/devices/system/node/node{number}"
        write(root, f"{home}/cpulist", listed(c for core in cores for c in core if c in online))
        write(
            root,
            f"{home}/meminfo",
            f"\nNode {number} MemTotal:       {share} kB\n"
            f"Node {number} MemFree:        {share // 2} kB\n"
            f"Node {number} Inactive(file): {share // 8} kB\n"
            f"Node {number} SReclaimable:   {share // 8} kB\n"
            f"Node {number} HugePages_Total:     0\n",
        )
        for core in cores:
            for cpu in core:
                if cpu in online:
                    siblings = listed(c for c in core if c in online)
                    place = f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
                    write(root, place, siblings)
    write(
        root,
        "proc/meminfo",
        f"MemTotal:       {memory_gib * GIB_IN_KIB} kB\n"
        f"MemFree:        {memory_gib * GIB_IN_KIB // 2} kB\n"
        f"MemAvailable:   {memory_gib * GIB_IN_KIB * 3 // 4} kB\n",
    )
    write(
        root,
        "proc/self/status",
        "Name:\tpython\n"
        f"Cpus_allowed_list:\t{cpus_allowed or listed(everything)}\n"
        f"Mems_allowed_list:\t{memory_nodes_allowed or f'0-{len(nodes) - 1}'}\n",
    )
    return root


def two_sockets_with_smt() -> list[list[list[int]]]:
    """Two nodes of four cores with two threads each, numbered as Linux numbers them."""
    return [[[core, core + 8] for core in range(first, first + 4)] for first in (0, 4)]


def listed(numbers: Iterable[int]) -> str:
    """A kernel list; ranges where they are."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts) + "\n"


def write(root: Path, place: str, text: str) -> None:
    """Write one file of the machine."""
    path = root / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
