"""What `fit` says, beside a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from gateway.local.gguf import read_model
from gateway.local.memory import ServerSettings, repacked_types, server_memory
from gateway.local.topology import read_topology
from tests.known import known
from tests.workshop.fit.random_models import Recipe, write
from tests.workshop.fit.real_server import real_server

pytestmark = [pytest.mark.real, pytest.mark.slow]

MIB = 1 << 20
TINY = Recipe("tiny", layers=1, width=64, heads=2, kv_heads=2, feed_forward=64)
CASES = (
    (Recipe("f16", 6, 768, 12, 12, 2048, vocabulary=8192), 1, "f32"),
    (Recipe("q4_0", 8, 1024, 16, 4, 4096, vocabulary=8192, weights=Type.Q4_0), 1, "f16"),
    (Recipe("moe", 4, 512, 8, 8, 512, experts=16, experts_used=2), 4, "q8_0"),
)


@pytest.fixture(scope="module")
def process_bytes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """What a server takes that has next to no model."""
    path = write(TINY, tmp_path_factory.mktemp("tiny"))
    shape = read_model(path).shape
    with real_server(path) as server:
        server.fill()
        found = server_memory(known(shape), ServerSettings(1, 256))
        yield server.resident() - (found.resident - found.process)


@pytest.mark.parametrize(
    ("recipe", "slots", "kv_type"), CASES, ids=[recipe.name for recipe, _, _ in CASES]
)
def test_a_full_server_takes_the_memory_that_is_told(
    tmp_path: Path, process_bytes: int, recipe: Recipe, slots: int, kv_type: str
) -> None:
    path = write(recipe, tmp_path)
    shape = read_model(path).shape
    settings = ServerSettings(
        slots,
        512,
        key_type=kv_type,
        value_type=kv_type,
        repacked=repacked_types(read_topology().processor.flags),
    )
    more = ("--cache-type-k", kv_type, "--cache-type-v", kv_type)
    with real_server(path, slots=slots, context=512, more=more) as server:
        server.fill()
        measured = server.resident() - process_bytes
    found = server_memory(known(shape), settings)
    assert found.resident - found.process == pytest.approx(measured, rel=0.1), (
        f"{measured / MIB:.0f} MiB measured; {found}"
    )
