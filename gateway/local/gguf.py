"""Reads GGUF files: header, tensors, shape of the model, and the files of a split one.

Whatever a file claims, the reader allocates no more than it has read, and stops at limits far above
real models. It needs the standard library alone, so that it runs on hosts without the gateway.

What a model keeps for each token and each slot follows llama.cpp's rules (`llama_hparams`,
`llama_model::create_memory`, and each architecture's `load_arch_hparams` in src/models), as of
November 2026. An architecture that is not listed here is refused: a guess would be worse than the
rule of thumb.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from gateway.local import LocalFleetError, ModelFileError

MAGIC = b"GGUF"
MOST_HEADER_BYTES = 1 << 26  # the largest vocabularies take some 15 MiB
MOST_KEYS = 4096  # key-value pairs; real files have some fifty
MOST_TENSORS = 1 << 17  # the largest mixtures of experts have some thousands
MOST_DIMENSIONS = 8  # of a tensor; ggml has four
MOST_STRING_BYTES = 1 << 24
MOST_STRINGS = 1 << 22  # in one array; the largest vocabularies have some 300,000 tokens
# Numbers of an array that is kept, such as a value for each layer; longer ones are skipped.
MOST_KEPT_ITEMS = 1024
DEFAULT_ALIGNMENT = 32  # bytes, unless the file has another
BOOL, STRING, ARRAY = 7, 8, 9  # value types, as the GGUF specification numbers them

VALUE_FORMATS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", BOOL: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip


class TensorType(NamedTuple):
    """A type of numbers: its name, and the numbers and bytes of a block."""

    name: str
    elements: int
    size: int


# By ggml's numbers (`GGML_QUANT_SIZES`).
TENSOR_TYPES = {
    kind: TensorType(name, elements, size)
    for elements, kinds in {
        1: {
            0: ("f32", 4), 1: ("f16", 2), 24: ("i8", 1), 25: ("i16", 2), 26: ("i32", 4),
            27: ("i64", 8), 28: ("f64", 8), 30: ("bf16", 2),
        },
        32: {
            2: ("q4_0", 18), 3: ("q4_1", 20), 6: ("q5_0", 22), 7: ("q5_1", 24), 8: ("q8_0", 34),
            9: ("q8_1", 40), 20: ("iq4_nl", 18), 39: ("mxfp4", 17),
        },
        256: {
            10: ("q2_k", 84), 11: ("q3_k", 110), 12: ("q4_k", 144), 13: ("q5_k", 176),
            14: ("q6_k", 210), 15: ("q8_k", 292), 16: ("iq2_xxs", 66), 17: ("iq2_xs", 74),
            18: ("iq3_xxs", 98), 19: ("iq1_s", 50), 21: ("iq3_s", 110), 22: ("iq2_s", 82),
            23: ("iq4_xs", 136), 29: ("iq1_m", 56), 34: ("tq1_0", 54), 35: ("tq2_0", 66),
        },
    }.items()
    for kind, (name, size) in kinds.items()
}  # fmt: skip
TYPE_NUMBERS = {one.name: kind for kind, one in TENSOR_TYPES.items()}

WRONG_FILES = (
    (re.compile(rb"\s*(<|\{)"), "it is a web page or an error message, not a model"),
    (re.compile(rb"version https://git-lfs"), "it is a Git LFS pointer, not the model itself"),
    (re.compile(rb"(?!GGUF)"), "it does not begin with GGUF"),
)

Value = bool | int | float | str | tuple[bool | int | float, ...]


class HeaderError(ValueError):
    """The file is no GGUF file, or not a sound one. The text names the byte where that shows."""


class EndsEarlyError(HeaderError):
    """The file ends within its header."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor's head. Its shape is in ggml's order: the length of a row first."""

    name: str
    shape: tuple[int, ...]
    kind: int  # ggml's number of its type
    offset: int  # bytes behind the beginning of the data

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Its bytes; 0 for an unknown type."""
        _, elements, size = TENSOR_TYPES.get(self.kind, ("", 1, 0))
        return self.elements // elements * size

    @property
    def type_name(self) -> str:
        """The name of its type, or the number of an unknown one."""
        known = TENSOR_TYPES.get(self.kind)
        return f"type {self.kind}" if known is None else known.name


@dataclass(frozen=True, slots=True)
class Header:
    """What a GGUF file says of itself."""

    metadata: dict[str, Value] = field(repr=False)
    """Numbers, texts, and short arrays of numbers."""
    tensors: tuple[Tensor, ...] = field(repr=False)
    size: int  # bytes of the header itself

    @property
    def architecture(self) -> str:
        """The model's architecture by llama.cpp's name; empty if the file has none."""
        found = self.metadata.get("general.architecture")
        return found if isinstance(found, str) else ""

    def number(self, key: str) -> int | None:
        """Return an integer of the metadata; None where there is none, or no integer."""
        found = self.metadata.get(key)
        return found if isinstance(found, int) and not isinstance(found, bool) else None

    @property
    def least_size(self) -> int:
        """Bytes of a file with all its tensors."""
        ends = (tensor.offset + tensor.size for tensor in self.tensors)
        if not (data := max(ends, default=0)):
            return 0
        alignment = max(1, self.number("general.alignment") or DEFAULT_ALIGNMENT)
        return -self.size % alignment + self.size + data


def read_header(file: BinaryIO) -> Header:
    """Read the header. Raises HeaderError with the offset, and OSError."""
    first = file.read(32)
    for pattern, problem in WRONG_FILES:
        if pattern.match(first):
            raise HeaderError(problem)
    file.seek(len(MAGIC))
    reader = _Reader(file)
    version, tensors, pairs = struct.unpack("<IQQ", reader.take(20))
    if not 2 <= version <= 0xFFFF:
        raise reader.error(f"version {version} is not supported")
    if pairs > MOST_KEYS or tensors > MOST_TENSORS:
        raise reader.error(
            f"{pairs} keys and {tensors} tensors (at most {MOST_KEYS} and {MOST_TENSORS})"
        )
    metadata: dict[str, Value] = {}
    for _ in range(pairs):
        key = reader.string()
        kind = reader.number("<I")
        if kind == ARRAY:
            if (kept := reader.array()) is not None:
                metadata[key] = kept
        elif kind == STRING:
            metadata[key] = reader.string()
        elif kind in VALUE_FORMATS:
            metadata[key] = reader.number(VALUE_FORMATS[kind])
        else:
            raise reader.error(f"a value of type {kind}")
    found = tuple(reader.tensor() for _ in range(tensors))
    return Header(metadata, found, reader.position)


class _Reader:
    """Reads values one after the other, within `MOST_HEADER_BYTES`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.position = file.tell()

    def error(self, problem: str) -> HeaderError:
        return HeaderError(f"{problem}, at byte {self.position:,}")

    def take(self, size: int) -> bytes:
        self._advance(size)
        data = self._file.read(size)
        if len(data) != size:
            self.position += len(data) - size
            raise EndsEarlyError(f"it ends early, at byte {self.position:,}")
        return data

    def number(self, form: str) -> int:
        value: int = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return value

    def string(self) -> str:
        return self.take(self._length()).decode(errors="replace")

    def array(self) -> tuple[bool | int | float, ...] | None:
        """Return an array's items if they are numbers and few."""
        inner, count = struct.unpack("<IQ", self.take(12))
        if inner in VALUE_FORMATS:
            form = VALUE_FORMATS[inner]
            size = count * struct.calcsize(form)
            if count <= MOST_KEPT_ITEMS:
                return struct.unpack(f"<{count}{form[1]}", self.take(size))
            self._advance(size)
            self._file.seek(size, os.SEEK_CUR)  # may pass the end: the next read fails
        elif inner != STRING or count > MOST_STRINGS:
            raise self.error(f"an array of {count} values of type {inner}")
        else:
            for _ in range(count):
                self.take(self._length())
        return None

    def tensor(self) -> Tensor:
        name = self.string()
        count = self.number("<I")
        if count > MOST_DIMENSIONS:
            raise self.error(f"a tensor of {count} dimensions (at most {MOST_DIMENSIONS})")
        shape = struct.unpack(f"<{count}Q", self.take(8 * count))
        kind, offset = struct.unpack("<IQ", self.take(12))
        return Tensor(name, shape, kind, offset)

    def _length(self) -> int:
        length = self.number("<Q")
        if length > MOST_STRING_BYTES:
            raise self.error(f"a text of {length} bytes (at most {MOST_STRING_BYTES})")
        return length

    def _advance(self, size: int) -> None:
        if self.position + size > MOST_HEADER_BYTES:
            raise self.error(f"a header of more than {MOST_HEADER_BYTES >> 20} MiB")
        self.position += size


