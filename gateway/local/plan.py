"""Plans the servers of this machine: how many, where, with which model."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from gateway.local import ContextError, MissingExtraError
from gateway.local.cache import cache_folder, logs_folder
from gateway.local.demo_model import DEMO_MODEL_NAME, ensure_demo_model
from gateway.local.embedded import batch_sizes, packaged_openmp, system_has_openmp
from gateway.local.gguf import ModelFile, read_model
from gateway.local.memory import (
    ServerSettings,
    check_memlock,
    check_memory,
    memlock_limit,
    memory_headroom,
    server_needs,
)
from gateway.local.server import MIB, ServerBinary, ServerSpec, find_binary
from gateway.local.topology import Topology, read_topology
from gateway.system import install_command

# Requests that a server takes at once. Decoding on a CPU waits for memory, so a second stream costs
# little; a third is already slowed down by the prefills of the others.
DEFAULT_SLOTS = 2
DEFAULT_CONTEXT = 4096  # tokens of one slot: a chat's. Coding agents begin with more.
# Evicted prompts that a server may keep where there is room: llama.cpp's own default.
MOST_PROMPT_CACHE_BYTES = 8192 * MIB
# Of a server's memory that prompt caches leave free: what its estimate may have missed.
UNFORESEEN_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class LocalFleetPlan:
    """The arguments of `LocalFleet(plan.specs, plan.log_folder, binary=plan.binary)`."""

    model: ModelFile
    is_demo: bool
    specs: tuple[ServerSpec, ...]
    binary: ServerBinary | None  # None: the embedded server
    log_folder: Path


def plan_local_fleet(
    model: Path | None = None,
    *,
    servers: int | None = None,
    slots: int = DEFAULT_SLOTS,
    context: int | None = None,
    server_bin: Path | None = None,
    force_memory: bool = False,
    embedding: bool = False,
    mlock: bool = False,
    cache: Path | None = None,
    topology: Topology | None = None,
    read_memlock_limit: Callable[[], int | None] = memlock_limit,
) -> LocalFleetPlan:
    """Plan the servers of this machine, for `model` or else the demo model.

    Raises a LocalFleetError that names the remedy (a missing extra, a file that is no model, a
    longer context than the model's, too little memory or too low a limit of locked memory, a binary
    that can't be run), and OSError when the cache folder can't be written.
    """
    cache = cache or cache_folder()
    topology = topology or read_topology()
    binary = find_server(server_bin)
    chosen = read_model(model) if model else read_model(ensure_demo_model(cache), DEMO_MODEL_NAME)
    specs = plan_servers(
        topology,
        chosen,
        servers=servers,
        slots=slots,
        context=context,
        embedding=embedding,
        mlock=mlock,
    )
    check_specs(topology, chosen, specs, force=force_memory)
    if mlock:
        check_memlock(chosen, read_memlock_limit())
    return LocalFleetPlan(chosen, model is None, specs, binary, logs_folder(cache))


def find_server(server_bin: Path | None) -> ServerBinary | None:
    """Return the program to start; None: the embedded server. Raises a LocalFleetError."""
    binary = find_binary(server_bin)
    if binary is None:
        _check_embedded()
    return binary


def check_model_fits(
    model: ModelFile,
    *,
    servers: int | None = None,
    slots: int = DEFAULT_SLOTS,
    context: int | None = None,
    force_memory: bool = False,
    embedding: bool = False,
    topology: Topology | None = None,
) -> None:
    """Raise the LocalFleetError of `plan_local_fleet` for a model that is not there yet."""
    topology = topology or read_topology()
    specs = plan_servers(
        topology, model, servers=servers, slots=slots, context=context, embedding=embedding
    )
    check_specs(topology, model, specs, force=force_memory)


def check_specs(
    topology: Topology, model: ModelFile, specs: tuple[ServerSpec, ...], *, force: bool = False
) -> None:
    """Raise MemoryShortError where the servers, their prompt caches left out, do not fit."""
    bound_to = [spec.memory_node for spec in specs]
    check_memory(topology, model, bound_to, server_settings(specs[0]), force=force)


def server_settings(spec: ServerSpec) -> ServerSettings:
    """Return the settings that a server's memory depends on, without its prompt cache."""
    _, micro_batch = batch_sizes(spec.context, embedding=spec.embedding)
    return ServerSettings(
        spec.slots,
        spec.context,
        micro_batch=spec.micro_batch or micro_batch,
        mapped=not spec.no_mmap,
    )


def plan_servers(
    topology: Topology,
    model: ModelFile,
    *,
    servers: int | None = None,
    slots: int = DEFAULT_SLOTS,
    context: int | None = None,
    embedding: bool = False,
    mlock: bool = False,
) -> tuple[ServerSpec, ...]:
    """Plan one server for each NUMA node, or `servers` of them spread over the nodes.

    With more than one node each server is pinned to its node's CPUs and memory, and reads the
    model into memory of its own, because a shared page cache lies on one node only. The servers
    of one node share its physical cores. Without `context`, tokens of one slot, it is the usual one
    or the model's trained one, the smaller. On a machine that mixes performance and efficiency
    cores, a server keeps to the performance cores. Raises ContextError, where the model was trained
    for less.
    """
    count = servers if servers is not None else len(topology.nodes)
    trained = model.trained_context
    if count < 1 or slots < 1 or (context is not None and context < 1):
        raise ValueError("servers, slots and context must be at least 1")
    if context and trained and context > trained:
        raise ContextError(
            f"{model.path}: --context {context}: the model was trained for {trained} tokens; take "
            f"--context {trained} at most, or another model"
        )
    nodes = [topology.nodes[index % len(topology.nodes)] for index in range(count)]
    several = len(topology.nodes) > 1
    specs = tuple(
        ServerSpec(
            name=f"local-{index}",
            model=model.path,
            alias=model.name,
            slots=slots,
            context=context or min(DEFAULT_CONTEXT, trained or DEFAULT_CONTEXT),
            threads=topology.threads_per_server(node, nodes.count(node)),
            numa_node=node.number,
            cpus=node.performance_cpus if several or node.efficiency_cpus else None,
            memory_node=node.number if several and node.memory_allowed else None,
            no_mmap=several,
            mlock=mlock,
            embedding=embedding,
            own_pooling=model.has_pooling,
        )
        for index, node in enumerate(nodes)
    )
    each, _ = server_needs(model, server_settings(specs[0]))
    if model.shape is not None:  # the rule of thumb is generous as it is
        each += int(each * UNFORESEEN_SHARE)
    spare = memory_headroom(topology, each, count) // count
    prompt_cache = min(MOST_PROMPT_CACHE_BYTES, max(0, spare))
    return tuple(replace(spec, prompt_cache_bytes=prompt_cache) for spec in specs)


def _check_embedded() -> None:
    remedy = f"{install_command('local')}, or name a llama-server with --server-bin FILE"
    if importlib.util.find_spec("xllamacpp") is None:
        raise MissingExtraError(
            "the embedded llama.cpp server needs the package 'xllamacpp', which is not installed: "
            + remedy
        )
    if not system_has_openmp() and packaged_openmp() is None:
        raise MissingExtraError(
            "the embedded llama.cpp server needs the OpenMP runtime, which neither this system nor "
            f"an installed package has: {remedy}, or apt-get install libgomp1"
        )
