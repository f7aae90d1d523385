"""What `fit` says, beside a real server."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from tests.workshop.fit.random_models import Recipe, write
from tests.workshop.fit.real_server import model_memory, process_memory

pytestmark = [pytest.mark.real, pytest.mark.slow]

CASES = (
    (Recipe("f16", 6, 768, 12, 12, 2048, vocabulary=8192), 1, "f32"),
    (Recipe("q4_0", 8, 1024, 16, 4, 4096, vocabulary=8192, weights=Type.Q4_0), 1, "f16"),
    (Recipe("moe", 4, 512, 8, 8, 512, experts=16, experts_used=2), 4, "q8_0"),
)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> int:
    return process_memory(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    ("recipe", "slots", "kv_type"), CASES, ids=[recipe.name for recipe, _, _ in CASES]
)
def test_a_full_server_takes_the_memory_that_is_told(
    tmp_path: Path, process: int, recipe: Recipe, slots: int, kv_type: str
) -> None:
    path = write(recipe, tmp_path)
    told, measured = model_memory(path, process, slots, 512, (kv_type, kv_type))
    assert told == pytest.approx(measured, rel=0.1)
