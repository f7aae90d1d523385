"""Reads the header of a GGUF file: its metadata, and the name, shape and type of each tensor.

Whatever a file claims, the reader allocates no more than it has read, and stops at limits far above
real models. It needs the standard library alone, so that it runs on hosts without the gateway.
"""

from __future__ import annotations

import math
import os
import re
import struct
from dataclasses import dataclass, field
from typing import BinaryIO

MAGIC = b"GGUF"

MOST_HEADER_BYTES = 1 << 26  # the largest vocabularies take some 15 MiB

MOST_KEYS = 4096  # key-value pairs; real files have some fifty

MOST_TENSORS = 1 << 17  # the largest mixtures of experts have some thousands

MOST_DIMENSIONS = 8  # of a tensor; ggml has four

MOST_STRING_BYTES = 1 << 24

MOST_STRINGS = 1 << 22  # in one array; the largest vocabularies have some 300,000 tokens

MOST_KEPT_ITEMS = 1024
"""Numbers of an array that is kept, such as a value for each layer; longer ones are skipped."""

DEFAULT_ALIGNMENT = 32  # bytes, unless the file has another

BOOL, STRING, ARRAY = 7, 8, 9  # value types, as the GGUF specification numbers them

VALUE_FORMATS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    BOOL: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}

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
        elements, size = TENSOR_BLOCKS.get(self.kind, (1, 0))
        return self.elements // elements * size


@dataclass(frozen=True, slots=True)
class Header:
    """What a GGUF file says of itself."""

    metadata: dict[str, Value] = field(repr=False)
    """Numbers, texts, and short arrays of numbers; other arrays are in `lengths` alone."""
    lengths: dict[str, int] = field(repr=False)  # items of each array
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
    lengths: dict[str, int] = {}
    for _ in range(pairs):
        key = reader.string()
        kind = reader.number("<I")
        if kind == ARRAY:
            lengths[key], kept = reader.array()
            if kept is not None:
                metadata[key] = kept
        elif kind == STRING:
            metadata[key] = reader.string()
        elif kind in VALUE_FORMATS:
            metadata[key] = reader.number(VALUE_FORMATS[kind])
        else:
            raise reader.error(f"a value of type {kind}")
    found = tuple(reader.tensor() for _ in range(tensors))
    return Header(metadata, lengths, found, reader.position)


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

    def array(self) -> tuple[int, tuple[bool | int | float, ...] | None]:
        """Return an array's length, and its items if they are numbers and few."""
        inner, count = struct.unpack("<IQ", self.take(12))
        if inner in VALUE_FORMATS:
            form = VALUE_FORMATS[inner]
            if count > MOST_KEPT_ITEMS:
                self._skip(count * struct.calcsize(form))
                return count, None
            items = struct.unpack(f"<{count}{form[1]}", self.take(count * struct.calcsize(form)))
            return count, items
        if inner != STRING:
            raise self.error(f"an array of type {inner}")
        if count > MOST_STRINGS:
            raise self.error(f"an array of {count} texts (at most {MOST_STRINGS})")
        for _ in range(count):
            self.take(self._length())
        return count, None

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

    def _skip(self, size: int) -> None:
        self._advance(size)
        self._file.seek(size, os.SEEK_CUR)  # may pass the end: the next read fails

    def _advance(self, size: int) -> None:
        if self.position + size > MOST_HEADER_BYTES:
            raise self.error(f"a header of more than {MOST_HEADER_BYTES >> 20} MiB")
        self.position += size
