from __future__ import annotations

import io
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.local import ModelFileError
from gateway.local.embedded import KV_TYPES
from gateway.local.gguf import (
    MOST_KEPT_ITEMS,
    MOST_STRING_BYTES,
    MOST_STRINGS,
    TENSOR_TYPES,
    TYPE_NUMBERS,
    EndsEarlyError,
    Header,
    HeaderError,
    Layer,
    Tensor,
    UnknownShapeError,
    model_parts,
    model_shape,
    read_header,
    read_model,
)
from tests.each_case import each_case
from tests.local.gguf_files import gguf_writer

PADDING = 8  # bytes behind the last tensor that `write_gguf` writes


def write_gguf(path: Path) -> Path:
    with gguf_writer(path) as writer:
        writer.add_name("a name")
        writer.add_head_count_kv([8, 4, 8])
        writer.add_array("some.numbers", list(range(MOST_KEPT_ITEMS + 1)))
        writer.add_token_list(["a", "b", "c"])
        writer.add_bool("some.flag", val=True)
        writer.add_context_length(32_768)
        writer.add_tensor("t", np.zeros((2, 3), dtype=np.float32))
    return path


def test_size_names_tensors_and_short_metadata_are_read(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "mistral-7b.gguf")
    model = read_model(path)
    assert (model.name, model.trained_context) == ("mistral-7b", 32_768)
    assert read_model(path, "other").name == "other"
    with path.open("rb") as file:
        header = read_header(file)
    assert header.architecture == "llama"
    assert header.metadata["general.name"] == "a name"
    assert header.metadata["llama.attention.head_count_kv"] == (8, 4, 8)
    assert header.metadata["some.flag"] is True
    assert header.number("some.flag") is None
    assert [(one.name, one.shape, one.size) for one in header.tensors] == [("t", (3, 2), 24)]
    assert header.metadata.keys().isdisjoint({"some.numbers", "tokenizer.ggml.tokens"})
    for size in (30, 60, 200):
        with pytest.raises(EndsEarlyError, match=f"it ends early, at byte {size}$"):
            read(path.read_bytes()[:size])
    needed = model.size - PADDING
    os.truncate(path, needed)
    assert read_model(path).size == needed
    os.truncate(path, needed - 1)
    with pytest.raises(ModelFileError, match=f"{needed - 1:,} of at least {needed:,}.*curl -C -"):
        read_model(path)


def test_all_parts_of_a_split_model_count_whichever_is_named(tmp_path: Path) -> None:
    parts = [write_gguf(tmp_path / f"big-0000{part}-of-00003.gguf") for part in (1, 2, 3)]
    first = parts[0]
    model = read_model(parts[1])
    assert model.path == first
    assert model.name == "big"
    assert model.size == 3 * first.stat().st_size
    assert len(model_parts(first)) == 3
    path = write_gguf(tmp_path / "big-00001-of-00000.gguf")
    assert (model_parts(path), read_model(path).name) == ([path], "big"), "it tells of no parts"


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "big-00001-of-00002.gguf")
    for path, said in (
        (first, r"big-00002-of-00002\.gguf: no such file"),
        (tmp_path / "gone.gguf", r"gone\.gguf: no such file"),
        (tmp_path, "is a directory"),
    ):
        with pytest.raises(ModelFileError, match=said):
            read_model(path)
    second = write_gguf(tmp_path / "big-00002-of-00002.gguf")
    os.truncate(second, second.stat().st_size - 20)
    with pytest.raises(ModelFileError, match=r"big-00002-of-00002\.gguf: cut short"):
        read_model(first)


@given(st.binary(max_size=200))
def test_other_files_are_refused_with_a_remedy(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match="not a GGUF model"):
        read_model(path)


