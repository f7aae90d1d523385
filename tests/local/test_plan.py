from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gateway.local import LocalFleetError, MemoryShortError, ModelFileError
from gateway.local.gguf import ModelFile, read_model
from gateway.local.memory import (
    MEMORY_RESERVE,
    MOST_PROMPT_CACHE_BYTES,
    ServerSettings,
    server_needs,
)
from gateway.local.plan import (
    DEFAULT_CONTEXT,
    plan_models,
    plan_servers,
)
from gateway.local.topology import Topology, read_topology
from tests.each_case import each_case
from tests.local.machine import make_machine, two_sockets_with_smt
from tests.workshop.fit.random_models import Recipe, write

GIB = 1 << 30
WIDE = Recipe("wide", layers=8, width=1024, heads=8, kv_heads=8, feed_forward=4096)
MODEL = ModelFile(Path("m.gguf"), "m", size=4 * GIB, trained_context=32_768)


@pytest.fixture
def one_node(tmp_path: Path) -> Topology:
    return read_topology(make_machine(tmp_path, [[[core, core + 8] for core in range(8)]]))


@pytest.fixture
def two_nodes(tmp_path: Path) -> Topology:
    return read_topology(make_machine(tmp_path, two_sockets_with_smt()))


def test_each_node_gets_a_server_pinned_and_with_memory_of_its_own(two_nodes: Topology) -> None:
    first, second = plan_servers(two_nodes, MODEL)
    assert (first.threads, second.threads) == (4, 4)
    assert (first.cpus, second.cpus) == (two_nodes.nodes[0].cpus, two_nodes.nodes[1].cpus)
    assert (first.memory_node, second.memory_node) == (0, 1)
    assert (first.no_mmap, second.no_mmap) == (True, True)
    # Memory that is not allowed is not bound.
    forbidden = replace(two_nodes.nodes[1], memory_allowed=False)
    machine = replace(two_nodes, nodes=(two_nodes.nodes[0], forbidden))
    assert [spec.memory_node for spec in plan_servers(machine, MODEL)] == [0, None]


@each_case(("servers", "threads"), [(1, 8), (2, 4), (3, 2), (8, 1), (20, 1)])
def test_several_servers_of_a_node_share_its_cores(
    one_node: Topology, servers: int, threads: int
) -> None:
    specs = plan_servers(one_node, MODEL, servers=servers)
    assert [spec.name for spec in specs] == [f"local-{number}" for number in range(servers)]
    assert {(spec.threads, spec.numa_node) for spec in specs} == {(threads, 0)}
    assert {(spec.cpus, spec.memory_node, spec.no_mmap) for spec in specs} == {(None, None, False)}


def test_servers_are_distributed_over_the_nodes(two_nodes: Topology) -> None:
    specs = plan_servers(two_nodes, MODEL, servers=3)
    assert [spec.numa_node for spec in specs] == [0, 1, 0]
    assert [spec.threads for spec in specs] == [2, 4, 2]


def test_a_quota_bounds_the_threads(one_node: Topology, two_nodes: Topology) -> None:
    assert plan_servers(replace(one_node, cpu_quota=3.5), MODEL)[0].threads == 3
    assert plan_servers(replace(one_node, cpu_quota=0.5), MODEL)[0].threads == 1
    halves = plan_servers(replace(two_nodes, cpu_quota=4.0), MODEL)
    assert [spec.threads for spec in halves] == [2, 2]


def test_the_context_is_bounded_by_the_models_training(one_node: Topology) -> None:
    assert plan_servers(one_node, MODEL)[0].context == DEFAULT_CONTEXT
    assert plan_servers(one_node, replace(MODEL, trained_context=2048))[0].context == 2048
    assert (
        plan_servers(one_node, replace(MODEL, trained_context=None))[0].context == DEFAULT_CONTEXT
    )
    for trained in (65_536, None):
        longer = replace(MODEL, trained_context=trained)
        assert plan_servers(one_node, longer, context=65_536)[0].context == 65_536
    with pytest.raises(LocalFleetError, match="--context 65536 at most"):
        plan_servers(one_node, replace(MODEL, trained_context=65_536), context=65_537)


