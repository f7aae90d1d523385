"""What a model keeps for each token and each slot, as its metadata tells it.

The rules are llama.cpp's (`llama_hparams`, `llama_model::create_memory`, and each architecture's
`load_arch_hparams` in src/models), as of November 2026. An architecture that is not listed here is
refused: a guess would be worse than the rule of thumb.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.tools.local import LocalFleetError
from gateway.tools.local.gguf_header import TENSOR_BLOCKS, Header, Tensor

FULL_ATTENTION_NAMES = """
    llama deci mistral3 qwen qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3vl qwen3vlmoe phi2 phi3
    phimoe gemma starcoder starcoder2 gptneox gpt2 mpt baichuan refact bloom falcon grok stablelm
    codeshell orion internlm2 minicpm xverse command-r dbrx olmo olmoe arctic deepseek chatglm glm4
    glm4moe bitnet nemotron exaone granite granitemoe bailingmoe bailingmoe2 dots1 arcee ernie4_5
    ernie4_5-moe hunyuan-moe hunyuan-dense smollm3 seed_oss grovemoe apertus minimax-m2
    pangu-embedded
"""

FULL_ATTENTION = frozenset(FULL_ATTENTION_NAMES.split())
"""Architectures that keep keys and values of every token in every layer."""

COMPRESSED_ATTENTION = frozenset({"deepseek2"})
"""Multi-head latent attention: one compressed row for a token and a layer, and no values."""


@dataclass(frozen=True, slots=True)
class WindowRule:
    """Which layers attend to a window of tokens only, unless the metadata says so itself."""

    period: int  # every such layer is full
    full_first: bool = False  # the first of a period is full, not the last
    window: int | None = None  # tokens, where the metadata has none; None: then none has a window
    layers: int | None = None  # only models of so many layers have windows


SLIDING_WINDOWS = {
    "gemma2": WindowRule(2, window=4096),
    "gemma3": WindowRule(6),
    "cohere2": WindowRule(4),
    "olmo2": WindowRule(4),
    "exaone4": WindowRule(4, window=4096, layers=64),
    "gpt-oss": WindowRule(2),
    "llama4": WindowRule(4, window=8192),
    "smallthinker": WindowRule(4, full_first=True, window=4096),
}

STATE_SPACES = frozenset({"mamba", "mamba2"})
"""Every layer keeps a state of fixed size, and no keys and values."""

HYBRIDS = frozenset({"jamba", "granitehybrid", "lfm2", "lfm2moe"})
"""Layers without key heads keep a state of fixed size."""

INTERVAL_HYBRIDS = frozenset({"qwen3next", "qwen35", "qwen35moe"})
"""Every layer but each fourth (or as the metadata says) keeps a state of fixed size."""

PARALLEL_HYBRIDS = frozenset({"falcon-h1"})
"""Every layer keeps both."""

STATE_BYTES = 4  # of an element: states are F32

MOST_LAYERS = 1024
"""llama.cpp's LLAMA_MAX_LAYERS is 512."""

MOST_ELEMENTS = 1 << 32
"""A width, a context or another size beyond this is a lie."""


class UnknownShapeError(LocalFleetError):
    """The memory of this model can't be told. The text says why."""


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer keeps."""

    key_width: int = 0  # elements for each token
    value_width: int = 0
    window: int | None = None  # tokens that it attends to; None: all
    state_bytes: int = 0  # for each slot, whatever its context


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The dimensions of a model."""

    architecture: str
    width: int  # of a token's state
    heads: int
    feed_forward: int  # width of the widest block or expert
    vocabulary: int
    experts: int  # of a layer; 0: none
    experts_used: int  # for each token
    trained_context: int | None
    layers: tuple[Layer, ...] = field(repr=False)
    tensors: tuple[Tensor, ...] = field(repr=False)

    @property
    def has_states(self) -> bool:
        """Whether a layer keeps a state, which can't be rolled back."""
        return any(layer.state_bytes for layer in self.layers)

    @property
    def has_windows(self) -> bool:
        """Whether a layer attends to a window of tokens only."""
        return any(layer.window is not None for layer in self.layers)


