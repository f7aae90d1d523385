from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.tools.fit.speed import (
    INSTRUCTION_FACTORS,
    LAYER_WAIT_SECONDS,
    Cores,
    expected_speed,
    instruction_set,
)
from gateway.tools.local.memory import ServerSettings, slot_bytes
from tests.tools.fit.shapes import MISTRAL_7B, MIXTRAL

SETTINGS = ServerSettings(1, 4096)
MANY = Cores(64, "AVX2", 100e9)


def test_a_token_reads_every_weight_but_the_embedding() -> None:
    found = expected_speed(MISTRAL_7B, SETTINGS, MANY, used=0)
    embedding = next(t.size for t in MISTRAL_7B.tensors if t.name == "token_embd.weight")
    assert found.weight_bytes == sum(t.size for t in MISTRAL_7B.tensors) - embedding
    assert found.kv_bytes == 0
    assert found.limit == "memory"
    assert found.decode == pytest.approx(MANY.bandwidth / found.weight_bytes, rel=0.05)


def test_an_embedding_that_is_the_output_too_is_read() -> None:
    tied = replace(
        MISTRAL_7B, tensors=tuple(t for t in MISTRAL_7B.tensors if t.name != "output.weight")
    )
    found = expected_speed(tied, SETTINGS, MANY)
    assert found.weight_bytes == sum(t.size for t in tied.tensors)


def test_a_token_reads_its_own_experts_alone() -> None:
    found = expected_speed(MIXTRAL, SETTINGS, MANY)
    # 12.9 of 46.7 billion weights are said to be active.
    assert found.weight_bytes / 2 == pytest.approx(12.9e9, rel=0.03)


def test_a_full_slot_is_slower_by_its_cache() -> None:
    empty = expected_speed(MISTRAL_7B, SETTINGS, MANY, used=0)
    full = expected_speed(MISTRAL_7B, SETTINGS, MANY, used=4096)
    assert full.kv_bytes == slot_bytes(MISTRAL_7B, SETTINGS)
    assert 1 / full.decode - 1 / empty.decode == pytest.approx(full.kv_bytes / MANY.bandwidth)
    assert full.prefill < empty.prefill


def test_few_cores_wait_for_themselves() -> None:
    found = expected_speed(MISTRAL_7B, SETTINGS, replace(MANY, count=2))
    assert found.limit == "cores"
    assert found.decode < expected_speed(MISTRAL_7B, SETTINGS, MANY).decode


def test_threads_of_several_cores_wait_for_each_other_in_each_layer() -> None:
    one, two = (expected_speed(MISTRAL_7B, SETTINGS, Cores(n, "AVX2", 1e9)) for n in (1, 2))
    waited = 1 / two.decode - 1 / one.decode
    assert waited == pytest.approx(len(MISTRAL_7B.layers) * LAYER_WAIT_SECONDS)


def test_prefill_goes_by_cores_and_instructions_not_by_memory() -> None:
    two = expected_speed(MISTRAL_7B, SETTINGS, replace(MANY, count=2)).prefill
    assert expected_speed(MISTRAL_7B, SETTINGS, replace(MANY, count=4)).prefill == pytest.approx(
        2 * two
    )
    slow = Cores(2, "AVX2", MANY.bandwidth / 10)
    assert expected_speed(MISTRAL_7B, SETTINGS, slow).prefill == pytest.approx(two)
    amx = expected_speed(MISTRAL_7B, SETTINGS, replace(MANY, count=2, instructions="AMX")).prefill
    assert amx == pytest.approx(two * INSTRUCTION_FACTORS["AMX"])


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({"avx2", "avx512f", "avx512_vnni", "amx_int8"}, "AMX"),
        ({"avx2", "avx512f"}, "AVX-512"),
        ({"avx2"}, "AVX2"),
        ({"asimd", "asimddp", "i8mm"}, "i8mm"),
        ({"asimd", "asimddp"}, "dot product"),
        ({"sse2"}, "none"),
    ],
)
def test_the_best_instruction_set_counts(flags: set[str], name: str) -> None:
    assert instruction_set(frozenset(flags)) == name


def test_experts_with_few_tokens_of_a_batch_read_prompts_slower() -> None:
    tokens = [16, 64, 256]
    speeds = [expected_speed(MIXTRAL, SETTINGS, MANY, used=count).prefill for count in tokens]
    assert speeds == sorted(speeds)
    dense = [expected_speed(MISTRAL_7B, SETTINGS, MANY, used=count).prefill for count in tokens]
    assert dense == sorted(dense, reverse=True)  # by attention alone
