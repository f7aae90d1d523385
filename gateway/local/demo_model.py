"""A model without downloads: random weights from a fixed seed in the llama architecture.

It reads and writes any text, supports chat and tools through its template, and answers with
words that mean nothing. The same bytes come out on every machine, and with F32 weights
("small") greedy generation repeats itself bit for bit.
"""

from __future__ import annotations

import os
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gateway.local.cache import locked, models_folder
from gateway.local.demo_vocabulary import (
    ASKED_TO_CALL,
    BEGIN,
    CALL_BEGIN,
    CALL_END,
    CHAT_TEMPLATE,
    END,
    TURN_END,
    UNKNOWN,
    Kind,
    Token,
    vocabulary,
)
from gateway.local.errors import MissingExtraError

if TYPE_CHECKING:
    import numpy as np

Size = Literal["small", "medium"]

MODEL_NAME = "demo"
VERSION = 1  # of the file: raise it whenever its bytes would differ
SEED = 20_260_501
TRAINED_CONTEXT = 16_384  # tokens
LOCK_LIMIT = 120.0  # seconds; writing the medium model takes a few on a busy machine

STEADY = 1.0  # what the first direction holds in every token's embedding
CALLING = 4.0  # what the second holds where a tool call begins or has ended
ATTENTION = 1.5  # how sharply a head picks among what it has read
MIX = 0.8  # what a layer adds, against what it was given
LOGIT = 3.0  # spread of the logits
# What is taken from a logit, so that text runs on in printable words.
OFTEN = -14.0
SELDOM = 16.0
LATE = 100.0  # only where a grammar leaves nothing likelier
LAST = 200.0  # the same, and after the one before
NEVER = 400.0
HELD_DOWN = {'"': OFTEN, "</tool_call>": LATE, "<": LAST, ",": LAST}  # JSON that comes to an end


@dataclass(frozen=True, slots=True)
class Shape:
    """The measures of one size of the model."""

    width: int
    layers: int
    heads: int
    feed_forward: int
    half: bool  # F16 instead of F32


SHAPES: dict[Size, Shape] = {
    "small": Shape(width=128, layers=4, heads=4, feed_forward=256, half=False),
    "medium": Shape(width=512, layers=8, heads=8, feed_forward=1408, half=True),
}


def ensure_demo_model(cache: Path, size: Size = "small") -> Path:
    """The demo model in the cache folder, written now unless an earlier run did.

    Safe when several processes ask at once: one writes, the others wait for it. Raises
    MissingExtraError without the `local` extra and OSError when the folder can't be written.
    """
    folder = models_folder(cache)
    path = folder / f"demo-{size}-v{VERSION}.gguf"
    if path.is_file():
        return path
    with locked(folder / f"{path.name}.lock", limit=LOCK_LIMIT):
        if not path.is_file():
            _write_atomically(path, SHAPES[size])
    return path


def _write_atomically(path: Path, shape: Shape) -> None:
    handle, name = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".part", dir=path.parent)
    os.close(handle)
    part = Path(name)
    try:
        write_model(part, shape)
        part.chmod(0o644)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_model(path: Path, shape: Shape) -> None:
    """Write the GGUF file of a demo model of this shape."""
    try:
        import gguf
    except ImportError as error:
        raise MissingExtraError(
            f"the demo model needs the package 'gguf', which can't be loaded ({error}): "
            "pip install 'llama-gateway[local]', or name a model with --model FILE.gguf"
        ) from error

    tokens = vocabulary()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(MODEL_NAME)
    writer.add_description("Random weights. Its words mean nothing.")
    writer.add_file_type(
        gguf.LlamaFileType.MOSTLY_F16 if shape.half else gguf.LlamaFileType.ALL_F32
    )
    writer.add_context_length(TRAINED_CONTEXT)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.heads)
    writer.add_rope_dimension_count(shape.width // shape.heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_token_list([token.text for token in tokens])
    writer.add_token_scores([token.score for token in tokens])
    writer.add_token_types([int(token.kind) for token in tokens])
    writer.add_bos_token_id(BEGIN)
    writer.add_eos_token_id(END)
    writer.add_eot_token_id(TURN_END)
    writer.add_unk_token_id(UNKNOWN)
    writer.add_add_bos_token(True)
    # With a space put before "assistant" no grammar would accept the template's own last line.
    writer.add_add_space_prefix(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, weights in _tensors(shape, tokens):
        writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(shape: Shape, tokens: list[Token]) -> list[tuple[str, np.ndarray[Any, Any]]]:
    import numpy as np

    # Not numpy's generator: its stream may change between versions, Python's may not.
    rng = random.Random(SEED)
    kind = np.float16 if shape.half else np.float32

    def weights(rows: int, columns: int, scale: float) -> np.ndarray[Any, Any]:
        """Uniform numbers with standard deviation `scale`."""
        raw = np.frombuffer(rng.randbytes(4 * rows * columns), dtype="<u4")
        unit = raw.astype(np.float64) / 2**31 - 1.0
        return (unit * (scale * 3**0.5)).astype(np.float32).reshape(rows, columns)

    width, hidden = shape.width, shape.feed_forward
    ones = np.ones(width, dtype=np.float32)
    embedding = weights(len(tokens), width, 1.0)
    # No layer writes to the first two directions. One is the same in every state, so that the
    # output matrix can hold any token down by it, whatever was read; the other tells of the
    # last token only: whether a tool call has to begin here, or has just ended.
    embedding[:, 0] = STEADY
    embedding[:, 1] = 0.0
    embedding[ASKED_TO_CALL, 1] = CALLING
    embedding[CALL_END, 1] = -CALLING
    tensors = [("token_embd.weight", embedding.astype(kind))]
    for layer in range(shape.layers):
        prefix = f"blk.{layer}"
        sharp = ATTENTION / width**0.5
        attended = weights(width, width, MIX / width**0.5)
        down = weights(width, hidden, MIX / hidden**0.5)
        attended[:2] = 0.0
        down[:2] = 0.0
        tensors += [
            (f"{prefix}.attn_norm.weight", ones),
            (f"{prefix}.attn_q.weight", weights(width, width, sharp).astype(kind)),
            (f"{prefix}.attn_k.weight", weights(width, width, sharp).astype(kind)),
            (f"{prefix}.attn_v.weight", weights(width, width, 1 / width**0.5).astype(kind)),
            (f"{prefix}.attn_output.weight", attended.astype(kind)),
            (f"{prefix}.ffn_norm.weight", ones),
            (f"{prefix}.ffn_gate.weight", weights(hidden, width, 2 / width**0.5).astype(kind)),
            (f"{prefix}.ffn_up.weight", weights(hidden, width, 2 / width**0.5).astype(kind)),
            (f"{prefix}.ffn_down.weight", down.astype(kind)),
        ]
    output = weights(len(tokens), width, LOGIT / width**0.5)
    output[:, 0] = [-_held_down(token) / STEADY for token in tokens]
    output[:, 1] = 0.0
    output[CALL_BEGIN, 1] = 2 * NEVER / CALLING
    output[TURN_END, 1] = -2 * NEVER / CALLING
    tensors += [("output_norm.weight", ones), ("output.weight", output.astype(kind))]
    return tensors


def _held_down(token: Token) -> float:
    if token.is_word:
        return 0.0
    return HELD_DOWN.get(token.text, SELDOM if token.kind is Kind.NORMAL else NEVER)