def model_shape(headers: Sequence[Header]) -> ModelShape:
    """Return the shape of the model in these files. Raises UnknownShapeError."""
    keys = _Keys(headers[0])
    tensors = tuple(tensor for header in headers for tensor in header.tensors)
    if not tensors:
        raise UnknownShapeError("it holds no weights")
    if strange := sorted({t.kind for t in tensors if t.kind not in TENSOR_BLOCKS}):
        raise UnknownShapeError(
            f"it has weights of type {strange[0]}, whose size is not known here"
        )
    blocks = keys.required("block_count")
    if blocks > MOST_LAYERS:
        raise UnknownShapeError(f"{keys.name('block_count')} is {blocks} (at most {MOST_LAYERS})")
    layers = tuple(_layers(keys, blocks))
    hidden = max([*keys.each("feed_forward_length", blocks), *_expert_widths(keys, blocks)])
    return ModelShape(
        architecture=keys.architecture,
        width=keys.required("embedding_length"),
        heads=max(keys.each("attention.head_count", blocks)),
        feed_forward=hidden,
        vocabulary=_vocabulary(headers[0], keys, tensors),
        experts=keys.optional("expert_count") or 0,
        experts_used=max(keys.each("expert_used_count", blocks)),
        trained_context=keys.optional("context_length"),
        layers=layers,
        tensors=tensors,
    )


class _Keys:
    """The metadata of an architecture."""

    def __init__(self, header: Header) -> None:
        self.architecture = header.architecture
        self._metadata = header.metadata
        known = (
            FULL_ATTENTION
            | COMPRESSED_ATTENTION
            | SLIDING_WINDOWS.keys()
            | STATE_SPACES
            | HYBRIDS
            | INTERVAL_HYBRIDS
            | PARALLEL_HYBRIDS
        )
        if self.architecture not in known:
            raise UnknownShapeError(
                f"its architecture is {self.architecture or 'not named'!r}, whose memory is not "
                "known here"
            )

    def name(self, key: str) -> str:
        """Return the whole name of a key."""
        return f"{self.architecture}.{key}"

    def has(self, key: str) -> bool:
        """Whether the metadata has a key."""
        return self.name(key) in self._metadata

    def optional(self, key: str) -> int | None:
        """Return a number; None where there is none. Raises UnknownShapeError."""
        found = self._metadata.get(self.name(key))
        return None if found is None else self._checked(key, found)

    def required(self, key: str) -> int:
        """Return a number above 0. Raises UnknownShapeError."""
        found = self.optional(key)
        if not found:
            raise UnknownShapeError(f"it has no {self.name(key)}, or 0")
        return found

    def each(self, key: str, layers: int) -> list[int]:
        """Return a number for each layer; 0 for each where there is none."""
        found = self._metadata.get(self.name(key), 0)
        if not isinstance(found, tuple):
            return [self._checked(key, found)] * layers
        if len(found) < layers:
            raise UnknownShapeError(f"{self.name(key)} has {len(found)} values for {layers} layers")
        return [self._checked(key, one) for one in found[:layers]]

    def flags(self, key: str, layers: int) -> list[bool] | None:
        """Return a truth value for each layer; None where the key is no array."""
        if not isinstance(self._metadata.get(self.name(key)), tuple):
            return None
        return [bool(one) for one in self.each(key, layers)]

    def _checked(self, key: str, found: object) -> int:
        if not isinstance(found, int) or not 0 <= found < MOST_ELEMENTS:
            raise UnknownShapeError(f"{self.name(key)} is {found!r}")
        return int(found)


