"""Plans the servers of this machine: how many, where, with which model."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gateway.local import (
    ContextError,
    MemoryShortError,
    MissingExtraError,
    ModelFileError,
    ServerBinaryError,
)
from gateway.local.cache import cache_folder, logs_folder
from gateway.local.demo_model import DEMO_MODEL_NAME, ensure_demo_model
from gateway.local.embedded import batch_sizes, packaged_openmp, system_has_openmp
from gateway.local.gguf import ModelFile, read_model
from gateway.local.memory import (
    MEMORY_RESERVE,
    ServerSettings,
    check_memlock,
    check_memory,
    format_gib,
    memlock_limit,
    memory_headroom,
    server_needs,
)
from gateway.local.model_folder import FolderContents, ModelFolder
from gateway.local.server import MIB, ServerBinary, ServerSpec, find_binary
from gateway.local.topology import NumaNode, Topology, read_topology
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

    models: tuple[ModelFile, ...]  # one, or one for each server; of routers none
    is_demo: bool
    specs: tuple[ServerSpec, ...]
    binary: ServerBinary | None  # None: the embedded server
    log_folder: Path

    @property
    def model(self) -> ModelFile:
        """The first model, which is that of all servers unless there are several."""
        return self.models[0]

    def model_of(self, spec: ServerSpec) -> ModelFile:
        """Return the model of a server."""
        return next(model for model in self.models if model.path == spec.model)


def plan_local_fleet(
    model: Path | ModelFile | None = None,
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
    if model is None:
        chosen = read_model(ensure_demo_model(cache), DEMO_MODEL_NAME)
    else:
        chosen = model if isinstance(model, ModelFile) else read_model(model)
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
    return LocalFleetPlan((chosen,), model is None, specs, binary, logs_folder(cache))


def plan_model_fleet(
    models: Sequence[ModelFile],
    *,
    slots: int = DEFAULT_SLOTS,
    context: int | None = None,
    server_bin: Path | None = None,
    force_memory: bool = False,
    embedding: bool = False,
    mlock: bool = False,
    topology: Topology | None = None,
) -> LocalFleetPlan:
    """Plan one server for each of several models. Raises as `plan_local_fleet` does."""
    specs = plan_models(
        topology or read_topology(),
        models,
        slots=slots,
        context=context,
        force_memory=force_memory,
        embedding=embedding,
        mlock=mlock,
    )
    if mlock:
        for model in models:
            check_memlock(model, memlock_limit())
    cache = cache_folder()
    return LocalFleetPlan(tuple(models), False, specs, find_server(server_bin), logs_folder(cache))


@dataclass(frozen=True, slots=True)
class FolderPlan:
    """Routers over a folder of models."""

    fleet: LocalFleetPlan
    folder: ModelFolder
    contents: FolderContents
    room: int  # bytes that the smallest host has for models


def plan_folder_fleet(
    path: Path,
    preset: Path,
    *,
    servers: int | None = None,
    slots: int = DEFAULT_SLOTS,
    context: int | None = None,
    server_bin: Path | None = None,
    force_memory: bool = False,
    embedding: bool = False,
    mlock: bool = False,
    topology: Topology | None = None,
    progress: Callable[[int, int], None] = lambda _, __: None,
) -> FolderPlan:
    """Plan one router for each NUMA node, over the models of a folder that memory has room for.

    `preset` is the file that they will read. Raises a LocalFleetError, such as for a folder without
    any such model.
    """
    topology = topology or read_topology()
    binary = find_router(server_bin)
    nothing = ModelFile(preset, "", 0, None)  # the models come later
    specs = plan_servers(
        topology,
        nothing,
        servers=servers,
        slots=slots,
        context=context,
        embedding=embedding,
        mlock=mlock,
    )
    specs = tuple(
        replace(
            spec,
            is_router=True,
            memory=_router_memory(topology, spec, specs, force=force_memory),
            prompt_cache_bytes=0,
        )
        for spec in specs
    )
    room = min(spec.memory or 0 for spec in specs)
    folder = ModelFolder(
        path, server_settings(specs[0]), room, embedding=embedding, force=force_memory
    )
    try:
        contents = folder.contents(progress)
    except OSError as error:
        raise ModelFileError(
            f"--models-dir {path}: {(error.strerror or str(error)).lower()}; name a folder of GGUF "
            "files"
        ) from None
    if not contents.models:
        why = "".join(f"\n  {name}: {why}" for name, why in contents.passed_over.items())
        raise ModelFileError(
            f"--models-dir {path}: no model here can be served{why or ': it has no GGUF file'}"
        )
    if mlock:
        for model in contents.models.values():
            check_memlock(model.file, memlock_limit())
    fleet = LocalFleetPlan((), False, specs, binary, logs_folder(cache_folder()))
    return FolderPlan(fleet, folder, contents, room)


def _router_memory(
    topology: Topology, spec: ServerSpec, specs: Sequence[ServerSpec], *, force: bool
) -> int:
    """Return what the host of a router has for models: the machine, or its own NUMA node."""
    reserve = 0 if force else MEMORY_RESERVE
    pools = {one.memory_node for one in specs}
    free = (topology.memory_available - reserve) // len(pools)
    for node in topology.nodes:
        if node.number == spec.memory_node:
            free = min(free, node.memory_available - reserve)
    if free <= 0:
        raise MemoryShortError(
            f"not enough memory for any model: {format_gib(reserve)} must stay free, and this "
            f"machine has {format_gib(topology.memory_available)} available. End other programs"
        )
    return free


# Where `make llama-server` of a checkout puts it (setup/llama_server.py).
FETCHED_SERVER = "llama-gateway-tests/llama-server/llama-server"


def find_router(server_bin: Path | None) -> ServerBinary:
    """Return a llama-server with router mode: named, on PATH, or fetched by `make llama-server`."""
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    fetched = (xdg if xdg.is_absolute() else Path.home() / ".cache") / FETCHED_SERVER
    binary = find_binary(server_bin) or (find_binary(fetched) if fetched.is_file() else None)
    if binary is None:
        raise ServerBinaryError(
            "--models-dir needs llama.cpp's llama-server: the embedded server can't load models on "
            "demand (it has no router mode). Install it so that it is on PATH, name it with "
            "--server-bin FILE, or fetch it with 'make llama-server' in a checkout; or serve a few "
            "models without it: --model FILE once for each"
        )
    if missing := {"--models-preset", "--models-max"} - binary.flags:
        raise ServerBinaryError(
            f"{binary.path}: --models-dir needs a newer llama-server: this one (version "
            f"{binary.version or 'unknown'}) has no {' and no '.join(sorted(missing))}; name "
            "another with --server-bin"
        )
    return binary


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
    if count < 1 or slots < 1 or (context is not None and context < 1):
        raise ValueError("servers, slots and context must be at least 1")
    placed = [(topology.nodes[index % len(topology.nodes)], model, slots) for index in range(count)]
    return _servers(topology, placed, context=context, embedding=embedding, mlock=mlock)


def _servers(
    topology: Topology,
    placed: Sequence[tuple[NumaNode, ModelFile, int]],  # each with its slots
    *,
    context: int | None,
    embedding: bool,
    mlock: bool,
) -> tuple[ServerSpec, ...]:
    nodes = [node for node, _, _ in placed]
    several = len(topology.nodes) > 1
    specs = []
    needed = 0
    for index, (node, model, slots) in enumerate(placed):
        trained = model.trained_context
        if context and trained and context > trained:
            raise ContextError(
                f"{model.path}: --context {context}: the model was trained for {trained} tokens; "
                f"take --context {trained} at most, or another model"
            )
        spec = ServerSpec(
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
        each, _ = server_needs(model, server_settings(spec))
        # The rule of thumb is generous as it is.
        needed += each if model.shape is None else each + int(each * UNFORESEEN_SHARE)
        specs.append(spec)
    spare = memory_headroom(topology, needed, 1) // len(specs)
    prompt_cache = min(MOST_PROMPT_CACHE_BYTES, max(0, spare))
    return tuple(replace(spec, prompt_cache_bytes=prompt_cache) for spec in specs)


def plan_models(
    topology: Topology,
    models: Sequence[ModelFile],
    *,
    slots: int = DEFAULT_SLOTS,
    context: int | None = None,
    force_memory: bool = False,
    embedding: bool = False,
    mlock: bool = False,
) -> tuple[ServerSpec, ...]:
    """Plan one server for each model, with as many of `slots` as memory has room for.

    The largest model comes first, each to the NUMA node with most memory left. Raises a
    LocalFleetError for models of one name, and where one slot of each has no room.
    """
    named: dict[str, Path] = {}
    for model in models:
        if model.name in named:
            raise ModelFileError(
                f"{named[model.name]} and {model.path}: both models are named {model.name}, by "
                "which requests ask for them; rename one, or leave it out"
            )
        named[model.name] = model.path
    free = {node: node.memory_available for node in topology.nodes}
    home: dict[str, NumaNode] = {}
    for model in sorted(models, key=lambda one: -one.size):
        home[model.name] = node = max(free, key=lambda one: free[one])
        free[node] -= model.size

    def planned(counts: Sequence[int]) -> tuple[ServerSpec, ...]:
        placed = [(home[one.name], one, count) for one, count in zip(models, counts, strict=True)]
        return _servers(topology, placed, context=context, embedding=embedding, mlock=mlock)

    if force_memory:
        return planned([slots] * len(models))
    counts = [1] * len(models)
    if short := _memory_short(topology, models, planned(counts)):
        raise MemoryShortError(short)
    for count in range(2, slots + 1):
        for index in range(len(models)):
            more = [*counts[:index], count, *counts[index + 1 :]]
            if not _memory_short(topology, models, planned(more)):
                counts = more
    return planned(counts)


def _memory_short(
    topology: Topology, models: Sequence[ModelFile], specs: Sequence[ServerSpec]
) -> str | None:
    """Say in which place the servers have no room; None: they have."""
    needs = [
        server_needs(model, server_settings(spec))
        for model, spec in zip(models, specs, strict=True)
    ]
    places = [("this machine", topology.memory_available, set(range(len(specs))))]
    for node in topology.nodes:
        bound = {index for index, spec in enumerate(specs) if spec.memory_node == node.number}
        places.append((f"NUMA node {node.number}", node.memory_available, bound))
    for place, free, inside in places:
        needed = sum(needs[index][0] for index in inside)
        if inside and free - needed < MEMORY_RESERVE:
            each = "; ".join(
                f"{models[index].name} {format_gib(needs[index][0])} ({needs[index][1]})"
                for index in sorted(inside)
            )
            return (
                f"not enough memory for these models at once: {each}. Together they need "
                f"{format_gib(needed)}, and {format_gib(MEMORY_RESERVE)} must stay free, but "
                f"{place} has {format_gib(free)} available. Leave a model out, take smaller ones "
                "or less --context, put them into one folder and let them be loaded on demand "
                "(--models-dir), or start anyway with --force-memory"
            )
    return None


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
