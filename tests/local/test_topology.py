from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.local.topology import read_topology
from tests.local.machine import make_machine, two_sockets_with_smt, write

GIB = 1 << 30


def test_one_socket_without_smt_has_a_core_per_cpu(tmp_path: Path) -> None:
    machine = read_topology(make_machine(tmp_path, [[[0], [1], [2], [3]], []], memory_gib=32))
    (node,) = machine.nodes  # one without CPUs is left out
    assert (node.number, node.cpus, machine.core_count) == (0, (0, 1, 2, 3), 4)
    assert (machine.memory_total, machine.memory_available) == (32 * GIB, 24 * GIB)
    assert machine.cpu_quota is None


def test_two_sockets_have_their_memory_and_distances(tmp_path: Path) -> None:
    """Memory that is easily reclaimed counts as free."""
    root = make_machine(tmp_path, two_sockets_with_smt(), memory_nodes_allowed="0")
    machine = read_topology(root)
    assert machine.sockets == (0, 1)
    assert [
        (node.sockets, node.distances, node.memory_total, node.memory_available)
        for node in machine.nodes
    ] == [((0,), (10, 32), 32 * GIB, 24 * GIB), ((1,), (32, 10), 32 * GIB, 24 * GIB)]
    assert [node.memory_allowed for node in machine.nodes] == [True, False]


FIRST, SECOND = ((0, 8), (1, 9), (2, 10), (3, 11)), ((4, 12), (5, 13), (6, 14), (7, 15))


@pytest.mark.parametrize(
    ("machine", "cores"),
    [
        ({}, {0: FIRST, 1: SECOND}),
        ({"offline": (9, 3, 11)}, {0: ((0, 8), (1,), (2, 10)), 1: SECOND}),
        ({"cpus_allowed": "0-1,8-9"}, {0: ((0, 8), (1, 9))}),
        ({"cpus_allowed": "0,9"}, {0: ((0,), (9,))}),
    ],
    ids=["all", "some offline", "within a cpuset", "without the siblings"],
)
def test_a_core_is_its_siblings_that_are_online_and_allowed(
    tmp_path: Path, machine: dict[str, Any], cores: dict[int, object]
) -> None:
    nodes = read_topology(make_machine(tmp_path, two_sockets_with_smt(), **machine)).nodes
    assert {node.number: node.cores for node in nodes} == cores
    for node in nodes:
        assert node.cpus == tuple(sorted(cpu for core in node.cores for cpu in core))


def test_a_kernel_without_numa_is_one_node(tmp_path: Path) -> None:
    write(tmp_path, "sys/devices/system/cpu/online", "0-1\n")
    write(tmp_path, "proc/self/status", "Cpus_allowed_list:\t0-1\n")
    write(tmp_path, "proc/meminfo", "MemTotal: 1048576 kB\nMemAvailable: 524288 kB\n")
    (node,) = read_topology(tmp_path).nodes
    assert (node.number, node.cores) == (0, ((0,), (1,)))
    assert (node.memory_total, node.memory_available) == (GIB, GIB // 2)


def test_an_unreadable_machine_has_one_core(tmp_path: Path) -> None:
    assert read_topology(tmp_path).core_count == 1


def test_a_containers_memory_limit_counts_where_it_is_less(tmp_path: Path) -> None:
    root = make_machine(tmp_path, [[[0], [1]]], memory_gib=32)
    write(root, "proc/self/cgroup", "0::/\n")
    write(root, "sys/fs/cgroup/memory.max", f"{8 * GIB}\n")
    write(root, "sys/fs/cgroup/memory.current", f"{GIB}\n")
    assert read_topology(root).memory_available == 7 * GIB


def test_a_socket_may_hold_several_nodes(tmp_path: Path) -> None:
    four = [[[node * 2], [node * 2 + 1]] for node in range(8)]
    machine = read_topology(make_machine(tmp_path, four, nodes_per_socket=4))
    assert len(machine.nodes) == 8
    assert machine.sockets == (0, 1)
    assert [node.sockets for node in machine.nodes] == [(0,)] * 4 + [(1,)] * 4


def test_a_server_gets_a_thread_for_each_physical_core_and_none_for_hyperthreads(
    tmp_path: Path,
) -> None:
    machine = read_topology(make_machine(tmp_path, two_sockets_with_smt()))
    assert [machine.threads_per_server(node) for node in machine.nodes] == [4, 4]
    assert machine.threads_per_server(machine.nodes[0], servers=2) == 2
    assert machine.threads_per_server(machine.nodes[0], servers=9) == 1


def test_efficiency_cores_of_a_hybrid_processor_get_no_thread(tmp_path: Path) -> None:
    cores = [[0, 1], [2, 3], [4], [5], [6], [7]]
    root = make_machine(tmp_path, [cores])
    write(root, "sys/devices/cpu_core/cpus", "0-3\n")
    write(root, "sys/devices/cpu_atom/cpus", "4-7\n")
    machine = read_topology(root)
    (node,) = machine.nodes
    assert node.efficiency_cpus == {4, 5, 6, 7}
    assert node.performance_cpus == (0, 1, 2, 3)
    assert machine.threads_per_server(node) == 2
    assert len(node.cores) == 6


def test_the_small_cores_of_an_arm_processor_get_no_thread(tmp_path: Path) -> None:
    root = make_machine(tmp_path, [[[0], [1], [2], [3]]])
    for cpu, capacity in enumerate((446, 446, 1024, 1024)):
        write(root, f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity", f"{capacity}\n")
    (node,) = read_topology(root).nodes
    assert node.performance_cores == ((2,), (3,))


def test_a_cpuset_of_efficiency_cores_alone_uses_them(tmp_path: Path) -> None:
    root = make_machine(tmp_path, [[[0, 1], [2], [3]]], cpus_allowed="2-3")
    write(root, "sys/devices/cpu_core/cpus", "0-1\n")
    write(root, "sys/devices/cpu_atom/cpus", "2-3\n")
    machine = read_topology(root)
    assert machine.threads_per_server(machine.nodes[0]) == 2


def test_a_containers_quota_bounds_the_threads(tmp_path: Path) -> None:
    root = make_machine(tmp_path, two_sockets_with_smt())
    write(root, "proc/self/cgroup", "0::/\n")
    write(root, "sys/fs/cgroup/cpu.max", "400000 100000\n")
    machine = read_topology(root)
    assert machine.cpu_quota == 4
    assert [machine.threads_per_server(node) for node in machine.nodes] == [2, 2]
