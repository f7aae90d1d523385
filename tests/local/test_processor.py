from __future__ import annotations

from pathlib import Path

import pytest

from gateway.local.topology import CpuCache, read_caches, read_processor
from tests.local.machine import (
    ALTRA,
    EPYC,
    GRAVITON_3,
    SAPPHIRE_RAPIDS,
    make_machine,
    two_sockets_with_smt,
    write,
)

X86, ARM = "x86_64", "aarch64"
AMX = {"AMX", "AMX INT8", "AMX BF16", "AVX-VNNI"}
AVX512 = {"AVX2", "AVX-512", "AVX-512 VNNI", "AVX-512 BF16"}


@pytest.mark.parametrize(
    ("cpuinfo", "architecture", "name", "has", "lacks"),
    [
        (EPYC, X86, "AMD EPYC 9554 64-Core Processor", AVX512, AMX),
        (SAPPHIRE_RAPIDS, X86, "Intel(R) Xeon(R) Platinum 8480+", AMX | AVX512, set()),
        (GRAVITON_3, ARM, "Neoverse V1", {"NEON", "dot product", "i8mm", "SVE", "BF16"}, {"SVE2"}),
        (ALTRA, ARM, "Neoverse N1", {"NEON", "dot product"}, {"i8mm", "SVE"}),
        ("", "", "", set(), AVX512),
    ],
    ids=["epyc", "sapphire rapids", "graviton 3", "altra", "unknown"],
)
def test_a_processor_has_the_instructions_that_llama_cpp_can_use(
    tmp_path: Path, cpuinfo: str, architecture: str, name: str, has: set[str], lacks: set[str]
) -> None:
    root = make_machine(tmp_path, [[[0]]], cpuinfo=cpuinfo) if cpuinfo else tmp_path
    processor = read_processor(root)
    assert (processor.architecture, processor.name) == (architecture, name)
    assert has <= set(processor.instructions)
    assert not lacks & set(processor.instructions)


def test_a_shared_cache_appears_once_and_instruction_caches_do_not(tmp_path: Path) -> None:
    root = make_machine(tmp_path, two_sockets_with_smt())
    caches = read_caches(root, set(range(16)))
    assert [cache.level for cache in caches] == [1] * 8 + [3] * 2
    assert caches[0] == CpuCache(1, "data", 32 << 10, (0, 8))
    assert caches[-1] == CpuCache(3, "unified", 16 << 20, (4, 5, 6, 7, 12, 13, 14, 15))


def test_a_cache_without_a_size_is_no_error(tmp_path: Path) -> None:
    write(tmp_path, "sys/devices/system/cpu/cpu0/cache/index0/level", "2")
    (cache,) = read_caches(tmp_path, {0})
    assert (cache.level, cache.size, cache.cpus) == (2, 0, (0,))
