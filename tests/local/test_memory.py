from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type

from gateway.local import LocalFleetError, MemoryShortError
from gateway.local.gguf import ModelFile, ModelShape, UnknownShapeError, read_model
from gateway.local.memory import (
    MIB,
    PlacedServer,
    ServerSettings,
    check_memory,
    compute_bytes,
    memlock_limit,
    repacked_types,
    server_memory,
    server_needs,
    weights_by_type,
)
from gateway.local.plan import plan_local_fleet
from gateway.local.topology import Topology, read_topology
from tests.each_case import each_case
from tests.known import known
from tests.local.machine import make_machine, run_alone, two_sockets_with_smt
from tests.local.machine import write as write_file
from tests.workshop.fit.random_models import Recipe, write

GIB = 1 << 30
REPOSITORY = Path(__file__).parents[2]
SETTINGS = ServerSettings(2, 4096)
MODEL = ModelFile(Path("big.gguf"), "big", size=10 * GIB, trained_context=None)


def bound(nodes: list[int | None]) -> list[PlacedServer]:
    """Servers of the model whose memory is bound to these NUMA nodes."""
    return [(MODEL, SETTINGS, node) for node in nodes]


@pytest.fixture
def machine(tmp_path: Path) -> Topology:
    return read_topology(make_machine(tmp_path, two_sockets_with_smt(), memory_gib=64))


def test_servers_must_leave_two_gib_or_are_refused_with_figures_and_the_remedy(
    machine: Topology,
) -> None:
    check_memory(replace(machine, memory_available=32 * GIB), bound([None, None]))
    with pytest.raises(MemoryShortError) as caught:
        check_memory(replace(machine, memory_available=32 * GIB - 1), bound([None, None]))
    figures = ("10.0 GiB", "30.0 GiB for 2", "2.0 GiB", "32.0 GiB")
    for part in ("big", *figures, "--force-memory", "fewer --servers"):
        assert part in str(caught.value)
    with pytest.raises(MemoryShortError) as caught:
        check_memory(replace(machine, memory_available=GIB), bound([None]))
    assert "fewer" not in str(caught.value), "it is no remedy for one"
    # One whose memory is bound must fit into its node.
    check_memory(machine, bound([0, 1]))  # 15 of 24 GiB on each
    with pytest.raises(MemoryShortError, match="NUMA node 1"):
        check_memory(machine, bound([1, 1]))


def test_a_known_shape_tells_what_a_server_needs_else_the_rule_of_thumb(
    machine: Topology, tmp_path: Path
) -> None:
    assert server_needs(MODEL, ServerSettings(2, 4096)) == (15 * GIB, "1.5 x model")
    recipe = Recipe("m", 2, 256, 4, 4, 512)
    model = read_model(write(recipe, tmp_path, hollow=True))
    settings = ServerSettings(2, 4096)
    needed, why = server_needs(model, settings)
    assert needed == server_memory(known(model.shape), settings).needed
    assert "2 slots of 4096 tokens 16 MiB" in why
    with pytest.raises(MemoryShortError, match="2 slots of 4096 tokens 16 MiB"):
        check_memory(replace(machine, memory_available=2 * GIB), [(model, settings, None)])
    check_memory(replace(machine, memory_available=2 * GIB + needed), [(model, settings, None)])


def test_the_module_says_what_a_server_needs_without_any_package(tmp_path: Path) -> None:
    path = write(Recipe("m", 2, 256, 4, 4, 512), tmp_path, hollow=True)
    settings = ("--slots", "2", "--context", "4096", "--ubatch", "256", "--cache-ram", "1")
    command = (REPOSITORY, "gateway.local.memory", path, *settings)
    done = run_alone(*command)
    shape = read_model(path).shape
    needed = server_memory(known(shape), ServerSettings(2, 4096, prompt_cache_bytes=1 << 20)).needed
    assert json.loads(done.stdout)["needed"] == needed
    path.write_bytes(b"<html>")
    failed = run_alone(*command)
    assert (failed.returncode, "web page" in failed.stderr) == (1, True)


# What a server needs, part by part.


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
        ({}, replace(ONE, key_type="f32", value_type="f32"), 32),
        ({"kv_heads": 2}, ONE, 4),
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
        ({}, replace(ONE, context=16_384), 14.63, 0.01),
        ({}, replace(ONE, micro_batch=512), 17.27, 0.01),
        ({"experts": 16, "experts_used": 4}, ONE, 21.01, 0.01),
        ({"width": 4096, "heads": 32, "kv_heads": 8, "feed_forward": 14_336}, ONE, 64.01, 0.01),
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
    # A processor takes some weights as they are.
    found = shape(tmp_path, weights=Type.Q8_0)
    assert server_memory(found, replace(ONE, repacked=AVX2)).mapped_twice == 0
    graviton = repacked_types({"asimd", "asimddp", "i8mm"})
    assert server_memory(found, replace(ONE, repacked=graviton)).mapped_twice > 0
    assert not repacked_types({"sse2"})
    found = shape(tmp_path, width=48, heads=4, kv_heads=1, feed_forward=64)
    with pytest.raises(UnknownShapeError, match="a row of 12 elements can't be of type q8_0"):
        server_memory(found, replace(ONE, key_type="q8_0"))


# Locked memory.


LOCK, UNITS = 1 << 14, 8 << 20  # CAP_IPC_LOCK; the hard limit of most units


@each_case(
    ("hard", "uid", "effective", "ambient", "limit"),
    [
        ("8388608", 1000, 0, 0, UNITS),
        ("unlimited", 1000, 0, 0, None),
        ("8388608", 0, LOCK, 0, None),
        ("8388608", 0, (1 << 41) - 1 - LOCK, 0, UNITS),  # a container's root
        ("8388608", 1000, LOCK, LOCK, None),  # a unit's AmbientCapabilities
        ("8388608", 1000, LOCK, 0, UNITS),  # a file's capabilities end with exec
    ],
)
def test_memory_may_be_locked_to_the_hard_limit_or_where_a_server_has_the_capability(
    tmp_path: Path, hard: str, uid: int, effective: int, ambient: int, limit: int | None
) -> None:
    status = (
        f"Uid:\t{uid}\t{uid}\t{uid}\t{uid}\nCapEff:\t{effective:016x}\nCapAmb:\t{ambient:016x}\n"
    )
    write_file(tmp_path, "proc/self/status", status)
    limits = f"Max open files   1024 1048576 files\nMax locked memory   65536 {hard}  bytes\n"
    write_file(tmp_path, "proc/self/limits", limits)
    assert memlock_limit(tmp_path) == limit
    assert memlock_limit(tmp_path / "no proc") is None


def test_a_model_that_may_not_be_locked_starts_nothing(tmp_path: Path) -> None:
    topology = read_topology(make_machine(tmp_path / "machine", [[[0]]]))

    def locks(limit: int | None, **asked: Any) -> bool:
        plan = plan_local_fleet(
            cache=tmp_path, topology=topology, **asked, read_memlock_limit=lambda: limit
        )
        return plan.specs[0].mlock

    with pytest.raises(LocalFleetError) as caught:
        locks(1 << 20, mlock=True)
    for word in ("demo-small-v2.gguf", "1 MiB", "4 MiB", "prlimit", "CAP_IPC_LOCK", "--mlock"):
        assert word in str(caught.value)
    assert (locks(None, mlock=True), locks(8 << 20, mlock=True), locks(1)) == (True, True, False)
