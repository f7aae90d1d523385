"""How a model fits a machine: memory, context, quantisations, and the speed to expect.

**Quantisations.** The types of the tensors follow llama.cpp's `llama_tensor_get_type_impl`
(src/llama-quant.cpp, November 2026) for a file made without an importance matrix. Publishers mix
types of their own, so that a file may differ by some percent.

**Speed.** Decode reads every weight that a token uses once, and the slot's whole KV cache. Each
type of weight comes as fast as memory delivers it, or as fast as the cores can take it up,
whichever is slower (the roofline of Williams, Waterman and Patterson, 2009). Prefill shares each
read among the tokens of a micro-batch, so that arithmetic decides: two operations for each weight
and token.
"""

from __future__ import annotations

import math
import re
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from gateway.local.gguf import TENSOR_TYPES, TYPE_NUMBERS, ModelFile, ModelShape, Tensor
from gateway.local.memory import (
    CELL_PADDING,
    MEMORY_RESERVE,
    MIB,
    Place,
    ServerMemory,
    ServerSettings,
    format_gib,
    server_memory,
    slot_bytes,
    weights_by_type,
)
from gateway.local.topology import Topology

START_SECONDS = 60.0  # until all threads have filled their parts
STREAM_ROUNDS = 8  # the fastest counts: other work can only make a round slower
LEAST_STREAM_BYTES = 64 << 20  # of a thread
MOST_STREAM_BYTES = 4 << 30  # of all threads
CACHE_MULTIPLE = 4  # of the caches that the test must not fit into
CHANNEL_BYTES = 8  # of a transfer: a DDR channel has 64 data lines
# Of the modules' peak that a program reads at. McCalpin's STREAM reaches 70 to 85 % of it on server
# processors.
REACHED_SHARE = 0.75


class StreamError(Exception):
    """The stream test can't run. The text says why."""


def bandwidth_of_modules(channels: int, transfers: float) -> float:
    """Return bytes/s of so many channels at so many MT/s."""
    return channels * transfers * 1e6 * CHANNEL_BYTES * REACHED_SHARE


