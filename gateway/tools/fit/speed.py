"""The speed to expect: decode by the bytes that a token reads, prefill by its arithmetic.

Decode reads every weight that a token uses once, and the slot's whole KV cache. Each type of weight
comes as fast as memory delivers it, or as fast as the cores can take it up, whichever is slower
(the roofline of Williams, Waterman and Patterson, 2009). Prefill shares each read among the tokens
of a micro-batch, so that arithmetic decides: two operations for each weight and token.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from gateway.tools.local.gguf import ModelShape
from gateway.tools.local.memory import (
    TENSOR_TYPE_NAMES,
    ServerSettings,
    slot_bytes,
)

EXPERT = re.compile(r"_exps\.")

# Of one core with AVX2 (docs/fit.md; `python -m tests.tools.fit.measure rates`, AMD EPYC of Zen 3):
# bytes/s of weights that one token's products take up, and operations/s with a micro-batch. A type
# that is not listed counts as OTHER_TYPE.
DECODE_RATES = {
    "f32": 13.2e9,
    "f16": 13.8e9,
    "bf16": 11.3e9,
    "q8_0": 13.1e9,
    "q6_k": 8.2e9,
    "q5_k": 5.5e9,
    "q4_k": 10.8e9,
    "q4_0": 9.3e9,
    "q3_k": 6.4e9,
    "q2_k": 5.5e9,
}

PREFILL_RATES = {
    "f32": 27e9,
    "f16": 28e9,
    "bf16": 27e9,
    "q8_0": 46e9,
    "q6_k": 65e9,
    "q5_k": 64e9,
    "q4_k": 58e9,
    "q4_0": 59e9,
    "q3_k": 66e9,
    "q2_k": 66e9,
}

OTHER_TYPE = "q3_k"

INSTRUCTION_FACTORS = {
    "AMX": 4.0,
    "AVX-512 VNNI": 2.0,
    "AVX-512": 1.5,
    "AVX2": 1.0,
    "i8mm": 1.5,
    "dot product": 0.8,
    "none": 0.2,
}
"""Arithmetic of a core beside one with AVX2. Only AVX2 is measured; the others are estimates from
the width of the instructions, and say so."""

MEASURED_INSTRUCTIONS = "AVX2"

FLAGS = (
    ("amx_int8", "AMX"),
    ("avx512_vnni", "AVX-512 VNNI"),
    ("avx512f", "AVX-512"),
    ("avx2", "AVX2"),
    ("i8mm", "i8mm"),
    ("asimddp", "dot product"),
)

TOKEN_SECONDS = 100e-6
"""Of a token, whatever its model: sampling and HTTP. Measured with a tiny model."""

LAYER_WAIT_SECONDS = 0.2e-3
"""For which the threads of several cores wait for each other in a layer of decode: each of its some
30 operations ends when the last thread has. 2.3 to 2.5 ms in models of 10 to 16 layers on two cores
of a virtual machine (`python -m tests.tools.fit.measure clock`)."""


HALF_SPEED_TOKENS = 4
"""Tokens of a micro-batch with which an expert reaches half of the speed of a long one. From the
prefill of one mixture (docs/fit.md)."""

LAYOUT_FLAGS = {
    "AMX": "avx512f",
    "AVX-512 VNNI": "avx512f",
    "AVX-512": "avx512f",
    "AVX2": "avx2",
    "i8mm": "asimddp",
    "dot product": "asimddp",
    "none": "",
}
"""The kernel flag by which llama.cpp chooses the layout of weights, by instruction set."""


@dataclass(frozen=True, slots=True)
class Cores:
    """What computes for one server."""

    count: int
    instructions: str  # a key of INSTRUCTION_FACTORS
    bandwidth: float  # bytes/s of the memory that it reads


@dataclass(frozen=True, slots=True)
class Speed:
    """What one request alone may expect."""

    decode: float  # tokens/s
    prefill: float
    weight_bytes: int  # that a token reads
    kv_bytes: int  # with the states of recurrent layers
    limit: str  # of decode: `memory` or `cores`


def instruction_set(flags: frozenset[str]) -> str:
    """Return the best instruction set that these kernel flags name."""
    return next((name for flag, name in FLAGS if flag in flags), "none")


def expected_speed(
    shape: ModelShape, settings: ServerSettings, cores: Cores, *, used: int | None = None
) -> Speed:
    """Return the speed of one request, with `used` tokens in its slot; default: half of it."""
    factor = INSTRUCTION_FACTORS[cores.instructions]
    filled = settings.context // 2 if used is None else used
    bytes_read, elements = _active(shape, min(settings.micro_batch, max(1, filled)))
    by_memory, by_cores, seconds = 0.0, 0.0, 0.0
    for kind, size in bytes_read.items():
        wait = size / cores.bandwidth
        work = size / (cores.count * factor * _rate(DECODE_RATES, kind))
        by_memory, by_cores, seconds = by_memory + wait, by_cores + work, seconds + max(wait, work)
    kv = slot_bytes(shape, settings) * filled // settings.context
    kv += sum(layer.state_bytes for layer in shape.layers)
    kv_rate = cores.count * factor * _rate(DECODE_RATES, settings.key_type)
    seconds += kv / min(cores.bandwidth, kv_rate)
    seconds += TOKEN_SECONDS + (len(shape.layers) * LAYER_WAIT_SECONDS if cores.count > 1 else 0.0)
    operations = sum(
        2 * count / (cores.count * factor * _rate(PREFILL_RATES, kind))
        for kind, count in elements.items()
    )
    # Attention: a token meets, on average, half of the tokens before it, in keys and in values.
    attended = 2 * 2 * (filled // 2) * shape.width * sum(1 for one in shape.layers if one.key_width)
    operations += attended / (cores.count * factor * PREFILL_RATES["f16"])
    return Speed(
        decode=1 / seconds,
        prefill=1 / operations,
        weight_bytes=sum(bytes_read.values()),
        kv_bytes=kv,
        limit="memory" if by_memory >= by_cores else "cores",
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
        kind = TENSOR_TYPE_NAMES.get(tensor.kind, OTHER_TYPE)
        is_expert = shape.experts > 0 and EXPERT.search(tensor.name) is not None
        output = tensor.name == "output.weight" or (tied and tensor.name == "token_embd.weight")
        if tensor.name.startswith("token_embd.") and not output:
            continue  # one row is looked up
        bytes_read[kind] += int(tensor.size * chosen) if is_expert else tensor.size
        if len(tensor.shape) > 1 and not output:  # a prompt needs the last token's output alone
            slower = chosen * (own + HALF_SPEED_TOKENS) / own if is_expert else 1.0
            elements[kind] += int(tensor.elements * slower)
    return bytes_read, elements


def _rate(rates: dict[str, float], kind: str) -> float:
    return rates.get(kind, rates[OTHER_TYPE])
