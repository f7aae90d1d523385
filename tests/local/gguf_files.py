"""Writes GGUF files by llama.cpp's own package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf


@contextmanager
def gguf_writer(path: Path, architecture: str = "llama") -> Iterator[gguf.GGUFWriter]:
    """A writer of the file, which is whole behind the context."""
    writer = gguf.GGUFWriter(path, architecture)
    yield writer
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