def test_evicted_prompts_are_kept_only_where_there_is_room(one_node: Topology) -> None:
    roomy = replace(one_node, memory_available=40 * GIB)
    assert [s.prompt_cache_bytes for s in plan_servers(roomy, MODEL, servers=2)] == [
        MOST_PROMPT_CACHE_BYTES
    ] * 2
    tight = replace(one_node, memory_available=16 * GIB)  # two servers take 12, 2 stay free
    assert [s.prompt_cache_bytes for s in plan_servers(tight, MODEL, servers=2)] == [GIB, GIB]
    short = replace(one_node, memory_available=6 * GIB)
    assert plan_servers(short, MODEL)[0].prompt_cache_bytes == 0


def model(name: str, gib: float) -> ModelFile:
    """A model of unknown shape, which needs half as much again."""
    return ModelFile(Path(f"/models/{name}.gguf"), name, int(gib * GIB), trained_context=32_768)


def test_each_of_several_models_gets_a_server_of_its_name(one_node: Topology) -> None:
    specs = plan_models(one_node, [model("a", 2), model("b", 4)], slots=3)
    assert [(spec.name, spec.alias, spec.slots, spec.threads) for spec in specs] == [
        ("local-0", "a", 3, 4),
        ("local-1", "b", 3, 4),
    ]
    assert all(spec.prompt_cache_bytes == MOST_PROMPT_CACHE_BYTES for spec in specs)


def test_models_go_to_the_numa_nodes_with_most_memory_left_the_largest_first(
    two_nodes: Topology,
) -> None:
    models = [model("a", 3), model("b", 1), model("c", 8), model("d", 2)]
    specs = plan_models(two_nodes, models)
    assert [spec.memory_node for spec in specs] == [1, 1, 0, 1]
    assert [spec.threads for spec in specs] == [1, 1, 4, 1]
    assert all(spec.no_mmap for spec in specs)
    with pytest.raises(MemoryShortError, match=r"NUMA node 0 has 24\.0 GiB available"):
        plan_models(two_nodes, [model("a", 15), model("b", 1)])


def test_models_get_as_many_slots_as_memory_has_room_for(
    one_node: Topology, tmp_path: Path
) -> None:
    large = read_model(write(WIDE, tmp_path, hollow=True))
    models = [large, replace(large, name="other", path=tmp_path / "other.gguf")]
    needs = [server_needs(large, ServerSettings(slots, DEFAULT_CONTEXT))[0] for slots in (1, 2, 3)]
    for room, slots in (
        (2 * needs[0], [1, 1]),
        (needs[0] + needs[1], [1, 1]),
        (2 * needs[1], [2, 2]),
        (2 * needs[2], [3, 3]),
        (9 * needs[2], [4, 4]),
    ):
        machine = replace(one_node, memory_available=room + MEMORY_RESERVE)
        assert [spec.slots for spec in plan_models(machine, models, slots=4)] == slots
    short = replace(one_node, memory_available=2 * needs[0] + MEMORY_RESERVE - 1)
    with pytest.raises(MemoryShortError, match=r"wide 0\.\d GiB \(weights.*other.*--models-dir"):
        plan_models(short, models, slots=4)
    assert [s.slots for s in plan_models(short, models, slots=4, force_memory=True)] == [4, 4]


def test_two_models_of_one_name_are_refused_with_both_paths(one_node: Topology) -> None:
    other = replace(model("a", 1), path=Path("/elsewhere/a.gguf"))
    with pytest.raises(ModelFileError, match=r"/models/a.gguf and /elsewhere/a.gguf: .* named a"):
        plan_models(one_node, [model("a", 1), other])


def test_a_context_beyond_the_training_of_any_model_is_refused(one_node: Topology) -> None:
    models = [model("a", 1), replace(model("b", 1), trained_context=2048)]
    assert [spec.context for spec in plan_models(one_node, models)] == [4096, 2048]
    with pytest.raises(LocalFleetError, match=r"/models/b\.gguf"):
        plan_models(one_node, models, context=4096)
