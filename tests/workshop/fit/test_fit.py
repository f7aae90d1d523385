from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from gateway.local.gguf import ModelFile, ModelShape, read_model
from gateway.local.memory import GIB, MEMORY_RESERVE, Place, ServerSettings, server_memory
from gateway.local.topology import read_topology
from gateway.workshop.fit import (
    INSTRUCTION_SETS,
    MOST_SLOTS,
    QUANTIZATIONS,
    ExpectedSpeed,
    Machine,
    StreamError,
    expected_speed,
    fit,
    largest_context,
    largest_slots,
    measure_bandwidth,
    quantizations,
)
from tests.known import known
from tests.local.machine import make_machine
from tests.local.small_models import MODELS, Published, types, weights, write_hollow
from tests.workshop.fit.choosing import LLAMA_8B, MISTRAL_7B, MIXTRAL, rows
from tests.workshop.fit.measure import model_memory, process_memory
from tests.workshop.fit.random_models import Recipe, write

MODEL = ModelFile(Path("m.gguf"), "m", 16 * GIB, 32_768, LLAMA_8B)
SETTINGS = ServerSettings(2, 4096)
NEEDED = server_memory(LLAMA_8B, SETTINGS).needed


def machine(*places: Place, bandwidth: float | None = None) -> Machine:
    return Machine(places, 8, "AVX2", bandwidth, "told")


def one(available: int) -> Machine:
    return machine(Place("this machine", 1, available))


def test_a_server_fits_where_the_reserve_stays_free_and_each_numa_node_holds_its_own() -> None:
    room = NEEDED + MEMORY_RESERVE
    whole = Place("this machine", 2, 3 * room)
    even = machine(whole, Place("NUMA node 0", 1, room), Place("NUMA node 1", 1, room))
    assert fit(MODEL, LLAMA_8B, SETTINGS, even).fits
    assert fit(MODEL, LLAMA_8B, SETTINGS, one(room)).fits
    assert not fit(MODEL, LLAMA_8B, SETTINGS, one(room - 1)).fits
    odd = machine(whole, Place("NUMA node 0", 1, room), Place("NUMA node 1", 1, room - 1))
    assert not fit(MODEL, LLAMA_8B, SETTINGS, odd).fits


@pytest.mark.parametrize("gib", [19, 20, 22])
def test_the_largest_context_fits_and_no_larger_one_does(gib: int) -> None:
    room = gib * GIB
    found = largest_context(LLAMA_8B, SETTINGS, room)
    assert 0 < found < 32_768
    assert server_memory(LLAMA_8B, replace(SETTINGS, context=found)).needed <= room
    assert server_memory(LLAMA_8B, replace(SETTINGS, context=found + 256)).needed > room
    assert largest_context(LLAMA_8B, SETTINGS, GIB) == 0
    # It is no longer than the model was trained on.
    for trained in (1000, 32_768):
        shape = replace(LLAMA_8B, trained_context=trained)
        assert largest_context(shape, SETTINGS, 1 << 50) == trained


def test_the_most_slots_fit_and_no_more_do() -> None:
    room = 24 * GIB
    found = largest_slots(LLAMA_8B, SETTINGS, room)
    assert server_memory(LLAMA_8B, replace(SETTINGS, slots=found)).needed <= room
    assert server_memory(LLAMA_8B, replace(SETTINGS, slots=found + 1)).needed > room
    assert largest_slots(LLAMA_8B, SETTINGS, 1 << 50) == MOST_SLOTS


