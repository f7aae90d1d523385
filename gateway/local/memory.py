"""What llama.cpp servers take of memory, and whether this machine has it and lets them lock it.

The formulas follow llama.cpp's allocations as of November 2026 (docs/fit.md names the sources) and
are checked against real servers by `python -m tests.workshop.fit.measure`. All sizes are bytes.

`llama-gateway node-memory FILE.gguf --slots 2 ...` says what one server needs, with the
standard library alone, since playbooks run it where the gateway is not installed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import NamedTuple

from gateway.local import LocalFleetError, MemoryShortError
from gateway.local.gguf import (
    TENSOR_TYPES,
    TYPE_NUMBERS,
    Layer,
    ModelFile,
    ModelShape,
    Tensor,
    UnknownShapeError,
    read_model,
)
from gateway.local.topology import Topology, read_fields, read_text

MIB = 1 << 20
# Evicted prompts that a server may keep where there is room: llama.cpp's own default.
MOST_PROMPT_CACHE_BYTES = 8192 * MIB
CELL_PADDING = 256  # a slot's cells are padded to it (llama_context)
CHECKPOINTS = 3  # of a prompt: two near its end, one at its last user message (server-context.cpp)
CHECKPOINT_SPACING = 8192  # tokens; more of a longer prompt (`--checkpoint-min-step`)
MOST_CHECKPOINTS = 32  # of a slot (`--ctx-checkpoints`)
# A server without model and context: the interpreter, the wheel's libraries, threads, buffers of
# HTTP. Measured with a tiny model; a bare llama-server takes less.
PROCESS_BYTES = 40 * MIB
# Of a token: its text twice, its place in two tables. Measured with 150,000 tokens.
VOCABULARY_BYTES = 250
# The types that llama.cpp copies into another layout for the CPU's instructions, by a multiple of
# rows (`ggml_repack_get_optimal_repack_type`): the copy is memory of its own beside the file.
_BY_AVX2 = {"q4_0": 8, "q4_k": 8, "iq4_nl": 8, "mxfp4": 8}
REPACKED = {  # by the kernel's flag of the processor, the best first
    "avx512f": {**_BY_AVX2, "q2_k": 8},
    "avx2": _BY_AVX2,
    "asimddp": {"q4_0": 4, "q4_k": 8, "q5_k": 8, "q6_k": 8, "iq4_nl": 4, "mxfp4": 4, "q8_0": 4},
}


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The settings of a server that its memory depends on."""

    slots: int
    context: int  # tokens of one slot
    key_type: str = "f16"  # of the KV cache
    value_type: str = "f16"
    micro_batch: int = 256
    prompt_cache_bytes: int = 0
    mapped: bool = True  # False: `--no-mmap`
    repacked: Mapping[str, int] = field(default_factory=dict)  # types by multiples of rows


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """What a server takes when its slots and its prompt cache are full."""

    weights: int
    kv_cache: int
    states: int  # of recurrent layers
    compute: int
    checkpoints: int  # of prompts, where the KV cache can't be rolled back
    prompt_cache: int
    vocabulary: int
    process: int
    mapped_twice: int
    """Pages of the model's file behind weights that were copied into another layout. The kernel
    counts them as the server's, and drops them when memory is short."""

    @property
    def needed(self) -> int:
        """Memory without which the server would be slow, or killed."""
        parts: tuple[int, ...] = astuple(self)
        return sum(parts) - self.mapped_twice

    @property
    def resident(self) -> int:
        """What the kernel shows as the server's resident memory."""
        return self.needed + self.mapped_twice


