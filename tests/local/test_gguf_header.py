from __future__ import annotations

import io
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.local.embedded import KV_TYPES
from gateway.local.gguf import (
    MOST_KEPT_ITEMS,
    MOST_STRING_BYTES,
    MOST_STRINGS,
    TENSOR_TYPES,
    TYPE_NUMBERS,
    EndsEarlyError,
    HeaderError,
    read_header,
)
from tests.each_case import each_case
from tests.local.gguf_files import gguf_writer

STRING, ARRAY, UINT8, UINT32 = 8, 9, 0, 4


def head(pairs: int = 0, tensors: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def read(data: bytes) -> object:
    return read_header(io.BytesIO(data))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    with gguf_writer(path) as writer:
        writer.add_name("a name")
        writer.add_head_count_kv([8, 4, 8])
        writer.add_array("some.numbers", list(range(MOST_KEPT_ITEMS + 1)))
        writer.add_token_list(["a", "b", "c"])
        writer.add_bool("some.flag", val=True)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tensor("t", np.zeros((2, 3), dtype=np.float32))
    return path


def test_metadata_and_tensors_are_read(written: Path) -> None:
    with written.open("rb") as file:
        header = read_header(file)
    assert header.architecture == "llama"
    assert header.metadata["general.name"] == "a name"
    assert header.metadata["llama.attention.head_count_kv"] == (8, 4, 8)
    assert header.metadata["some.flag"] is True
    assert header.metadata["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    assert header.number("some.flag") is None
    (tensor,) = header.tensors
    assert (tensor.name, tensor.shape, tensor.size) == ("t", (3, 2), 24)
    # Long arrays and texts are counted and not kept.
    assert header.lengths["some.numbers"] == MOST_KEPT_ITEMS + 1
    assert header.lengths["tokenizer.ggml.tokens"] == 3
    assert header.metadata.keys().isdisjoint({"some.numbers", "tokenizer.ggml.tokens"})


def test_a_header_that_ends_early_names_the_byte(written: Path) -> None:
    whole = written.read_bytes()
    for size in (30, 60, 200):
        with pytest.raises(EndsEarlyError, match=f"it ends early, at byte {size}$"):
            read(whole[:size])


KEY = head(1) + text(b"k")


@each_case(
    ("data", "problem"),
    [
        (head(version=1), "version 1 is not supported, at byte 24"),
        (head(pairs=1 << 40), "keys and 0 tensors"),
        (head(tensors=1 << 40), "1099511627776 tensors"),
        (head(1) + struct.pack("<Q", MOST_STRING_BYTES + 1), "a text of 16777217 bytes"),
        (KEY + struct.pack("<I", 77), "a value of type 77, at byte 37"),
        (KEY + struct.pack("<IIQ", ARRAY, ARRAY, 1), "an array of type 9"),
        (KEY + struct.pack("<IIQ", ARRAY, STRING, MOST_STRINGS + 1), "an array of 4194305 texts"),
        (KEY + struct.pack("<IIQ", ARRAY, UINT8, 1 << 62), "more than 64 MiB"),
        (KEY + struct.pack("<IIQ", ARRAY, UINT32, MOST_KEPT_ITEMS + 1), "it ends early"),
        (head(tensors=1) + text(b"t") + struct.pack("<I", 9), "a tensor of 9 dimensions"),
    ],
)  # fmt: skip
def test_a_lying_header_is_refused_before_anything_is_allocated(data: bytes, problem: str) -> None:
    if "ends early" in problem:  # the array is skipped: the next key is missing
        data = data.replace(head(1), head(2))
    with pytest.raises(HeaderError, match=problem):
        read(data)


@pytest.mark.slow
def test_the_longest_array_of_empty_texts_takes_seconds_at_most(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    begin = head(1) + text(b"k") + struct.pack("<IIQ", ARRAY, STRING, MOST_STRINGS)
    path.write_bytes(begin)
    with path.open("r+b") as file:
        file.truncate(1 << 30)  # a hole: every text is empty
    began = time.process_time()
    with path.open("rb") as file:
        assert read_header(file).lengths == {"k": MOST_STRINGS}
    assert time.process_time() - began < 60


@given(st.binary(max_size=400))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        read(b"GGUF" + data)
    except HeaderError:
        return


def test_the_types_of_tensors_are_those_of_ggml() -> None:
    for number, known in TENSOR_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert known == (kind.name.lower(), *gguf.GGML_QUANT_SIZES[kind])
    assert TYPE_NUMBERS.keys() >= set(KV_TYPES)
