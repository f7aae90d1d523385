"""Writes a demo model, so that nothing is downloaded: random weights in the llama architecture.

It reads and writes any text, supports chat and tools through its template, and answers with
meaningless words. Its bytes are the same on every machine, and with F32 weights ("small") greedy
decoding is reproducible bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from gateway.local import LocalFleetError
from gateway.local.cache import DEMO_MODELS, ensure_file
from gateway.system import install_command

DemoSize = Literal["small", "medium"]
DEMO_MODEL_NAME = "demo"
FILE_VERSION = 2  # raise it when the file's bytes change
WEIGHTS_SEED = 20_260_501
TRAINED_CONTEXT = 131_072  # tokens: a coding agent begins with up to 57,000 of them
LOCK_TIMEOUT = 120.0  # seconds; writing the medium model takes a few on a busy machine
CONSTANT_EMBEDDING = 1.0  # first component of every token's embedding
TOOL_CALL_EMBEDDING = 4.0  # second component where a tool call begins or has ended
ATTENTION_SHARPNESS = 1.5  # how sharply a head selects among the tokens before
LAYER_SCALE = 0.8  # a layer's output over its input
LOGIT_SPREAD = 3.0  # standard deviation of the logits
# Subtracted from a token's logit, so that text consists of printable words.
FREQUENT_PENALTY = -14.0
RARE_PENALTY = 16.0
GRAMMAR_ONLY_PENALTY = 100.0  # chosen only where a grammar allows nothing likelier
GRAMMAR_LAST_PENALTY = 200.0  # chosen only after those
FORBIDDEN_PENALTY = 400.0

TOKEN_PENALTIES = {
    '"': FREQUENT_PENALTY,
    "</tool_call>": GRAMMAR_ONLY_PENALTY,
    "<": GRAMMAR_LAST_PENALTY,
    ",": GRAMMAR_LAST_PENALTY,
}  # so that generated JSON ends


@dataclass(frozen=True, slots=True)
class DemoShape:
    """The dimensions of one size of the model."""

    width: int
    layers: int
    heads: int
    feed_forward: int
    half_precision: bool  # F16 instead of F32


DEMO_SHAPES: dict[DemoSize, DemoShape] = {
    "small": DemoShape(width=128, layers=4, heads=4, feed_forward=256, half_precision=False),
    "medium": DemoShape(width=512, layers=8, heads=8, feed_forward=1408, half_precision=True),
}


def ensure_demo_model(cache: Path, size: DemoSize = "small") -> Path:
    """Return the demo model in the cache folder, written now unless an earlier run did.

    Several processes may call it at once: one writes, the others wait. Raises LocalFleetError
    without the `local` extra, and OSError when the folder can't be written.
    """
    path = cache / DEMO_MODELS / f"demo-{size}-v{FILE_VERSION}.gguf"
    return ensure_file(
        path, lambda part: write_model(part, DEMO_SHAPES[size]), timeout=LOCK_TIMEOUT
    )


def write_model(
    path: Path,
    shape: DemoShape,
    *,
    more_tokens: Sequence[Token] = (),
    more_penalties: Mapping[str, float] = MappingProxyType({}),
    chat_template: str | None = None,
) -> None:
    """Write the GGUF file of a demo model of this shape.

    `more_tokens` follow those of every demo model, with their logit penalties by text;
    `chat_template` replaces the usual one.
    """
    try:
        import gguf
    except ImportError as error:
        raise LocalFleetError(
            f"the demo model needs the package 'gguf', which can't be loaded ({error}): "
            f"{install_command('local')}, or name a model with --model FILE.gguf"
        ) from error

    tokens = [*vocabulary(), *more_tokens]
    penalties = {**TOKEN_PENALTIES, **more_penalties}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(DEMO_MODEL_NAME)
    writer.add_description("Random weights. Its words mean nothing.")
    writer.add_file_type(
        gguf.LlamaFileType.MOSTLY_F16 if shape.half_precision else gguf.LlamaFileType.ALL_F32
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
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_eot_token_id(TURN_END_ID)
    writer.add_unk_token_id(UNKNOWN_ID)
    writer.add_add_bos_token(True)
    # With a space before "assistant" no grammar would accept the template's own last line.
    writer.add_add_space_prefix(False)
    writer.add_chat_template(CHAT_TEMPLATE if chat_template is None else chat_template)
    for name, weights in _tensors(shape, tokens, penalties):
        writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(
    shape: DemoShape, tokens: Sequence[Token], penalties: Mapping[str, float]
) -> list[tuple[str, np.ndarray[Any, Any]]]:
    # Python's generator: numpy's may change between versions.
    rng = random.Random(WEIGHTS_SEED)
    kind = np.float16 if shape.half_precision else np.float32

    def weights(rows: int, columns: int, scale: float) -> np.ndarray[Any, Any]:
        """Return uniform numbers with standard deviation `scale`."""
        raw = np.frombuffer(rng.randbytes(4 * rows * columns), dtype="<u4")
        unit = raw.astype(np.float64) / 2**31 - 1.0
        return (unit * (scale * 3**0.5)).astype(np.float32).reshape(rows, columns)

    width, hidden = shape.width, shape.feed_forward
    ones = np.ones(width, dtype=np.float32)
    embedding = weights(len(tokens), width, 1.0)
    # No layer writes the first two components. The first is the same in every state, so that the
    # output matrix can apply a token's penalty whatever the text; the second depends on the last
    # token only: whether a tool call must begin here, or has just ended.
    embedding[:, 0] = CONSTANT_EMBEDDING
    embedding[:, 1] = 0.0
    embedding[USE_TOOL_ID, 1] = TOOL_CALL_EMBEDDING
    embedding[TOOL_CALL_END_ID, 1] = -TOOL_CALL_EMBEDDING
    tensors = [("token_embd.weight", embedding.astype(kind))]
    for layer in range(shape.layers):
        prefix = f"blk.{layer}"
        sharp = ATTENTION_SHARPNESS / width**0.5
        attended = weights(width, width, LAYER_SCALE / width**0.5)
        down = weights(width, hidden, LAYER_SCALE / hidden**0.5)
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
    output = weights(len(tokens), width, LOGIT_SPREAD / width**0.5)
    for row, token in enumerate(tokens):
        usual = RARE_PENALTY if token.kind is TokenType.NORMAL else FORBIDDEN_PENALTY
        penalty = 0.0 if token.is_word else penalties.get(token.text, usual)
        output[row, 0] = -penalty / CONSTANT_EMBEDDING
    output[:, 1] = 0.0
    output[TOOL_CALL_BEGIN_ID, 1] = 2 * FORBIDDEN_PENALTY / TOOL_CALL_EMBEDDING
    output[TURN_END_ID, 1] = -2 * FORBIDDEN_PENALTY / TOOL_CALL_EMBEDDING
    tensors += [("output_norm.weight", ones), ("output.weight", output.astype(kind))]
    return tensors


SPACE_MARK = "\u2581"  # how SentencePiece writes a space

UNKNOWN_ID, BOS_ID, EOS_ID, TURN_BEGIN_ID, TURN_END_ID, USE_TOOL_ID = range(6)
TOOL_CALL_BEGIN_ID, TOOL_CALL_END_ID = 6, 7

_FILES = files("gateway.local")

WORDS = tuple(_FILES.joinpath("demo_words.txt").read_text(encoding="utf-8").split())

# Also without a space before, since they follow a control token.
BARE_WORDS = ("assistant", "system", "user")

CHAT_TEMPLATE = _FILES.joinpath("demo_chat_template.jinja").read_text(encoding="utf-8")


class TokenType(IntEnum):
    """Token types as GGUF numbers them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Token:
    """One token: its text, its merge score, its type, and whether it is a whole word."""

    text: str
    score: float
    kind: TokenType
    is_word: bool = False


def vocabulary() -> list[Token]:
    """Return all tokens in the order of their ids."""
    tokens = [Token("<unk>", 0.0, TokenType.UNKNOWN)]
    controls = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|use_tool|>")
    tokens += [Token(text, 0.0, TokenType.CONTROL) for text in controls]
    marks = ("<tool_call>", "</tool_call>")
    tokens += [Token(text, 0.0, TokenType.USER_DEFINED) for text in marks]
    tokens += [Token(f"<0x{byte:02X}>", 0.0, TokenType.BYTE) for byte in range(256)]
    words = {SPACE_MARK + word for word in WORDS}
    singles = {chr(code) for code in range(0x21, 0x7F)} | {SPACE_MARK, *"".join(words)}
    reachable = words | set(BARE_WORDS)
    prefixes = {word[:end] for word in reachable for end in range(2, len(word) + 1)}
    for text in [*sorted(singles), *sorted(prefixes, key=lambda text: (len(text), text))]:
        # A longer token scores higher: the tokenizer merges the pair with the highest score first.
        tokens.append(Token(text, float(len(text)) - 100.0, TokenType.NORMAL, text in words))
    return tokens