PUBLISHED = {  # bytes of files published under these names, as rounded on their pages
    "llama-3.1-8b": (
        LLAMA_8B,
        {"Q2_K": 3.18e9, "Q4_K_M": 4.92e9, "Q5_K_M": 5.73e9, "Q6_K": 6.60e9, "F16": 16.07e9},
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
    found = {name: one.size for name, one in quantizations(shape).items()}
    assert list(found) == sorted(found, key=lambda name: found[name]) == list(QUANTIZATIONS)
    for quantization, size in published.items():
        assert found[quantization] == pytest.approx(size, rel=0.01), quantization


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.file)
def test_the_types_of_a_published_file_are_told_from_its_own_tensors(
    model: Published, tmp_path: Path
) -> None:
    shape = read_model(write_hollow(model, tmp_path)).shape
    found = quantizations(known(shape))["Q4_K_M"]
    assert found.size == pytest.approx(weights(model), rel=0.02)
    if model.recipe.width % 256 == 0:
        assert Counter(Type(tensor.kind) for tensor in found.tensors) == types(model)


SPEED_SETTINGS = ServerSettings(1, 4096)
BANDWIDTH = 100e9


def speed(
    shape: ModelShape,
    cores: int = 64,
    instructions: str = "AVX2",
    bandwidth: float = BANDWIDTH,
    used: int | None = None,
) -> ExpectedSpeed:
    alone = Machine((Place("this machine", 1, 0),), cores, instructions, bandwidth, "told")
    return known(expected_speed(shape, SPEED_SETTINGS, alone, used=used))


def test_a_token_reads_every_weight_but_the_embedding() -> None:
    found = speed(MISTRAL_7B, used=0)
    embedding = next(t.size for t in MISTRAL_7B.tensors if t.name == "token_embd.weight")
    assert found.weight_bytes == sum(t.size for t in MISTRAL_7B.tensors) - embedding
    assert found.kv_bytes == 0
    assert found.limit == "memory"
    assert found.decode == pytest.approx(BANDWIDTH / found.weight_bytes, rel=0.05)
    # One that is the output too is read.
    tied = tuple(t for t in MISTRAL_7B.tensors if t.name != "output.weight")
    whole = speed(replace(MISTRAL_7B, tensors=tied)).weight_bytes
    assert whole == sum(t.size for t in tied)


def test_a_token_reads_its_own_experts_alone() -> None:
    found = speed(MIXTRAL)
    # 12.9 of 46.7 billion weights are said to be active.
    assert found.weight_bytes / 2 == pytest.approx(12.9e9, rel=0.03)


def test_prefill_goes_by_cores_and_instructions_not_by_memory() -> None:
    two = speed(MISTRAL_7B, 2).prefill
    assert speed(MISTRAL_7B, 4).prefill == pytest.approx(2 * two)
    assert speed(MISTRAL_7B, 2, bandwidth=BANDWIDTH / 10).prefill == pytest.approx(two)
    amx = speed(MISTRAL_7B, 2, "AMX").prefill
    assert amx == pytest.approx(two * INSTRUCTION_SETS["AMX"].factor)


def test_memory_is_read_at_a_plausible_speed() -> None:
    assert 1e8 < measure_bandwidth(read_topology()) < 1e13


def test_a_machine_without_room_is_not_filled(tmp_path: Path) -> None:
    machine = read_topology(make_machine(tmp_path, [[[0], [1]]]))
    with pytest.raises(StreamError, match="--channels and --mt-per-s"):
        measure_bandwidth(replace(machine, memory_available=1 << 20))


PAGE = Path(__file__).parents[3] / "docs/choosing-a-model.md"


def test_the_page_has_the_figures_that_fit_computes() -> None:
    page = PAGE.read_text().splitlines()
    missing = [row for row in rows() if row not in page]
    assert not missing, "python -m tests.workshop.fit.choosing prints the table"


CASES = (
    (Recipe("f16", 6, 768, 12, 12, 2048, vocabulary=8192), 1, "f32"),
    (Recipe("q4_0", 8, 1024, 16, 4, 4096, vocabulary=8192, weights=Type.Q4_0), 1, "f16"),
    (Recipe("moe", 4, 512, 8, 8, 512, experts=16, experts_used=2), 4, "q8_0"),
)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.wheel_only("the formulas are those of its build")
def test_a_full_server_takes_the_memory_that_is_told(tmp_path: Path) -> None:
    process = process_memory(tmp_path)
    for recipe, slots, kv_type in CASES:
        path = write(recipe, tmp_path)
        told, measured = model_memory(path, process, slots, 512, (kv_type, kv_type))
        assert told == pytest.approx(measured, rel=0.1), recipe.name