FULL_ATTENTION_NAMES = """
    llama deci mistral3 qwen qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3vl qwen3vlmoe phi2 phi3
    phimoe gemma starcoder starcoder2 gptneox gpt2 mpt baichuan refact bloom falcon grok stablelm
    codeshell orion internlm2 minicpm xverse command-r dbrx olmo olmoe arctic deepseek chatglm glm4
    glm4moe bitnet nemotron exaone granite granitemoe bailingmoe bailingmoe2 dots1 arcee ernie4_5
    ernie4_5-moe hunyuan-moe hunyuan-dense smollm3 seed_oss grovemoe apertus minimax-m2
    pangu-embedded
"""

# Architectures that keep keys and values of every token in every layer.
FULL_ATTENTION = frozenset(FULL_ATTENTION_NAMES.split())
# Multi-head latent attention: one compressed row for a token and a layer, and no values.
COMPRESSED_ATTENTION = frozenset({"deepseek2"})


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

# Every layer keeps a state of fixed size, and no keys and values.
STATE_SPACES = frozenset({"mamba", "mamba2"})
# Layers without key heads keep a state of fixed size.
HYBRIDS = frozenset({"jamba", "granitehybrid", "lfm2", "lfm2moe"})
# Every layer but each fourth (or as the metadata says) keeps a state of fixed size.
INTERVAL_HYBRIDS = frozenset({"qwen3next", "qwen35", "qwen35moe"})
PARALLEL_HYBRIDS = frozenset({"falcon-h1"})  # every layer keeps both
ARCHITECTURES = frozenset().union(
    *(FULL_ATTENTION, COMPRESSED_ATTENTION, SLIDING_WINDOWS, STATE_SPACES),
    *(HYBRIDS, INTERVAL_HYBRIDS, PARALLEL_HYBRIDS),
)
STATE_BYTES = 4  # of an element: states are F32
MOST_LAYERS = 1024  # llama.cpp's LLAMA_MAX_LAYERS is 512
MOST_ELEMENTS = 1 << 32  # a width, a context or another size beyond this is a lie


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
    def size(self) -> int:
        """Bytes of its weights."""
        return sum(tensor.size for tensor in self.tensors)


