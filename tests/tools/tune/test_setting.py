from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gateway.tools.local.gguf import ModelFile
from gateway.tools.local.plan import plan_servers
from gateway.tools.local.topology import Topology, read_topology
from gateway.tools.tune.measurements import (
    BenchmarkRequest,
    Figures,
    combine_servers,
    median_figures,
    score,
)
from gateway.tools.tune.setting import Setting, rule_of_thumb, search_space, server_spec
from tests.tools.local.machine import make_machine, two_sockets_with_smt, write

MODEL = ModelFile(Path("/models/m.gguf"), "m", 4 << 30, 32_768)
FIGURES = Figures(prefill=100.0, decode=10.0, decode_busy=16.0, stall=4.0, memory=None)
REQUEST = BenchmarkRequest(prompt=1000, answer=100)


@pytest.fixture
def two_sockets(tmp_path: Path) -> Topology:
    return read_topology(make_machine(tmp_path, two_sockets_with_smt()))


@pytest.fixture
def smt(tmp_path: Path) -> Topology:
    return read_topology(make_machine(tmp_path, two_sockets_with_smt()[:1]))


def test_the_search_begins_with_the_setting_of_up(two_sockets: Topology) -> None:
    start = rule_of_thumb(two_sockets)
    assert start == Setting(4, 512, 256, 2, "node")
    planned = plan_servers(two_sockets, MODEL)
    for spec in planned:
        changed = server_spec(start, spec, two_sockets, spec.context)
        same = replace(
            spec,
            name=changed.name,
            batch=512,
            micro_batch=256,
            prompt_cache_bytes=changed.prompt_cache_bytes,
        )
        assert changed == same


def test_the_start_is_in_the_space(two_sockets: Topology, smt: Topology) -> None:
    for topology in (two_sockets, smt):
        start, space = rule_of_thumb(topology), search_space(topology, context=256, max_slots=1)
        for knob in ("threads", "batch", "micro_batch", "slots", "pinning"):
            assert getattr(start, knob) in space.values(knob)


def test_threads_are_physical_cores_at_most(smt: Topology) -> None:
    assert search_space(smt, context=4096, max_slots=8).threads == (2, 3, 4)


def test_a_quota_bounds_the_threads(smt: Topology) -> None:
    assert search_space(replace(smt, cpu_quota=2.0), context=4096, max_slots=8).threads == (1, 2)


def test_one_thread_of_each_core_is_tried_where_cores_have_several(
    smt: Topology, tmp_path: Path
) -> None:
    assert search_space(smt, context=4096, max_slots=8).pinning == ("free", "cores")
    spec = plan_servers(smt, MODEL)[0]
    pinned = server_spec(Setting(4, 512, 256, 2, "cores"), spec, smt, 4096)
    assert pinned.cpus == (0, 1, 2, 3)
    plain = read_topology(make_machine(tmp_path / "plain", [[[0], [1]]]))
    assert search_space(plain, context=4096, max_slots=8).pinning == ("free",)


def test_servers_of_several_nodes_are_always_pinned(two_sockets: Topology) -> None:
    assert search_space(two_sockets, context=4096, max_slots=8).pinning == ("node",)
    specs = [
        server_spec(rule_of_thumb(two_sockets), spec, two_sockets, 4096)
        for spec in plan_servers(two_sockets, MODEL)
    ]
    assert [(spec.memory_node, spec.no_mmap) for spec in specs] == [(0, True), (1, True)]
    assert [spec.cpus for spec in specs] == [
        (0, 1, 2, 3, 8, 9, 10, 11),
        (4, 5, 6, 7, 12, 13, 14, 15),
    ]


def test_efficiency_cores_are_left_out(tmp_path: Path) -> None:
    root = make_machine(tmp_path, [[[0, 1], [2], [3]]])
    write(root, "sys/devices/cpu_core/cpus", "0-1\n")
    write(root, "sys/devices/cpu_atom/cpus", "2-3\n")
    assert rule_of_thumb(read_topology(root)) == Setting(1, 512, 256, 2, "node")


def test_batch_and_micro_batch_follow_each_other() -> None:
    start = Setting(4, 512, 256, 2, "free")
    assert start.with_knob("micro_batch", 1024) == Setting(4, 1024, 1024, 2, "free")
    assert start.with_knob("batch", 128) == Setting(4, 128, 128, 2, "free")
    assert start.with_knob("batch", 2048) == Setting(4, 2048, 256, 2, "free")


class TestGoals:
    def test_latency_is_a_request_alone_and_the_stall(self) -> None:
        assert score(FIGURES, REQUEST, "latency") == 10 + 10 + 4

    def test_with_one_slot_a_request_waits_for_its_neighbour(self) -> None:
        alone = replace(FIGURES, stall=None)
        assert score(alone, REQUEST, "latency") == (10 + 10) * 1.5

    def test_throughput_is_time_of_a_busy_server(self) -> None:
        assert score(FIGURES, REQUEST, "throughput") == 10 + 100 / 16

    def test_balanced_prefers_the_setting_that_is_better_in_both(self) -> None:
        better = replace(FIGURES, prefill=120.0)
        assert score(better, REQUEST, "balanced") < score(FIGURES, REQUEST, "balanced")
        assert score(FIGURES, REQUEST, "balanced") == pytest.approx((24 * 16.25) ** 0.5)

    def test_repeats_give_medians_and_servers_give_means(self) -> None:
        slow = Figures(80.0, 8.0, 14.0, 6.0, 100)
        fast = Figures(120.0, 30.0, 20.0, 1.0, 300)
        assert median_figures([FIGURES, slow, fast]) == Figures(100.0, 10.0, 16.0, 4.0, 300)
        assert combine_servers([slow, fast]) == Figures(100.0, 19.0, 17.0, 6.0, 400)
