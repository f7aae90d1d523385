"""Prints where processes run and where their memory lies: `python3 - PID... < placement.py`."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any


def placement(pid: int) -> dict[str, Any]:
    """The CPUs and the memory nodes of a server, from the kernel."""
    home = Path(f"/proc/{pid}")
    status = dict(re.findall(r"^(\w+):\s*(.*)$", (home / "status").read_text(), re.MULTILINE))
    maps = [line.split() for line in (home / "numa_maps").read_text().splitlines()]
    anonymous: Counter[str] = Counter()
    for words in maps:
        # Pages of a file lie on the node of the process that read it first.
        if not any(word.startswith("file=") for word in words):
            for node, pages in re.findall(r"\bN(\d+)=(\d+)", " ".join(words)):
                anonymous[node] += int(pages)
    return {
        "command": (home / "cmdline").read_bytes().decode().rstrip("\0").split("\0"),
        "cpus": status["Cpus_allowed_list"],
        "cpus_of_threads": sorted({_cpus(task) for task in (home / "task").iterdir()}),
        "memory_nodes": status["Mems_allowed_list"],
        "locked_kib": int(status["VmLck"].split()[0]),
        "policies": sorted({words[1] for words in maps}),
        "anonymous_pages": anonymous,
        "maps_model": any("demo.gguf" in word for words in maps for word in words),
    }


def _cpus(task: Path) -> str:
    (found,) = re.findall(
        r"^Cpus_allowed_list:\s*(.*)$", (task / "status").read_text(), re.MULTILINE
    )
    return str(found)


def flag(server: dict[str, Any], name: str) -> str:
    """The value of an option in a server's command."""
    command = server["command"]
    return str(command[command.index(name) + 1])


def check_memory(server: dict[str, Any], node: int) -> None:
    """Its private memory is bound to a node and lies there."""
    assert server["policies"] == [f"bind:{node}"]
    assert list(server["anonymous_pages"]) == [str(node)]
    assert server["anonymous_pages"][str(node)] > 2000  # the model alone has 950 pages


def check_model(server: dict[str, Any]) -> None:
    """It has a copy of the model, and has locked it."""
    assert "--no-mmap" in server["command"]
    assert not server["maps_model"]
    assert server["locked_kib"] > 3500


if __name__ == "__main__":
    print(json.dumps([placement(int(pid)) for pid in sys.argv[1:]]))
