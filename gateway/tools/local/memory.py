"""Checks that servers fit into memory and may lock it, before they start.

`llama-gateway node-memory FILE.gguf --slots 2 ...` says what one server needs. It needs
the standard library alone, since playbooks run it where the gateway is not installed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from gateway.tools.local import LocalFleetError, MemoryLockError, MemoryShortError
from gateway.tools.local.gguf_file import ModelFile, read_model
from gateway.tools.local.model_shape import UnknownShapeError
from gateway.tools.local.server_memory import ServerSettings, server_memory
from gateway.tools.local.system_files import read_text
from gateway.tools.local.topology import Topology

GIB = 1 << 30

MEMORY_FACTOR = 1.5  # memory of a server over its model's size, where its shape is not known

MEMORY_RESERVE = 2 * GIB  # stays free


def memory_needed(model_size: int, servers: int) -> int:
    """Return the bytes that the servers will take, by a rule of thumb."""
    return int(model_size * MEMORY_FACTOR) * servers


def server_needs(model: ModelFile, settings: ServerSettings | None) -> tuple[int, str]:
    """Return the bytes that a server of the model needs, and in words what they rest on.

    Without settings, or for a model whose shape is not known, it is the rule of thumb.
    """
    if model.shape is not None and settings is not None:
        try:
            found = server_memory(model.shape, settings)
        except UnknownShapeError:
            pass  # the server itself will say why it refuses these settings
        else:
            slots = "1 slot" if settings.slots == 1 else f"{settings.slots} slots"
            return found.needed, (
                f"weights {format_gib(found.weights)}, {slots} of {settings.context} tokens "
                f"{format_gib(found.kv_cache + found.states)}, the rest "
                f"{format_gib(found.needed - found.weights - found.kv_cache - found.states)}"
            )
    return memory_needed(model.size, 1), f"{MEMORY_FACTOR} x model"


def memory_headroom(topology: Topology, each: int, servers: int) -> int:
    """Return the bytes left beside servers of `each` bytes and the reserve; may be negative."""
    return topology.memory_available - each * servers - MEMORY_RESERVE


def check_memory(
    topology: Topology,
    model: ModelFile,
    bound_to: Sequence[int | None],
    settings: ServerSettings | None = None,
    *,
    force: bool = False,
) -> None:
    """Raise MemoryShortError when the servers would leave less than 2 GiB free.

    `bound_to`: the NUMA node of each server's memory, None for any. The machine is checked, and so
    is each node that servers are bound to. Without `settings` the rule of thumb counts. `force`
    skips the checks.
    """
    if force:
        return
    each, why = server_needs(model, settings)
    for place, servers, free in memory_places(topology, bound_to):
        if free - each * servers < MEMORY_RESERVE:
            raise _short(model, each, why, servers, place, free)


def memory_places(topology: Topology, bound_to: Sequence[int | None]) -> list[tuple[str, int, int]]:
    """Return each place that must hold servers: its name, how many, and its available bytes."""
    places = [("this machine", len(bound_to), topology.memory_available)]
    available = {node.number: node.memory_available for node in topology.nodes}
    for number, servers in sorted(Counter(n for n in bound_to if n is not None).items()):
        places.append((f"NUMA node {number}", servers, available.get(number, 0)))
    return places


def _short(
    model: ModelFile, each: int, why: str, servers: int, place: str, free: int
) -> MemoryShortError:
    several = servers > 1
    return MemoryShortError(
        f"{model.path}: not enough memory: the model is {format_gib(model.size)}, so "
        f"{f'{servers} servers need' if several else 'a server needs'} about "
        f"{format_gib(each * servers)} ({why}{' each' if several else ''}), and "
        f"{format_gib(MEMORY_RESERVE)} must stay free, but {place} has {format_gib(free)} "
        f"available. Take a smaller model or quantization, less --context or --slots"
        f"{', fewer --servers' if several else ''}, or start anyway with --force-memory"
    )


def format_gib(size: int) -> str:
    """Format a size for people, such as `1.5 GiB`."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / (1 << 20):.0f} MiB"


ROOT = Path("/")

CAP_IPC_LOCK = 14  # linux/capability.h

LOCKED_SHARE = 0.9  # of the model file that must be locked; the vocabulary never is


def memlock_limit(sysroot: Path = ROOT) -> int | None:
    """Return the bytes that a server of this process may lock; None: no limit, or unknown.

    It is the hard limit, to which `tools.local.launch` raises the soft one. CAP_IPC_LOCK lifts it
    where the capability survives exec: root's, or an ambient one.
    """
    status = dict(_pairs(sysroot / "proc/self/status"))
    is_root = status.get("Uid", "").split()[1:2] == ["0"]
    capabilities = int(status.get("CapEff" if is_root else "CapAmb", "0"), 16)
    if capabilities >> CAP_IPC_LOCK & 1:
        return None
    for line in read_text(sysroot / "proc/self/limits").splitlines():
        if line.startswith("Max locked memory"):
            hard = line.split()[4]
            return int(hard) if hard.isdecimal() else None
    return None


def check_memlock(model: ModelFile, limit: int | None) -> None:
    """Raise MemoryLockError when a server may not lock the whole model."""
    if limit is not None and limit < model.size:
        raise MemoryLockError(
            f"{model.path}: --mlock: a server may lock {format_gib(limit)} of memory here, and "
            f"the model is {format_gib(model.size)}. Remedy: `sudo prlimit --pid $$ "
            "--memlock=unlimited` in this shell; in a systemd unit LimitMEMLOCK=infinity and "
            "AmbientCapabilities=CAP_IPC_LOCK; for a container --ulimit memlock=-1; or leave "
            "--mlock out"
        )


def memlock_warning(model: ModelFile, pid: int, sysroot: Path = ROOT) -> str | None:
    """Return a warning about a server that has loaded its model without locking all of it."""
    words = dict(_pairs(sysroot / f"proc/{pid}/status")).get("VmLck", "").split()
    if not words:
        return None  # the process has ended, or this is not Linux
    locked = int(words[0]) * 1024
    if locked >= LOCKED_SHARE * model.size:
        return None
    return (
        f"only {format_gib(locked)} of {format_gib(model.size)} is locked in memory; its "
        "log may say why"
    )


def _pairs(path: Path) -> list[tuple[str, str]]:
    lines = [line.partition(":") for line in read_text(path).splitlines()]
    return [(key, value.strip()) for key, _, value in lines]


def main(arguments: list[str] | None = None) -> None:
    """Write what a server of a model needs, as JSON; exit 1 where its shape is not known."""
    parser = argparse.ArgumentParser(prog="llama-gateway node-memory")
    parser.add_argument("model", type=Path, metavar="FILE.gguf")
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--context", type=int, required=True, help="tokens of one slot")
    parser.add_argument("--ubatch", type=int, required=True)
    parser.add_argument("--cache-ram", type=int, required=True, metavar="MiB")
    options = parser.parse_args(arguments)
    settings = ServerSettings(
        options.slots,
        options.context,
        micro_batch=options.ubatch,
        prompt_cache_bytes=options.cache_ram << 20,
    )
    try:
        model = read_model(options.model)
    except LocalFleetError as error:
        sys.exit(str(error))
    if model.shape is None:
        sys.exit(f"{model.path}: its shape is not known")
    needed, why = server_needs(model, settings)
    sys.stdout.write(json.dumps({"needed": needed, "why": why}) + "\n")


if __name__ == "__main__":
    main()
