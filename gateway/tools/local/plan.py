"""Which servers a machine gets: pure, from its topology and the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gateway.tools.local.gguf_file import ModelFile
from gateway.tools.local.memory import memory_headroom
from gateway.tools.local.topology import Topology

MIB = 1 << 20

DEFAULT_SLOTS = 2
"""Requests a server takes at once. Decoding on a CPU waits for memory, so a second stream costs
little; a third already finds its neighbours' prefills in its way."""

DEFAULT_CONTEXT = 4096
"""Tokens of one slot."""

MOST_PROMPT_CACHE_BYTES = 8192 * MIB
"""Bytes of evicted prompts a server may keep, where there is room: llama.cpp's own default."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """One llama.cpp server to start."""

    name: str
    model: Path
    alias: str  # the model's name as the server reports it
    slots: int
    context: int  # tokens of one slot
    threads: int
    numa_node: int  # the node it is meant for
    cpus: tuple[int, ...] | None = None  # None: any
    memory_node: int | None = None  # None: any
    no_mmap: bool = False
    mlock: bool = False
    prompt_cache_bytes: int = 0  # bytes of evicted prompts
    embedding: bool = False
    host: str = "127.0.0.1"
    batch: int | None = None  # tokens of one step; None: what suits its slots
    micro_batch: int | None = None  # tokens of one computation


def plan_servers(
    topology: Topology,
    model: ModelFile,
    *,
    servers: int | None = None,
    slots: int = DEFAULT_SLOTS,
    context: int = DEFAULT_CONTEXT,
    embedding: bool = False,
    mlock: bool = False,
) -> tuple[ServerSpec, ...]:
    """One server per NUMA node, or `servers` of them spread over the nodes.

    With more than one node each server is pinned to its node's CPUs and memory, and reads the
    model into memory of its own, because a shared page cache lies on one node only. The servers
    of one node share out its physical cores. `context` is bounded by what the model was trained
    on. On a machine that mixes strong and weak cores, a server keeps to the strong ones.
    """
    count = servers if servers is not None else len(topology.nodes)
    if count < 1 or slots < 1 or context < 1:
        raise ValueError("servers, slots and context must be at least 1")
    homes = [topology.nodes[index % len(topology.nodes)] for index in range(count)]
    several = len(topology.nodes) > 1
    left = max(0, memory_headroom(topology, model.size, count))
    return tuple(
        ServerSpec(
            name=f"local-{index}",
            model=model.path,
            alias=model.name,
            slots=slots,
            context=min(context, model.trained_context or context),
            threads=topology.threads_per_server(home, homes.count(home)),
            numa_node=home.number,
            cpus=home.performance_cpus if several or home.efficiency_cpus else None,
            memory_node=home.number if several and home.memory_allowed else None,
            no_mmap=several,
            mlock=mlock,
            prompt_cache_bytes=min(MOST_PROMPT_CACHE_BYTES, left // count),
            embedding=embedding,
        )
        for index, home in enumerate(homes)
    )