def _layers(keys: _Keys, blocks: int) -> list[Layer]:
    if keys.architecture in STATE_SPACES:
        return [Layer(state_bytes=_state_bytes(keys))] * blocks
    attention = _attention(keys, blocks)
    recurrent = _recurrent(keys, blocks)
    trained = blocks - (keys.optional("nextn_predict_layers") or 0)  # the others draft, if at all
    found = []
    for number in range(trained):
        if keys.architecture in PARALLEL_HYBRIDS:
            layer = attention[number]
            found.append(Layer(layer.key_width, layer.value_width, None, _state_bytes(keys)))
        elif recurrent[number]:
            found.append(Layer(state_bytes=_state_bytes(keys)))
        else:
            found.append(attention[number])
    return found


def _attention(keys: _Keys, blocks: int) -> list[Layer]:
    heads = keys.each("attention.head_count", blocks)
    if not (first := max(heads)):
        raise UnknownShapeError(f"it has no {keys.name('attention.head_count')}, or 0")
    # Without the key there are as many key heads as heads.
    shared = keys.has("attention.head_count_kv")
    kv_heads = keys.each("attention.head_count_kv", blocks) if shared else heads
    default = keys.required("embedding_length") // first
    key = keys.optional("attention.key_length") or default
    value = keys.optional("attention.value_length") or default
    if keys.architecture in COMPRESSED_ATTENTION and keys.optional("attention.key_length_mla"):
        return [Layer(key * count, 0) for count in kv_heads]
    windows = _windows(keys, blocks)
    key_in_window = keys.optional("attention.key_length_swa") or key
    value_in_window = keys.optional("attention.value_length_swa") or value
    return [
        Layer(key * count, value * count)
        if window is None
        else Layer(key_in_window * count, value_in_window * count, window)
        for count, window in zip(kv_heads, windows, strict=True)
    ]


def _windows(keys: _Keys, blocks: int) -> list[int | None]:
    if keys.architecture in HYBRIDS and keys.optional("attention.sliding_window"):
        raise UnknownShapeError("it mixes windows with recurrent layers, which is not known here")
    rule = SLIDING_WINDOWS.get(keys.architecture)
    if rule is None or (rule.layers is not None and blocks != rule.layers):
        return [None] * blocks
    told = keys.optional("attention.sliding_window")
    # llama4 has its own window whatever the metadata says, but for 0: none.
    window = rule.window if told is None or (told and keys.architecture == "llama4") else told
    if not window:
        return [None] * blocks
    pattern = keys.flags("attention.sliding_window_pattern", blocks)
    if pattern is None:
        period = keys.optional("attention.sliding_window_pattern")
        period = rule.period if period is None else period
        full = 0 if rule.full_first else period - 1
        pattern = [not period or number % period != full for number in range(blocks)]
    return [window if slides else None for slides in pattern]


def _recurrent(keys: _Keys, blocks: int) -> list[bool]:
    if keys.architecture in HYBRIDS:
        return [not count for count in keys.each("attention.head_count_kv", blocks)]
    if keys.architecture in INTERVAL_HYBRIDS:
        told = keys.flags("attention.recurrent_layers", blocks)
        interval = keys.optional("full_attention_interval") or 4
        return told or [(number + 1) % interval != 0 for number in range(blocks)]
    return [False] * blocks


def _state_bytes(keys: _Keys) -> int:
    """Return the bytes of a layer's state (`llama_hparams::n_embd_r` and `n_embd_s`)."""
    if length := keys.optional("shortconv.l_cache"):
        return STATE_BYTES * keys.required("embedding_length") * (length - 1)
    inner, state = keys.required("ssm.inner_size"), keys.required("ssm.state_size")
    convolved = inner + 2 * (keys.optional("ssm.group_count") or 0) * state
    return STATE_BYTES * ((keys.required("ssm.conv_kernel") - 1) * convolved + inner * state)


def _expert_widths(keys: _Keys, blocks: int) -> list[int]:
    return keys.each("expert_feed_forward_length", blocks)


def _vocabulary(header: Header, keys: _Keys, tensors: Sequence[Tensor]) -> int:
    for tensor in tensors:
        if tensor.name == "token_embd.weight" and len(tensor.shape) == 2:
            return min(tensor.shape[1], MOST_ELEMENTS)
    return keys.optional("vocab_size") or header.lengths.get("tokenizer.ggml.tokens", 0)