def model_shape(headers: Sequence[Header]) -> ModelShape:
    """Return the shape of the model in these files. Raises UnknownShapeError."""
    keys = _Keys(headers[0])
    tensors = tuple(tensor for header in headers for tensor in header.tensors)
    if not tensors:
        raise UnknownShapeError("it holds no weights")
    if strange := sorted({t.kind for t in tensors if t.kind not in TENSOR_TYPES}):
        raise UnknownShapeError(
            f"it has weights of type {strange[0]}, whose size is not known here"
        )
    blocks = keys.required("block_count")
    if blocks > MOST_LAYERS:
        raise UnknownShapeError(f"{keys.name('block_count')} is {blocks} (at most {MOST_LAYERS})")
    layers = tuple(_layers(keys, blocks))
    widths = ("feed_forward_length", "expert_feed_forward_length")
    shapes = (one.shape for one in tensors if one.name == "token_embd.weight")
    told = keys.optional("vocab_size") or 0
    vocabulary = next((shape[1] for shape in shapes if len(shape) == 2), told)
    return ModelShape(
        architecture=keys.architecture,
        width=keys.required("embedding_length"),
        heads=max(keys.each("attention.head_count", blocks)),
        feed_forward=max(width for key in widths for width in keys.each(key, blocks)),
        vocabulary=min(vocabulary, MOST_ELEMENTS),
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
        if self.architecture not in ARCHITECTURES:
            raise UnknownShapeError(
                f"its architecture is {self.architecture or 'not named'!r}, whose memory is not "
                "known here"
            )

    def name(self, key: str) -> str:
        """Return the whole name of a key."""
        return f"{self.architecture}.{key}"

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

    def each(self, key: str, layers: int, missing: list[int] | None = None) -> list[int]:
        """Return a number for each layer; where there is none `missing`, else 0 for each."""
        found = self._metadata.get(self.name(key))
        if found is None:
            return missing or [0] * layers
        if not isinstance(found, tuple):
            return [self._checked(key, found)] * layers
        if len(found) < layers:
            raise UnknownShapeError(f"{self.name(key)} has {len(found)} values for {layers} layers")
        return [self._checked(key, one) for one in found[:layers]]

    def flags(self, key: str, layers: int) -> list[bool] | None:
        """Return a truth value for each layer; None where the key is no array."""
        is_array = isinstance(self._metadata.get(self.name(key)), tuple)
        return [bool(one) for one in self.each(key, layers)] if is_array else None

    def _checked(self, key: str, found: object) -> int:
        if not isinstance(found, int) or not 0 <= found < MOST_ELEMENTS:
            raise UnknownShapeError(f"{self.name(key)} is {found!r}")
        return int(found)


def _layers(keys: _Keys, blocks: int) -> list[Layer]:
    if keys.architecture in STATE_SPACES:
        return [Layer(state_bytes=_state_bytes(keys))] * blocks
    layers = _attention(keys, blocks)
    recurrent = [False] * blocks
    if keys.architecture in PARALLEL_HYBRIDS:
        layers = [replace(layer, state_bytes=_state_bytes(keys)) for layer in layers]
    elif keys.architecture in HYBRIDS:
        recurrent = [not count for count in keys.each("attention.head_count_kv", blocks)]
    elif keys.architecture in INTERVAL_HYBRIDS:
        told = keys.flags("attention.recurrent_layers", blocks)
        interval = keys.optional("full_attention_interval") or 4
        recurrent = told or [(number + 1) % interval != 0 for number in range(blocks)]
    trained = blocks - (keys.optional("nextn_predict_layers") or 0)  # the others draft, if at all
    return [
        Layer(state_bytes=_state_bytes(keys)) if recurrent[number] else layers[number]
        for number in range(trained)
    ]


def _attention(keys: _Keys, blocks: int) -> list[Layer]:
    heads = keys.each("attention.head_count", blocks)
    if not (first := max(heads)):
        raise UnknownShapeError(f"it has no {keys.name('attention.head_count')}, or 0")
    # Without the key there are as many key heads as heads.
    kv_heads = keys.each("attention.head_count_kv", blocks, heads)
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


def _state_bytes(keys: _Keys) -> int:
    """Return the bytes of a layer's state (`llama_hparams::n_embd_r` and `n_embd_s`)."""
    if length := keys.optional("shortconv.l_cache"):
        return STATE_BYTES * keys.required("embedding_length") * (length - 1)
    inner, state = keys.required("ssm.inner_size"), keys.required("ssm.state_size")
    convolved = inner + 2 * (keys.optional("ssm.group_count") or 0) * state
    return STATE_BYTES * ((keys.required("ssm.conv_kernel") - 1) * convolved + inner * state)


PART_NAME = re.compile(r"^(?P<stem>.+)-\d{5}-of-(?P<parts>\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model on disk."""

    path: Path  # the first part of a split model
    name: str  # its name on the servers
    size: int  # bytes of all its parts
    trained_context: int | None  # tokens; None: not in the file
    shape: ModelShape | None = None  # None: not known, by its architecture or before a download
    has_pooling: bool = False  # its head says how its embeddings are made
    kind: Literal["model", "projector", "adapter"] = "model"  # by its head; one of images, of LoRA


def read_model(path: Path, name: str | None = None) -> ModelFile:
    """Read the model at `path`. Raises ModelFileError with the file and the remedy."""
    parts = model_parts(path)
    try:
        sizes = [part.stat().st_size for part in parts]
    except OSError as error:
        of = f" (of {len(parts)} files)" if len(parts) > 1 else ""
        raise ModelFileError(f"{error.filename}: {_why(error)}{of}") from error
    heads = [file_header(part) for part in parts]
    for part, size, head in zip(parts, sizes, heads, strict=True):
        if size < head.least_size:
            raise ModelFileError(
                f"{part}: cut short: {size:,} of at least {head.least_size:,} bytes are there; "
                "download it again, or resume the download (curl -C -)"
            )
    shape, head = None, heads[0]
    with suppress(UnknownShapeError):
        shape = model_shape(heads)
    is_adapter = shape is None and head.metadata.get("general.type") == "adapter"
    match = PART_NAME.match(path.name)
    return ModelFile(
        path=parts[0].absolute(),
        name=name or (match["stem"] if match else path.stem),
        size=sum(sizes),
        trained_context=head.number(f"{head.architecture}.context_length"),
        has_pooling=bool(head.number(f"{head.architecture}.pooling_type")),
        kind="projector" if head.architecture == "clip" else "adapter" if is_adapter else "model",
        shape=shape,
    )


def least_size(path: Path) -> int | None:
    """Return the bytes that a model's head asks for; None while the file ends within its head.

    Raises ModelFileError for a file that is no model, however much of it is missing.
    """
    try:
        return file_header(path).least_size
    except ModelFileError as error:
        if isinstance(error.__cause__, EndsEarlyError):
            return None
        raise


def part_names(name: str) -> list[str]:
    """Return the names of all files of the model of which this is one, in order; of 0: none."""
    match = PART_NAME.match(name)
    if match is None:
        return [name]
    numbers = range(1, int(match["parts"]) + 1)
    return [f"{match['stem']}-{number:05}-of-{match['parts']}.gguf" for number in numbers]


def model_parts(path: Path) -> list[Path]:
    """Return all files of the model that `path` is, or is a part of, in order."""
    return [path.with_name(name) for name in part_names(path.name)] or [path]


def file_header(path: Path) -> Header:
    """Read the header of a file of a model. Raises ModelFileError."""
    try:
        with path.open("rb") as file:
            return read_header(file)
    except OSError as error:
        raise ModelFileError(f"{path}: {_why(error)}") from error
    except HeaderError as error:
        raise ModelFileError(
            f"{path}: not a GGUF model, or cut short: {error}; download it again, or convert "
            "it with llama.cpp's convert_hf_to_gguf.py"
        ) from error


def _why(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
