"""The two models of docs/models.md, as files of the same shape but without the weights.

Everything is as published: the metadata is what llama.cpp prints when it loads the files, the
tensors have their shapes and types, and the sizes are exact. Only the weights are missing (a hole
in the file, so that it takes little room on the disk), and the words of the vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from tests.workshop.fit.random_models import tensor_bytes

TOKENS = 151_936
MERGES = 151_387
END_OF_TEXT, TURN_BEGIN, TURN_END = 151_643, 151_644, 151_645
Q4_K_M = 15
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Published:
    """A published model file: its size, its shape and where it is published."""

    file: str
    name: str  # general.name
    size: int  # bytes
    sha256: str
    layers: int
    width: int
    feed_forward: int
    heads: int
    head_size: int
    weights_mib: float  # llama.cpp's "file size"
    types: dict[Type, int]  # how many tensors of each

    @property
    def url(self) -> str:
        """The publisher's address of the file."""
        repository = self.name.replace("qwen", "Qwen").replace("b-instruct", "B-Instruct")
        return f"https://huggingface.co/Qwen/{repository}-GGUF/resolve/{REVISIONS[self.name]}/{self.file}"


REVISIONS = {
    "qwen2.5-0.5b-instruct": "9217f5db79a29953eb74d5343926648285ec7e67",
    "qwen2.5-1.5b-instruct": "91cad51170dc346986eccefdc2dd33a9da36ead9",
}
KEY_HEADS = 2
CONTEXT = 32_768
SMALL = Published(
    file="qwen2.5-0.5b-instruct-q4_k_m.gguf",
    name="qwen2.5-0.5b-instruct",
    size=491_400_032,
    sha256="74a4da8c9fdbcd15bd1f6d01d621410d31c6fc00986f5eb687824e7b93d7a9db",
    layers=24,
    width=896,
    feed_forward=4864,
    heads=14,
    head_size=64,
    weights_mib=462.96,
    types={Type.F32: 121, Type.Q5_0: 133, Type.Q8_0: 13, Type.Q4_K: 12, Type.Q6_K: 12},
)
LARGER = Published(
    file="qwen2.5-1.5b-instruct-q4_k_m.gguf",
    name="qwen2.5-1.5b-instruct",
    size=1_117_320_736,
    sha256="6a1a2eb6d15622bf3c96857206351ba97e1af16c30d7a74ee38970e434e9407e",
    layers=28,
    width=1536,
    feed_forward=8960,
    heads=12,
    head_size=128,
    weights_mib=1059.89,
    types={Type.F32: 141, Type.Q4_K: 169, Type.Q6_K: 29},
)
MODELS = (SMALL, LARGER)


def write_hollow(model: Published, folder: Path) -> Path:
    """Write the file of `model` without its weights."""
    path = folder / model.file
    path.write_bytes(_head(model.name))
    with path.open("r+b") as file:
        file.truncate(model.size)
    return path


@cache
def _head(name: str) -> bytes:
    """What stands before the weights; it takes half a second to make."""
    model = next(one for one in MODELS if one.name == name)
    with TemporaryDirectory() as folder:
        path = Path(folder) / model.file
        _write_head(model, path)
        return path.read_bytes()


def _write_head(model: Published, path: Path) -> None:
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_type("model")
    writer.add_name(model.name)
    writer.add_version("v0.1")
    writer.add_finetune(model.name)
    writer.add_block_count(model.layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(model.width)
    writer.add_feed_forward_length(model.feed_forward)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_file_type(Q4_K_M)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(list(_vocabulary()))
    kinds = [gguf.TokenType.NORMAL] * END_OF_TEXT
    writer.add_token_types(kinds + [gguf.TokenType.CONTROL] * (TOKENS - END_OF_TEXT))
    writer.add_token_merges([f"Ġ{number} Ġ" for number in range(MERGES)])
    writer.add_eos_token_id(TURN_END)
    writer.add_pad_token_id(END_OF_TEXT)
    writer.add_bos_token_id(END_OF_TEXT)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    writer.add_quantization_version(2)
    for name, shape, kind in tensors(model):
        writer.add_tensor_info(name, shape, np.dtype(np.float32), tensor_bytes(shape, kind), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def tensors(model: Published) -> Iterator[tuple[str, tuple[int, ...], Type]]:
    """Every tensor with its shape and its type, as llama.cpp's Q4_K_M chooses it."""
    normal, better = (Type.Q4_K, Type.Q6_K) if model.width % 256 == 0 else (Type.Q5_0, Type.Q8_0)
    width, keys = model.width, KEY_HEADS * model.head_size
    yield "token_embd.weight", (TOKENS, width), normal
    for layer in range(model.layers):
        # An eighth of the layers at either end, and every third between them.
        eighth = model.layers // 8
        fine = layer < eighth or layer >= 7 * model.layers // 8 or (layer - eighth) % 3 == 2
        for name, shape, kind in (
            ("attn_norm.weight", (width,), Type.F32),
            ("attn_q.weight", (width, width), normal),
            ("attn_q.bias", (width,), Type.F32),
            ("attn_k.weight", (keys, width), normal),
            ("attn_k.bias", (keys,), Type.F32),
            ("attn_v.weight", (keys, width), better if fine else normal),
            ("attn_v.bias", (keys,), Type.F32),
            ("attn_output.weight", (width, width), normal),
            ("ffn_norm.weight", (width,), Type.F32),
            ("ffn_gate.weight", (model.feed_forward, width), normal),
            ("ffn_up.weight", (model.feed_forward, width), normal),
            ("ffn_down.weight", (width, model.feed_forward), Type.Q6_K if fine else Type.Q4_K),
        ):
            yield f"blk.{layer}.{name}", shape, kind
    yield "output_norm.weight", (width,), Type.F32
    yield "output.weight", (TOKENS, width), better


def types(model: Published) -> Counter[Type]:
    """Count the tensors of each type."""
    return Counter(kind for _, _, kind in tensors(model))


def weights(model: Published) -> int:
    """Sum the bytes of all tensors."""
    return sum(tensor_bytes(shape, kind) for _, shape, kind in tensors(model))


def _vocabulary() -> Iterator[str]:
    """Every byte as GPT-2's tokenizers write it, placeholder words, and the control tokens."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [byte for byte in range(256) if byte not in plain]
    yield from map(chr, plain)
    yield from (chr(256 + number) for number in range(len(other)))
    yield from (f"Ġw{number}" for number in range(256, END_OF_TEXT))
    yield from ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    yield from (f"<|unused_{number}|>" for number in range(TURN_END + 1, TOKENS))
