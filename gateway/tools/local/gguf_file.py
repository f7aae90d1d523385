"""Reads the head of a GGUF file, and finds the files of a split model.

It needs the standard library alone, so that servers can be planned without any extra.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gateway.tools.local import ModelFileError

MAGIC = b"GGUF"

MOST_KEYS = 4096  # key-value pairs; real files have some fifty

MOST_TENSORS = 1 << 17  # the largest mixtures of experts have some thousands

MOST_DIMENSIONS = 8  # of a tensor; ggml has four

MOST_STRING_BYTES = 1 << 24

DEFAULT_ALIGNMENT = 32  # bytes, unless the file has another

STRING, ARRAY = 8, 9  # value types, as the GGUF specification numbers them

VALUE_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

INTEGER_FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 10: "<Q", 11: "<q"}

TENSOR_BLOCKS = {
    kind: (elements, size)
    for elements, sizes in {
        1: {0: 4, 1: 2, 24: 1, 25: 2, 26: 4, 27: 8, 28: 8, 30: 2},
        32: {2: 18, 3: 20, 6: 22, 7: 24, 8: 34, 9: 40, 20: 18, 39: 17},
        256: {10: 84, 11: 110, 12: 144, 13: 176, 14: 210, 15: 292, 16: 66, 17: 74, 18: 98}
        | {19: 50, 21: 110, 22: 82, 23: 136, 29: 56, 34: 54, 35: 66},
    }.items()
    for kind, size in sizes.items()
}
"""Elements and bytes of a block of each tensor type, by ggml's numbers (`GGML_QUANT_SIZES`)."""

WRONG_FILES = (
    (re.compile(rb"\s*(<|\{)"), "it is a web page or an error message, not a model"),
    (re.compile(rb"version https://git-lfs"), "it is a Git LFS pointer, not the model itself"),
    (re.compile(rb"(?!GGUF)"), "it does not begin with GGUF"),
)

PART_NAME = re.compile(r"^(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model on disk."""

    path: Path  # the first part of a split model
    name: str  # its name on the servers
    size: int  # bytes of all its parts
    trained_context: int | None  # tokens; None: not in the file


class EndsEarlyError(ValueError):
    """The file ends within its head."""


@dataclass(frozen=True, slots=True)
class _Head:
    trained_context: int | None
    least_size: int  # bytes of a file with all its tensors


def read_model(path: Path, name: str | None = None) -> ModelFile:
    """Read the model at `path`. Raises ModelFileError with the file and the remedy."""
    parts = model_parts(path)
    sizes = [_size(part, len(parts)) for part in parts]
    heads = [_head(part) for part in parts]
    for part, size, head in zip(parts, sizes, heads, strict=True):
        if size < head.least_size:
            raise ModelFileError(
                f"{part}: cut short: {size:,} of at least {head.least_size:,} bytes are there; "
                "download it again, or resume the download (curl -C -)"
            )
    match = PART_NAME.match(path.name)
    return ModelFile(
        path=parts[0].absolute(),
        name=name or (match["stem"] if match else path.stem),
        size=sum(sizes),
        trained_context=heads[0].trained_context,
    )


def least_size(path: Path) -> int | None:
    """Return the bytes that a model's head asks for; None while the file ends within its head.

    Raises ModelFileError for a file that is no model, however much of it is missing.
    """
    try:
        return _head(path).least_size
    except ModelFileError as error:
        if isinstance(error.__cause__, EndsEarlyError):
            return None
        raise


def model_parts(path: Path) -> list[Path]:
    """Return all files of the model that `path` is, or is a part of, in order."""
    match = PART_NAME.match(path.name)
    if match is None:
        return [path]
    total = int(match["parts"])
    return [
        path.with_name(f"{match['stem']}-{number:05}-of-{total:05}.gguf")
        for number in range(1, total + 1)
    ]


def _size(part: Path, parts: int) -> int:
    try:
        return part.stat().st_size
    except OSError as error:
        of = f" (of {parts} files)" if parts > 1 else ""
        raise ModelFileError(f"{part}: {_why(error)}{of}") from error


def _head(path: Path) -> _Head:
    try:
        with path.open("rb") as file:
            return _read_head(file)
    except OSError as error:
        raise ModelFileError(f"{path}: {_why(error)}") from error
    except (struct.error, KeyError, OverflowError, ValueError) as error:
        raise ModelFileError(
            f"{path}: not a GGUF model, or cut short: {error}; download it again, or convert "
            "it with llama.cpp's convert_hf_to_gguf.py"
        ) from error


def _read_head(file: BinaryIO) -> _Head:
    first = file.read(32)
    for pattern, problem in WRONG_FILES:
        if pattern.match(first):
            raise ValueError(problem)
    file.seek(len(MAGIC))
    version, tensors, pairs = struct.unpack("<IQQ", _exactly(file, 20))
    if not 2 <= version <= 0xFFFF:
        raise ValueError(f"version {version} is not supported")
    if pairs > MOST_KEYS or tensors > MOST_TENSORS:
        raise ValueError(f"{pairs} keys and {tensors} tensors")
    numbers: dict[str, int] = {}
    architecture = ""
    for _ in range(pairs):
        key = _string(file)
        kind = _unpack(file, "<I")
        if key == "general.architecture" and kind == STRING:
            architecture = _string(file)
        elif kind in INTEGER_FORMATS:
            numbers[key] = _unpack(file, INTEGER_FORMATS[kind])
        else:
            _skip(file, kind)
    data = max((_tensor_end(file) for _ in range(tensors)), default=0)
    alignment = max(1, numbers.get("general.alignment", DEFAULT_ALIGNMENT))
    before = -file.tell() % alignment + file.tell()
    return _Head(numbers.get(f"{architecture}.context_length"), before + data if data else 0)


def _tensor_end(file: BinaryIO) -> int:
    """Read a tensor's head; return where its data ends, or begins if its type is unknown."""
    _string(file)
    count = _unpack(file, "<I")
    if count > MOST_DIMENSIONS:
        raise ValueError(f"a tensor of {count} dimensions")
    shape = struct.unpack(f"<{count}Q", _exactly(file, 8 * count))
    kind, offset = struct.unpack("<IQ", _exactly(file, 12))
    elements, size = TENSOR_BLOCKS.get(kind, (1, 0))
    end: int = offset + math.prod(shape) // elements * size
    return end


def _skip(file: BinaryIO, kind: int) -> None:
    if kind == STRING:
        _exactly(file, _length(file))
    elif kind == ARRAY:
        inner, count = struct.unpack("<IQ", _exactly(file, 12))
        if inner in VALUE_WIDTHS:
            file.seek(VALUE_WIDTHS[inner] * count, 1)  # may pass the end: the next read fails
        elif inner == STRING:
            for _ in range(count):
                _exactly(file, _length(file))
        else:
            raise ValueError(f"array of type {inner}")
    else:
        _exactly(file, VALUE_WIDTHS[kind])


def _string(file: BinaryIO) -> str:
    return _exactly(file, _length(file)).decode(errors="replace")


def _length(file: BinaryIO) -> int:
    length = _unpack(file, "<Q")
    if length > MOST_STRING_BYTES:
        raise ValueError(f"a string of {length} bytes")
    return length


def _unpack(file: BinaryIO, form: str) -> int:
    value: int = struct.unpack(form, _exactly(file, struct.calcsize(form)))[0]
    return value


def _exactly(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise EndsEarlyError("it ends early")
    return data


def _why(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