def server_memory(shape: ModelShape, settings: ServerSettings) -> ServerMemory:
    """Return what a server takes. Raises UnknownShapeError for settings it would refuse."""
    checkpoint = sum(_checkpoint_bytes(layer, settings) for layer in shape.layers)
    copied = [one.size for one in shape.tensors if is_repacked(one, settings.repacked)]
    kept = min(MOST_CHECKPOINTS, CHECKPOINTS + settings.context // CHECKPOINT_SPACING)
    return ServerMemory(
        weights=shape.size,
        kv_cache=settings.slots * slot_bytes(shape, settings),
        states=settings.slots * sum(layer.state_bytes for layer in shape.layers),
        compute=compute_bytes(shape, settings),
        checkpoints=settings.slots * kept * checkpoint,
        prompt_cache=settings.prompt_cache_bytes,
        vocabulary=shape.vocabulary * VOCABULARY_BYTES,
        process=PROCESS_BYTES,
        mapped_twice=sum(copied) if settings.mapped else 0,
    )


def slot_bytes(shape: ModelShape, settings: ServerSettings) -> int:
    """Return the bytes of one slot's KV cache."""
    return sum(
        _row_bytes(layer, settings) * _cells(layer.window, settings) for layer in shape.layers
    )


def compute_bytes(shape: ModelShape, settings: ServerSettings) -> int:
    """Return the bytes of the buffers for one computation, with flash attention as on CPUs.

    The largest is that of a prompt's micro-batch. It holds the attention mask, and beside it what
    is alive at once: in the feed-forward block three of its widths and five of the model's, in
    attention eight of the model's, behind experts all of their outputs twice. `work` is ggml's
    scratch space, which holds a micro-batch converted for the weights' type. So found by the sizes
    that llama.cpp logs; exact for usual proportions, up to a quarter too high for a narrow block.
    """
    tokens, width = settings.micro_batch, shape.width
    at_once = max(1, shape.experts_used)
    alive = max(3 * shape.feed_forward * at_once + 5 * width, 8 * width)
    if shape.experts:
        alive = max(alive, (2 * at_once + 6) * width)
    windows = {None, *(layer.window for layer in shape.layers)}
    mask = sum(2 * tokens * _cells(window, settings) for window in windows)
    work = 2 * tokens * max(shape.feed_forward, width)
    logits = 4 * settings.slots * (shape.vocabulary + width)
    return 4 * tokens * alive + mask + work + 2 * logits


def is_repacked(tensor: Tensor, repacked: Mapping[str, int]) -> bool:
    """Whether llama.cpp copies this tensor into another layout."""
    multiple = repacked.get(tensor.type_name)
    if multiple is None or len(tensor.shape) < 2 or tensor.name == "token_embd.weight":
        return False  # rows are looked up in the embedding, not multiplied
    return tensor.shape[1] % multiple == 0


def repacked_types(flags: Collection[str]) -> Mapping[str, int]:
    """Return the types that are copied on a processor with these kernel flags."""
    return next((types for flag, types in REPACKED.items() if flag in flags), {})


def weights_by_type(shape: ModelShape) -> dict[str, int]:
    """Return the bytes of all tensors of each type, the largest first."""
    sizes: Counter[str] = Counter()
    for tensor in shape.tensors:
        sizes[tensor.type_name] += tensor.size
    return dict(sizes.most_common())


def type_bytes(name: str, elements: int) -> int:
    """Return the bytes of so many elements of a type. Raises UnknownShapeError."""
    _, block, size = TENSOR_TYPES[TYPE_NUMBERS[name]]
    if elements % block:
        raise UnknownShapeError(
            f"a row of {elements} elements can't be of type {name}, whose blocks have {block}"
        )
    return elements // block * size


def _row_bytes(layer: Layer, settings: ServerSettings) -> int:
    return type_bytes(settings.key_type, layer.key_width) + type_bytes(
        settings.value_type, layer.value_width
    )


def _cells(window: int | None, settings: ServerSettings) -> int:
    whole = _padded(settings.context)
    return whole if window is None else _padded(min(whole, window + settings.micro_batch))


def _checkpoint_bytes(layer: Layer, settings: ServerSettings) -> int:
    if layer.window is None:
        return layer.state_bytes
    return layer.state_bytes + _row_bytes(layer, settings) * min(layer.window, settings.context)


def _padded(cells: int) -> int:
    return -(-cells // CELL_PADDING) * CELL_PADDING


GIB = 1 << 30
MEMORY_FACTOR = 1.5  # memory of a server over its model's size, where its shape is not known
MEMORY_RESERVE = 2 * GIB  # stays free
MACHINE = "this machine"


def memory_needed(model_size: int) -> int:
    """Return the bytes that a server will take, by a rule of thumb."""
    return int(model_size * MEMORY_FACTOR)


def server_needs(model: ModelFile, settings: ServerSettings) -> tuple[int, str]:
    """Return the bytes that a server of the model needs, and in words what they rest on.

    For a model whose shape is not known, it is the rule of thumb; else it is within 3 % of real
    servers (docs/fit.md).
    """
    if model.shape is not None:
        # Else the server itself will say why it refuses these settings.
        with suppress(UnknownShapeError):
            found = server_memory(model.shape, settings)
            slots = "1 slot" if settings.slots == 1 else f"{settings.slots} slots"
            return found.needed, (
                f"weights {format_gib(found.weights)}, {slots} of {settings.context} tokens "
                f"{format_gib(found.kv_cache + found.states)}, the rest "
                f"{format_gib(found.needed - found.weights - found.kv_cache - found.states)}"
            )
    return memory_needed(model.size), f"{MEMORY_FACTOR} x model"


class Place(NamedTuple):
    """Memory that servers share: the machine's, or a NUMA node's."""

    name: str
    servers: int
    available: int  # bytes


# A server's model, its settings, and the NUMA node that its memory is bound to; None: any.
PlacedServer = tuple[ModelFile, ServerSettings, int | None]


def check_memory(topology: Topology, servers: Sequence[PlacedServer]) -> None:
    """Raise MemoryShortError when the servers would leave less than `MEMORY_RESERVE` free.

    The machine is checked, and so is each node that servers are bound to.
    """
    needs = [(node, model, *server_needs(model, settings)) for model, settings, node in servers]
    for place, count, free in memory_places(topology, [node for _, _, node in servers]):
        inside = [need for need in needs if place in {MACHINE, f"NUMA node {need[0]}"}]
        needed = sum(size for _, _, size, _ in inside)
        if free - needed >= MEMORY_RESERVE:
            continue
        each = dict.fromkeys(
            f"{one.name} ({format_gib(one.size)}) takes {format_gib(size)} ({why})"
            for _, one, size, why in inside
        )
        fewer = ", fewer --servers" if count > 1 else ""
        raise MemoryShortError(
            f"not enough memory: {'; '.join(each)}. Together {format_gib(needed)} for {count}, and "
            f"{format_gib(MEMORY_RESERVE)} must stay free, but {place} has {format_gib(free)} "
            "available. Take a smaller model or quantization, less --context or --slots"
            f"{fewer}, a folder of models that are loaded on demand (--models-dir), or start "
            "anyway with --force-memory"
        )


def memory_places(topology: Topology, bound_to: Sequence[int | None]) -> list[Place]:
    """Return each place that must hold servers, the machine first."""
    places = [Place(MACHINE, len(bound_to), topology.memory_available)]
    available = {node.number: node.memory_available for node in topology.nodes}
    for number, servers in sorted(Counter(n for n in bound_to if n is not None).items()):
        places.append(Place(f"NUMA node {number}", servers, available.get(number, 0)))
    return places


def format_gib(size: int) -> str:
    """Format a size for people, such as `1.5 GiB`."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / (1 << 20):.0f} MiB"


ROOT = Path("/")
CAP_IPC_LOCK = 14  # linux/capability.h


def memlock_limit(sysroot: Path = ROOT) -> int | None:
    """Return the bytes that a server of this process may lock; None: no limit, or unknown.

    It is the hard limit, to which `local.launch` raises the soft one. CAP_IPC_LOCK lifts it
    where the capability survives exec: root's, or an ambient one.
    """
    status = read_fields(sysroot / "proc/self/status")
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
    """Raise LocalFleetError when a server may not lock the whole model."""
    if limit is not None and limit < model.size:
        raise LocalFleetError(
            f"{model.path}: --mlock: a server may lock {format_gib(limit)} of memory here, and "
            f"the model is {format_gib(model.size)}. Remedy: `sudo prlimit --pid $$ "
            "--memlock=unlimited` in this shell; in a systemd unit LimitMEMLOCK=infinity and "
            "AmbientCapabilities=CAP_IPC_LOCK; for a container --ulimit memlock=-1; or leave "
            "--mlock out"
        )


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
