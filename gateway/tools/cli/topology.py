"""`llama-gateway topology`: shows this machine, and how to place llama.cpp servers on it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gateway.tools.cli import options
from gateway.tools.cli.options import examples_epilog
from gateway.tools.cli.terminal import CommandFailed, console, print_json

if TYPE_CHECKING:
    from gateway.tools.local.topology import Topology


EXAMPLES = examples_epilog(
    ("llama-gateway topology", "sockets, NUMA nodes, cores, caches, memory"),
    ("llama-gateway topology --json", "as JSON, for a script or a playbook"),
    ("llama-gateway topology --root saved/", "for a machine whose /sys and /proc were copied"),
)


def topology(
    root: Path = typer.Option(
        Path("/"), metavar="FOLDER", help="Folder that holds the machine's `sys` and `proc`."
    ),
    as_json: options.Json = False,
) -> None:
    """Show what this machine has for llama.cpp: sockets, NUMA nodes, cores, caches, memory.

    Only resources that this process may use are shown, by its affinity mask, its cpuset and its
    container's limits. The last lines show how to run one server on each NUMA node.
    """
    from gateway.tools.local.topology import read_topology, topology_as_dict

    if not (root / "proc").is_dir() or not (root / "sys").is_dir():
        raise CommandFailed(
            f"{root}: holds no folders `proc` and `sys`. Remedy: name the folder that holds copies "
            "of them with --root; without it this machine is shown",
            2,
        )
    found = read_topology(root)
    if as_json:
        print_json(topology_as_dict(found))
    else:
        _report(found)


def _report(found: Topology) -> None:
    from gateway.tools.local.memory import format_gib
    from gateway.tools.local.topology import format_kernel_list, server_placement

    out = console()
    threads = max((len(core) for node in found.nodes for core in node.cores), default=1)
    processor = found.processor
    out.print(f"processor     {processor.name or 'unknown'} ({processor.architecture or '?'})")
    out.print(f"instructions  {', '.join(processor.instructions) or 'none that llama.cpp uses'}")
    out.print(
        f"cores         {found.core_count} in {_count(len(found.sockets) or 1, 'socket')} and "
        f"{_count(len(found.nodes), 'NUMA node')}, {_count(threads, 'thread')} each"
    )
    if found.cpu_quota is not None:
        out.print(f"quota         {found.cpu_quota:g} CPUs' worth of time (this container)")
    out.print(
        f"memory        {format_gib(found.memory_available)} of "
        f"{format_gib(found.memory_total)} available"
    )
    for level in sorted({cache.level for cache in found.caches}):
        alike = [cache for cache in found.caches if cache.level == level]
        size, shared = alike[0].size, len(alike[0].cpus)
        out.print(f"L{level} cache      {len(alike)} x {_size(size)}, {_count(shared, 'CPU')} each")
    for node in found.nodes:
        out.print(
            f"node {node.number:<8} CPUs {format_kernel_list(node.cpus)} "
            f"({_count(len(node.cores), 'core')}), "
            f"{format_gib(node.memory_available)} of {format_gib(node.memory_total)} free or "
            f"easily freed" + ("" if node.memory_allowed else "; its memory is not allowed here")
        )
        if node.efficiency_cpus:
            out.print(
                f"              efficiency CPUs "
                f"{format_kernel_list(tuple(node.efficiency_cpus))}: left out"
            )
    out.print("\nOne llama.cpp server on each NUMA node:")
    for node in found.nodes:
        server = server_placement(found, node)
        bound = f" --membind={node.number}" if server["bind_memory"] else ""
        pinned = f"numactl --physcpubind={server['cpus']}{bound} " if server["pin"] else ""
        no_mmap = " --no-mmap" if server["no_mmap"] else ""
        out.print(f"  {pinned}llama-server --threads {server['threads']}{no_mmap} ...")


def _size(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
