from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.local.gguf import Header, Layer, Tensor, UnknownShapeError, model_shape, read_header
from tests.each_case import each_case
from tests.local.gguf_files import gguf_writer

F32 = 0


def header(architecture: str, **metadata: Any) -> Header:
    """A header whose keys belong to the architecture; `__` stands for a dot."""
    own = {f"{architecture}.{key.replace('__', '.')}": value for key, value in metadata.items()}
    return Header(
        {"general.architecture": architecture, **own}, {}, (Tensor("t", (4, 4), F32, 0),), 100
    )


def layers(architecture: str, **metadata: Any) -> tuple[Layer, ...]:
    usual = {"block_count": 4, "embedding_length": 1024, "attention__head_count": 8}
    return model_shape([header(architecture, **usual | metadata)]).layers


def test_heads_that_share_keys_keep_fewer() -> None:
    assert set(layers("llama")) == {Layer(1024, 1024)}
    assert set(layers("llama", attention__head_count_kv=2)) == {Layer(256, 256)}
    sizes = {"attention__key_length": 256, "attention__value_length": 64}
    assert set(layers("llama", attention__head_count_kv=2, **sizes)) == {Layer(512, 128)}
    found = layers("deci", attention__head_count_kv=(8, 0, 4, 8))
    assert [layer.key_width for layer in found] == [1024, 0, 512, 1024]
    assert len(layers("glm4moe", nextn_predict_layers=1)) == 3, "one layer only drafts"


def test_latent_attention_keeps_one_compressed_row() -> None:
    found = layers(
        "deepseek2",
        attention__head_count_kv=1,
        attention__key_length=576,
        attention__value_length=512,
        attention__key_length_mla=192,
        attention__value_length_mla=128,
    )
    assert set(found) == {Layer(576, 0)}
    old = layers("deepseek2", attention__key_length=192, attention__value_length=128)
    assert set(old) == {Layer(8 * 192, 8 * 128)}


@each_case(
    ("architecture", "metadata", "windows"),
    [
        ("gemma3", {"attention__sliding_window": 512}, [512] * 5 + [None] + [512] * 2),
        ("gemma3", {}, [None] * 8),
        ("gemma2", {}, [4096, None] * 4),
        ("gpt-oss", {"attention__sliding_window": 128}, [128, None] * 4),
        ("smallthinker", {}, [None, 4096, 4096, 4096] * 2),
        ("llama4", {"attention__sliding_window": 0}, [None] * 8),
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


def test_recurrent_layers_keep_a_state_in_place_of_keys() -> None:
    space = {"ssm__inner_size": 2048, "ssm__state_size": 16, "ssm__conv_kernel": 4}
    state = 4 * (3 * 2048 + 2048 * 16)
    assert set(layers("mamba", **space)) == {Layer(state_bytes=state)}
    mixed = layers("jamba", attention__head_count_kv=(0, 0, 8, 0), **space)
    assert [layer.state_bytes for layer in mixed] == [state, state, 0, state]
    assert mixed[2] == Layer(1024, 1024)
    assert set(layers("falcon-h1", **space)) == {Layer(1024, 1024, None, state)}
    every = layers("qwen35", ssm__group_count=2, **space)
    grouped = 4 * (3 * (2048 + 2 * 2 * 16) + 2048 * 16)
    assert [layer.state_bytes for layer in every] == [grouped, grouped, grouped, 0]
    short = layers("lfm2", attention__head_count_kv=(0, 8, 0, 0), shortconv__l_cache=3)
    assert [layer.state_bytes for layer in short] == [8192, 0, 8192, 8192]


@each_case(
    ("metadata", "problem"),
    [
        ({"block_count": 0}, "no llama.block_count, or 0"),
        ({"block_count": 1 << 31}, "at most 1024"),
        ({"block_count": "many"}, "llama.block_count is 'many'"),
        ({"embedding_length": 1 << 40}, "llama.embedding_length is 1099511627776"),
        ({"attention__head_count": 0}, "no llama.attention.head_count, or 0"),
        ({"attention__head_count_kv": (8, 8)}, "2 values for 4 layers"),
        ({"attention__head_count_kv": -1}, "head_count_kv is -1"),
    ],
)
def test_metadata_that_contradicts_itself_is_refused(
    metadata: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UnknownShapeError, match=problem):
        layers("llama", **metadata)


def test_what_is_not_known_is_refused() -> None:
    known = header("llama", block_count=1, embedding_length=64, attention__head_count=2)
    for one, said in (
        (header("rwkv7"), "its architecture is 'rwkv7'"),
        (Header({}, {}, (), 0), "'not named'"),
        (Header(known.metadata, {}, (), 0), "no weights"),
        (Header(known.metadata, {}, (Tensor("t", (4, 4), 77, 0),), 100), "weights of type 77"),
    ):
        with pytest.raises(UnknownShapeError, match=said):
            model_shape([one])
    mixed = {"shortconv__l_cache": 3, "attention__sliding_window": 64}
    with pytest.raises(UnknownShapeError, match="mixes windows with recurrent layers"):
        layers("lfm2", attention__head_count_kv=(0, 8, 0, 0), **mixed)


def test_every_part_of_a_split_model_counts(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with gguf_writer(path) as writer:
        writer.add_block_count(1)
        writer.add_embedding_length(64)
        writer.add_head_count(2)
        writer.add_tensor("token_embd.weight", np.zeros((10, 64), dtype=np.float32))
    part = read_header(io.BytesIO(path.read_bytes()))
    shape = model_shape([part, part])
    assert len(shape.tensors) == 2
    assert shape.vocabulary == 10
