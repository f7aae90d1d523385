from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gateway.tools.local import MemoryShortError
from gateway.tools.local.gguf_file import ModelFile
from gateway.tools.local.memory import check_memory, format_gib, memory_headroom
from gateway.tools.local.topology import Topology, read_topology
from tests.tools.local.machine import make_machine, two_sockets_with_smt

GIB = 1 << 30
MODEL = ModelFile(Path("big.gguf"), "big", size=10 * GIB, trained_context=None)


@pytest.fixture
def machine(tmp_path: Path) -> Topology:
    return read_topology(make_machine(tmp_path, two_sockets_with_smt(), memory_gib=64))


def test_servers_that_leave_exactly_two_gib_fit(machine: Topology) -> None:
    machine = replace(machine, memory_available=32 * GIB)
    check_memory(machine, MODEL, [None, None])
    assert memory_headroom(machine, MODEL.size, 2) == 0


def test_one_byte_less_is_refused_with_figures_and_the_remedy(machine: Topology) -> None:
    machine = replace(machine, memory_available=32 * GIB - 1)
    with pytest.raises(MemoryShortError) as caught:
        check_memory(machine, MODEL, [None, None])
    message = str(caught.value)
    for part in ("big.gguf", "10.0 GiB", "2 servers", "30.0 GiB", "2.0 GiB", "32.0 GiB"):
        assert part in message
    assert "--force-memory" in message
    assert "fewer --servers" in message


def test_fewer_servers_are_no_remedy_for_one(machine: Topology) -> None:
    machine = replace(machine, memory_available=GIB)
    with pytest.raises(MemoryShortError) as caught:
        check_memory(machine, MODEL, [None])
    assert "fewer" not in str(caught.value)


def test_a_bound_server_must_fit_into_its_node(machine: Topology) -> None:
    check_memory(machine, MODEL, [0, 1])  # 15 of 24 GiB on each
    with pytest.raises(MemoryShortError, match="NUMA node 1"):
        check_memory(machine, MODEL, [1, 1])
    low = replace(machine.nodes[0], memory_available=16 * GIB)
    with pytest.raises(MemoryShortError, match="NUMA node 0 has 16"):
        check_memory(replace(machine, nodes=(low, machine.nodes[1])), MODEL, [0, 1])


def test_force_skips_the_check(machine: Topology) -> None:
    check_memory(replace(machine, memory_available=0), MODEL, [0, 0, 0], force=True)


def test_sizes_for_people() -> None:
    assert format_gib(3_892_256) == "4 MiB"
    assert format_gib(3 * GIB // 2) == "1.5 GiB"
