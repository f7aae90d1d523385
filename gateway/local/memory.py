"""Whether the servers fit into memory, said with figures before anything is started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gateway.local.errors import MemoryShortError
from gateway.local.gguf_file import Model
from gateway.local.topology import Topology

GIB = 1 << 30
RULE_OF_THUMB = 1.5  # memory of a server over the size of its model: weights, cache, buffers
KEPT_FREE = 2 * GIB


def memory_needed(model_size: int, servers: int) -> int:
    """Bytes that the servers will take, by the rule of thumb."""
    return int(model_size * RULE_OF_THUMB) * servers


def memory_left(topology: Topology, model_size: int, servers: int) -> int:
    """Bytes beyond what they take and what is kept free; negative when they don't fit."""
    return topology.memory_available - memory_needed(model_size, servers) - KEPT_FREE


def check_memory(
    topology: Topology,
    model: Model,
    bound_to: Sequence[int | None],
    *,
    force: bool = False,
) -> None:
    """Raise MemoryShortError when the servers would leave less than 2 GiB free.

    `bound_to` names for each server the NUMA node its memory comes from, None for any: the
    machine as a whole is checked, and so is each node that servers are bound to. `force` lets
    everything pass.
    """
    if force:
        return
    rooms = [("this machine", len(bound_to), topology.memory_available)]
    available = {node.number: node.memory_available for node in topology.nodes}
    for number, servers in sorted(Counter(n for n in bound_to if n is not None).items()):
        rooms.append((f"NUMA node {number}", servers, available.get(number, 0)))
    for where, servers, room in rooms:
        if room - memory_needed(model.size, servers) < KEPT_FREE:
            raise _short(model, servers, where, room)


def _short(model: Model, servers: int, where: str, room: int) -> MemoryShortError:
    several = servers > 1
    return MemoryShortError(
        f"{model.path}: not enough memory: the model is {gib(model.size)}, so "
        f"{f'{servers} servers need' if several else 'a server needs'} about "
        f"{gib(memory_needed(model.size, servers))} ({RULE_OF_THUMB} x model each), and "
        f"{gib(KEPT_FREE)} must stay free, but {where} has {gib(room)} available. Take a smaller "
        f"model or quantization{', fewer --servers' if several else ''}, or start all the same "
        "with --force-memory"
    )


def gib(size: int) -> str:
    """A size for people, such as `1.5 GiB`."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / (1 << 20):.0f} MiB"