def measure_bandwidth(topology: Topology) -> float:
    """Read memory with a thread for each core; return bytes/s of the fastest round.

    It takes about a second, and memory of four times the last-level caches. Raises StreamError
    where there is too little.
    """
    import numpy as np

    count = sum(topology.threads_per_server(node) for node in topology.nodes)
    top = max((cache.level for cache in topology.caches), default=0)
    cached = sum(cache.size for cache in topology.caches if cache.level == top)
    size = max(LEAST_STREAM_BYTES, CACHE_MULTIPLE * cached // count)
    size = min(size, MOST_STREAM_BYTES // count)
    if size * count > topology.memory_available // 2:
        raise StreamError(
            f"--measure reads {size * count >> 20} MiB, more than half of the available memory. "
            "Remedy: give --channels and --mt-per-s instead"
        )
    barrier, rounds = threading.Barrier(count, timeout=START_SECONDS), range(STREAM_ROUNDS)

    def read(_: int) -> list[tuple[float, float]]:
        # Each thread fills its own part, so that its pages lie on its own NUMA node.
        part, times = np.ones(size, dtype=np.int8), list[tuple[float, float]]()
        for _round in rounds:
            barrier.wait()
            began = time.perf_counter()
            part.max()
            times.append((began, time.perf_counter()))
        return times

    with ThreadPoolExecutor(count) as pool:
        threads = list(pool.map(read, range(count)))
    fastest: float = min(
        max(end for _, end in times) - min(begin for begin, _ in times)
        for times in zip(*threads, strict=True)
    )
    return size * count / fastest


EXPERT = re.compile(r"_exps\.")

# Of one core with AVX2 (docs/fit.md; `python -m tests.workshop.fit.measure rates`, EPYC of Zen 3):
# bytes/s of weights that one token's products take up, and operations/s with a micro-batch. A type
# that is not listed counts as OTHER_TYPE.
RATES = {
    "f32": (13.2e9, 27e9),
    "f16": (13.8e9, 28e9),
    "bf16": (11.3e9, 27e9),
    "q8_0": (13.1e9, 46e9),
    "q6_k": (8.2e9, 65e9),
    "q5_k": (5.5e9, 64e9),
    "q4_k": (10.8e9, 58e9),
    "q4_0": (9.3e9, 59e9),
    "q3_k": (6.4e9, 66e9),
    "q2_k": (5.5e9, 66e9),
}

OTHER_TYPE = "q3_k"

MEASURED_INSTRUCTIONS = "AVX2"


class InstructionSet(NamedTuple):
    """Instructions that llama.cpp computes with."""

    factor: float  # arithmetic of a core beside one with AVX2
    flag: str  # by which the kernel names it
    layout_flag: str  # by which llama.cpp chooses the layout of weights


# The best first. Only AVX2 is measured; the others are estimates from the width of the
# instructions, and say so.
INSTRUCTION_SETS = {
    "AMX": InstructionSet(4.0, "amx_int8", "avx512f"),
    "AVX-512 VNNI": InstructionSet(2.0, "avx512_vnni", "avx512f"),
    "AVX-512": InstructionSet(1.5, "avx512f", "avx512f"),
    "AVX2": InstructionSet(1.0, "avx2", "avx2"),
    "i8mm": InstructionSet(1.5, "i8mm", "asimddp"),
    "dot product": InstructionSet(0.8, "asimddp", "asimddp"),
    "none": InstructionSet(0.2, "", ""),
}

# Of a token, whatever its model: sampling and HTTP. Measured with a tiny model.
TOKEN_SECONDS = 100e-6
# For which the threads of several cores wait for each other in a layer of decode: each of its some
# 30 operations ends when the last thread has. 2.3 to 2.5 ms in models of 10 to 16 layers on two
# cores of a virtual machine (`python -m tests.workshop.fit.measure clock`).
LAYER_WAIT_SECONDS = 0.2e-3
# Tokens of a micro-batch with which an expert reaches half of the speed of a long one. From the
# prefill of one mixture (docs/fit.md).
HALF_SPEED_TOKENS = 4


@dataclass(frozen=True, slots=True)
class ExpectedSpeed:
    """What one request alone may expect."""

    decode: float  # tokens/s
    prefill: float
    weight_bytes: int  # that a token reads
    kv_bytes: int  # with the states of recurrent layers
    limit: str  # of decode: `memory` or `cores`


def instruction_set(flags: frozenset[str]) -> str:
    """Return the best instruction set that these kernel flags name."""
    return next((name for name, one in INSTRUCTION_SETS.items() if one.flag in flags), "none")


def expected_speed(
    shape: ModelShape, settings: ServerSettings, machine: Machine, *, used: int | None = None
) -> ExpectedSpeed | None:
    """Return the speed of one request, with `used` tokens in its slot; default: half of it.

    None: the machine's bandwidth is not known. Its servers share it.
    """
    if machine.bandwidth is None:
        return None
    bandwidth = machine.bandwidth / machine.servers
    power = machine.cores_per_server * INSTRUCTION_SETS[machine.instructions].factor
    filled = settings.context // 2 if used is None else used
    bytes_read, elements = _active(shape, min(settings.micro_batch, max(1, filled)))
    waits_by_type = [size / bandwidth for size in bytes_read.values()]
    work_by_type = [size / (power * _rates(kind)[0]) for kind, size in bytes_read.items()]
    seconds = sum(map(max, waits_by_type, work_by_type))
    kv = slot_bytes(shape, settings) * filled // settings.context
    kv += sum(layer.state_bytes for layer in shape.layers)
    seconds += kv / min(bandwidth, power * _rates(settings.key_type)[0])
    waits = len(shape.layers) if machine.cores_per_server > 1 else 0
    seconds += TOKEN_SECONDS + waits * LAYER_WAIT_SECONDS
    operations = sum(2 * count / (power * _rates(kind)[1]) for kind, count in elements.items())
    # Attention: a token meets, on average, half of the tokens before it, in keys and in values.
    attended = 2 * 2 * (filled // 2) * shape.width * sum(1 for one in shape.layers if one.key_width)
    operations += attended / (power * RATES["f16"][1])
    return ExpectedSpeed(
        decode=1 / seconds,
        prefill=1 / operations,
        weight_bytes=sum(bytes_read.values()),
        kv_bytes=kv,
        limit="memory" if sum(waits_by_type) >= sum(work_by_type) else "cores",
    )


def _active(shape: ModelShape, batch: int) -> tuple[Counter[str], Counter[str]]:
    """Return the bytes of each type that a token of decode reads, and a prompt token's elements.

    An expert gets few of the `batch` tokens that are computed at once, and is the slower for it:
    its elements count as more.
    """
    tied = not any(tensor.name == "output.weight" for tensor in shape.tensors)
    chosen = shape.experts_used / shape.experts if shape.experts else 1.0
    own = max(1.0, batch * chosen)  # tokens of an expert
    bytes_read: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    for tensor in shape.tensors:
        kind = tensor.type_name
        is_expert = shape.experts > 0 and EXPERT.search(tensor.name) is not None
        output = tensor.name == "output.weight" or (tied and tensor.name == "token_embd.weight")
        if tensor.name.startswith("token_embd.") and not output:
            continue  # one row is looked up
        bytes_read[kind] += int(tensor.size * chosen) if is_expert else tensor.size
        if len(tensor.shape) > 1 and not output:  # a prompt needs the last token's output alone
            slower = chosen * (own + HALF_SPEED_TOKENS) / own if is_expert else 1.0
            elements[kind] += int(tensor.elements * slower)
    return bytes_read, elements


def _rates(kind: str) -> tuple[float, float]:
    return RATES.get(kind, RATES[OTHER_TYPE])


# The type of most tensors of each quantisation, the smallest first.
QUANTIZATIONS = {
    "Q2_K": "q2_k",
    "Q3_K_M": "q3_k",
    "Q4_0": "q4_0",
    "Q4_K_M": "q4_k",
    "Q5_K_M": "q5_k",
    "Q6_K": "q6_k",
    "Q8_0": "q8_0",
    "F16": "f16",
}

# Of a tensor whose rows are no multiple of 256 (`tensor_type_fallback`).
FALLBACKS = {"q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}

NEVER_QUANTIZED = re.compile(
    r"_norm\.weight$|ffn_gate_inp\.weight$|altup|laurel|per_layer_model_proj|ssm_conv1d"
    r"|shortconv\.conv\.weight$|attn_rel_b|position_embd|token_types"
)

LAYER = re.compile(r"^blk\.(\d+)\.")
SPREAD_EXPERTS = 8  # a model of so many has Q8_0 for keys and values in every layer
GROUPED = 4  # heads that share a key head, from which on values are few and get more bits


def quantizations(shape: ModelShape) -> dict[str, ModelShape]:
    """Return the model as each of the family's usual files would be, the smallest first."""
    return {name: replace(shape, tensors=tuple(_quantized(shape, name))) for name in QUANTIZATIONS}


def _quantized(shape: ModelShape, name: str) -> Iterator[Tensor]:
    tied = not any(tensor.name == "output.weight" for tensor in shape.tensors)
    values = sorted({n for t in shape.tensors if (n := _layer(t)) >= 0 and _is_value(t)})
    layers = max((_layer(tensor) for tensor in shape.tensors), default=0) + 1
    for tensor in shape.tensors:
        if len(tensor.shape) < 2 or NEVER_QUANTIZED.search(tensor.name):
            yield tensor
            continue
        kind = _type(tensor, name, shape, values, layers, tied=tied)
        fallbacks = (kind, FALLBACKS.get(kind, "f16"), "f16")
        numbers = (TYPE_NUMBERS[one] for one in fallbacks)
        fits = (n for n in numbers if tensor.shape[0] % TENSOR_TYPES[n].elements == 0)
        yield replace(tensor, kind=next(fits))


def _has_more_bits(number: int, count: int) -> bool:
    """An eighth of the layers at either end, and every third between (`use_more_bits`)."""
    eighth = count // 8
    return number < eighth or number >= 7 * count // 8 or (number - eighth) % 3 == 2


def _type(
    tensor: Tensor, name: str, shape: ModelShape, values: list[int], layers: int, *, tied: bool
) -> str:
    """`values`: the numbers of the layers that have values, of `layers` in all."""
    usual, layer = QUANTIZATIONS[name], _layer(tensor)
    if usual in {"f16", "q8_0"}:
        return usual
    if tensor.name == "output.weight" or (tied and tensor.name == "token_embd.weight"):
        return "q8_0" if tensor.shape[0] % 256 else "q6_k"
    spread = shape.experts == SPREAD_EXPERTS
    if (_is_value(tensor) or ".attn_k.weight" in tensor.name) and spread:
        return "q8_0"
    if ".attn_output.weight" in tensor.name:
        if spread:
            return "q5_k" if name in {"Q2_K", "Q3_K_M", "Q4_K_M"} else usual
        return {"Q2_K": "q3_k", "Q3_K_M": "q4_k"}.get(name, usual)
    if ".attn_qkv.weight" in tensor.name:
        return {"Q3_K_M": "q4_k", "Q4_K_M": "q5_k", "Q5_K_M": "q6_k"}.get(name, usual)
    if _is_value(tensor):
        place, count, few = values.index(layer), len(values), 2
        width = max((one.value_width for one in shape.layers), default=0)
        least = "q4_k" if width and shape.width // width >= GROUPED else "q3_k"
    elif ".ffn_down" in tensor.name:
        place, count, few, least = layer, layers, layers // 16, "q3_k"
    else:
        return usual
    if name == "Q2_K":
        return least
    if name == "Q3_K_M":
        return "q5_k" if place < few else "q4_k"
    return "q6_k" if name in {"Q4_K_M", "Q5_K_M"} and _has_more_bits(place, count) else usual


def _is_value(tensor: Tensor) -> bool:
    return ".attn_v.weight" in tensor.name or ".attn_kv_b.weight" in tensor.name


def _layer(tensor: Tensor) -> int:
    found = LAYER.match(tensor.name)
    return int(found[1]) if found else -1


MOST_SLOTS = 256
MOST_CONTEXT = 1 << 22  # tokens, where the metadata has no trained context


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine, as far as a fit depends on it."""

    places: tuple[Place, ...]  # the whole machine first
    cores_per_server: int
    instructions: str  # a key of INSTRUCTION_SETS
    bandwidth: float | None  # bytes/s of the whole machine; None: not known
    bandwidth_source: str

    @property
    def servers(self) -> int:
        """How many servers run on it."""
        return self.places[0].servers

    @property
    def room(self) -> int:
        """The bytes that one server may take, where the reserve stays free everywhere."""
        return min((one.available - MEMORY_RESERVE) // one.servers for one in self.places)


class Choice(NamedTuple):
    """One quantisation of the model."""

    name: str
    bytes: int  # of its weights
    needed: int  # by a server
    fits: bool
    largest_context: int  # tokens of each slot; 0: not even the shortest
    decode: float | None
    prefill: float | None


@dataclass(frozen=True, slots=True)
class Fit:
    """How a model fits a machine."""

    model: ModelFile
    shape: ModelShape
    settings: ServerSettings
    machine: Machine
    memory: ServerMemory  # of one server
    largest_context: int
    largest_slots: int
    speed: ExpectedSpeed | None
    choices: tuple[Choice, ...]

    @property
    def fits(self) -> bool:
        """Whether the servers leave the reserve free everywhere."""
        return self.memory.needed <= self.machine.room


def fit(model: ModelFile, shape: ModelShape, settings: ServerSettings, machine: Machine) -> Fit:
    """Compute how the model fits. Raises UnknownShapeError for settings that a server refuses."""
    return Fit(
        model=model,
        shape=shape,
        settings=settings,
        machine=machine,
        memory=server_memory(shape, settings),
        largest_context=largest_context(shape, settings, machine.room),
        largest_slots=largest_slots(shape, settings, machine.room),
        speed=expected_speed(shape, settings, machine),
        choices=tuple(
            _choice(name, one, settings, machine) for name, one in quantizations(shape).items()
        ),
    )


def _choice(name: str, shape: ModelShape, settings: ServerSettings, machine: Machine) -> Choice:
    needed, room = server_memory(shape, settings).needed, machine.room
    speed = expected_speed(shape, settings, machine)
    speeds = (None, None) if speed is None else (speed.decode, speed.prefill)
    longest = largest_context(shape, settings, room)
    return Choice(name, shape.size, needed, needed <= room, longest, *speeds)


def largest_context(shape: ModelShape, settings: ServerSettings, room: int) -> int:
    """Return the most tokens of each slot, at most as trained, that fit into `room`; 0: none."""
    most = min(shape.trained_context or MOST_CONTEXT, MOST_CONTEXT)
    bare, left = replace(shape, tensors=()), room - shape.size  # tensors may be many

    def fits(steps: int) -> bool:
        context = min(steps * CELL_PADDING, most)
        return server_memory(bare, replace(settings, context=context)).needed <= left

    return min(_largest(math.ceil(most / CELL_PADDING), fits) * CELL_PADDING, most)


def largest_slots(shape: ModelShape, settings: ServerSettings, room: int) -> int:
    """Return the most slots of this context that fit into `room`; 0: none."""
    bare, left = replace(shape, tensors=()), room - shape.size
    return _largest(
        MOST_SLOTS,
        lambda slots: server_memory(bare, replace(settings, slots=slots)).needed <= left,
    )


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to `most` that fits, given that all smaller ones do; 0: none."""
    return bisect_left(range(1, most + 1), True, key=lambda number: not fits(number))


LEAST_SHARE = 0.01  # of the weights, below which a type of them is not told


def report_lines(found: Fit) -> list[tuple[str, str]]:
    """Return what is told of a fit: a word, and a sentence beside it."""
    shape, settings, memory = found.shape, found.settings, found.memory
    parameters = sum(tensor.elements for tensor in shape.tensors) / 1e9
    experts = f", {shape.experts_used} of {shape.experts} experts" if shape.experts else ""
    trained = f", trained on {shape.trained_context:,} tokens" if shape.trained_context else ""
    kinds = ", ".join(
        f"{name} {format_gib(size)}"
        for name, size in weights_by_type(shape).items()
        if size >= memory.weights * LEAST_SHARE
    )
    types = " and ".join(dict.fromkeys((settings.key_type, settings.value_type)))
    slots = _count(settings.slots, "slot")
    rest = {
        "compute buffers": memory.compute,
        "recurrent states": memory.states,
        "checkpoints of prompts": memory.checkpoints,
        "prompt cache": memory.prompt_cache,
        "vocabulary": memory.vocabulary,
        "process": memory.process,
    }
    told = ", ".join(f"{name} {format_gib(size)}" for name, size in rest.items() if size >= MIB)
    model = (
        f"{found.model.name}: {shape.architecture}, {parameters:.2f} billion weights in "
        f"{len(shape.layers)} layers{experts}{trained}"
    )
    lines = [
        ("model", model),
        ("weights", f"{format_gib(memory.weights)}: {kinds}"),
        (
            "KV cache",
            f"{format_gib(memory.kv_cache)}: {slots} of {settings.context:,} tokens in {types}",
        ),
        ("the rest", told),
        ("a server", f"needs {format_gib(memory.needed)} with all of that full"),
    ]
    if memory.mapped_twice:
        twice = (
            f"shows up to {format_gib(memory.resident)}: behind weights that it copied into "
            f"another layout, {format_gib(memory.mapped_twice)} of the file stay in memory until "
            "others need it"
        )
        lines.append(("", twice))
    for place in found.machine.places:
        needed = memory.needed * place.servers
        left = place.available - needed
        spare = f"{format_gib(left)} stay free" if left >= 0 else f"{format_gib(-left)} are missing"
        need = "needs" if place.servers == 1 else "need"
        sentence = (
            f"{place.name}: {_count(place.servers, 'server')} {need} {format_gib(needed)} of "
            f"{format_gib(place.available)}; {spare}, {format_gib(MEMORY_RESERVE)} must"
        )
        lines.append(("fits" if left >= MEMORY_RESERVE else "does not fit", sentence))
    at_most = (
        f"{found.largest_context:,} tokens in each of {slots}, or "
        f"{_count(found.largest_slots, 'slot')} of {settings.context:,} tokens"
    )
    lines.append(("at most", at_most))
    return lines if found.speed is None else lines + _speed_lines(found.speed, found.machine)


def _speed_lines(speed: ExpectedSpeed, machine: Machine) -> list[tuple[str, str]]:
    waits = "memory" if speed.limit == "memory" else "the cores"
    estimated = "" if machine.instructions == MEASURED_INSTRUCTIONS else ", estimated from AVX2"
    decode = (
        f"{speed.decode:.1f} tokens/s for one request in a half full slot: a token reads "
        f"{format_gib(speed.weight_bytes)} of weights and {format_gib(speed.kv_bytes)} of KV "
        f"cache, and waits for {waits}"
    )
    prefill = (
        f"{speed.prefill:.0f} tokens/s by {_count(machine.cores_per_server, 'core')} with "
        f"{machine.instructions}{estimated}"
    )
    bandwidth = f"{(machine.bandwidth or 0) / 1e9:.1f} GB/s, {machine.bandwidth_source}"
    return [("decode", decode), ("prefill", prefill), ("bandwidth", bandwidth)]


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def choice_rows(found: Fit) -> list[list[tuple[str, object]]]:
    """Return a row for each quantisation: of each cell the title of its column, and the text."""
    rows = []
    for one in found.choices:
        row: list[tuple[str, object]] = [
            ("quantisation", one.name),
            ("weights", format_gib(one.bytes)),
            ("a server needs", format_gib(one.needed)),
            ("fits", "yes" if one.fits else "no"),
            ("longest context", f"{one.largest_context:,}" if one.largest_context else None),
        ]
        if one.decode is not None:
            row += [("decode/s", f"{one.decode:.1f}"), ("prefill/s", f"{one.prefill:.0f}")]
        rows.append(row)
    return rows


def fit_as_dict(found: Fit) -> dict[str, Any]:
    """Return a fit as JSON values: sizes in bytes, speeds in tokens/s."""
    shape, settings, machine, memory = found.shape, found.settings, found.machine, found.memory
    speed = found.speed
    return {
        "model": {
            "file": str(found.model.path),
            "name": found.model.name,
            "bytes": found.model.size,
            "architecture": shape.architecture,
            "parameters": sum(tensor.elements for tensor in shape.tensors),
            "layers": len(shape.layers),
            "experts": shape.experts,
            "experts_used": shape.experts_used,
            "trained_context": shape.trained_context,
            "weights_by_type": weights_by_type(shape),
        },
        "settings": {
            "servers": machine.servers,
            "slots": settings.slots,
            "context": settings.context,
            "key_type": settings.key_type,
            "value_type": settings.value_type,
            "mapped": settings.mapped,
        },
        "server": {
            **asdict(memory),
            "kv_cache_per_slot": slot_bytes(shape, settings),
            "needed": memory.needed,
            "resident": memory.resident,
        },
        "needed": memory.needed * machine.servers,
        "reserve": MEMORY_RESERVE,
        "fits": found.fits,
        "places": [
            {
                **one._asdict(),
                "needed": memory.needed * one.servers,
                "left": one.available - memory.needed * one.servers,
            }
            for one in machine.places
        ],
        "largest_context": found.largest_context,
        "largest_slots": found.largest_slots,
        "speed": None
        if speed is None
        else {
            **_rounded(speed),
            "weight_bytes_per_token": speed.weight_bytes,
            "kv_bytes_per_token": speed.kv_bytes,
            "decode_waits_for": speed.limit,
            "cores": machine.cores_per_server,
            "instructions": machine.instructions,
            "bandwidth": round(machine.bandwidth or 0),
            "bandwidth_source": machine.bandwidth_source,
        },
        "quantizations": [{**one._asdict(), **_rounded(one)} for one in found.choices],
    }


def _rounded(one: ExpectedSpeed | Choice) -> dict[str, float | None]:
    return {
        "decode": None if one.decode is None else round(one.decode, 2),
        "prefill": None if one.prefill is None else round(one.prefill, 1),
    }
