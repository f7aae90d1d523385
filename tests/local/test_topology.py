from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gateway
from gateway.local.topology import (
    CpuCache,
    cgroup_cpu_quota,
    cgroup_memory_headroom,
    format_kernel_list,
    parse_kernel_list,
    parse_kernel_size,
    read_caches,
    read_kernel_list,
    read_number,
    read_processor,
    read_topology,
)
from tests.each_case import each_case
from tests.local.machine import (
    ALTRA,
    EPYC,
    GRAVITON_3,
    SAPPHIRE_RAPIDS,
    make_machine,
    two_sockets_with_smt,
    write,
)

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


RUN = """
import sys, runpy
sys.path.insert(0, sys.argv.pop(1))
runpy.run_module("gateway.local.topology", run_name="__main__", alter_sys=True)
"""
MODULES = (
    "local/__init__",
    "local/topology",
)
"""The modules that a playbook runs on a host, beside an empty `gateway/__init__.py`."""


def test_a_bare_python_reads_the_topology(tmp_path: Path) -> None:
    copied = tmp_path / "gateway/local"
    copied.mkdir(parents=True)
    (tmp_path / "gateway/__init__.py").touch()
    for module in MODULES:
        shutil.copy(
            Path(gateway.__file__).parent / f"{module}.py", tmp_path / f"gateway/{module}.py"
        )
    machine = make_machine(tmp_path / "machine", two_sockets_with_smt())
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c",
         RUN, str(tmp_path), str(machine)],
        capture_output=True, check=True, text=True, timeout=120,
    )  # fmt: skip
    found = json.loads(result.stdout)
    assert (found["sockets"], found["cores"]) == (2, 8)
    assert [server["threads"] for server in found["servers"]] == [4, 4]


# Processors and their caches.


X86, ARM = "x86_64", "aarch64"
AMX = {"AMX", "AMX INT8", "AMX BF16", "AVX-VNNI"}
AVX512 = {"AVX2", "AVX-512", "AVX-512 VNNI", "AVX-512 BF16"}


@pytest.mark.parametrize(
    ("cpuinfo", "architecture", "name", "has", "lacks"),
    [
        (EPYC, X86, "AMD EPYC 9554 64-Core Processor", AVX512, AMX),
        (SAPPHIRE_RAPIDS, X86, "Intel(R) Xeon(R) Platinum 8480+", AMX | AVX512, set()),
        (
            GRAVITON_3,
            ARM,
            "maker 0x41 part 0xd40",
            {"NEON", "dot product", "i8mm", "SVE", "BF16"},
            {"SVE2"},
        ),
        (ALTRA, ARM, "maker 0x41 part 0xd0c", {"NEON", "dot product"}, {"i8mm", "SVE"}),
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


# Limits of control groups.


V1_UNLIMITED = 0x7FFFFFFFFFFFF000


def test_no_limit_is_none(tmp_path: Path) -> None:
    assert cgroup_cpu_quota(tmp_path) is None
    assert cgroup_memory_headroom(tmp_path) is None
    write(tmp_path, "proc/self/cgroup", "0::/user.slice\n")
    write(tmp_path, "sys/fs/cgroup/user.slice/cpu.max", "max 100000\n")
    write(tmp_path, "sys/fs/cgroup/user.slice/memory.max", "max\n")
    assert cgroup_cpu_quota(tmp_path) is None
    assert cgroup_memory_headroom(tmp_path) is None


def test_version_2_quota_of_a_container(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "150000 100000\n")
    assert cgroup_cpu_quota(tmp_path) == 1.5


def test_the_tightest_limit_of_the_ancestors_counts(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/a.slice/b.service\n")
    write(tmp_path, "sys/fs/cgroup/a.slice/b.service/cpu.max", "400000 100000\n")
    write(tmp_path, "sys/fs/cgroup/a.slice/cpu.max", "200000 100000\n")
    write(tmp_path, "sys/fs/cgroup/a.slice/b.service/memory.max", f"{6 * GIB}\n")
    write(tmp_path, "sys/fs/cgroup/a.slice/memory.max", f"{8 * GIB}\n")
    write(tmp_path, "sys/fs/cgroup/a.slice/memory.current", f"{5 * GIB}\n")
    assert cgroup_cpu_quota(tmp_path) == 2.0
    assert cgroup_memory_headroom(tmp_path) == 3 * GIB


def test_inactive_page_cache_counts_as_free(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", f"{8 * GIB}\n")
    write(tmp_path, "sys/fs/cgroup/memory.current", f"{6 * GIB}\n")
    write(tmp_path, "sys/fs/cgroup/memory.stat", f"anon {GIB}\ninactive_file {4 * GIB}\n")
    assert cgroup_memory_headroom(tmp_path) == 6 * GIB


def test_version_1_limits(tmp_path: Path) -> None:
    lines = "9:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n1:name=systemd:/\n"
    write(tmp_path, "proc/self/cgroup", lines)
    cpu, memory = "sys/fs/cgroup/cpu,cpuacct/docker/x", "sys/fs/cgroup/memory/docker/x"
    write(tmp_path, f"{cpu}/cpu.cfs_quota_us", "300000\n")
    write(tmp_path, f"{cpu}/cpu.cfs_period_us", "100000\n")
    write(tmp_path, f"{memory}/memory.limit_in_bytes", f"{4 * GIB}\n")
    write(tmp_path, f"{memory}/memory.usage_in_bytes", f"{3 * GIB}\n")
    write(tmp_path, f"{memory}/memory.stat", f"total_inactive_file {GIB}\n")
    assert cgroup_cpu_quota(tmp_path) == 3.0
    assert cgroup_memory_headroom(tmp_path) == 2 * GIB


def test_version_1_in_a_container_that_shows_its_group_as_the_root(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "9:memory:/docker/x\n4:cpu:/docker/x\n")
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "50000\n")
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{GIB}\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.usage_in_bytes", "0\n")
    assert cgroup_cpu_quota(tmp_path) == 0.5
    assert cgroup_memory_headroom(tmp_path) == GIB


def test_version_1_without_limits(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "9:memory:/\n4:cpu:/\n")
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{V1_UNLIMITED}\n")
    assert cgroup_cpu_quota(tmp_path) is None
    assert cgroup_memory_headroom(tmp_path) is None


def test_a_path_cannot_leave_the_mount(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/../../outside\n")
    write(tmp_path, "sys/fs/outside/cpu.max", "100000 100000\n")
    assert cgroup_cpu_quota(tmp_path) is None


# The kernel's files.


@each_case(
    ("text", "numbers"), [("0\n", {0}), ("0-3,8\n", {0, 1, 2, 3, 8}), ("\n", set()), ("2-2", {2})]
)
def test_kernel_lists_are_read(text: str, numbers: set[int]) -> None:
    assert parse_kernel_list(text) == numbers


def test_consecutive_numbers_are_formatted_as_a_range_and_a_missing_file_is_empty(
    tmp_path: Path,
) -> None:
    assert format_kernel_list({0, 1, 2, 5, 7, 8}) == "0-2,5,7-8"
    assert read_number(tmp_path / "none") is None
    assert read_kernel_list(tmp_path / "none") is None


@given(st.sets(st.integers(0, 512)))
def test_a_list_is_read_back_as_it_was_written(numbers: set[int]) -> None:
    assert parse_kernel_list(format_kernel_list(numbers)) == numbers


@each_case(
    ("text", "size"),
    [("32K\n", 32768), ("1M", 1 << 20), ("4096", 4096), ("", 0), ("none", 0), ("K", 0)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_kernel_size(text) == size
