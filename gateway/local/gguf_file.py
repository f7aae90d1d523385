"""What a GGUF file says of itself, and which files a split model is made of.

Only the head of the file is read, with nothing but the standard library: a model is planned for
before anything that needs an extra is imported.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gateway.local.errors import ModelFileError

MAGIC = b"GGUF"
KEYS_READ = 4096  # key-value pairs; real files have some fifty
STRING_BYTES = 1 << 24
STRING, ARRAY = 8, 9  # value types, as the GGUF specification numbers them
WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
INTEGERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 10: "<Q", 11: "<q"}
PART = re.compile(r"^(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class Model:
    """A model on disk."""

    path: Path  # the file that llama.cpp is given: the first part of a split model
    name: str  # what the servers call it
    size: int  # bytes of all its parts
    trained_context: int | None  # tokens; None where the file doesn't say


def read_model(path: Path, name: str | None = None) -> Model:
    """Read the model at `path`. Raises ModelFileError with the file and the remedy."""
    parts = model_parts(path)
    size = 0
    for part in parts:
        try:
            size += part.stat().st_size
        except OSError as error:
            of = f" (of {len(parts)} files)" if len(parts) > 1 else ""
            raise ModelFileError(f"{part}: {_why(error)}{of}") from error
    match = PART.match(path.name)
    return Model(
        path=parts[0].absolute(),
        name=name or (match["stem"] if match else path.stem),
        size=size,
        trained_context=_trained_context(parts[0]),
    )


def model_parts(path: Path) -> list[Path]:
    """All files of the model that `path` is, or is a part of, in order."""
    match = PART.match(path.name)
    if match is None:
        return [path]
    total = int(match["parts"])
    return [
        path.with_name(f"{match['stem']}-{number:05}-of-{total:05}.gguf")
        for number in range(1, total + 1)
    ]


def _trained_context(path: Path) -> int | None:
    try:
        with path.open("rb") as file:
            return _find_context(file)
    except OSError as error:
        raise ModelFileError(f"{path}: {_why(error)}") from error
    except (struct.error, KeyError, ValueError) as error:
        raise ModelFileError(
            f"{path}: not a GGUF model, or cut short: {error}; download it again, or convert "
            "it with llama.cpp's convert_hf_to_gguf.py"
        ) from error


def _find_context(file: BinaryIO) -> int | None:
    if file.read(4) != MAGIC:
        raise ValueError("it does not begin with GGUF")
    version, _tensors, pairs = struct.unpack("<IQQ", _exactly(file, 20))
    if not 2 <= version <= 0xFFFF:
        raise ValueError(f"version {version} is not read here")
    architecture = None
    for _ in range(min(pairs, KEYS_READ)):
        key = _string(file)
        kind = _unpack(file, "<I")
        if key == "general.architecture" and kind == STRING:
            architecture = _string(file)
        elif architecture and key == f"{architecture}.context_length" and kind in INTEGERS:
            return _unpack(file, INTEGERS[kind])
        else:
            _skip(file, kind)
    return None


def _skip(file: BinaryIO, kind: int) -> None:
    if kind == STRING:
        _exactly(file, _length(file))
    elif kind == ARRAY:
        inner, count = struct.unpack("<IQ", _exactly(file, 12))
        if inner in WIDTHS:
            file.seek(WIDTHS[inner] * count, 1)
        elif inner == STRING:
            for _ in range(count):
                _exactly(file, _length(file))
        else:
            raise ValueError(f"array of type {inner}")
    else:
        _exactly(file, WIDTHS[kind])


def _string(file: BinaryIO) -> str:
    return _exactly(file, _length(file)).decode(errors="replace")


def _length(file: BinaryIO) -> int:
    length = _unpack(file, "<Q")
    if length > STRING_BYTES:
        raise ValueError(f"a string of {length} bytes")
    return length


def _unpack(file: BinaryIO, form: str) -> int:
    value: int = struct.unpack(form, _exactly(file, struct.calcsize(form)))[0]
    return value


def _exactly(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise ValueError("it ends early")
    return data


def _why(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
