"""`python -m gateway.local.description [ROOT]`: a machine's topology as JSON.

Needs nothing but Python's own library, like all that it imports: a playbook copies these few
modules to a machine on which nothing is installed yet.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from gateway.local.sysfs import shown_list
from gateway.local.topology import ROOT, NumaNode, Topology, read_topology


def described(found: Topology) -> dict[str, Any]:
    """Everything for a script: sizes in bytes, CPUs by the kernel's numbers."""
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
        "servers": [server_on(found, node) for node in found.nodes],
    }


def server_on(found: Topology, node: NumaNode) -> dict[str, Any]:
    """How a server sits on this node: one thread for each physical core, never a hyperthread."""
    several = len(found.nodes) > 1
    return {
        "numa": node.number,
        "threads": found.threads(node),
        "cpus": shown_list(node.fast_cpus),
        "pin": several or bool(node.efficiency),
        "bind_memory": several and node.memory_allowed,
        "no_mmap": several,
    }


if __name__ == "__main__":
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    sys.stdout.write(json.dumps(described(read_topology(root))) + "\n")