@each_case(
    ("held", "message"),
    [
        ("<!DOCTYPE html><html>404</html>", "web page"),
        ('{"error": "Repository not found"}', "error message"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        ("PK\3\4", "does not begin with GGUF"),
    ],
)
def test_another_file_in_place_of_a_model_is_named(tmp_path: Path, held: str, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_text(held)
    with pytest.raises(ModelFileError, match=message):
        read_model(path)


# Headers.


STRING, ARRAY, UINT8, UINT32 = 8, 9, 0, 4


def head(pairs: int = 0, tensors: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def read(data: bytes) -> object:
    return read_header(io.BytesIO(data))


KEY = head(1) + text(b"k")


@each_case(
    ("data", "problem"),
    [
        (head(version=1), "version 1 is not supported, at byte 24"),
        (head(pairs=1 << 40), "keys and 0 tensors"),
        (head(tensors=1 << 40), "1099511627776 tensors"),
        (head(1) + struct.pack("<Q", MOST_STRING_BYTES + 1), "a text of 16777217 bytes"),
        (KEY + struct.pack("<I", 77), "a value of type 77, at byte 37"),
        (KEY + struct.pack("<IIQ", ARRAY, ARRAY, 1), "an array of 1 values of type 9"),
        (KEY + struct.pack("<IIQ", ARRAY, STRING, MOST_STRINGS + 1), "an array of 4194305 values"),
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


def test_the_types_of_tensors_are_those_of_ggml() -> None:
    for number, known in TENSOR_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert known == (kind.name.lower(), *gguf.GGML_QUANT_SIZES[kind])
    assert TYPE_NUMBERS.keys() >= set(KV_TYPES)


# Shapes.


F32 = 0


def header(architecture: str, **metadata: Any) -> Header:
    """A header whose keys belong to the architecture; `__` stands for a dot."""
    own = {f"{architecture}.{key.replace('__', '.')}": value for key, value in metadata.items()}
    return Header(
        {"general.architecture": architecture, **own}, (Tensor("t", (4, 4), F32, 0),), 100
    )


def layers(architecture: str, **metadata: Any) -> tuple[Layer, ...]:
    usual = {"block_count": 4, "embedding_length": 1024, "attention__head_count": 8}
    return model_shape([header(architecture, **usual | metadata)]).layers


HEADS_2 = {"attention__head_count_kv": 2}
SIZES = {"attention__key_length": 256, "attention__value_length": 64}
MLA = SIZES | {"attention__key_length_mla": 192, "attention__value_length_mla": 128}
SPACE = {"ssm__inner_size": 2048, "ssm__state_size": 16, "ssm__conv_kernel": 4}
STATE = Layer(state_bytes=4 * (3 * 2048 + 2048 * 16))
GROUPED = Layer(state_bytes=4 * (3 * (2048 + 2 * 2 * 16) + 2048 * 16))
FULL, SHORT = Layer(1024, 1024), Layer(state_bytes=8192)


@each_case(
    ("architecture", "metadata", "found"),
    [
        ("llama", {}, [FULL] * 4),
        ("llama", HEADS_2, [Layer(256, 256)] * 4),
        ("llama", HEADS_2 | SIZES, [Layer(512, 128)] * 4),
        ("glm4moe", {"nextn_predict_layers": 1}, [FULL] * 3),  # one layer only drafts
        # Latent attention keeps one compressed row.
        ("deepseek2", MLA | {"attention__head_count_kv": 1}, [Layer(256, 0)] * 4),
        ("deepseek2", SIZES, [Layer(8 * 256, 8 * 64)] * 4),
        # Recurrent layers keep a state in place of keys.
        ("mamba", SPACE, [STATE] * 4),
        ("jamba", SPACE | {"attention__head_count_kv": (0, 0, 8, 0)}, [STATE, STATE, FULL, STATE]),
        ("falcon-h1", SPACE, [replace(FULL, state_bytes=STATE.state_bytes)] * 4),
        ("qwen35", SPACE | {"ssm__group_count": 2}, [GROUPED, GROUPED, GROUPED, FULL]),
        (
            "lfm2",
            {"attention__head_count_kv": (0, 8, 0, 0), "shortconv__l_cache": 3},
            [SHORT, FULL, SHORT, SHORT],
        ),
    ],
)
def test_what_a_layer_keeps_of_a_token_or_in_all(
    architecture: str, metadata: dict[str, Any], found: list[Layer]
) -> None:
    assert list(layers(architecture, **metadata)) == found


@each_case(
    ("architecture", "metadata", "windows"),
    [
        ("gemma3", {"attention__sliding_window": 512}, [512] * 5 + [None] + [512] * 2),
        ("gemma2", {}, [4096, None] * 4),
        ("gpt-oss", {"attention__sliding_window": 128}, [128, None] * 4),
        ("smallthinker", {}, [None, 4096, 4096, 4096] * 2),
        ("llama4", {"attention__sliding_window": 99}, [8192, 8192, 8192, None] * 2),
        ("exaone4", {"attention__sliding_window": 4096}, [None] * 8),  # only its 64 layers slide
        (
            "gemma3",
            {"attention__sliding_window": 64, "attention__sliding_window_pattern": 2},
            [64, None] * 4,
        ),
        (
            "gemma3",
            {"attention__sliding_window": 64, "attention__sliding_window_pattern": (True,) * 8},
            [64] * 8,
        ),
    ],
)
def test_layers_with_a_window(
    architecture: str, metadata: dict[str, Any], windows: list[int | None]
) -> None:
    found = layers(architecture, **{"block_count": 8, **metadata})
    assert [layer.window for layer in found] == windows


@each_case(
    ("metadata", "problem"),
    [
        ({"block_count": 0}, "no llama.block_count, or 0"),
        ({"block_count": 1 << 31}, "at most 1024"),
        ({"embedding_length": 1 << 40}, "llama.embedding_length is 1099511627776"),
        ({"attention__head_count_kv": (8, 8)}, "2 values for 4 layers"),
        ({"attention__head_count_kv": -1}, "head_count_kv is -1"),
    ],
)
def test_metadata_that_contradicts_itself_is_refused(
    metadata: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UnknownShapeError, match=problem):
        layers("llama", **metadata)
