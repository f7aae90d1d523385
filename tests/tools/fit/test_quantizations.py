from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from gateway.tools.fit.quantizations import QUANTIZATIONS, quantizations
from gateway.tools.local.gguf import ModelShape, read_model
from tests.tools.fit.shapes import LLAMA_8B, MISTRAL_7B, MIXTRAL
from tests.tools.local.small_models import MODELS, Published, types, weights, write_hollow

PUBLISHED = {  # bytes of files published under these names, as rounded on their pages
    "llama-3.1-8b": (
        LLAMA_8B,
        {
            "Q2_K": 3.18e9,
            "Q3_K_M": 4.02e9,
            "Q4_0": 4.66e9,
            "Q4_K_M": 4.92e9,
            "Q5_K_M": 5.73e9,
            "Q6_K": 6.60e9,
            "Q8_0": 8.54e9,
            "F16": 16.07e9,
        },
    ),
    "mistral-7b": (
        MISTRAL_7B,
        {"Q3_K_M": 3.52e9, "Q4_0": 4.11e9, "Q4_K_M": 4.37e9, "Q5_K_M": 5.13e9, "Q8_0": 7.70e9},
    ),
    "mixtral": (MIXTRAL, {"Q4_0": 26.44e9, "Q8_0": 49.62e9}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_those_of_published_files(name: str) -> None:
    shape, published = PUBLISHED[name]
    found = {one.name: one.size for one in quantizations(shape)}
    for quantization, size in published.items():
        assert found[quantization] == pytest.approx(size, rel=0.01), quantization


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_types_of_a_published_file_are_told_from_its_own_tensors(
    model: Published, tmp_path: Path
) -> None:
    shape = read_model(write_hollow(model, tmp_path)).shape
    assert shape is not None
    found = next(one for one in quantizations(shape) if one.name == "Q4_K_M")
    assert found.size == pytest.approx(weights(model), rel=0.02)
    if model.width % 256 == 0:
        assert Counter(Type(tensor.kind) for tensor in found.shape.tensors) == types(model)


def test_each_is_larger_than_the_one_before() -> None:
    sizes = [one.size for one in quantizations(LLAMA_8B)]
    assert sizes == sorted(sizes)
    assert [one.name for one in quantizations(LLAMA_8B)] == list(QUANTIZATIONS)


def test_rows_that_no_block_divides_keep_sixteen_bits() -> None:
    from dataclasses import replace

    odd = replace(
        LLAMA_8B.tensors[1], name="blk.0.attn_q.weight", shape=(100, 64), kind=int(Type.F32)
    )
    shape: ModelShape = replace(LLAMA_8B, tensors=(odd,))
    assert {one.size for one in quantizations(shape)} == {2 * 6400}
