"""The sizes of a model's other quantisations, from the shapes of its tensors.

The types of the tensors follow llama.cpp's `llama_tensor_get_type_impl` (src/llama-quant.cpp,
November 2026) for a file made without an importance matrix. Publishers mix types of their own, so
that a file may differ by some percent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gateway.tools.local.gguf import TENSOR_BLOCKS, ModelShape, Tensor
from gateway.tools.local.memory import TENSOR_TYPE_NAMES

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
"""The type of most tensors of each quantisation, the smallest first."""

FALLBACKS = {
    "q2_k": "q4_0",
    "q3_k": "q4_0",
    "q4_k": "q5_0",
    "q5_k": "q5_1",
    "q6_k": "q8_0",
}
"""Of a tensor whose rows are no multiple of 256 (`tensor_type_fallback`)."""

NUMBERS = {name: number for number, name in TENSOR_TYPE_NAMES.items()}

NEVER_QUANTIZED = re.compile(
    r"_norm\.weight$|ffn_gate_inp\.weight$|altup|laurel|per_layer_model_proj|ssm_conv1d"
    r"|shortconv\.conv\.weight$|attn_rel_b|position_embd|token_types"
)

LAYER = re.compile(r"^blk\.(\d+)\.")

SPREAD_EXPERTS = 8  # a model of so many has Q8_0 for keys and values in every layer

GROUPED = 4  # heads that share a key head, from which on values are few and get more bits


@dataclass(frozen=True, slots=True)
class Quantized:
    """A model as one of the family's files would be."""

    name: str
    shape: ModelShape
    size: int  # bytes of all tensors


def quantizations(shape: ModelShape) -> list[Quantized]:
    """Return the family's usual quantisations, the smallest first."""
    found = []
    for name in QUANTIZATIONS:
        tensors = tuple(_quantized(shape, name))
        size = sum(tensor.size for tensor in tensors)
        found.append(Quantized(name, replace(shape, tensors=tensors), size))
    return found


def _quantized(shape: ModelShape, name: str) -> Iterator[Tensor]:
    tied = not any(tensor.name == "output.weight" for tensor in shape.tensors)
    depth = _Depth(shape)
    for tensor in shape.tensors:
        if len(tensor.shape) < 2 or NEVER_QUANTIZED.search(tensor.name):
            yield tensor
            continue
        kind = _type(tensor, name, shape, depth, tied=tied)
        row = tensor.shape[0]
        if row % TENSOR_BLOCKS[NUMBERS[kind]][0]:
            kind = FALLBACKS.get(kind, "f16")
        if row % TENSOR_BLOCKS[NUMBERS[kind]][0]:
            kind = "f16"
        yield replace(tensor, kind=NUMBERS[kind])


class _Depth:
    """Where a tensor stands among those of its kind."""

    def __init__(self, shape: ModelShape) -> None:
        layers = [int(found[1]) for t in shape.tensors if (found := LAYER.match(t.name))]
        self.layers = max(layers, default=0) + 1
        self.values = sorted({n for t in shape.tensors if (n := _layer(t)) >= 0 and _is_value(t)})

    def has_more_bits(self, number: int, count: int) -> bool:
        """An eighth of the layers at either end, and every third between (`use_more_bits`)."""
        eighth = count // 8
        return number < eighth or number >= 7 * count // 8 or (number - eighth) % 3 == 2


def _type(tensor: Tensor, name: str, shape: ModelShape, depth: _Depth, *, tied: bool) -> str:
    usual = QUANTIZATIONS[name]
    if usual in {"f16", "q8_0"}:
        return usual
    if tensor.name == "output.weight" or (tied and tensor.name == "token_embd.weight"):
        return "q8_0" if tensor.shape[0] % 256 else "q6_k"
    spread = shape.experts == SPREAD_EXPERTS
    if _is_value(tensor):
        return "q8_0" if spread else _value_type(tensor, name, shape, depth)
    if ".attn_k.weight" in tensor.name and spread:
        return "q8_0"
    if ".ffn_down" in tensor.name:
        return _down_type(tensor, name, depth)
    if ".attn_output.weight" in tensor.name:
        if spread:
            return "q5_k" if name in {"Q2_K", "Q3_K_M", "Q4_K_M"} else usual
        return {"Q2_K": "q3_k", "Q3_K_M": "q4_k"}.get(name, usual)
    if ".attn_qkv.weight" in tensor.name:
        return {"Q3_K_M": "q4_k", "Q4_K_M": "q5_k", "Q5_K_M": "q6_k"}.get(name, usual)
    return usual


def _value_type(tensor: Tensor, name: str, shape: ModelShape, depth: _Depth) -> str:
    usual = QUANTIZATIONS[name]
    number, count = depth.values.index(_layer(tensor)), len(depth.values)
    if name == "Q2_K":
        values = max((layer.value_width for layer in shape.layers), default=0)
        return "q4_k" if values and shape.width // values >= GROUPED else "q3_k"
    if name == "Q3_K_M":
        return "q5_k" if number < 2 else "q4_k"
    if name in {"Q4_K_M", "Q5_K_M"} and depth.has_more_bits(number, count):
        return "q6_k"
    return usual


def _down_type(tensor: Tensor, name: str, depth: _Depth) -> str:
    number = _layer(tensor)
    if name == "Q2_K":
        return "q3_k"
    if name == "Q3_K_M":
        return "q5_k" if number < depth.layers // 16 else "q4_k"
    if name in {"Q4_K_M", "Q5_K_M"} and depth.has_more_bits(number, depth.layers):
        return "q6_k"
    return QUANTIZATIONS[name]


def _is_value(tensor: Tensor) -> bool:
    return ".attn_v.weight" in tensor.name or ".attn_kv_b.weight" in tensor.name


def _layer(tensor: Tensor) -> int:
    found = LAYER.match(tensor.name)
    return int(found[1]) if found else -1
