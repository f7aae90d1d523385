from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gateway.tools.fit.estimate import (
    MOST_SLOTS,
    Machine,
    Place,
    fit,
    largest_context,
    largest_slots,
)
from gateway.tools.local.gguf import ModelFile
from gateway.tools.local.memory import GIB, MEMORY_RESERVE, ServerSettings, server_memory
from tests.tools.fit.shapes import LLAMA_8B

MODEL = ModelFile(Path("m.gguf"), "m", 16 * GIB, 32_768, LLAMA_8B)
SETTINGS = ServerSettings(2, 4096)
NEEDED = server_memory(LLAMA_8B, SETTINGS).needed


def machine(*places: Place, bandwidth: float | None = None) -> Machine:
    return Machine(places, 8, "AVX2", bandwidth, "told")


def one(available: int) -> Machine:
    return machine(Place("this machine", 1, available))


def test_a_server_fits_where_the_reserve_stays_free() -> None:
    assert fit(MODEL, LLAMA_8B, SETTINGS, one(NEEDED + MEMORY_RESERVE)).fits
    assert not fit(MODEL, LLAMA_8B, SETTINGS, one(NEEDED + MEMORY_RESERVE - 1)).fits


def test_each_numa_node_must_hold_its_server() -> None:
    room = NEEDED + MEMORY_RESERVE
    whole = Place("this machine", 2, 3 * room)
    even = machine(whole, Place("NUMA node 0", 1, room), Place("NUMA node 1", 1, room))
    assert fit(MODEL, LLAMA_8B, SETTINGS, even).fits
    odd = machine(whole, Place("NUMA node 0", 1, room), Place("NUMA node 1", 1, room - 1))
    assert not fit(MODEL, LLAMA_8B, SETTINGS, odd).fits


@pytest.mark.parametrize("gib", [19, 20, 22])
def test_the_largest_context_fits_and_no_larger_one_does(gib: int) -> None:
    room = gib * GIB
    found = largest_context(LLAMA_8B, SETTINGS, room)
    assert 0 < found < 32_768
    assert server_memory(LLAMA_8B, replace(SETTINGS, context=found)).needed <= room
    assert server_memory(LLAMA_8B, replace(SETTINGS, context=found + 256)).needed > room


def test_no_context_is_longer_than_the_model_was_trained_on() -> None:
    assert largest_context(LLAMA_8B, SETTINGS, 1 << 50) == 32_768
    short = replace(LLAMA_8B, trained_context=1000)
    assert largest_context(short, SETTINGS, 1 << 50) == 1000
    assert largest_context(LLAMA_8B, SETTINGS, GIB) == 0


def test_the_most_slots_fit_and_no_more_do() -> None:
    room = 24 * GIB
    found = largest_slots(LLAMA_8B, SETTINGS, room)
    assert server_memory(LLAMA_8B, replace(SETTINGS, slots=found)).needed <= room
    assert server_memory(LLAMA_8B, replace(SETTINGS, slots=found + 1)).needed > room
    assert largest_slots(LLAMA_8B, SETTINGS, 1 << 50) == MOST_SLOTS


def test_smaller_quantisations_fit_where_larger_ones_do_not() -> None:
    found = fit(MODEL, LLAMA_8B, SETTINGS, one(10 * GIB))
    verdicts = [choice.fits for choice in found.choices]
    assert verdicts == sorted(verdicts, reverse=True)
    assert set(verdicts) == {True, False}
    contexts = [choice.largest_context for choice in found.choices]
    assert contexts == sorted(contexts, reverse=True)


def test_speed_needs_the_bandwidth_and_servers_share_it() -> None:
    place = Place("this machine", 1, 64 * GIB)
    assert fit(MODEL, LLAMA_8B, SETTINGS, machine(place)).speed is None
    alone = fit(MODEL, LLAMA_8B, SETTINGS, machine(place, bandwidth=50e9)).speed
    halves = (replace(place, servers=2), place, place)
    shared = fit(MODEL, LLAMA_8B, SETTINGS, machine(*halves, bandwidth=100e9)).speed
    assert alone is not None
    assert alone == shared
