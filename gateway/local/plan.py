"""Plans the servers of this machine: how many, where, with which model.

A folder of models is for a server in router mode, which reads the preset file that lists them.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypedDict, Unpack

from gateway.local import LocalFleetError, MemoryShortError, ModelFileError, memory
from gateway.local.cache import LOGS, cache_folder
from gateway.local.demo_model import DEMO_MODEL_NAME, ensure_demo_model
from gateway.local.embedded import batch_sizes, packaged_openmp, system_has_openmp
from gateway.local.gguf import PART_NAME, ModelFile, model_parts, read_model
from gateway.local.memory import (
    MEMORY_RESERVE,
    MIB,
    MOST_PROMPT_CACHE_BYTES,
    ServerSettings,
    format_gib,
    server_needs,
)
from gateway.local.server import MEAN, ServerBinary, ServerSpec, find_binary
from gateway.local.topology import NumaNode, Topology, read_topology
from gateway.system import install_command

# Requests that a server takes at once. Decoding on a CPU waits for memory, so a second stream costs
# little; a third is already slowed down by the prefills of the others.
DEFAULT_SLOTS = 2
DEFAULT_CONTEXT = 4096  # tokens of one slot: a chat's. Coding agents begin with more.
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
    folder: ModelFolder | None = None  # of the routers

    @property
    def model(self) -> ModelFile:
        """The first model, which is that of all servers unless there are several."""
        return self.models[0]


class Wanted(TypedDict, total=False):
    """What every plan may be asked for."""

    slots: int
    context: int | None
    embedding: bool
    mlock: bool


def plan_local_fleet(
    model: Path | Sequence[ModelFile] | None = None,
    *,
    servers: int | None = None,
    server_bin: Path | None = None,
    force_memory: bool = False,
    cache: Path | None = None,
    topology: Topology | None = None,
    read_memlock_limit: Callable[[], int | None] = memory.memlock_limit,
    **wanted: Unpack[Wanted],
) -> LocalFleetPlan:
    """Plan the servers of this machine, for the model or models, or else the demo model.

    Raises a LocalFleetError that names the remedy (a missing extra, a file that is no model, a
    longer context than the model's, too little memory or too low a limit of locked memory, a binary
    that can't be run), and OSError when the cache folder can't be written.
    """
    cache = cache or cache_folder()
    binary = find_server(server_bin)
    if not model:
        models = [read_model(ensure_demo_model(cache), DEMO_MODEL_NAME)]
    else:
        models = [read_model(model)] if isinstance(model, Path) else list(model)
    specs = plan_specs(
        models, servers=servers, force_memory=force_memory, topology=topology, **wanted
    )
    if specs[0].mlock:
        for one in models:
            memory.check_memlock(one, read_memlock_limit())
    return LocalFleetPlan(tuple(models), not model, specs, binary, cache / LOGS)


def plan_folder_fleet(
    path: Path,
    preset: Path,
    *,
    servers: int | None = None,
    server_bin: Path | None = None,
    force_memory: bool = False,
    topology: Topology | None = None,
    **wanted: Unpack[Wanted],
) -> LocalFleetPlan:
    """Plan a router for each NUMA node, over the models of a folder that memory has room for.

    They read them from the file `preset`. Raises a LocalFleetError, as for a folder without any.
    """
    topology = topology or read_topology()
    binary = find_router(server_bin)
    specs = plan_servers(topology, ModelFile(preset, "", 0, None), servers=servers, **wanted)
    reserve = 0 if force_memory else MEMORY_RESERVE
    # Routers share the machine, or have each the memory of its own NUMA node.
    share = (topology.memory_available - reserve) // len({spec.memory_node for spec in specs})
    own: dict[int | None, int] = {None: share}
    own |= {node.number: node.memory_available - reserve for node in topology.nodes}
    specs = tuple(
        replace(spec, is_router=True, memory=max(1, min(share, own[spec.memory_node])))
        for spec in specs
    )
    folder = ModelFolder(
        path.absolute(),
        preset,
        server_settings(specs[0]),
        min(spec.memory or 0 for spec in specs),
        embedding=specs[0].embedding,
        force=force_memory,
    )
    try:
        folder.refresh()
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ModelFileError(f"--models-dir {path}: {why}; name a folder of GGUF files") from None
    if not folder.models:
        reasons = "".join(f"\n  {name}: {why}" for name, why in folder.passed_over.items())
        raise ModelFileError(
            f"--models-dir {path}: no model here can be served{reasons or ': it has no GGUF file'}"
        )
    if specs[0].mlock:
        for model in folder.models.values():
            memory.check_memlock(model.file, memory.memlock_limit())
    return LocalFleetPlan((), False, specs, binary, cache_folder() / LOGS, folder)


# Where `make llama-server` of a checkout puts it (setup/llama_server.py).
FETCHED_SERVER = "llama-gateway-tests/llama-server/llama-server"


def find_router(server_bin: Path | None) -> ServerBinary:
    """Return a llama-server with router mode: named, on PATH, or fetched by `make llama-server`."""
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    fetched = (xdg if xdg.is_absolute() else Path.home() / ".cache") / FETCHED_SERVER
    binary = find_binary(server_bin) or (find_binary(fetched) if fetched.is_file() else None)
    remedy = (
        "take a newer llama-server on PATH or named with --server-bin FILE, the one that 'make "
        "llama-server' fetches in a checkout, or serve a few models without it: --model FILE once "
        "for each"
    )
    if binary is None:
        raise LocalFleetError(
            "--models-dir needs llama.cpp's llama-server, since the embedded server has no router "
            f"mode, which loads models on demand: {remedy}"
        )
    if missing := {"--models-preset", "--models-max"} - binary.flags:
        raise LocalFleetError(
            f"{binary.path} (version {binary.version or 'unknown'}) has no {min(missing)}, which "
            f"--models-dir needs: {remedy}"
        )
    return binary


def find_server(server_bin: Path | None) -> ServerBinary | None:
    """Return the program to start; None: the embedded server. Raises a LocalFleetError."""
    if (binary := find_binary(server_bin)) is not None:
        return binary
    remedy = f"{install_command('local')}, or name a llama-server with --server-bin FILE"
    if importlib.util.find_spec("xllamacpp") is None:
        raise LocalFleetError(
            "the embedded llama.cpp server needs the package 'xllamacpp', which is not installed: "
            + remedy
        )
    if not system_has_openmp() and packaged_openmp() is None:
        raise LocalFleetError(
            "the embedded llama.cpp server needs the OpenMP runtime, which neither this system nor "
            f"an installed package has: {remedy}, or apt-get install libgomp1"
        )
    return None


def plan_specs(
    models: Sequence[ModelFile],
    *,
    servers: int | None = None,
    force_memory: bool = False,
    topology: Topology | None = None,
    **wanted: Unpack[Wanted],
) -> tuple[ServerSpec, ...]:
    """Plan the servers of these models, which need not be there yet. Raises a LocalFleetError.

    Of several models each has one server, with as many of `slots` as memory has room for.
    """
    topology = topology or read_topology()
    several = len(models) > 1
    placed = _homes(topology, models) if several else _spread(topology, models[0], servers)
    while True:
        specs = _servers(topology, placed, **wanted)
        try:
            if not force_memory:
                of_servers = placed_servers([model for _, model in placed], specs)
                memory.check_memory(topology, of_servers)
        except MemoryShortError:
            if not several or specs[0].slots == 1:
                raise
            wanted["slots"] = specs[0].slots - 1
        else:
            return specs


def placed_servers(
    models: Sequence[ModelFile], specs: Sequence[ServerSpec]
) -> list[memory.PlacedServer]:
    """Return what `check_memory` is to know of servers, each with its model."""
    return [
        (model, server_settings(spec), spec.memory_node)
        for model, spec in zip(models, specs, strict=True)
    ]


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
    topology: Topology, model: ModelFile, *, servers: int | None = None, **wanted: Unpack[Wanted]
) -> tuple[ServerSpec, ...]:
    """Plan one server for each NUMA node, or `servers` of them spread over the nodes.

    With more than one node each server is pinned to its node's CPUs and memory, and reads the
    model into memory of its own, because a shared page cache lies on one node only. The servers
    of one node share its physical cores. Without `context`, tokens of one slot, it is the usual one
    or the model's trained one, the smaller. On a machine that mixes performance and efficiency
    cores, a server keeps to the performance cores. Raises LocalFleetError, where the model was
    trained for less.
    """
    return _servers(topology, _spread(topology, model, servers), **wanted)


def _spread(
    topology: Topology, model: ModelFile, servers: int | None
) -> list[tuple[NumaNode, ModelFile]]:
    nodes = topology.nodes
    return [(nodes[index % len(nodes)], model) for index in range(servers or len(nodes))]


def _homes(topology: Topology, models: Sequence[ModelFile]) -> list[tuple[NumaNode, ModelFile]]:
    """Place each model on the NUMA node with most memory left, the largest first.

    Raises ModelFileError for two of one name.
    """
    named = {model.name: model for model in reversed(models)}
    for model in models:
        if (other := named[model.name]) is not model or models.count(model) > 1:
            raise ModelFileError(
                f"{other.path} and {model.path}: both models are named {model.name}, by which "
                "requests ask for them; rename one, or leave it out"
            )
    free = {node: node.memory_available for node in topology.nodes}
    homes: dict[str, NumaNode] = {}
    for model in sorted(models, key=lambda one: -one.size):
        homes[model.name] = node = max(free, key=lambda one: free[one])
        free[node] -= model.size
    return [(homes[one.name], one) for one in models]


def _servers(
    topology: Topology,
    placed: Sequence[tuple[NumaNode, ModelFile]],
    *,
    slots: int = DEFAULT_SLOTS,
    context: int | None = None,
    embedding: bool = False,
    mlock: bool = False,
) -> tuple[ServerSpec, ...]:
    nodes = [node for node, _ in placed]
    several = len(topology.nodes) > 1
    specs = []
    needed = 0
    for index, (node, model) in enumerate(placed):
        trained = model.trained_context
        if context and trained and context > trained:
            raise LocalFleetError(
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
        each, _ = memory.server_needs(model, server_settings(spec))
        # The rule of thumb is generous as it is.
        needed += each if model.shape is None else each + int(each * UNFORESEEN_SHARE)
        specs.append(spec)
    spare = (topology.memory_available - needed - MEMORY_RESERVE) // len(specs)
    prompt_cache = min(memory.MOST_PROMPT_CACHE_BYTES, max(0, spare))
    return tuple(replace(spec, prompt_cache_bytes=prompt_cache) for spec in specs)


MOST_FILES = 10_000  # that are looked at
PROJECTOR = "mmproj"  # in the names of files that read images for a model, as llama.cpp has it
# A preset can't quote: it ends values at these, and changes names with a colon.
_UNWRITABLE = re.compile(r"[#;:\[\]\\]|^\s|\s$|^\*$")
# A prompt cache gets these shares of what its model needs, or of all memory, whichever is more.
CACHE_SHARE_OF_NEED, CACHE_SHARE_OF_ROOM = 1 / 4, 1 / 16


class FolderModel(NamedTuple):
    """One model of a folder, as its server is to be started."""

    file: ModelFile
    projector: Path | None
    settings: ServerSettings
    memory: int  # bytes that it takes with full slots and a full prompt cache


@dataclass(slots=True, eq=False)
class ModelFolder:
    """Reads a folder again and again, each file once, and keeps the preset.

    Left to itself the router takes each part of a split model for a model, leaves projectors out
    that lie beside their models, and offers files that can't be loaded. It reads the preset again
    whenever its list is asked for with `reload=1`, as the gateway does, and unloads a model whose
    section changes: sections only come and go.
    """

    folder: Path
    preset: Path
    settings: ServerSettings  # `context`: the most of each model
    room: int  # bytes of the smallest host of a router
    _: KW_ONLY
    embedding: bool = False
    force: bool = False
    models: dict[str, FolderModel] = field(default_factory=dict)
    passed_over: dict[str, str] = field(default_factory=dict)
    """Why each other file is no model to serve."""
    _marks: dict[Path, object] = field(default_factory=dict)
    """By which a file that has changed is known."""

    def memory(self, path: Path, _slots: int, _context: int) -> int:
        """Return what the model of a file takes, with its projector and its prompts.

        Raises: ValueError if it is not served.
        """
        for model in self.models.values():
            if model.file.path == path:
                return model.memory
        raise ValueError(f"{path} is not served")

    def refresh(self) -> dict[str, list[str]] | None:
        """Read the folder, write the preset, and return what has changed. Raises OSError."""
        files = list(islice(_gguf_files(self.folder), MOST_FILES))
        marks = dict[Path, object].fromkeys(files)
        for path in files:
            with suppress(OSError):
                found = path.stat()
                # Not when it was written: a copy keeps that of its original.
                marks[path] = found.st_size, found.st_ino, found.st_ctime_ns
        if marks == self._marks:
            return None
        before, told = self.models, self.passed_over
        models, passed_over = dict[str, FolderModel](), dict[str, str]()
        projectors = [path for path in marks if PROJECTOR in path.name]
        # One path for all parts of a split model.
        others = (path for path in reversed(marks) if path not in projectors)
        whole = {(path.parent, PART_NAME.sub(r"\1-of-\2", path.name)): path for path in others}
        for path in (*sorted(whole.values()), *projectors):
            read = _read_model(path, tuple(marks.get(part) for part in model_parts(path)))
            served = read if isinstance(read, str) else self._served(read, models)
            if isinstance(served, str):
                passed_over[str(path.relative_to(self.folder))] = served
            else:
                models[served.file.name] = served
        draft = self.preset.with_suffix(".draft")
        draft.write_text("\n".join(self._section(*one) for one in models.items()), "utf-8")
        draft.replace(self.preset)  # whole, since a router may read it at any time
        self.models, self.passed_over, self._marks = models, passed_over, marks
        news = passed_over.items() - told.items()
        return {
            "added": sorted(models.keys() - before.keys()),
            "removed": sorted(before.keys() - models.keys()),
            "not_served": sorted(f"{name}: {why}" for name, why in news),
        }

    def _served(self, file: ModelFile, models: dict[str, FolderModel]) -> FolderModel | str:
        """Return a model as it is served, or with this projector; or why the file is not."""
        projector = None
        if PROJECTOR in file.path.name:
            projector = file.path
            beside = [one for one in models.values() if one.file.path.parent == projector.parent]
            if len(beside) != 1 or beside[0].projector:
                return "a projector of images; put it and its model into a folder of their own"
            file = beside[0].file
        elif other := models.get(file.name):
            shown = other.file.path.relative_to(self.folder)
            return f"{shown} has this name too; rename one of them"
        most = self.settings.context
        settings = replace(self.settings, context=min(most, file.trained_context or most))
        needed, why = server_needs(file, settings)
        needed += projector.stat().st_size if projector else 0
        if needed > self.room and not self.force:
            return (
                f"needs {format_gib(needed)} ({why}) of the {format_gib(self.room)} that models "
                "may take; take a smaller quantization, or less --context or --slots"
            )
        cache = max(needed * CACHE_SHARE_OF_NEED, self.room * CACHE_SHARE_OF_ROOM)
        cache = int(max(0, min(cache, MOST_PROMPT_CACHE_BYTES, self.room - needed))) // MIB * MIB
        settings = replace(settings, prompt_cache_bytes=cache)
        return FolderModel(file, projector, settings, min(needed + cache, self.room))

    def _section(self, name: str, model: FolderModel) -> str:
        settings = model.settings
        keys = {
            "model": model.file.path,
            "mmproj": model.projector,
            "parallel": settings.slots,
            "ctx-size": settings.slots * settings.context,
            "cache-ram": settings.prompt_cache_bytes // MIB,
            "pooling": MEAN if self.embedding and not model.file.has_pooling else None,
        }
        lines = [f"{key} = {value}" for key, value in keys.items() if value is not None]
        return "\n".join((f"[{name}]", *lines, ""))


def _gguf_files(folder: Path) -> Iterator[Path]:
    """Yield the GGUF files of a folder and of the folders in it, as llama.cpp looks for them."""
    for entry in _listed(folder):
        if os.path.isdir(entry):  # noqa: PTH112 - it raises nothing
            with suppress(OSError):
                yield from (path for path in _listed(entry) if _is_gguf(path))
        elif _is_gguf(entry):
            yield entry


def _listed(folder: Path) -> list[Path]:
    seen = (entry for entry in folder.iterdir() if not entry.name.startswith("."))
    return sorted(islice(seen, MOST_FILES))


def _is_gguf(path: Path) -> bool:
    # A link to nothing is told of; what is no file, such as a pipe, may never end.
    return path.suffix == ".gguf" and (os.path.isfile(path) or not os.path.exists(path))  # noqa: PTH110, PTH113


@lru_cache(MOST_FILES)
def _read_model(path: Path, _marks: tuple[object, ...]) -> ModelFile | str:
    """Read a model, once for the `_marks` of its files; or return why it is none to serve."""
    try:
        found = read_model(path)
    except LocalFleetError as error:
        return str(error).removeprefix(f"{path}: ")
    if (found.kind == "projector") is not (PROJECTOR in path.name):
        return "a projector of images by what it holds or by its name, but not by both"
    if found.kind == "adapter":
        return "an adapter, which changes a model and is none"
    if any(_UNWRITABLE.search(one) or not one.isprintable() for one in (found.name, str(path))):
        return r"a router can't be told names with # ; : [ ] or \; rename the file or its folder"
    return found
