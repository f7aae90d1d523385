"""Writes models of any shape with random weights, that a llama.cpp server loads and runs.

A weight matrix is one piece of random blocks, repeated: nothing is quantised, so that a model of
several GiB takes as long as its bytes take to be written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from gguf.quants import quantize

PIECE_BYTES = 1 << 22
TRAINED_CONTEXT = 32_768
SEED = 7
SCALES = {  # where a block's 16-bit scales stand, in bytes
    Type.Q8_0: (0,),
    Type.Q4_0: (0,),
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """The shape of a model."""

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int = 2048
    weights: Type = Type.F16
    mixed: bool = False  # the weights are of the types that llama.cpp's Q4_K_M chooses
    output: Type | None = None  # None: as the weights
    architecture: str = "llama"  # llama, gemma3, lfm2 or qwen2
    head_size: int = 0  # 0: the width over the heads
    experts: int = 0
    experts_used: int = 0
    window: int = 0  # of gemma3's sliding-window attention
    attention_every: int = 1  # of lfm2: the layers between are short convolutions

    @property
    def key_length(self) -> int:
        """Elements of a head."""
        return self.head_size or self.width // self.heads


def write(recipe: Recipe, folder: Path, *, hollow: bool = False) -> Path:
    """Write the model; `hollow` without its weights, as a hole in the file."""
    path = folder / f"{recipe.name}.gguf"
    writer = gguf.GGUFWriter(path, recipe.architecture)
    _metadata(writer, recipe)
    all_tensors = list(tensors(recipe))
    for name, shape, kind in all_tensors:
        writer.add_tensor_info(name, shape, np.dtype(np.float32), tensor_bytes(shape, kind), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        at = -(-file.seek(0, 2) // 32) * 32
        kinds = set() if hollow else {kind for _, _, kind in all_tensors}
        pieces = {kind: _piece(kind) for kind in kinds}
        for name, shape, kind in all_tensors:
            file.seek(at)
            size = tensor_bytes(shape, kind)
            if not hollow:
                _fill(file, _ones(size) if name.endswith("norm.weight") else pieces[kind], size)
            at += -(-size // 32) * 32
        file.truncate(at)
    return path


def _fill(file: Any, piece: bytes, size: int) -> None:
    while size > 0:
        size -= file.write(piece[: min(size, len(piece))])


def _ones(size: int) -> bytes:
    return np.ones(size // 4, dtype=np.float32).tobytes()


def tensor_bytes(shape: tuple[int, ...], kind: Type) -> int:
    """The bytes of a tensor."""
    elements, size = GGML_QUANT_SIZES[kind]
    return prod(shape) // elements * size


def _piece(kind: Type) -> bytes:
    rng = np.random.default_rng(SEED)
    if kind not in SCALES:
        values = rng.normal(0, 0.03, PIECE_BYTES // 4).astype(np.float32)
        return quantize(values, kind).tobytes()
    size = GGML_QUANT_SIZES[kind][1]
    blocks = rng.integers(0, 256, (PIECE_BYTES // size, size), dtype=np.uint8)
    scale = np.frombuffer(np.float16(0.0004).tobytes(), dtype=np.uint8)
    for at in SCALES[kind]:
        blocks[:, at : at + 2] = scale
    return blocks.tobytes()


def _metadata(writer: gguf.GGUFWriter, recipe: Recipe) -> None:
    writer.add_name(recipe.name)
    writer.add_context_length(TRAINED_CONTEXT)
    writer.add_embedding_length(recipe.width)
    writer.add_block_count(recipe.layers)
    writer.add_feed_forward_length(recipe.feed_forward)
    writer.add_head_count(recipe.heads)
    attends = [recipe.kv_heads if _attends(recipe, n) else 0 for n in range(recipe.layers)]
    writer.add_head_count_kv(attends if recipe.architecture == "lfm2" else recipe.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(recipe.vocabulary)
    if recipe.head_size:
        writer.add_key_length(recipe.head_size)
        writer.add_value_length(recipe.head_size)
    if recipe.architecture == "llama":
        writer.add_rope_dimension_count(recipe.key_length)
    if recipe.architecture == "lfm2":
        writer.add_shortconv_l_cache(3)
    if recipe.experts:
        writer.add_expert_count(recipe.experts)
        writer.add_expert_used_count(recipe.experts_used)
    if recipe.window:
        writer.add_sliding_window(recipe.window)
    words = [f"w{number}" for number in range(259, recipe.vocabulary)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), *words])
    writer.add_token_scores([0.0] * recipe.vocabulary)
    writer.add_token_types([2, 3, 3, *([6] * 256), *([1] * len(words))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def _attends(recipe: Recipe, layer: int) -> bool:
    return layer % recipe.attention_every == recipe.attention_every - 1


def tensors(recipe: Recipe) -> Iterator[tuple[str, tuple[int, ...], Type]]:
    """The name, the shape and the type of each tensor."""
    width, hidden = recipe.width, recipe.feed_forward
    kind = _q4_k_m(recipe, "token_embd", 0) if recipe.mixed else recipe.weights
    queries, keys = recipe.heads * recipe.key_length, recipe.kv_heads * recipe.key_length
    yield "token_embd.weight", (recipe.vocabulary, width), kind
    for layer in range(recipe.layers):
        rows: dict[str, tuple[int, ...]] = {"attn_norm": (width,), "ffn_norm": (width,)}
        if recipe.architecture == "lfm2" and not _attends(recipe, layer):
            rows |= {
                "shortconv.in_proj": (3 * width, width),
                "shortconv.out_proj": (width, width),
                "shortconv.conv": (width, 3),
            }
        else:
            rows |= {
                "attn_q": (queries, width),
                "attn_k": (keys, width),
                "attn_v": (keys, width),
                "attn_output": (width, queries),
            }
            if recipe.architecture == "qwen2":
                rows |= {"attn_q.bias": (queries,), "attn_k.bias": (keys,), "attn_v.bias": (keys,)}
            if recipe.architecture in {"gemma3", "lfm2"}:
                rows |= {"attn_q_norm": (recipe.key_length,), "attn_k_norm": (recipe.key_length,)}
        if recipe.architecture == "gemma3":
            rows |= {"post_attention_norm": (width,), "post_ffw_norm": (width,)}
        if recipe.experts:
            rows |= {
                "ffn_gate_inp": (recipe.experts, width),
                "ffn_gate_exps": (recipe.experts, hidden, width),
                "ffn_up_exps": (recipe.experts, hidden, width),
                "ffn_down_exps": (recipe.experts, width, hidden),
            }
        else:
            rows |= {
                "ffn_gate": (hidden, width),
                "ffn_up": (hidden, width),
                "ffn_down": (width, hidden),
            }
        for name, shape in rows.items():
            whole = name if name.endswith(".bias") else f"{name}.weight"
            small = name.endswith(("norm", ".bias")) or name in {"ffn_gate_inp", "shortconv.conv"}
            better = _q4_k_m(recipe, name, layer) if recipe.mixed else kind
            yield f"blk.{layer}.{whole}", shape, Type.F32 if small else better
    last = "token_embd_norm" if recipe.architecture == "lfm2" else "output_norm"
    yield f"{last}.weight", (width,), Type.F32
    if recipe.architecture in {"llama", "qwen2"}:
        better = _q4_k_m(recipe, "output", 0) if recipe.mixed else recipe.output or kind
        yield "output.weight", (recipe.vocabulary, width), better


def _q4_k_m(recipe: Recipe, name: str, layer: int) -> Type:
    """The type of a matrix of a published file."""
    normal, better = (Type.Q4_K, Type.Q6_K) if recipe.width % 256 == 0 else (Type.Q5_0, Type.Q8_0)
    # An eighth of the layers at either end, and every third between them.
    layers, eighth = recipe.layers, recipe.layers // 8
    fine = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
    if name == "ffn_down":
        return Type.Q6_K if fine else Type.Q4_K
    return better if name == "output" or (name == "attn_v" and fine) else normal
