"""A model on disk: its size, whether it is whole, and the files of a split one.

It needs the standard library alone, so that servers can be planned without any extra.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from gateway.tools.local import ModelFileError
from gateway.tools.local.gguf_header import EndsEarlyError, Header, HeaderError, read_header
from gateway.tools.local.model_shape import ModelShape, UnknownShapeError, model_shape

PART_NAME = re.compile(r"^(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model on disk."""

    path: Path  # the first part of a split model
    name: str  # its name on the servers
    size: int  # bytes of all its parts
    trained_context: int | None  # tokens; None: not in the file
    shape: ModelShape | None = None  # None: not known, by its architecture or before a download
    has_pooling: bool = False  # its head says how its embeddings are made


def read_model(path: Path, name: str | None = None) -> ModelFile:
    """Read the model at `path`. Raises ModelFileError with the file and the remedy."""
    parts = model_parts(path)
    sizes = [_size(part, len(parts)) for part in parts]
    heads = read_headers(parts)
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
        trained_context=heads[0].number(f"{heads[0].architecture}.context_length"),
        has_pooling=bool(heads[0].number(f"{heads[0].architecture}.pooling_type")),
        shape=_shape(heads),
    )


def least_size(path: Path) -> int | None:
    """Return the bytes that a model's head asks for; None while the file ends within its head.

    Raises ModelFileError for a file that is no model, however much of it is missing.
    """
    try:
        return _header(path).least_size
    except ModelFileError as error:
        if isinstance(error.__cause__, EndsEarlyError):
            return None
        raise


def read_headers(parts: list[Path]) -> list[Header]:
    """Read the header of each file of a model. Raises ModelFileError."""
    return [_header(part) for part in parts]


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


def _shape(headers: list[Header]) -> ModelShape | None:
    try:
        return model_shape(headers)
    except UnknownShapeError:
        return None


def _header(path: Path) -> Header:
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
