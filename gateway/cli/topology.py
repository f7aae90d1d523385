"""`llama-gateway topology`: what this machine is, and how llama.cpp servers sit best on it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.cli import options
from gateway.cli.options import examples
from gateway.cli.terminal import CommandFailed, console, put_json

if TYPE_CHECKING:
    from gateway.local.topology import NumaNode, Topology

EXAMPLES = examples(
    ("llama-gateway topology", "sockets, NUMA nodes, cores, caches, memory"),
    ("llama-gateway topology --json", "the same for a script or a playbook"),
    ("llama-gateway topology --root saved/", "of a machine whose /sys and /proc were copied"),
)


def topology(
    root: Annotated[
        Path,
        typer.Option("--root", help="Folder that holds the machine's `sys` and `proc`."),
    ] = Path("/"),
    as_json: options.Json = False,
) -> None:
    """Show what this machine has for llama.cpp: sockets, NUMA nodes, cores, caches, memory.

    Only what this process may use counts: its affinity mask, its cpuset and its container's limits
    are respected. The last lines tell how to run one server on each NUMA node.
    """
    from gateway.local.topology import read_topology

    if not (root / "proc").is_dir() or not (root / "sys").is_dir():
        raise CommandFailed(
            f"{root}: holds no folders `proc` and `sys`. Remedy: --root names the folder that they "
            "were copied into; without it this machine is looked at",
            2,
        )
    found = read_topology(root)
    if as_json:
        put_json(_as_dict(found))
    else:
        _report(found)


def _as_dict(found: Topology) -> dict[str, Any]:
    return {
        "architecture": found.processor.architecture,
        "processor": found.processor.name,
        "instructions": found.processor.instructions,
        "flags": sorted(found.processor.flags),
        "sockets": len(found.sockets),
        "cores": found.cores,
        "cpus": sum(len(node.cpus) for node in found.nodes),
        "cpu_quota": found.cpu_quota,
        "memory_total": found.memory_total,
        "memory_available": found.memory_available,
        "caches": [
            {"level": one.level, "type": one.kind, "size": one.size, "cpus": list(one.cpus)}
            for one in found.caches
        ],
        "numa_nodes": [
            {
                "number": node.number,
                "sockets": list(node.sockets),
                "cores": [list(core) for core in node.cores],
                "efficiency_cpus": sorted(node.efficiency),
                "memory_total": node.memory_total,
                "memory_available": node.memory_available,
                "memory_allowed": node.memory_allowed,
                "distances": list(node.distances),
            }
            for node in found.nodes
        ],
        "servers": [_server(found, node) for node in found.nodes],
    }


def _server(found: Topology, node: NumaNode) -> dict[str, Any]:
    """How a server sits on this node: one thread for each physical core, never a hyperthread."""
    from gateway.local.sysfs import shown_list

    several = len(found.nodes) > 1
    return {
        "numa": node.number,
        "threads": found.threads(node),
        "cpus": shown_list(node.fast_cpus),
        "pin": several or bool(node.efficiency),
        "bind_memory": several and node.memory_allowed,
        "no_mmap": several,
    }


def _report(found: Topology) -> None:
    from gateway.local.memory import gib
    from gateway.local.sysfs import shown_list

    out = console()
    threads = max((len(core) for node in found.nodes for core in node.cores), default=1)
    processor = found.processor
    out.print(f"processor     {processor.name or 'unknown'} ({processor.architecture or '?'})")
    out.print(f"instructions  {', '.join(processor.instructions) or 'none that llama.cpp knows'}")
    out.print(
        f"cores         {found.cores} in {_count(len(found.sockets) or 1, 'socket')} and "
        f"{_count(len(found.nodes), 'NUMA node')}, {_count(threads, 'thread')} each"
    )
    if found.cpu_quota is not None:
        out.print(f"quota         {found.cpu_quota:g} CPUs' worth of time (this container)")
    out.print(f"memory        {gib(found.memory_available)} of {gib(found.memory_total)} available")
    for level in sorted({cache.level for cache in found.caches}):
        alike = [cache for cache in found.caches if cache.level == level]
        size, shared = alike[0].size, len(alike[0].cpus)
        out.print(f"L{level} cache      {len(alike)} x {_size(size)}, {_count(shared, 'CPU')} each")
    for node in found.nodes:
        out.print(
            f"node {node.number:<8} CPUs {shown_list(node.cpus)} "
            f"({_count(len(node.cores), 'core')}), "
            f"{gib(node.memory_available)} of {gib(node.memory_total)} free or easily freed"
            + ("" if node.memory_allowed else "; its memory is not allowed here")
        )
        if node.efficiency:
            out.print(
                f"              efficiency CPUs {shown_list(tuple(node.efficiency))}: left out"
            )
    out.print("\nOne llama.cpp server on each NUMA node:")
    for node in found.nodes:
        server = _server(found, node)
        bound = f" --membind={node.number}" if server["bind_memory"] else ""
        pinned = f"numactl --physcpubind={server['cpus']}{bound} " if server["pin"] else ""
        no_mmap = " --no-mmap" if server["no_mmap"] else ""
        out.print(f"  {pinned}llama-server --threads {server['threads']}{no_mmap} ...")


def _size(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
