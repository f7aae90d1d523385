from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from gateway.local.gguf import ModelShape, UnknownShapeError, read_model
from gateway.local.memory import (
    MIB,
    MOST_CHECKPOINTS,
    ServerSettings,
    compute_bytes,
    repacked_types,
    server_memory,
    weights_by_type,
)
from tests.each_case import each_case
from tests.known import known
from tests.workshop.fit.random_models import Recipe, write

BASE = Recipe("base", layers=2, width=512, heads=8, kv_heads=8, feed_forward=1408)
ONE = ServerSettings(slots=1, context=4096)
AVX2 = repacked_types({"avx2"})


def shape(folder: Path, **changes: object) -> ModelShape:
    return known(read_model(write(replace(BASE, **changes), folder, hollow=True)).shape)  # type: ignore[arg-type]


@each_case(
    ("changes", "settings", "mib"),
    [  # as the server logs it: "CPU KV buffer size"
        ({}, ONE, 16),
        ({}, replace(ONE, slots=4), 64),
        ({}, replace(ONE, context=16_384), 64),
        ({}, replace(ONE, key_type="f32", value_type="f32"), 32),
        ({"kv_heads": 2}, ONE, 4),
        ({"head_size": 128}, ONE, 32),
        ({"architecture": "gemma3", "window": 512, "layers": 6}, ONE, 8 + 7.5),
        ({"architecture": "gemma3", "window": 512, "layers": 6}, replace(ONE, slots=4), 32 + 30),
        ({"architecture": "lfm2", "layers": 6, "attention_every": 3}, ONE, 16),
    ],
)
def test_the_kv_cache_is_that_which_the_server_logs(
    tmp_path: Path, changes: dict[str, object], settings: ServerSettings, mib: float
) -> None:
    assert server_memory(shape(tmp_path, **changes), settings).kv_cache == mib * MIB


@each_case(
    ("changes", "settings", "logged", "over"),
    [  # "CPU compute buffer size"; a narrow block is told too high
        ({}, ONE, 8.63, 0.01),
        ({}, replace(ONE, slots=4), 8.63, 0.01),
        ({}, replace(ONE, context=16_384), 14.63, 0.01),
        ({}, replace(ONE, micro_batch=512), 17.27, 0.01),
        ({"feed_forward": 2816}, ONE, 12.76, 0.01),
        ({"experts": 8, "experts_used": 2}, ONE, 12.76, 0.01),
        ({"experts": 16, "experts_used": 4}, ONE, 21.01, 0.01),
        ({"width": 4096, "heads": 32, "kv_heads": 8, "feed_forward": 14_336}, ONE, 64.01, 0.01),
        ({"width": 1024, "heads": 16, "kv_heads": 16}, ONE, 9.76, 0.25),
        ({"architecture": "gemma3", "window": 512, "layers": 6}, ONE, 9.01, 0.01),
    ],
)
def test_the_compute_buffer_is_that_which_the_server_logs(
    tmp_path: Path, changes: dict[str, object], settings: ServerSettings, logged: float, over: float
) -> None:
    found = shape(tmp_path, **changes)
    told = compute_bytes(found, settings)
    work = 2 * settings.micro_batch * max(found.feed_forward, found.width)
    told -= work + 8 * settings.slots * (found.vocabulary + found.width)
    assert logged * 0.99 <= told / MIB <= logged * (1 + over) + 0.1


def test_copied_weights_count_twice_as_resident_and_once_as_needed(tmp_path: Path) -> None:
    found = shape(tmp_path, weights=Type.Q4_0)
    sizes = weights_by_type(found)
    assert list(sizes) == ["q4_0", "f32"]
    assert sum(sizes.values()) == server_memory(found, ONE).weights
    kept = server_memory(found, replace(ONE, prompt_cache_bytes=MIB))
    assert kept.needed == server_memory(found, ONE).needed + MIB
    mapped = server_memory(found, replace(ONE, repacked=AVX2))
    embedding = next(t.size for t in found.tensors if t.name == "token_embd.weight")
    assert mapped.mapped_twice == sizes["q4_0"] - embedding
    assert mapped.resident == mapped.needed + mapped.mapped_twice
    apart = server_memory(found, replace(ONE, repacked=AVX2, mapped=False))
    assert apart.resident == apart.needed == mapped.needed


def test_weights_that_a_processor_takes_as_they_are_count_once(tmp_path: Path) -> None:
    found = shape(tmp_path, weights=Type.Q8_0)
    assert server_memory(found, replace(ONE, repacked=AVX2)).mapped_twice == 0
    graviton = repacked_types({"asimd", "asimddp", "i8mm"})
    assert server_memory(found, replace(ONE, repacked=graviton)).mapped_twice > 0
    assert not repacked_types({"sse2"})


def test_prompts_that_cannot_be_rolled_back_are_kept_in_checkpoints(tmp_path: Path) -> None:
    assert server_memory(shape(tmp_path), ONE).checkpoints == 0
    windowed = shape(tmp_path, architecture="gemma3", window=512, layers=6)
    row = 2 * 2 * 512  # keys and values in f16
    assert server_memory(windowed, ONE).checkpoints == 3 * 5 * 512 * row
    endless = server_memory(windowed, replace(ONE, context=1 << 20)).checkpoints
    assert endless == MOST_CHECKPOINTS * 5 * 512 * row


def test_a_type_that_a_row_does_not_divide_into_is_refused(tmp_path: Path) -> None:
    found = shape(tmp_path, width=48, heads=4, kv_heads=1, feed_forward=64)
    with pytest.raises(UnknownShapeError, match="a row of 12 elements can't be of type q8_0"):
        server_memory(found, replace(ONE, key_type="q8_0"))
